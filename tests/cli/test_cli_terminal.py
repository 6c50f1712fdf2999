"""`headrace chat` in a pseudo-terminal, as a person uses it, with a scripted server."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

# They wait for a prompt by what the terminal shows, and a key that comes between two modes of the terminal can be lost: run them by hand.
pytestmark = pytest.mark.skipif(
    not os.environ.get("HEADRACE_TERMINAL_TESTS"), reason="set HEADRACE_TERMINAL_TESTS=1 to type into a pseudo-terminal"
)

LIMIT_S = 60
UP, ENTER, CTRL_C, CTRL_D = "\x1b[A", "\r", "\x03", "\x04"
PASTE = "\x1b[200~{}\x1b[201~"

# A leader of a session gets the terminal that it opens as its own, and so its Ctrl-C.
# Tests may run in the background, where Ctrl-C is ignored.
CHAT = (
    "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "os.close(os.open(os.ttyname(0), os.O_RDWR)); from headrace.cli import main; main()"
)


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


class Person:
    """Someone at a terminal of 40 columns."""

    def __init__(self, url, folder):
        self.folder = folder
        self.fd, theirs = pty.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        keep = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        env = {**keep, "TERM": "xterm", "INPUTRC": "/dev/null", "XDG_STATE_HOME": str(folder / "state")}
        argv = [sys.executable, "-c", CHAT, "chat", "--url", url]
        self.chat = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=folder, start_new_session=True
        )
        os.close(theirs)
        self.seen = ""

    def types(self, text):
        os.write(self.fd, text.encode())

    def enters(self, text):
        """Type a line when asked for one, and wait for the next prompt."""
        self.types(text + ENTER)
        return self.until_prompt()

    def until_prompt(self):
        return self.until("\x1b[?2004h")  # readline has begun to read

    def until(self, text):
        """What is shown up to this text, which must come."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.seen:
            assert self.read(deadline), f"waited for {text!r}, got {self.seen!r}"
        before, _, self.seen = self.seen.partition(text)
        return before

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

    def read(self, deadline):
        ready, _, _ = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            more = os.read(self.fd, 65536)
        except OSError:
            return False  # its last user has closed it
        self.seen += more.decode(errors="replace")
        return bool(more)

    def leaves(self):
        self.types(CTRL_D)
        deadline = time.monotonic() + LIMIT_S
        while self.read(deadline):
            pass
        assert self.chat.wait(LIMIT_S) == 0


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
        if someone.chat.poll() is None:
            someone.chat.kill()
            someone.chat.wait()
        os.close(someone.fd)


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
