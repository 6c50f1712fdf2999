"""The command tree: what it imports, how it fails, what it prints."""

import json
import re
import subprocess
import sys

import pytest

from headrace.benchmark.machine import NumaNode
from headrace.cache.page_files import PageFiles
from headrace.cli.app import main
from headrace.cli.arguments import OTHER_COMMANDS, with_model
from headrace.cli.running_servers import address, is_server
from headrace.config.cli import asked_page
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.kernels import cpu
from headrace.processes.numa import Node


def run(*argv):
    """Exit code of a command in this process."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return caught.value.code


def test_help_lists_the_commands(capsys):
    assert run("--help") == 0
    text = capsys.readouterr().out
    for command in ("serve", "generate", "chat", "top", "models", "pull", "doctor", "bench", "version"):
        assert command in text


def test_serve_help_has_options_in_their_groups(capsys):
    assert run("serve", "--help", "all") == 0
    text = capsys.readouterr().out
    for words in ("Memory and schedule", "Observability", "--chunked-prefill-size"):
        assert words in text


def options_of_help(capsys, *argv):
    """The options that a page of the help describes, without --help itself; and the page."""
    assert run(*argv) == 0
    text = capsys.readouterr().out
    return [found for found in re.findall(r"^│ \*?(--[\w-]+)", text, re.MULTILINE) if found != "--help"], text


def test_the_first_page_of_serve_has_the_fifteen_options_that_matter(capsys):
    for words in (("--help",), ("smollm2", "-h")):
        options, text = options_of_help(capsys, "serve", *words)
        assert len(options) == 15
        assert {"--model-path", "--port", "--api-key", "--quantization", "--context-length"} < set(options)
        assert len(text.splitlines()) < 100
        assert "--help all" in text
    every, _ = options_of_help(capsys, "serve", "--help", "all")
    assert len(every) > 140


@pytest.mark.parametrize(
    ("word", "some", "says"),
    [
        ("lora", {"--lora-paths", "--max-loras"}, ""),
        ("--max-loras", {"--max-loras"}, ""),
        ("chunked_prefill", {"--chunked-prefill-size"}, ""),
        ("Speculative", {"--speculative-algorithm"}, ""),
        ("max-model-len", {"--context-length"}, "--max-model-len is --context-length here"),
        ("swap-space", set(), "--swap-space is accepted"),
        ("max-logprobs", set(), "--max-logprobs is not an option here"),
    ],
)
def test_help_with_a_word_has_the_options_with_it(capsys, word, some, says):
    options, text = options_of_help(capsys, "serve", "--help", word)
    assert some <= set(options)
    assert len(options) < 40
    assert says in " ".join(text.split())


def test_help_with_a_word_that_no_option_has_says_so(capsys):
    assert run("serve", "--help", "xyzzy") == 2
    assert "no option has the word 'xyzzy'; --help all shows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["smollm2", "--system", "-h"], None),
        (["--system", "--help", "all"], None),
        (["--chat_template", "-h"], None),
        (["-m", "-h", "--help", "all"], "all"),
        (["--system=-h", "-h"], ""),
        (["--flag", "-h", "--cache"], "cache"),
        (["smollm2", "--", "-h"], None),
        (["--system"], None),
    ],
)
def test_the_value_of_an_option_asks_for_no_help(words, asked):
    own = {"--system": True, "--chat-template": True, "-m": True, "--flag": False, "--help": False, "-h": False}
    assert asked_page(words, own) == asked


def test_a_command_takes_a_value_that_looks_like_a_request_for_help(capsys):
    assert run("generate", "text", "--stop", "-h", "--max-new-tokens", "none") == 2
    assert "a whole number, got 'none'" in capsys.readouterr().err


def test_what_only_one_command_has_is_on_its_first_page(capsys):
    options, _ = options_of_help(capsys, "chat", "--help")
    assert {"--url", "--tools", "--model-path"} < set(options)
    assert "--lora-paths" not in options


def test_a_command_of_another_tool_names_ours(capsys):
    for command in OTHER_COMMANDS:
        assert run(command, "smollm2", "--some-option") == 2
        line = capsys.readouterr().err
        assert line.startswith(f"headrace: there is no command {command}: ")
        assert re.search(r"`[^`]*headrace (models|serve|pull|ps|generate|doctor)|model_info|examples/", line), line
    assert run("serv") == 2, "a typing error is not one"
    assert "'serve'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("serve --port abc", "'--port': it must be a whole number, got 'abc'"),
        ("serve --port 3.5", "'--port': it must be a whole number, got '3.5'"),
        ("serve --mem-fraction-static much", "'--mem-fraction-static': it must be a number, got 'much'"),
        ("serve --device xpu", "'--device': 'xpu' is not one of 'auto', 'cpu', 'cuda'"),
        ("chat --temperature hot", "'--temperature': it must be a number, got 'hot'"),
        ("top --interval x", "'--interval': it must be a number, got 'x'"),
        ("top --interval 0", "'--interval': it must be at least 0.1, got '0'"),
        ("doctor --tp-size 100", "'--tp-size': it must be at most 64, got '100'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_told_in_our_words(argv, says, capsys):
    assert run(*argv.split()) == 2
    text = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert f"Invalid value for {says}" in text


def test_list_is_models(capsys):
    assert run("models") == 0
    known = capsys.readouterr().out
    assert run("list") == 0
    assert capsys.readouterr().out == known


@pytest.mark.parametrize(
    ("words", "is_one"),
    [
        (["/usr/bin/python", "/usr/local/bin/headrace", "serve", "smollm2"], True),
        (["python", "-m", "headrace.cli", "serve"], True),
        (["python", "-m", "headrace.launch_server", "--port", "1"], True),
        (["/usr/bin/python3.12", "-u", "-X", "dev", "-m", "headrace.cli", "serve"], True),
        (["headrace", "serve", "--port", "1"], True),
        (["timeout", "60", "headrace", "serve"], False),
        (["sudo", "headrace", "serve"], False),
        (["grep", "headrace", "serve"], False),
        (["sh", "-c", "exec headrace serve", "headrace", "serve"], False),
        (["python", "-c", "pass", "headrace", "serve"], False),
        (["python", "notes.py", "-m", "headrace.launch_server"], False),
        (["vi", "headrace.launch_server"], False),
        (["python", "-m", "headrace.processes.child_main", "scheduler"], False),
        (["headrace", "chat", "serve"], False),
        (["grep", "serve"], False),
        ([], False),
    ],
)
def test_a_server_is_known_by_its_command_line(words, is_one):
    assert is_server(words) == is_one


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:5"),
        ("0.0.0.0", "http://127.0.0.1:5"),
        ("::1", "http://[::1]:5"),
        ("::", "http://[::1]:5"),
        ("fd00::2", "http://[fd00::2]:5"),
    ],
)
def test_ps_has_an_address_that_can_be_asked(host, url):
    assert address(host, 5) == url


SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"served_model_name": "the-model", "version": "9"}).encode()
        self.send_response(200 if self.path == "/server_info" else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_ps_lists_the_servers_that_answer(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    program = tmp_path / "headrace"
    program.write_text(SERVER)
    with subprocess.Popen([sys.executable, program, "serve"], stdout=subprocess.PIPE, text=True) as one:
        try:
            port = one.stdout.readline().strip()
            assert run("ps") == 0
        finally:
            one.kill()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if f" {one.pid} " in f"{line} "]
    assert f"http://127.0.0.1:{port}" in line
    assert "the-model" in line
    assert "answers" in line


def test_importing_the_commands_imports_nothing_heavy():
    code = (
        "import sys, headrace.cli\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'aiohttp', 'numpy', 'matplotlib', 'tokenizers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_benchmark_client_needs_no_torch():
    code = "import sys, headrace.benchmark.serving; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_module_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "headrace.cli", "version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0.1.0"


def test_an_error_of_ours_is_one_line_and_exit_code_2(capsys):
    assert run("serve", "--page-size", "3") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("headrace: --page-size must be 1 or 16")
    assert "Traceback" not in captured.err
    assert len(captured.err.strip().splitlines()) == 1


@pytest.mark.parametrize("argv", [["serve", "--nonsense"], ["nonsense"], ["bench", "serving", "--repeat", "x"]])
def test_wrong_usage_is_exit_code_2(argv):
    assert run(*argv) == 2


@pytest.mark.parametrize("argv", [["--presets", "Z"], ["--rate", "0"], ["--extra-body", "[]"], ["--extra-body", "{"]])
def test_bench_refuses_options_that_make_no_sense_before_it_connects(argv, capsys):
    assert run("bench", "serving", *argv) == 2
    assert argv[0] in capsys.readouterr().err


def test_models_lists_the_known_names(capsys):
    main_result = run("models")
    assert main_result == 0
    assert "smollm2" in capsys.readouterr().out


def test_an_unknown_model_to_pull_is_a_clear_error(capsys):
    assert run("pull", "no-such-model") == 2
    assert "no-such-model" in capsys.readouterr().err


def test_doctor_as_json_tells_of_every_part(capsys):
    assert run("doctor", "--json") == 0
    report = json.loads(capsys.readouterr().out)

    assert {"python", "machine", "torch", "kernels", "attention_backends", "models"} <= report.keys()
    assert report["machine"]["num_cores"] >= 1
    assert {row["op"] for row in report["kernels"]} >= {"linear", "rms_norm", "paged_attention"}
    assert any(row["name"] == "torch_native" and not row["reasons_against"] for row in report["attention_backends"])


def test_doctor_tells_what_each_rank_of_a_model_would_get(capsys, monkeypatch):
    monkeypatch.setattr("headrace.kernels.cpu.default_num_threads", lambda: 7)
    monkeypatch.setattr("headrace.execution.memory.available_bytes", lambda device: 12 * 2**30)
    nodes = (NumaNode(0, "0-3", 8.0), NumaNode(1, "4-7", 8.0))
    monkeypatch.setattr("headrace.cli.doctor.numa_nodes", lambda: nodes)
    assert run("doctor", "--json", "--tp-size", "3") == 0
    report = json.loads(capsys.readouterr().out)

    near = "any of 0, 1: ranks are bound with --numa-bind"
    assert report["ranks"] == [
        {"rank": rank, "num_threads": 2, "memory_gib": 2.0, "numa_node": near} for rank in range(3)
    ]
    assert [node["cores"] for node in report["numa_nodes"]] == ["0-3", "4-7"]


def test_doctor_tells_to_which_node_each_rank_would_be_bound(capsys, monkeypatch):
    cpu.load()  # with the threads of this machine, not of that below
    nodes = (Node(0, (0, 1, 2, 3), 8 << 30, 6 << 30), Node(1, (4, 5), 8 << 30, 4 << 30))
    monkeypatch.setattr("headrace.processes.numa.read_nodes", lambda folder: nodes)
    monkeypatch.setattr("headrace.processes.share.read_nodes", lambda: nodes)
    monkeypatch.setattr("headrace.processes.numa._allowed_nodes", lambda status: None)
    monkeypatch.setattr("headrace.cgroup.quota_cpus", lambda: None)
    monkeypatch.setattr("headrace.execution.memory.available_bytes", lambda device: 16 * 2**30)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert run("doctor", "--json", "--tp-size", "3", "--numa-bind") == 0
    report = json.loads(capsys.readouterr().out)

    assert [(row["rank"], row["num_threads"], row["numa_node"]) for row in report["ranks"]] == [
        (0, 2, "0: cores 0-3"),
        (1, 2, "0: cores 0-3"),
        (2, 2, "1: cores 4-5"),
    ]
    assert {row["memory_gib"] for row in report["ranks"]} == {1.5}, "half of what each of two ranks has on node 0"


def test_doctor_says_which_variant_of_the_kernels_runs_and_why_others_cannot(monkeypatch, capsys):
    monkeypatch.setattr("headrace.kernels.cpu.isas", lambda: [("wide", "this processor lacks it"), ("plain", "")])
    monkeypatch.setattr("headrace.kernels.cpu.isa", lambda: "plain")
    assert run("doctor", "--json") == 0
    report = json.loads(capsys.readouterr().out)

    assert [(row["name"], row["runs"], row["reason"]) for row in report["kernel_variants"]] == [
        ("wide", False, "this processor lacks it"),
        ("plain", True, ""),
    ]


def test_doctor_says_why_the_native_backend_does_not_run(monkeypatch, capsys):
    monkeypatch.setattr("headrace.kernels.cpu._loaded", None)
    monkeypatch.setattr("headrace.kernels.cpu._reason", "it was not built")

    assert run("doctor", "--json") == 0
    report = json.loads(capsys.readouterr().out)

    (row,) = [row for row in report["attention_backends"] if (row["name"], row["device"]) == ("cpu", "cpu")]
    assert row["reasons_against"] == ["it was not built"]


def test_doctor_prints_tables(capsys):
    assert run("doctor") == 0
    text = capsys.readouterr().out
    for words in ("Machine", "kernel variants", "Kernels on CPU", "Attention backends", "Models"):
        assert words in text


class FakeEngine:
    """Remembers what it is asked for, and answers with nothing."""

    asked = []

    def __init__(self, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def generate(self, prompt, sampling_params, stream=False, **media):
        self.asked.append(sampling_params | media)
        return [] if stream else {}


@pytest.fixture
def asked(monkeypatch):
    """The sampling parameters that `generate` gives to its engine."""
    monkeypatch.setattr("headrace.api.engine.Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "asked", [])
    return FakeEngine.asked


def test_generate_takes_a_schema_from_a_file_or_as_json(asked, tmp_path):
    path = tmp_path / "schema.json"
    path.write_text('\n{"b": 1,\n "a": 2}\n')
    for given in (str(path), ' {"b": 1, "a": 2}'):
        assert run("generate", "hi", "--json-schema", given) == 0
    assert [params["json_schema"] for params in asked] == ['{"b":1,"a":2}'] * 2


def test_generate_takes_files_of_images_and_sounds(asked, tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n...")
    (tmp_path / "b.flac").write_bytes(b"fLaC...")
    files = (
        "--image",
        str(tmp_path / "a.png"),
        "--image",
        str(tmp_path / "a.png"),
        "--audio",
        str(tmp_path / "b.flac"),
    )
    assert run("generate", "hi", *files, "--max-new-tokens", "3") == 0
    (given,) = asked
    assert given == {
        "max_new_tokens": 3, "image_data": [b"\x89PNG\r\n\x1a\n..."] * 2, "audio_data": [b"fLaC..."],
    }  # fmt: skip
    assert run("generate", "hi", "--audio", str(tmp_path / "a.png")) == 2
    assert "is not an audio file" in capsys.readouterr().err


def test_generate_takes_a_regular_expression_or_a_choice(asked):
    assert run("generate", "hi", "--regex", "[ab]+") == 0
    assert run("generate", "hi", "--choice", "a", "--choice", "b", "--json") == 0
    assert run("generate", "hi") == 0
    grammars = [{name: params.get(name) for name in ("json_schema", "regex", "choice")} for params in asked]
    assert [{name: value for name, value in given.items() if value} for given in grammars] == [
        {"regex": "[ab]+"},
        {"choice": ["a", "b"]},
        {},
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--json-schema", "/no/such/schema.json"], "cannot be read: No such file"),
        (["--json-schema", "."], "cannot be read: Is a directory"),
        (["--json-schema", '{"a":'], "the schema is not valid JSON: it ends too early"),
        (["--regex", "a", "--choice", "b"], "--regex and --choice cannot be combined"),
    ],
)
def test_generate_refuses_a_grammar_that_is_none_before_it_loads_a_model(asked, capsys, argv, words):
    assert run("generate", "hi", *argv) == 2
    assert words in capsys.readouterr().err
    assert asked == []


@pytest.mark.parametrize(
    ("content", "words"), [(b"[1]", "must be a JSON object"), (b"\xff", "UTF-8"), (b"", "is empty")]
)
def test_a_file_without_a_schema_is_refused_by_its_name(asked, capsys, tmp_path, content, words):
    path = tmp_path / "schema.json"
    path.write_bytes(content)
    assert run("generate", "hi", "--json-schema", str(path)) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert words in error


def test_the_model_argument_and_option_must_not_contradict_each_other():
    assert with_model(ServerArgs(), "x").model_path == "x"
    assert with_model(ServerArgs(model_path="x"), None).model_path == "x"
    assert with_model(ServerArgs(model_path="x"), "x").model_path == "x"
    with pytest.raises(ConfigError, match="two models"):
        with_model(ServerArgs(model_path="y"), "x")


def test_a_server_starts_as_sglang_s_does():
    argv = [sys.executable, "-m", "headrace.launch_server", "--swap-space", "4"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("headrace: --swap-space 4 is not possible here")


def test_cache_kv_lists_and_clears_a_folder(tmp_path, capsys):
    files = PageFiles(tmp_path, "weights", 4, 32, 1 << 20)
    tokens = bytes(16 * 4)
    files.write(files.keys("", tokens), tokens, 0, [memoryview(bytes(4 * 32))])
    (tmp_path / "notes.txt").write_text("not a page")

    def said(command: str) -> str:
        assert run("cache", "kv", command, str(tmp_path)) == 0
        return capsys.readouterr().out

    assert said("list").count("4.2 kB") == 2
    assert "freed 4.2 kB" in said("clear")
    assert said("list").startswith("0 bytes in")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["notes.txt"]
