"""The terminal chat with a scripted source, and over HTTP with a scripted server."""

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from headrace.cli.app import main
from headrace.cli.chat import run_chat
from headrace.cli.chat_sources import ChatSampling, Piece, Reading, ServerChat, ToolUse, new_texts
from headrace.cli.given import read_tools
from headrace.errors import ConfigError, RequestError


class Script:
    """Replies with what it was given, and remembers what it was asked."""

    name = "script"

    def __init__(self, *replies):
        self.replies = list(replies)
        self.sampling = ChatSampling()
        self.asked = []
        self.schemas = []
        self.closed = 0

    def reply(self, messages, json_schema, tools):
        self.asked.append([dict(message) for message in messages])
        self.schemas.append(json_schema)
        self.tools = tools
        reply = self.replies.pop(0)
        if isinstance(reply, RequestError):
            raise reply
        try:
            for count, word in enumerate(reply, 1):
                if word is KeyboardInterrupt:
                    raise KeyboardInterrupt
                yield Piece(word, count) if isinstance(word, str) else word
        finally:
            self.closed += 1


class Terminal(io.StringIO):
    """Input that a person types."""

    def isatty(self):
        return True


def talk(monkeypatch, source, *lines, system=None, stdin=io.StringIO, tools=()):
    """What a chat prints for piped input, or for typed input when `stdin` is a Terminal."""
    monkeypatch.setattr("sys.stdin", stdin("".join(line + "\n" for line in lines)))
    out = io.StringIO()
    run_chat(source, Console(file=out, width=100), system, tools)
    return out.getvalue()


def test_the_conversation_is_remembered(monkeypatch):
    source = Script(["He", "llo"], ["Bye"])

    printed = talk(monkeypatch, source, "hi", "", "and now?", system="be brief")

    assert printed == "Hello\nBye\n"
    assert source.asked[1] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "and now?"},
    ]


def test_clear_keeps_the_system_message_and_system_begins_again(monkeypatch):
    source = Script(["a"], ["b"], ["c"], ["d"])

    talk(monkeypatch, source, "1", "/clear", "2", "/system other", "3", "/system", "4", system="first", stdin=Terminal)

    assert [[m["content"] for m in asked] for asked in source.asked] == [
        ["first", "1"],
        ["first", "2"],
        ["other", "3"],
        ["4"],
    ]


def test_exit_ends_before_the_rest_is_read(monkeypatch):
    source = Script()
    talk(monkeypatch, source, "/exit", "never asked", stdin=Terminal)
    assert source.asked == []


def test_replies_match_a_schema_until_it_is_taken_away(monkeypatch, tmp_path):
    path = tmp_path / "a schema.json"
    path.write_text('{"type": "integer"}')
    source = Script(["1"], ["2"], ["true"], ["hi"])

    printed = talk(
        monkeypatch, source, f"/schema {path}", "a", "/clear", "b", '/schema {"type": "boolean"}', "c", "/schema", "d", stdin=Terminal
    )  # fmt: skip

    assert source.schemas == ['{"type":"integer"}'] * 2 + ['{"type":"boolean"}', None]
    assert "replies match this schema" in printed
    assert "replies are any text" in printed


def test_a_schema_that_cannot_be_used_changes_nothing(monkeypatch, tmp_path):
    source = Script(["1"])

    printed = talk(monkeypatch, source, "/schema true", f"/schema {tmp_path}/none", "/schema {", "a", stdin=Terminal)

    assert source.schemas == ["true"]
    words = " ".join(printed.split())  # the terminal breaks long lines
    assert "cannot be read: No such file or directory" in words
    assert "the schema is not valid JSON" in words


def test_help_and_unknown_commands_say_so(monkeypatch):
    printed = talk(monkeypatch, Script(), "/help", "/nonsense", stdin=Terminal)
    assert "/clear" in printed
    assert "no such command: /nonsense" in printed


def test_a_failed_turn_is_shown_and_forgotten(monkeypatch):
    source = Script(RequestError("too long [1]"), ["fine"])

    printed = talk(monkeypatch, source, "one", "two", stdin=Terminal)

    assert "too long [1]" in printed
    assert [m["content"] for m in source.asked[1]] == ["two"]


def test_in_a_pipe_a_line_that_begins_with_a_slash_is_a_message(monkeypatch):
    source = Script(["a"], ["b"])

    assert talk(monkeypatch, source, "/exit", "/usr/bin is what?") == "a\nb\n"
    assert [asked[-1]["content"] for asked in source.asked] == ["/exit", "/usr/bin is what?"]


def test_in_a_pipe_a_failed_turn_ends_the_chat_with_its_error(monkeypatch):
    source = Script(RequestError("too long"), ["never asked"])

    with pytest.raises(RequestError, match="too long"):
        talk(monkeypatch, source, "one", "two")
    assert len(source.asked) == 1


def test_a_piped_chat_that_fails_says_so_on_stderr_and_leaves_with_2(monkeypatch, capsys, server):
    server.status, server.frames = 400, [b'{"error": {"message": "prompt too long"}}']
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))

    with pytest.raises(SystemExit) as left:
        main(["chat", "--url", server.url])

    printed = capsys.readouterr()
    assert left.value.code == 2
    assert printed.out == ""
    assert "prompt too long" in printed.err


def test_ctrl_c_stops_the_reply_only(monkeypatch):
    source = Script(["par", KeyboardInterrupt], ["next"])

    printed = talk(monkeypatch, source, "one", "two")

    assert printed == "par\nnext\n"
    assert source.closed == 2
    assert source.asked[1][1] == {"role": "assistant", "content": "par"}


def test_replies_are_printed_as_they_are_without_markup(monkeypatch):
    assert talk(monkeypatch, Script(["[bold]", ":smile: [/x]"]), "hi") == "[bold]:smile: [/x]\n"


def test_the_texts_of_a_cumulative_stream_join_to_its_text():
    texts = ["", "He", "He", "Hello"]
    assert list(new_texts({"text": text} for text in texts)) == ["", "He", "", "llo"]


CALL = ToolUse("a", "get_weather", '{"city": "[Rome]"}')
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("stdin", [io.StringIO, Terminal])
def test_calls_are_shown_and_the_next_line_is_their_result(monkeypatch, capsys, stdin):
    source = Script(["I look.", CALL, ToolUse("b", "get_time", "{}")], ["Sunny."], ["Bye."])

    printed = talk(monkeypatch, source, "weather?", "sunny", "noon", "thanks", tools=[TOOL], stdin=stdin)

    assert source.tools == [TOOL]
    assert "I look.\n" in printed
    assert 'get_weather({"city": "[Rome]"})' in printed
    assert ("result of get_time>" in capsys.readouterr().out) == (stdin is Terminal)
    assert source.asked[1][1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "[Rome]"}'}},
                {"id": "b", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
    ]
    assert source.asked[2][-2:] == [{"role": "assistant", "content": "Sunny."}, {"role": "user", "content": "thanks"}]


def test_a_turn_that_fails_after_a_call_is_forgotten_as_a_whole(monkeypatch):
    source = Script([CALL], RequestError("too long"), ["fine"])

    printed = talk(monkeypatch, source, "weather?", "sunny", "hi", tools=[TOOL], stdin=Terminal)

    assert "too long" in printed
    assert source.asked[2] == [{"role": "user", "content": "hi"}]


def test_the_end_of_input_at_a_result_ends_the_chat(monkeypatch):
    source = Script([CALL], ["never asked"])
    assert talk(monkeypatch, source, "weather?", tools=[TOOL]) == 'get_weather({"city": "[Rome]"})\n'
    assert len(source.asked) == 1


def test_reasoning_is_dimmed_and_only_people_see_it(monkeypatch):
    thoughts = [Piece("hm, ", 1, True), Piece("so", 2, True), Piece("yes", 3)]
    assert talk(monkeypatch, Script(thoughts), "hi") == "yes\n"
    monkeypatch.setattr("sys.stdin", Terminal("hi\nmore\n"))
    out, source = io.StringIO(), Script(thoughts, ["no"])
    run_chat(source, Console(file=out, width=100, force_terminal=True))
    assert "\x1b[2mhm, \x1b[0m\x1b[2mso\x1b[0m\nyes" in out.getvalue()
    assert source.asked[1][1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm, so"}


def test_tools_are_read_from_a_file_or_as_they_are(tmp_path):
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([TOOL, {"name": "get_time"}]))
    assert read_tools(str(path)) == [TOOL, {"type": "function", "function": {"name": "get_time"}}]
    assert read_tools(json.dumps([TOOL])) == [TOOL]
    for given in (str(tmp_path / "none"), "[", "[]", "[1]", "[{}]", json.dumps([TOOL, TOOL]), '[{"name": 5}]'):
        with pytest.raises(ConfigError):
            read_tools(given)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="list of tools"):
        read_tools(str(path))


class Handler(BaseHTTPRequestHandler):
    """One chat server: its reply is what the test put into `server.frames`."""

    def do_GET(self):
        listed = self.server.listed or {"data": [{"id": "the-model", "owned_by": self.server.owner}]}
        self.answer(200, json.dumps(listed).encode())

    def do_POST(self):
        self.server.asked.append(
            (json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.headers["Authorization"])
        )
        self.answer(self.server.status, b"".join(self.server.frames))

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.frames, server.status, server.owner, server.listed = [], [], 200, "somebody", None
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def frame(content):
    return b"data: " + json.dumps(content).encode() + b"\n\n"


MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_servers_stream_becomes_pieces(server):
    server.frames = [
        frame({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
        frame({"choices": [{"index": 0, "delta": {"content": "He"}}]}),
        frame({"choices": [{"index": 0, "delta": {"content": "y"}}]}),
        frame({"choices": [{"index": 0, "delta": None, "finish_reason": "stop"}], "error": None}),
        frame({"choices": None, "usage": {"completion_tokens": 7}}),
        b"data: [DONE]\n\n",
    ]
    chat = ServerChat(server.url + "/v1/", ChatSampling(temperature=0.0), api_key="k")

    pieces = list(chat.reply(MESSAGES, None, ()))

    assert [piece.text for piece in pieces] == ["He", "y", ""]
    assert pieces[-1].num_tokens == 7
    body, key = server.asked[0]
    assert body["model"] == "the-model"
    assert body["temperature"] == 0.0
    assert "max_tokens" not in body
    assert "response_format" not in body
    assert key == "Bearer k"


@pytest.mark.parametrize("model", [None, "named"])
def test_a_server_that_can_tell_says_how_much_of_the_prompt_is_read(server, model):
    progress = {"total": 40, "cache": 8, "processed": 16, "time_ms": 5}
    server.frames = [
        b": keep-alive\n\n",
        frame({"choices": [{"index": 0, "delta": {}}], "prompt_progress": progress}),
        frame({"choices": [{"index": 0, "delta": {"content": "Hey"}}]}),
        b"data: [DONE]\n\n",
    ]
    for owner in ("headrace", "somebody"):
        server.owner = owner
        pieces = list(ServerChat(server.url, ChatSampling(), model).reply(MESSAGES, None, ()))
        assert pieces == [Reading(16, 40), Piece("Hey", 1)]

    assert [body.get("return_progress") for body, _ in server.asked] == [True, None]


@pytest.mark.parametrize(
    "listed", [{"data": ["m"]}, {"data": [{"id": None}]}, {"data": [None]}, {"data": {"id": "m"}}, ["m"], "m"]
)
def test_a_list_of_models_of_another_form_names_none(server, listed):
    server.listed = listed
    with pytest.raises(ConfigError, match="names no model; give one"):
        ServerChat(server.url, ChatSampling())
    assert ServerChat(server.url, ChatSampling(), "named").name == "named"


def test_people_see_how_much_of_the_prompt_is_read_until_the_reply_begins(monkeypatch):
    reply = [Reading(0, 6615), Reading(3307, 6615), Reading(6615, 6615), Piece("yes", 1)]
    assert talk(monkeypatch, Script(reply), "hi") == "yes\n"
    monkeypatch.setattr("sys.stdin", Terminal("hi\n"))
    out = io.StringIO()
    run_chat(Script(reply), Console(file=out, width=100, force_terminal=True))
    shown = [f"\r\x1b[K\x1b[2mreading the prompt: {percent} % of 6,615 tokens\x1b[0m" for percent in (0, 49)]
    assert "".join(shown) + "\r\x1b[Kyes\n" in out.getvalue()


def test_what_is_read_does_not_stay_before_an_error(monkeypatch):
    def fails():
        yield Reading(0, 9)
        raise RequestError("too long")

    source = Script()
    source.reply = lambda *_: fails()
    monkeypatch.setattr("sys.stdin", Terminal("hi\n"))
    out = io.StringIO()
    run_chat(source, Console(file=out, width=100, force_terminal=True))
    assert "9 tokens\x1b[0m\r\x1b[K\x1b[31mtoo long" in out.getvalue()


def test_a_server_is_asked_for_a_schema_as_openai_s_api_takes_it(server):
    server.frames = [b"data: [DONE]\n\n"]
    list(ServerChat(server.url, ChatSampling(), model="m").reply(MESSAGES, '{"b":1,"a":2}', ()))

    body, _ = server.asked[0]
    schema = {"name": "schema", "schema": {"b": 1, "a": 2}}
    assert body["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert list(body["response_format"]["json_schema"]["schema"]) == ["b", "a"]


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_prompt_is_answered_once_and_no_other_is_read(command, monkeypatch, capsys, server):
    server.frames = [frame({"choices": [{"index": 0, "delta": {"content": "Hey"}}]}), b"data: [DONE]\n\n"]
    monkeypatch.setattr("sys.stdin", Terminal("unread\n"))
    main_ends(0, command, "m", "Hi there", "--url", server.url)

    assert capsys.readouterr().out == "Hey\n"
    ((body, _),) = server.asked
    assert (body["model"], body["messages"]) == ("m", [{"role": "user", "content": "Hi there"}])


def main_ends(code, *argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == code


def test_a_servers_reasoning_and_calls_become_pieces(server):
    def delta(**fields):
        return frame({"choices": [{"index": 0, "delta": fields}]})

    server.frames = [
        delta(reasoning_content="hm", reasoning="hm"),
        delta(content="Let me look."),
        delta(tool_calls=[{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"x"'}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}, {"index": 1, "function": {"name": "g"}}]),
        b"data: [DONE]\n\n",
    ]
    pieces = list(ServerChat(server.url, ChatSampling(), model="m").reply(MESSAGES, None, [TOOL]))

    assert pieces == [
        Piece("hm", 1, True), Piece("Let me look.", 2), ToolUse("a", "f", '{"x": 1}'), ToolUse("call_1", "g", "")
    ]  # fmt: skip
    assert server.asked[0][0]["tools"] == [TOOL]
    server.frames = [delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}])]
    with pytest.raises(RequestError, match="tool call"):
        list(ServerChat(server.url, ChatSampling(), model="m").reply(MESSAGES, None, []))


def test_a_reply_that_the_limit_cuts_is_said_to_be_cut(monkeypatch, server):
    end = (
        {"choices": [{"index": 0, "delta": {"content": "He"}}]},
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
    )
    server.frames = [*map(frame, end), b"data: [DONE]\n\n"]
    chat = ServerChat(server.url, ChatSampling(), model="m")

    assert list(chat.reply(MESSAGES, None, ())) == [Piece("He", 1), Piece("", 1, is_cut=True)]
    shown = talk(monkeypatch, chat, "hi", stdin=Terminal)
    assert "cut at the limit of tokens" in " ".join(shown.split())
    server.frames = server.frames[::2]
    assert "cut" not in talk(monkeypatch, chat, "hi", stdin=Terminal)


def test_a_servers_refusal_is_told_in_its_words(server):
    server.status, server.frames = 400, [b'{"error": {"message": "prompt too long"}}']
    chat = ServerChat(server.url, ChatSampling(), model="m")

    with pytest.raises(RequestError, match="prompt too long"):
        list(chat.reply(MESSAGES, None, ()))


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([frame({"error": {"message": "out of memory"}})], "out of memory"),
        ([frame({"choices": []})], "cut off"),
        ([b"data: {nonsense\n\n"], "cut off"),
        ([frame(["a", "list"])], "not a JSON object"),
    ],
    ids=["error frame", "no end", "not JSON", "no object"],
)
def test_a_stream_that_breaks_is_an_error(server, frames, words):
    server.frames = frames
    with pytest.raises(RequestError, match=words):
        list(ServerChat(server.url, ChatSampling(), model="m").reply(MESSAGES, None, ()))


def test_no_server_is_a_clear_error():
    with pytest.raises(ConfigError, match="no server answers at"):
        ServerChat("http://127.0.0.1:9", ChatSampling())
