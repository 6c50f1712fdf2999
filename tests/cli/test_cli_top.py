"""`headrace top` in a pseudo-terminal and in a pipe, with a scripted server."""

import json
import os
import signal
import termios
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pseudo_terminal import PseudoTerminal

from headrace.cli.app import main
from headrace.metrics.catalog import Metrics
from headrace.metrics.export import render

LOAD = {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 4, "num_used_tokens": 1, "token_usage": 0.25}
REQUEST = {"rid": "the-request", "state": "running", "prompt_tokens": 12, "completion_tokens": 3, "age_s": 2.5}
OTHER_SCREEN, FIRST_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


def answers(**changes):
    """Path -> status and body; a change to an int is a refusal with that status."""
    found = {
        "/metrics": (200, render(Metrics("the-model"))),
        "/v1/loads": (200, {"loads": [LOAD]}),
        "/v1/requests": (200, {"object": "list", "data": [REQUEST]}),
        "/server_info": (200, {"served_model_name": "the-model", "version": "9.9.9"}),
    }
    return found | {
        f"/{name}": (status, {"error": {"message": f"status {status}"}}) for name, status in changes.items()
    }


class Handler(BaseHTTPRequestHandler):
    """Answers what `server.answers` has; to a wrong key, 401. Counts the paths and keeps the keys."""

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        self.server.keys.add(self.headers["Authorization"])
        status, body = self.server.answers.get(path, (404, {}))
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@contextmanager
def serving(port=0, **changes):
    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.answers, server.asked, server.keys = answers(**changes), [], set()
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def top():
    shown = []

    def start(url, *argv, **more):
        shown.append(PseudoTerminal("top", "--url", url, "--interval", "0.1", *argv, **more))
        return shown[-1]

    yield start
    for terminal in shown:
        terminal.close()


def once(capsys, server, *argv):
    """What one view shows."""
    with pytest.raises(SystemExit) as caught:
        main(["top", "--url", server.url, "--interval", "0.1", *argv])
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_it_shows_again_and_again_until_a_key_ends_it_and_leaves_the_terminal_as_it_was(top, key):
    with serving() as server:
        someone = top(server.url)
        someone.until(OTHER_SCREEN)
        someone.until("the-request")
        server.answers["/v1/requests"] = (200, {"data": [REQUEST | {"rid": "another-one"}]})
        someone.until("another-one")
        during = termios.tcgetattr(someone.fd)
        someone.types(key)
        someone.until(FIRST_SCREEN)
        assert someone.ends() == 0

    assert not during[3] & termios.ECHO
    assert termios.tcgetattr(someone.fd) == someone.settings
    assert "Traceback" not in someone.seen


def test_a_signal_that_ends_it_leaves_the_terminal_as_it_was(top):
    with serving() as server:
        someone = top(server.url)
        someone.until("the-request")
        someone.command.send_signal(signal.SIGTERM)
        someone.until(FIRST_SCREEN)
        assert someone.ends() == 128 + signal.SIGTERM

    assert termios.tcgetattr(someone.fd) == someone.settings


def test_a_new_size_is_taken_at_once(top):
    with serving() as server:
        someone = top(server.url, "--interval", "600", columns=100)
        someone.until("the-request")
        someone.resize(40, 30)
        os.killpg(someone.command.pid, signal.SIGWINCH)  # what a terminal does for its foreground processes
        someone.until("the-request")
        someone.types("q")
        assert someone.ends() == 0


def test_it_waits_for_a_server_that_goes_away_and_comes_back(top):
    with serving() as server:
        someone = top(server.url)
        someone.until("the-request")
    someone.until(f"waiting for {server.url}")
    with serving(server.server_port):
        someone.until("the-request")
        someone.types("q")
        assert someone.ends() == 0


def test_output_that_is_no_terminal_gets_one_view(capsys):
    with serving() as server:
        shown = once(capsys, server)
        assert "\x1b" not in shown
        assert "the-model" in shown.splitlines()[0]
        assert "the-request" in shown
        assert "3 running, 4 waiting" in shown
        assert server.asked == ["/v1/loads", "/v1/requests", "/server_info"]


def test_the_key_is_sent_and_what_it_does_not_open_is_left_out(capsys, monkeypatch):
    with serving(**{"v1/requests": 401}) as server:
        shown = once(capsys, server, "--api-key", "secret")
        assert server.keys == {"Bearer secret"}
    assert "need an API key" in shown
    assert "3 running, 4 waiting" in shown

    monkeypatch.setenv("HEADRACE_API_KEY", "from-there")
    with serving(**{"server_info": 401, "v1/loads": 401, "v1/requests": 401}) as server:
        shown = once(capsys, server)
        assert server.keys == {"Bearer from-there"}
    assert shown.startswith("the-model · http"), "which the metrics say without a key"
    assert "need an API key" in shown
    assert "the-request" not in shown


def test_what_is_not_open_is_not_asked_for_again(top):
    with serving(**{"v1/requests": 401}) as server:
        someone = top(server.url)
        someone.until("3 running")
        server.answers["/v1/loads"] = (200, {"loads": [LOAD | {"num_running_reqs": 99}]})
        someone.until("99 running")
        someone.types("q")
        assert someone.ends() == 0
        assert server.asked.count("/v1/requests") == server.asked.count("/server_info") == 1


def test_an_engine_that_restarts_is_told_in_the_servers_words(capsys):
    with serving(**{"v1/loads": 503}) as server:
        shown = once(capsys, server)
    assert "status 503" in shown
    assert "the-request" in shown


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/v1/requests", (404, {}), "is not a Headrace server"),
        ("/v1/requests", (200, b"<html>hello</html>"), "is not a Headrace server: /v1/requests"),
        ("/server_info", (200, b"[]"), "is not a Headrace server: /server_info"),
    ],
)
def test_another_server_is_a_clear_error(capsys, path, answer, words):
    with serving(**{"v1/loads": 404}) as server:
        server.answers[path] = answer
        with pytest.raises(SystemExit) as caught:
            main(["top", "--once", "--url", server.url])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_no_server_is_a_clear_error_for_one_view(capsys):
    with serving() as server:
        pass
    with pytest.raises(SystemExit) as caught:
        main(["top", "--once", "--url", server.url])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("headrace: no server answers at http://127.0.0.1:")
    assert "Traceback" not in error


def test_a_url_that_is_none_is_a_clear_error(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["top", "--once", "--url", "localhost:30000"])
    assert caught.value.code == 2
    assert "localhost:30000" in capsys.readouterr().err
