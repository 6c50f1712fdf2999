"""The client that owns a server process. The server here is a small stand-in that speaks the native HTTP API."""

import json
import socket
import sys

import pytest

from headrace.api import runtime
from headrace.api.runtime import Runtime, command_line, free_port
from headrace.errors import AuthError, CapacityError, ConfigError, ExecutionError, RequestError

SERVER = r"""
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    num_ready = num_flushes = 0
    def log_message(self, *args):
        pass
    def reply(self, status, value, **headers):
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(value if isinstance(value, bytes) else json.dumps(value).encode())
    def do_GET(self):
        Handler.num_ready += 1
        self.reply(200 if Handler.num_ready > 1 else 503, {})
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/flush_cache":
            Handler.num_flushes += 1
            status = [200, 409, 401][Handler.num_flushes - 1]
            return self.reply(status, {"error": {"message": "no"}})
        request = json.loads(body)
        text = request["text"]
        if text == "full":
            return self.reply(503, {"error": {"message": "queue is full"}}, Retry_After="7")
        if text == "bad":
            return self.reply(400, {"error": {"message": "no good", "param": "text"}})
        if text == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"data: {")
            return
        if not request.get("stream"):
            answer = {"text": text, "key": self.headers["Authorization"]}
            if text == "keys":
                answer = {n: os.environ.get(n) for n in ("HEADRACE_API_KEY", "HEADRACE_PAGE_SIZE")}
            return self.reply(200, answer)
        frames = [{"text": text[: i + 1]} for i in range(len(text))]
        if text == "killed":
            return self.reply(200, "".join(f"data: {json.dumps(f)}\n\n" for f in frames).encode())
        if text == "breaks":
            frames.append({"error": {"message": "broke"}})
        out = "".join(f"data: {json.dumps(f)}\n\n" for f in frames) + "data: [DONE]\n\n"
        self.reply(200, out.encode())

port = int(next(a for a in sys.argv if a.startswith("--port=")).split("=")[1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Makes `python -m headrace.cli serve ...` run the stand-in."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    real = runtime.subprocess.Popen
    commands = []

    def popen(command, **options):
        commands.append(command)
        return real([sys.executable, str(script), *command[3:]], **options)

    monkeypatch.setattr(runtime.subprocess, "Popen", popen)
    monkeypatch.setattr(runtime, "READY_POLL_S", 0.01)
    return commands


def test_it_speaks_to_its_server(stand_in):
    with Runtime(model_path="tiny", api_key="k") as server:
        assert server.generate("hello") == {"text": "hello", "key": "Bearer k"}
        assert [c["text"] for c in server.generate("abc", stream=True)] == ["a", "ab", "abc"]
        assert server.flush_cache()
        assert not server.flush_cache()
        with pytest.raises(AuthError):
            server.flush_cache()
        with pytest.raises(RequestError, match="no good"):
            server.generate("bad")
        with pytest.raises(CapacityError) as full:
            server.generate("full")
        assert full.value.retry_after_s == 7.0
        with pytest.raises(ExecutionError, match="broke"):
            list(server.generate("breaks", stream=True))
        assert server.encode("x")["text"] == "x"
        process = server._server
    server.shutdown()

    assert process.exit_code is not None
    assert stand_in[0][:4] == [sys.executable, "-m", "headrace.cli", "serve"]
    assert not any(word.rpartition("=")[2] == "k" for word in stand_in[0])


@pytest.mark.parametrize("prompt", ["killed", "cut"])
async def test_an_answer_that_breaks_off_is_an_error(stand_in, prompt):
    with Runtime(model_path="tiny") as server:
        with pytest.raises(ExecutionError, match="before it was complete"):
            list(server.generate(prompt, stream=True))
        with pytest.raises(ExecutionError, match="before it was complete"):
            [chunk async for chunk in server.async_generate(prompt)]
        if prompt == "cut":
            with pytest.raises(ExecutionError, match="before it was complete"):
                server.generate(prompt)


def test_options_in_the_environment_are_not_the_server_s_unless_given(stand_in, monkeypatch):
    monkeypatch.setenv("HEADRACE_API_KEY", "of another server")
    monkeypatch.setenv("HEADRACE_PAGE_SIZE", "1")
    with Runtime(model_path="tiny") as server:
        assert server.generate("keys") == {"HEADRACE_API_KEY": None, "HEADRACE_PAGE_SIZE": None}
    with Runtime(model_path="tiny", api_key="k") as server:
        assert server.generate("keys") == {"HEADRACE_API_KEY": "k", "HEADRACE_PAGE_SIZE": None}


async def test_it_streams_asynchronously(stand_in):
    with Runtime(model_path="tiny") as server:
        assert [c["text"] async for c in server.async_generate("abc")] == ["a", "ab", "abc"]
        with pytest.raises(CapacityError):
            await anext(server.async_generate("full"))


def test_a_server_that_dies_while_starting_is_an_error(monkeypatch):
    real = runtime.subprocess.Popen
    monkeypatch.setattr(
        runtime.subprocess,
        "Popen",
        lambda command, **options: real([sys.executable, "-c", "raise SystemExit(2)"]),
    )
    with pytest.raises(ExecutionError, match="exit code 2"):
        Runtime(model_path="tiny")


def test_a_server_that_is_never_ready_is_ended(stand_in):
    with pytest.raises(ExecutionError, match="not ready"):
        Runtime(start_timeout_s=0.0, model_path="tiny")


def test_options_become_flags_and_keys_do_not():
    options = {
        "model_path": "x",
        "max_total_tokens": 5,
        "disable_metrics": True,
        "single_process": False,
        "enable_cache_report": False,
        "api_key": "secret",
        "context_length": None,
    }

    assert command_line(options) == [
        "--model-path=x",
        "--max-total-tokens=5",
        "--disable-metrics",
        "--no-enable-cache-report",
    ]
    with pytest.raises(ConfigError, match="nonsense"):
        command_line({"nonsense": 1})


def test_a_free_port_is_in_the_range_and_can_be_bound():
    port = free_port()

    assert 10000 <= port <= 40000
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def test_the_body_is_json_without_what_was_not_said():
    assert json.loads(runtime._body("a", None, {"stream": True, "rid": None})) == {"text": "a", "stream": True}
