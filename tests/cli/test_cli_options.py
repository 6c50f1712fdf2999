"""Every field of ServerArgs is an option, and only they are."""

from dataclasses import fields
from typing import Literal, get_args, get_origin

import pytest
import typer
import yaml
from typer.testing import CliRunner

from headrace.cli.app import app as headrace
from headrace.config.cli import ENGINE_FIELDS, ENV_VARS, parse, with_server_options
from headrace.config.server_args import ServerArgs
from headrace.config.server_options import flag
from headrace.config.settings import variable
from headrace.errors import ConfigError

FIELDS = {f.name: f for f in fields(ServerArgs)}
SPARSE = ["--enable-double-sparsity", "--max-loras", "0"]
NEEDED_WITH = {
    "log_requests_level": ["--log-requests"],
    "crash_dump_prompts": ["--dump-requests-dir", "dumps"],
    "enable_priority_preemption": ["--schedule-policy", "priority"],
    "ep_size": ["--tp-size", "16"],
    "enable_dp_attention": ["--tp-size", "2", "--dp-size", "2"],
    "enable_two_batch_overlap": ["--tp-size", "2"],
    "speculative_shared_tokens": ["--speculative-algorithm", "ngram"],
    "speculative_draft_model_path": ["--speculative-algorithm", "draft"],
    "speculative_draft_model_quantization": [
        "--speculative-algorithm",
        "draft",
        "--speculative-draft-model-path",
        "m",
    ],
    **{name: ["--ray"] for name in FIELDS if name.startswith("ray_")},
    **{
        name: [*SPARSE, "--ds-channel-config-path", "channels.json"]
        for name in FIELDS
        if name.startswith("ds_") or name == "enable_double_sparsity"
    },
    "ds_channel_config_path": SPARSE,
}
"""Options without which another is refused."""
TEXTS = {
    "allow_origins": "http://a.example",
    "allowed_hosts": "a.example",
    "allowed_media_domains": "images.example",
    "disaggregation_prefill_hosts": "10.0.0.0/8",
    "kv_events_config": '{"publisher": "null"}',
    "trusted_proxies": "10.0.0.0/8",
}
"""Of options that take no other text than such."""


def another_value(f):
    """A value that is not the default, and how it is spelled on the command line."""
    if f.type is bool:
        return (not f.default), [("--no-" if f.default else "--") + f.name.replace("_", "-")]
    if get_origin(f.type) is Literal:
        value = next(choice for choice in get_args(f.type) if choice != f.default)
    elif f.type in (int, int | None):
        value = 16 if f.default != 16 else 17
    elif f.type in (float, float | None):
        value = 0.25
    else:
        value = TEXTS.get(f.name, "{}x")
    return value, [flag(f.name), str(value)]


@pytest.fixture(autouse=True)
def no_options_in_the_environment(monkeypatch):
    for name in FIELDS:
        monkeypatch.delenv(variable(name), raising=False)


def test_no_options_give_the_defaults():
    assert parse([]) == ServerArgs()


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_can_be_set(name):
    value, argv = another_value(FIELDS[name])

    got = getattr(parse([*argv, *NEEDED_WITH.get(name, [])]), name)

    assert got == value
    assert type(got) is type(value)


def test_every_field_can_be_set_by_its_variable_and_in_a_file(monkeypatch, tmp_path):
    """All at once, so what goes together is not looked at."""
    monkeypatch.setattr(ServerArgs, "__post_init__", lambda args: None)
    wanted = {name: another_value(f)[0] for name, f in FIELDS.items()}
    path = tmp_path / "server.yaml"
    path.write_text(yaml.safe_dump(wanted))

    from_file = parse(["--config", str(path)])
    for name, value in wanted.items():
        monkeypatch.setenv(variable(name), str(value))
    from_variables = parse([])

    for got in (from_file, from_variables):
        found = {name: getattr(got, name) for name in FIELDS}
        assert found == wanted
        assert {name: type(value) for name, value in found.items()} == {n: type(v) for n, v in wanted.items()}


@pytest.mark.parametrize("argv", [["--no-such-option"], ["--dtype", "int3"], ["--port", "x"], ["surplus"]])
def test_what_is_not_an_option_is_refused(argv):
    with pytest.raises(Exception, match=r"No such option|not one of|valid integer|unexpected") as caught:
        parse(argv)
    assert caught.value.exit_code == 2


def test_options_that_cannot_work_are_a_config_error():
    with pytest.raises(ConfigError, match="--page-size"):
        parse(["--page-size", "3"])


@pytest.mark.parametrize("name", ENV_VARS)
def test_keys_come_from_the_environment_and_the_option_wins(name, monkeypatch):
    monkeypatch.setenv(ENV_VARS[name], "from-env")

    assert getattr(parse([]), name) == "from-env"
    assert getattr(parse([flag(name), "given"]), name) == "given"


def test_what_is_on_by_default_may_be_said_and_can_be_turned_off():
    assert parse(["--enable-cache-report"]).enable_cache_report
    assert not parse(["--no-enable-cache-report"]).enable_cache_report


def test_model_has_short_names():
    assert parse(["-m", "x"]).model_path == parse(["--model", "x"]).model_path == "x"


def test_a_command_can_offer_some_options_with_its_own_defaults():
    got = []
    app = typer.Typer()

    @app.command()
    @with_server_options(ENGINE_FIELDS, {"log_level": "warning"})
    def command(*, extra: int = 1, server_args: ServerArgs) -> None:
        got.append((extra, server_args))

    runner = CliRunner()

    assert runner.invoke(app, ["--extra", "2", "--page-size", "16"]).exit_code == 0
    assert got == [(2, ServerArgs(page_size=16, log_level="warning"))]
    assert runner.invoke(app, ["--port", "1"]).exit_code == 2


def test_a_switch_shows_no_value_in_the_help():
    commands = typer.main.get_command(headrace).commands
    params = [p for command in (*commands.values(), *commands["bench"].commands.values()) for p in command.params]

    switches = [param for param in params if getattr(param, "is_flag", False)]

    assert len(switches) > 20
    assert [param.name for param in switches if param.metavar != ""] == []
