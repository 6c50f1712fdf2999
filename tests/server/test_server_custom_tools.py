"""Custom tools: the reader of their input, and their place in chat completions."""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_frontend import Running, events, running_server

from headrace.errors import RequestError
from headrace.server.chat.custom_tools import InputReader, custom_tool, input_of

CHAT = "/v1/chat/completions"
PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "Changes a file"}}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "tools": [PATCH, WEATHER], "max_tokens": 400}
PATCHED = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\n\\"b\\" \\ud83d\\ude42 é"}}\n</tool_call>'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEXT = 'a\n"b" 🙂 é'


def read(pieces: list[str]) -> str:
    reader = InputReader()
    return "".join([reader.push(piece) for piece in pieces]) + reader.finish()


CHARACTERS = [
    '"',
    "\\",
    "/",
    "\b\f\n\r\t",
    "\x00\x1f\x7f",
    "é漢",
    "🙂\U0010ffff",
    "\ud800",
    "\udfff",
    "u0041",
    "{}[]:,",
    " a",
]


def test_the_input_is_that_of_a_json_parser():
    for seed in range(2_000):
        chance = random.Random(seed)
        text = "".join(chance.choices("".join(CHARACTERS), k=chance.randint(0, 12)))
        indent, separators = chance.choice([(None, (",", ":")), (None, (", ", ": ")), (2, (" ,", " : "))])
        arguments = json.dumps(
            {"input": text}, ensure_ascii=chance.random() < 0.5, indent=indent, separators=separators
        )
        # What no text can hold becomes the replacement character; two halves become the character.
        expected = json.loads(arguments)["input"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if not arguments.isascii():
            arguments = arguments.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        assert read([arguments]) == expected
        cuts = sorted(chance.choices(range(len(arguments) + 1), k=chance.randint(0, 6)))
        assert read([arguments[a:b] for a, b in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]) == expected
        assert read(list(arguments)) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", ""),
        ("{}", "{}"),
        ('{"code": "x"}', '{"code": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('["a"]', '["a"]'),
        ('{"inp', '{"inp'),
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\', "cut"),
        ('{"input": "cut\\u00', "cut"),
        ('{"input": "cut\\ud83d', "cut\ufffd"),
        ('{"input": "a\\xb\\uzzzz"}', "a\\xb\\uzzzz"),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"input": "a", "more": "b"}', "a"),
    ],
)
def test_what_is_no_input_stays_as_it_is(arguments: str, expected: str):
    assert input_of(arguments) == expected
    assert read(list(arguments)) == expected


def test_a_regular_expression_binds_the_whole_input():
    tool = custom_tool("t", "f", None, {"type": "grammar", "syntax": "regex", "definition": "a|b+"})
    assert tool.strict
    assert tool.parameters is not None
    properties: Any = tool.parameters["properties"]
    assert properties["input"] == {"type": "string", "pattern": "^(?:a|b+)$"}
    assert tool == custom_tool(
        "t", "f", None, {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a|b+"}}
    )
    for form in (None, {}, {"type": "text"}):
        assert not custom_tool("t", "f", None, form).strict
    for form, param in (
        ({"type": "grammar", "syntax": "lark"}, "t.format.definition"),
        ({"type": "grammar", "syntax": "peg", "definition": "x"}, "t.format.syntax"),
        ({"type": "grammar", "syntax": "regex"}, "t.format.definition"),
        ({"type": "grammar", "syntax": "regex", "definition": "a)|(?:b"}, "t.format.definition"),
        ({"type": "other"}, "t.format.type"),
        ("text", "t.format.type"),
    ):
        with pytest.raises(RequestError) as caught:
            custom_tool("t", "f", None, form)
        assert caught.value.param == param


def test_a_lark_definition_is_shown_to_the_model():
    definition = 'start: "a" /[^"]+/'
    tool = custom_tool("t", "f", None, {"type": "grammar", "syntax": "lark", "definition": definition})
    assert tool.strict
    assert tool.lark == definition
    assert tool.parameters is not None
    properties: Any = tool.parameters["properties"]
    assert definition in properties["input"]["description"]


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with running_server(fake_context_length=4096) as server:
        yield server


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 1000])
def test_a_chat_streams_the_input(client: httpx.Client, server: Running, tokens_per_chunk: int):
    server.frontend.script.text = f"So: {PATCHED}{CALL}{PATCHED}"
    server.frontend.script.tokens_per_chunk = tokens_per_chunk
    choice = client.post(CHAT, json=ASKED).json()["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert [call["type"] for call in calls] == ["custom", "function", "custom"]
    assert calls[0]["custom"] == {"name": "patch", "input": TEXT}
    assert calls[1]["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    found: list[dict[str, Any]] = []
    for frame in events(client.post(CHAT, json=ASKED | {"stream": True})):
        for delta in frame["choices"][0]["delta"].get("tool_calls", ()):
            if "id" in delta:
                assert delta["index"] == len(found)
                found.append(delta)
            else:
                kind = found[delta["index"]]["type"]
                for name, text in delta[kind].items():
                    assert text
                    found[delta["index"]][kind][name] += text
    changing = ("index", "id")
    shown = [{name: value for name, value in call.items() if name not in changing} for call in found]
    assert shown == [{name: value for name, value in call.items() if name not in changing} for call in calls]


def test_a_cut_call_gives_what_it_held(client: httpx.Client, server: Running):
    server.frontend.script.text = '<tool_call>\n{"name": "patch", "arguments": {"inp'
    for stream in (False, True):
        reply = client.post(CHAT, json=ASKED | {"stream": stream})
        assert '{\\"inp' in reply.text, "given as it is, at the end"


@pytest.mark.parametrize("choice", ["required", "auto", {"type": "custom", "custom": {"name": "patch"}}])
def test_a_lark_definition_is_noted_where_calls_are_json(client: httpx.Client, server: Running, choice: Any):
    grammar = {"syntax": "lark", "definition": 'start: "*** " /[a-z]+/ "\\n"'}
    patch = {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": grammar}}}
    reply = client.post(CHAT, json=ASKED | {"tools": [patch, WEATHER], "tool_choice": choice})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-headrace-noted"] == "tools.format"
    prompt = server.frontend.tokenizer.decode(server.frontend.calls[-1].input_ids or [], False)
    assert "A text of this lark grammar" in prompt
    bound = server.frontend.resolved[-1].grammar
    assert bound is not None
    assert '"required":["input"]' in bound.text


def test_calls_and_choices_in_a_chat(client: httpx.Client, server: Running):
    messages = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "patch", "input": 'x"\n'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    reply = client.post(CHAT, json=ASKED | {"messages": messages})
    assert reply.status_code == 200, reply.text
    prompt = server.frontend.tokenizer.decode(server.frontend.calls[-1].input_ids or [], False)
    assert '{"name": "patch", "arguments": {"input": "x\\"\\n"}}' in prompt
    reply = client.post(CHAT, json=ASKED | {"tool_choice": {"type": "custom", "custom": {"name": "patch"}}})
    assert reply.status_code == 200, reply.text
    assert server.frontend.resolved[-1].grammar is not None
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [WEATHER]}}
    assert client.post(CHAT, json=ASKED | {"tool_choice": only}).status_code == 200
    prompt = server.frontend.tokenizer.decode(server.frontend.calls[-1].input_ids or [], False)
    assert '"get_weather"' in prompt
    assert '"patch"' not in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "x"}}}]},
            "tools[0].custom.format.type",
        ),
        ({"tool_choice": {"type": "custom", "custom": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [5]}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "patch"}}]}
                ]
            },
            "messages[0].tool_calls[0].custom.input",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]},
            "messages[0].tool_calls[0].custom",
        ),
    ],
)
def test_wrong_custom_tools_are_refused_by_name(client: httpx.Client, fields: dict[str, Any], param: str):
    reply = client.post(CHAT, json=ASKED | fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
