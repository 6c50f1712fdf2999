"""Options as SGLang and vLLM write them. The command lines are such as their documentations show."""

import logging
import re
from dataclasses import fields
from typing import Literal, get_args, get_origin

import pytest

from headrace.api.options import option_values
from headrace.cli.app import main
from headrace.config.cli import parse
from headrace.config.other_servers import DROPPED, LISTS, VALUES, table
from headrace.config.server_args import ServerArgs
from headrace.config.settings import own_options
from headrace.errors import ConfigError

FIELDS = {f.name: f for f in fields(ServerArgs)}


@pytest.fixture(autouse=True)
def logger_as_before():
    """A command line with something to log sets the logger up."""
    logger = logging.getLogger("headrace")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


def changed(argv):
    """The fields that a command line sets to another value than the default."""
    args = parse(argv.split())
    return {name: getattr(args, name) for name, f in FIELDS.items() if getattr(args, name) != f.default}


@pytest.mark.parametrize(
    ("argv", "fields_set"),
    [
        (
            "--model m --dtype half --max-model-len 4096 --gpu-memory-utilization 0.9 --max-num-seqs 16 --seed 7",
            {
                "model_path": "m",
                "dtype": "float16",
                "context_length": 4096,
                "mem_fraction_static": 0.9,
                "max_running_requests": 16,
                "random_seed": 7,
            },
        ),
        (
            "--model m --tensor-parallel-size 1 --trust-remote-code --enable-prefix-caching --enforce-eager --swap-space 0",
            {"model_path": "m", "disable_cuda_graph": True},
        ),
        (
            "--enable-auto-tool-choice --tool-call-parser hermes --disable-log-requests --max-num-batched-tokens=8192",
            {"tool_call_parser": "hermes", "max_prefill_tokens": 8192, "chunked_prefill_size": -1},
        ),
        (
            "--enable-hierarchical-cache --hicache-size 1.5 --hicache-write-policy write_back --hicache-io-backend kernel",
            {"kv_cache_host_size": 1_500_000_000, "kv_cache_write": "back"},
        ),
        ("--kv-offloading-size 2 --kv-offloading-backend native", {"kv_cache_host_size": 2 << 30}),
        ("--cache-ram 8192", {"kv_cache_host_size": 8 << 30}),
        ("--max-model-len 25.6k", {"context_length": 25600}),
        ("--max-model-len 2K", {"context_length": 2048}),
        ("--max_model_len 12 --max_queued_requests=5", {"context_length": 12, "max_queued_requests": 5}),
        ("--no-enable-prefix-caching --no-enable-log-requests", {"disable_radix_cache": True}),
        (
            "--enable-prefix-caching=False --enforce-eager=true",
            {"disable_radix_cache": True, "disable_cuda_graph": True},
        ),
        ("--enable-log-requests True", {"log_requests": True}),
        ("--no-async-scheduling -q int8", {"disable_overlap_schedule": True, "quantization": "int8"}),
        ("--quantization awq --kv-cache-dtype fp8 -dp 2", {"kv_cache_dtype": "fp8_e4m3", "dp_size": 2}),
        ("--enable-lora --lora-modules a=x b=y --max-cpu-loras 4", {"lora_paths": "a=x,b=y", "max_loras": 4}),
        (
            "--model m --served-model-name a org/b --port 1",
            {"model_path": "m", "served_model_name": "a,org/b", "port": 1},
        ),
        ('--served-model-name ["a","b"]', {"served_model_name": "a,b"}),
        ("--cudagraph-capture-sizes 1 2 4 --port 1", {"cuda_graph_bs": "1,2,4", "port": 1}),
        (
            '--allowed-origins ["http://a.example","http://b.example"]',
            {"allow_origins": "http://a.example,http://b.example"},
        ),
        ("--generation-config vllm --model-impl vllm", {"sampling_defaults": "openai", "model_impl": "headrace"}),
        (
            "--model-path m --tp 2 --pp 3 --dp 2 --mem-fraction-static 0.7 --enable-metrics --host 0.0.0.0",
            {
                "model_path": "m",
                "tp_size": 2,
                "pp_size": 3,
                "dp_size": 2,
                "mem_fraction_static": 0.7,
                "host": "0.0.0.0",
            },
        ),
        ("--lora-paths a=x b=y --enable-priority-scheduling", {"lora_paths": "a=x,b=y", "schedule_policy": "priority"}),
        ("--crash-dump-folder d --watchdog-timeout 9", {"crash_dump_dir": "d", "watchdog_timeout_s": 9.0}),
        ("--load-balance-method auto --model-impl sglang", {"model_impl": "headrace"}),
        (
            "--speculative-algorithm NGRAM --num-speculative-tokens 5",
            {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 5},
        ),
        ("--speculative-algorithm none", {"speculative_algorithm": "off"}),
        ("--nccl-init-addr a:1 --nnodes 2", {"dist_init_addr": "a:1", "nnodes": 2}),
        ("--attention-backend fa3 --sampling-backend pytorch --enable-nan-detection", {}),
        ("--attention-backend FLASH_ATTN --sampling-backend=flashinfer --port 1", {"port": 1}),
        ("--attention-backend TORCH_SDPA", {"attention_backend": "torch_native"}),
    ],
)
def test_command_lines_of_other_servers_are_understood(argv, fields_set):
    assert changed(argv) == fields_set


@pytest.mark.parametrize(
    ("argv", "model", "names"),
    [
        ("m --served-model-name a b", "m", ("a", "b")),
        ("--served-model-name a b --port 1 m", "m", ("a", "b")),
        ("--served-model-name a m", "m", ("a",)),
        ("--served-model-name a b m --port 1", "m", ("a", "b")),
        ("--served-model-name a,b m", "m", ("a", "b")),
        ("--served-model-name a b --model m", "m", ("a", "b")),
        ("--served-model-name=a -m m", "m", ("a",)),
        ("org/m", "org/m", ("m",)),
    ],
)
def test_names_of_a_model_do_not_swallow_the_model(monkeypatch, argv, model, names):
    """As vLLM has it, but for a model that comes last: `serve --served-model-name a MODEL` has one name."""
    served = []
    monkeypatch.setattr("headrace.serve.launch_server", lambda args: served.append(args) or 0)
    with pytest.raises(SystemExit):
        main(["serve", *argv.split()])
    assert [(args.model_path, args.served_names, args.served_name) for args in served] == [(model, names, names[0])]


def test_a_model_in_the_environment_needs_no_word(monkeypatch):
    served = []
    monkeypatch.setattr("headrace.serve.launch_server", lambda args: served.append(args) or 0)
    monkeypatch.setenv("HEADRACE_MODEL_PATH", "m")
    with pytest.raises(SystemExit):
        main(["serve", "--served-model-name", "a", "b"])
    assert [(args.model_path, args.served_names) for args in served] == [("m", ("a", "b"))]


def test_a_python_program_and_a_file_may_name_a_model_several_times(tmp_path):
    assert option_values("m", {"served_model_name": ["a", "b"]})["served_model_name"] == "a,b"
    file = tmp_path / "server.yaml"
    file.write_text("served-model-name: [a, b]")
    assert parse(["--config", str(file)]).served_names == ("a", "b")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--enable-dbo", "--enable-two-batch-overlap needs --tp-size above 1"),
        ("--tp 2 --ep 8", r"--ep-size must be 1 or the value of --tp-size \(2\), .* got 8"),
        ("--enable-expert-parallel", "give --ep-size the value of --tp-size"),
        ("--speculative-config {}", "--speculative-algorithm chooses the method"),
        ("--ssl-ca-certs c", "proxy"),
        ("--revision main", "org/name@REVISION"),
        ("--scheduling-policy priority", "lowest first"),
        ("--swap-space 4", "stay on the device"),
        ("--task embed", "--is-embedding serves any other model"),
        ("--enable-metrics --disable-metrics", "--enable-metrics cannot be combined with --disable-metrics"),
        ("--disable-log-requests --log-requests", "cannot be combined"),
        ("--enable-auto-tool-choice --tool-call-parser none", "--tool-call-parser none"),
        ("--enable-chunked-prefill=False", "--chunked-prefill-size"),
        ("--enable-prefix-caching=maybe", "true or false"),
        ("--max-model-len", "needs a value"),
        ("--tp", "needs a value"),
        ("--allowed-origins [1", "not JSON"),
        ("--sampling-backend token_oracle", "one sampler for each device"),
        ("--enable-nan-detection=False", "NaN logits are always found"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_to_do(argv, words):
    with pytest.raises(ConfigError, match=words):
        parse(argv.split())


@pytest.mark.parametrize("argv", [["-m", "--tp"], ["--model=--tp"], ["--chat-template", "--enable-metrics"]])
def test_a_value_that_looks_like_an_option_stays_a_value(argv):
    args = parse(argv)

    assert "--tp" in args.model_path or args.chat_template == "--enable-metrics"


def test_words_after_two_dashes_are_not_options(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--", "a", "--tp", "2"])
    assert "unexpected extra argument" in capsys.readouterr().err


def test_what_is_already_so_is_logged_once(capsys):
    parse(["--enable-metrics", "--base-gpu-id", "0"])
    lines = [line.partition("headrace.config.cli: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "--enable-metrics: metrics are always served",
        "--base-gpu-id 0: the first GPU that CUDA_VISIBLE_DEVICES names is used",
    ]


@pytest.mark.parametrize("backend", ["fa3", "flashmla", "cutlass_mla", "aiter", "ascend", "intel_amx", "FLASH_ATTN"])
def test_attention_kernels_of_other_servers_are_a_hint_and_what_runs_is_said(capsys, backend):
    parse(["--attention-backend", backend])
    (line,) = capsys.readouterr().err.splitlines()
    says = f"--attention-backend {backend}: the fastest backend for the model on this device runs instead"
    assert says in line
    assert "attention_backend" in line
    assert "attention_backend" not in option_values("m", {"attention_backend": backend})


def test_a_refusal_is_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--swap-space", "4"])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headrace: --swap-space 4 is not possible here: weights and KV cache stay on the device")


def test_the_table_names_each_option_once():
    every = [name for entry in table() for name in entry.names]
    assert len(every) > 150
    assert sorted(name for name in set(every) if every.count(name) > 1) == []


def test_the_table_speaks_of_options_that_exist():
    targets = {name for entry in table() for name in entry.sets}
    targets |= {entry.unless[0] for entry in table() if entry.unless}
    assert targets <= FIELDS.keys()
    assert {*VALUES, *LISTS, *DROPPED} <= FIELDS.keys()
    assert all(entry.otherwise for entry in table() if entry.values)


def test_other_spellings_of_values_mean_values_of_ours():
    for name, pairs in VALUES.items():
        annotation = FIELDS[name].type
        if get_origin(annotation) is Literal:
            assert set(pairs.values()) <= set(get_args(annotation))
            assert not set(pairs) & set(get_args(annotation))
    for name, (_, values) in DROPPED.items():
        assert not {value.lower() for value in (*get_args(FIELDS[name].type), *VALUES.get(name, ()))} & set(
            values.split()
        )
        assert values == values.lower()


def test_every_remark_names_options_that_exist():
    known = own_options().keys()
    for entry in table():
        text = f"{entry.says or entry.already or entry.refused} {entry.otherwise}"
        assert [word for word in re.findall(r"--[a-z][a-z-]*", text) if word not in known] == [], entry.names
