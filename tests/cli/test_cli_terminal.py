"""`headrace chat` in a pseudo-terminal, as a person uses it, with a scripted server."""

import contextlib
import json
import re
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pseudo_terminal import LIMIT_S, PseudoTerminal

UP, ENTER, CTRL_C, CTRL_D = "\x1b[A", "\r", "\x03", "\x04"
PASTE = "\x1b[200~{}\x1b[201~"


class Handler(BaseHTTPRequestHandler):
    """Answers each chat with the pieces that the test put into `server.replies`; None = wait for `server.go_on`."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "the-model"}]}')

    def do_POST(self):
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        try:
            for piece in self.server.replies.pop(0):
                if piece is None:
                    self.server.go_on.wait(LIMIT_S)
                else:
                    chunk = {"choices": [{"index": 0, "delta": {"content": piece}}]}
                    self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass  # stopped by Ctrl-C

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.replies, server.go_on = [], [], threading.Event()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.go_on.set()
        server.shutdown()
        thread.join()


class Person(PseudoTerminal):
    """Someone who chats at a terminal of 40 columns."""

    def __init__(self, url, folder):
        self.folder = folder
        env = {"INPUTRC": "/dev/null", "XDG_STATE_HOME": str(folder / "state")}
        super().__init__("chat", "--url", url, columns=40, env=env, cwd=folder)

    def enters(self, text):
        """Type a line when asked for one, and wait for the next prompt."""
        self.types(text + ENTER)
        return self.until_prompt()

    def until_prompt(self):
        return self.until("\x1b[?2004h")  # readline has begun to read

    def stops_the_reply(self):
        """Press Ctrl-C, and again as a person does when nothing happens for a while."""
        deadline = time.monotonic() + LIMIT_S
        while "stopped" not in self.seen:
            assert time.monotonic() < deadline, self.seen
            self.types(CTRL_C)
            again = time.monotonic() + 5
            while "stopped" not in self.seen and self.read(again):
                pass
        self.until("stopped")

    def leaves(self):
        """Press Ctrl-D until the chat ends: between two modes of the terminal, one is taken for the end of an empty line."""
        deadline = time.monotonic() + LIMIT_S
        while self.command.poll() is None:
            assert time.monotonic() < deadline, self.seen
            with contextlib.suppress(OSError):  # it has just closed the terminal
                self.types(CTRL_D)
            again = time.monotonic() + 2
            while self.read(again):
                pass
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.command.wait(max(0.1, again - time.monotonic()))
        assert self.command.returncode == 0


@pytest.fixture
def person(server, tmp_path):
    people = []

    def come():
        someone = Person(server.url, tmp_path)
        people.append(someone)
        someone.until_prompt()
        return someone

    server.url = f"http://127.0.0.1:{server.server_port}"
    yield come
    for someone in people:
        someone.close()


def contents(asked):
    return [message["content"] for message in asked["messages"]]


def test_up_brings_back_what_was_typed_also_in_the_next_chat(server, person):
    server.replies = [["one"], ["two"], ["three"]]
    first = person()
    first.enters("hello there")
    first.enters(UP + "!")
    first.leaves()

    second = person()
    second.enters(UP + UP + "?")
    second.leaves()

    assert [contents(asked)[-1] for asked in server.asked] == ["hello there", "hello there!", "hello there?"]
    file = first.folder / "state" / "headrace" / "chat_history"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        "hello there",
        "hello there!",
        "hello there?",
    ]


def test_a_paste_and_a_block_are_one_message(server, person):
    server.replies = [["a"], ["b"], ["c"]]
    someone = person()
    someone.enters(PASTE.format("def f():\n    return 1") + " # ok")
    someone.types('"""/not a command' + ENTER)
    someone.until_prompt()
    someone.types(ENTER)
    someone.until_prompt()
    someone.enters('  end"""')
    someone.enters('/system """be brief' + ENTER + 'and kind"""')
    someone.enters("hi")
    someone.leaves()

    assert contents(server.asked[0]) == ["def f():\n    return 1 # ok"]
    assert contents(server.asked[1])[-1] == "/not a command\n\n  end"
    assert contents(server.asked[2]) == ["be brief\nand kind", "hi"]


def test_ctrl_c_stops_the_reply_only_and_empties_a_line(server, person):
    server.replies = [["partial", None], ["fine"]]
    someone = person()
    someone.types("one" + ENTER)
    someone.until("partial")
    someone.stops_the_reply()
    someone.until_prompt()
    someone.types("never sent")
    someone.until("never sent")
    someone.types(CTRL_C)
    someone.until_prompt()
    someone.enters("two")
    someone.leaves()

    assert contents(server.asked[1]) == ["one", "partial", "two"]


def test_keys_typed_during_a_reply_are_not_shown_in_it_and_not_lost(server, person):
    server.replies = [["par", None, "tial"], ["fine"]]
    someone = person()
    someone.types("one" + ENTER)
    someone.until("par")
    someone.types("typed ahead" + ENTER)
    server.go_on.set()

    meanwhile = someone.until("tial")
    someone.until("typed ahead")
    someone.until("fine")
    someone.until_prompt()
    someone.leaves()

    assert "typed" not in meanwhile
    assert contents(server.asked[1])[-1] == "typed ahead"


def test_replies_break_between_words(server, person):
    server.replies = [["The quick brown fox jumps over the la", "zier dog."]]
    someone = person()
    someone.types("one" + ENTER)
    someone.until("\x1b[?2004l\r")  # readline has read it

    reply = someone.until("dog.")

    lines = re.sub(r"\x1b\[(\d+)D\x1b\[K", lambda moved: "<" * int(moved[1]), reply).split("\r\n")
    assert lines == ["The quick brown fox jumps over the lazi<<<<", "lazier "]


def test_settings_apply_from_the_next_reply_on(server, person):
    server.replies = [["a"], ["b"]]
    someone = person()
    assert "temperature 0.5" in someone.enters("/set temperature 0.5")
    someone.enters("/set max_tokens 7")
    assert "there is no setting 'heat'" in someone.enters("/set heat 1")
    assert ">= 0" in someone.enters("/set seed -3")
    assert "expected a number, " in someone.enters("/set temperature hot")
    someone.enters("one")
    someone.enters("/set temperature")
    someone.enters("two")

    shown = someone.enters("/show")
    someone.leaves()

    wanted = [
        {name: asked[name] for name in ("temperature", "max_tokens", "seed") if name in asked} for asked in server.asked
    ]
    assert wanted == [{"temperature": 0.5, "max_tokens": 7}, {"max_tokens": 7}]
    assert "max_new_tokens 7" in shown
    assert all(word in shown for word in ("the-model", "one", "two"))


def test_a_conversation_is_saved_and_loaded_and_nothing_is_overwritten_unasked(server, person, tmp_path):
    server.replies = [["hi"], ["again"], ["more"]]
    someone = person()
    someone.enters("/set top_k 5")
    someone.enters("hello")
    someone.enters("/save a.json")
    saved = (tmp_path / "a.json").read_text()
    someone.enters("second")
    someone.types("/save a.json" + ENTER)
    someone.until("[y/N]")
    assert "not saved" in someone.enters("")
    assert (tmp_path / "a.json").read_text() == saved
    someone.types("/load a.json" + ENTER)
    someone.until("[y/N]")
    assert "loaded 2 messages" in someone.enters("y")
    someone.enters("third")
    someone.types("/save a.json" + ENTER)
    someone.until("[y/N]")
    someone.enters("y")
    someone.leaves()

    assert json.loads(saved) == {
        "model": "the-model",
        "settings": {"top_k": 5},
        "json_schema": None,
        "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}],
    }
    assert contents(server.asked[2]) == ["hello", "hi", "third"]
    assert len(json.loads((tmp_path / "a.json").read_text())["messages"]) == 4
