"""Options from a file and from the environment: which wins, and what is refused."""

import logging
import os
import shutil
import subprocess
import sys

import pytest

from headrace.cli.app import main
from headrace.config.cli import parse
from headrace.errors import ConfigError


@pytest.fixture(autouse=True)
def no_options_in_the_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def logger_as_before():
    """Options with something to log set the logger up."""
    logger = logging.getLogger("headrace")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture
def parse_file(tmp_path):
    """`parse` with a file of this text; further words follow."""

    def parse_file(text, *argv, name="server.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return parse(["--config", str(path), *argv])

    return parse_file


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(parse_file, monkeypatch):
    monkeypatch.setenv("HEADRACE_PORT", "2")
    monkeypatch.setenv("HEADRACE_MAX_LORAS", "2")
    args = parse_file("port: 1\nmax_loras: 1\nmax_n: 1\ndtype: float32\n", "--max-loras", "3")
    assert (args.port, args.max_loras, args.max_n, args.dtype) == (2, 3, 1, "float32")


def test_switches_can_be_turned_on_and_off_at_each_level(parse_file, monkeypatch):
    assert not parse_file("enable_cache_report: false").enable_cache_report
    assert not parse_file("no-enable-cache-report: true").enable_cache_report
    assert parse_file("no-enable-cache-report: true", "--enable-cache-report").enable_cache_report
    assert not parse_file("disable-metrics: false").disable_metrics
    monkeypatch.setenv("HEADRACE_ENABLE_CACHE_REPORT", "off")
    monkeypatch.setenv("HEADRACE_DISABLE_METRICS", "1")
    assert not parse([]).enable_cache_report
    assert parse([]).disable_metrics
    assert parse(["--enable-cache-report"]).enable_cache_report


def test_toml_and_yaml_say_the_same(parse_file):
    toml = """
model-path = "m"
context_length = 512
mem_fraction_static = 0.25
log_requests = true
log_requests_level = 2
lora_paths = ["a=x", "b=y"]
json_model_override_args = { rope_theta = 1.5 }
"""
    yaml = """
model-path: m
context_length: 512
mem_fraction_static: 0.25
log_requests: yes
log_requests_level: 2
lora_paths: [a=x, b=y]
json_model_override_args: {rope_theta: 1.5}
api_key:   # left empty
"""
    args = parse_file(toml, name="server.toml")
    assert args == parse_file(yaml) == parse_file(yaml, name="server.yml")
    assert args.lora_paths == "a=x,b=y"
    assert args.json_model_override_args == '{"rope_theta": 1.5}'


def test_an_empty_file_and_empty_variables_set_nothing(parse_file, monkeypatch):
    monkeypatch.setenv("HEADRACE_PORT", "")
    assert parse_file("# nothing\n") == parse_file("", name="server.toml") == parse([])


def test_a_file_may_be_written_for_another_server(parse_file):
    args = parse_file(
        "model: m\nmax-model-len: 2k\ntensor-parallel-size: 1\nenable-metrics: true\nspeculative-config: null\n"
    )
    assert (args.model_path, args.context_length) == ("m", 2000)
    assert parse_file("enable-prefix-caching: false").disable_radix_cache


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_lora: 3", "there is no option max_lora; did you mean max_loras"),
        ("server:\n  port: 1", "there is no option server"),
        ("port: x", "server.yaml: --port must be a whole number, got 'x'"),
        ("port: true", "must be a whole number"),
        ("port: [1]", "takes one value, not a list"),
        ("port: 65536", r"--port must be at most 65535, got 65536 \(--port is set by .*server.yaml\)"),
        ("served-model-name: 3.10", "must be text, got 3.1; put it in quotes"),
        ("dtype: int3", "--dtype must be one of auto, float32"),
        ("log_requests: maybe", "takes true or false, got 'maybe'"),
        ("log_requests: 1", "takes true or false, got 1"),
        ("swap-space: 4", "server.yaml: --swap-space 4 is not possible here"),
        ("speculative-config: {}", "--speculative-algorithm chooses the method"),
        ("max-model-len: 1\ncontext-length: 2", "--context-length is set twice"),
        ("port: 1\nport: 2", "sets an option twice"),
        ("enable-metrics: true\ndisable-metrics: true", "cannot be combined"),
        ("- port", "must hold options"),
        ("port: {", "is not YAML"),
        ("!!python/object/apply:os.system [true]", "is not YAML"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_by_its_name(parse_file, text, words):
    with pytest.raises(ConfigError, match=words):
        parse_file(text)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.yaml", "cannot be read: No such file"),
        (".", "cannot be read: Is a directory"),
        ("a.json", "must end with .toml, .yaml or .yml"),
        ("a.toml", "is not TOML"),
        ("b.yaml", "not UTF-8"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, name, words):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "a.toml").write_text("port: 1")
    (tmp_path / "b.yaml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=words):
        parse(["--config", str(tmp_path / name)])


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("HEADRACE_PORT", "x", "HEADRACE_PORT: --port must be a whole number, got 'x'"),
        ("HEADRACE_DTYPE", "int3", "HEADRACE_DTYPE: --dtype must be one of"),
        ("HEADRACE_LOG_REQUESTS", "2", "HEADRACE_LOG_REQUESTS: --log-requests takes true or false"),
        ("HEADRACE_PAGE_SIZE", "3", r"--page-size must be 1 or 16, got 3 \(--page-size is set by HEADRACE_PAGE_SIZE\)"),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(monkeypatch, variable, value, words):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=words):
        parse([])


def test_an_option_of_the_command_line_is_not_blamed_on_a_variable(monkeypatch):
    monkeypatch.setenv("HEADRACE_PAGE_SIZE", "16")
    with pytest.raises(ConfigError) as caught:
        parse(["--page-size", "3"])
    assert caught.value.message == "--page-size must be 1 or 16, got 3"


def test_a_misspelt_variable_is_logged_and_a_service_of_kubernetes_is_no_port(monkeypatch, capsys):
    monkeypatch.setenv("HEADRACE_MAX_LORA", "3")
    monkeypatch.setenv("HEADRACE_PORT", "tcp://10.0.0.1:30000")
    monkeypatch.setenv("HEADRACE_SERVICE_HOST", "10.0.0.1")

    args = parse([])

    assert (args.port, args.max_loras) == (30000, 8)
    first, second = capsys.readouterr().err.splitlines()
    assert "HEADRACE_PORT=tcp://10.0.0.1:30000 is Kubernetes' address" in first
    assert second.endswith("HEADRACE_MAX_LORA is not an option; did you mean HEADRACE_MAX_LORAS?")


def test_a_command_without_the_option_does_not_look_at_its_variable(monkeypatch, capsys):
    monkeypatch.setenv("HEADRACE_PORT", "x")
    with pytest.raises(SystemExit):
        main(["generate", "hi", "--page-size", "3"])
    assert capsys.readouterr().err.startswith("headrace: --page-size must be")


def test_version_is_an_option_too(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == "0.1.0\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_choices(tmp_path):
    """In bash itself, with the script that `headrace completion bash` prints."""
    program = tmp_path / "headrace"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m headrace.cli "$@"\n')
    program.chmod(0o755)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.gguf").touch()
    (tmp_path / "models" / "a.txt").touch()
    asks = [("headrace ser", 1), ("headrace serve --max-ru", 2), ("headrace serve --device c", 3)]
    asks += [(f"headrace {words} smoll", at) for words, at in (("chat", 2), ("serve --model-path", 3))]
    asks += [(f"headrace run {tmp_path}/mod", 2), (f"headrace run {tmp_path}/models/a", 2)]
    lines = [
        f"COMP_WORDS=({words}); COMP_CWORD={at}; _headrace_completion headrace; echo ${{COMPREPLY[@]}}"
        for words, at in asks
    ]
    script = "\n".join(["source <(headrace completion bash)", *lines])
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environ)
    folder = f"{tmp_path}/models/"
    assert done.stdout.splitlines() == [
        "serve",
        "--max-running-requests",
        "cpu cuda",
        *["smollm2"] * 2,
        folder,
        f"{folder}a.gguf",
    ]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_too(shell, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["completion", shell])
    assert caught.value.code == 0
    assert f"_HEADRACE_COMPLETE=complete_{shell}" in capsys.readouterr().out
