"""Conversations that clients send back as they got, cut or made them: every chat API takes them, and the model is shown what they say."""

import base64
import json
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import httpx
import pydantic
import pytest
from anthropic.types.beta.beta_content_block_param import BetaContentBlockParam
from anthropic.types.beta.beta_tool_result_block_param import Content as ResultContent
from anthropic.types.content_block_param import ContentBlockParam
from fake_frontend import Running, running_server
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from headrace.server.anthropic.request import FIELDS_OF_TYPE
from headrace.server.anthropic.request import WRITTEN_OUT as WRITTEN_BLOCKS
from headrace.server.responses.items import UNREADABLE, WRITTEN_OUT

CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
APIS = [CHAT, RESPONSES, MESSAGES, OLLAMA]
BEGIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<call {{ c.function.name }}>"
END = "</call>{% endfor %}{{ '\n' }}{% endfor %}{% if tools %}tools{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEMPLATES = {
    "items": "{% for k, v in c.function.arguments|items %}<{{ k }}>{{ v if v is string else v|tojson }}</{{ k }}>{% endfor %}",
    "tojson": "{{ c.function.arguments|tojson }}",
    "text": "{{ '' + c.function.arguments }}",
}
STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% if loop.first or not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result without a call') }}{% endif %}<|tool|>{{ m.content }}"
    "{% elif m.role in ('user', 'assistant') %}<|{{ m.role }}|>{{ m.content }}"
    "{% elif m.role == 'king' %}{{ raise_exception('no kings') }}{% endif %}{{ '\n' }}{% endfor %}{% if tools %}tools{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module", params=list(TEMPLATES))
def templated(request: pytest.FixtureRequest) -> Iterator[tuple[str, Running]]:
    with running_server(BEGIN + TEMPLATES[request.param] + END, fake_context_length=4096) as server:
        yield request.param, server


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with running_server(BEGIN + TEMPLATES["items"] + END, fake_context_length=4096) as server:
        yield server


CLIENT = httpx.Client(timeout=20)


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end() -> Iterator[None]:
    with CLIENT:
        yield


def post(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    return CLIENT.post(server.url + path, json={"model": "", "stream": False} | body)


def prompt_of(server: Running, path: str, body: dict[str, Any]) -> str:
    """The prompt that a request makes. /tokenize and /apply-template give the same."""
    reply = post(server, path, body)
    assert reply.status_code == 200, (path, reply.text)
    ids = server.frontend.calls[-1].input_ids or []
    if path == CHAT and body.keys() == {"messages"}:
        assert CLIENT.post(server.url + "/tokenize", json=body).json()["tokens"] == ids
    prompt = server.frontend.tokenizer.decode(ids, False)
    if path == CHAT:
        assert post(server, "/apply-template", body).json() == {"prompt": prompt}
    return prompt


USER = {"role": "user", "content": "hi"}


def function(arguments: object, **more: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}, **more}


def called(path: str, arguments: object, result: dict[str, Any] | None = None) -> dict[str, Any]:
    """A conversation with one call. result: the content of its result, under the name that each API has for it; None = x."""
    match path:
        case "/v1/responses":
            output = {"output": "x"} if result is None else {"output": next(iter(result.values()))}
            call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}
            return {"input": [USER, call, {"type": "function_call_output", "call_id": "a", **output}]}
        case "/v1/messages":
            block = {"type": "tool_use", "id": "a", "name": "f", "input": arguments}
            answer = {"type": "tool_result", "tool_use_id": "a", **({"content": "x"} if result is None else result)}
            turn = [{"role": "assistant", "content": [block]}, {"role": "user", "content": [answer]}]
            return {"messages": [USER, *turn], "max_tokens": 5}
        case _:
            call = {"role": "assistant", "content": "", "tool_calls": [function(arguments, id="a")]}
            answer = {"role": "tool", "tool_call_id": "a", **({"content": "x"} if result is None else result)}
            return {"messages": [USER, call, answer]}


NO_OBJECTS = [
    '{"path',
    "null",
    "[]",
    "5",
    "just text",
    '{"a": 1}{"b": 2}',
    '"a"',
    "true",
    '{"a": "\\ud83d"}',
    "[" * 2000,
]


@pytest.mark.parametrize("path", APIS)
def test_arguments_that_are_no_object_are_shown_in_one(templated: tuple[str, Running], path: str):
    kind, server = templated
    for text in NO_OBJECTS:
        prompt = prompt_of(server, path, called(path, text))
        written = json.dumps({"invalid_arguments": text}, ensure_ascii=False, separators=(",", ":"))
        shown = {"items": f"<invalid_arguments>{text}</invalid_arguments>", "text": written}.get(kind)
        assert f"<call f>{shown}</call>" in prompt if shown else json.dumps({"invalid_arguments": text}) in prompt
    for value, text in (([], "[]"), (5, "5"), (["a", {"b": None}], '["a",{"b":null}]'), (True, "true")):
        assert "invalid_arguments" in (prompt := prompt_of(server, path, called(path, value)))
        assert text in prompt.replace('\\"', '"')
    for nothing in ("", " \n", None, {}):
        assert "invalid_arguments" not in prompt_of(server, path, called(path, nothing))
    assert "Z\u00fcrich" in prompt_of(server, path, called(path, {"city": "Z\u00fcrich"}))


@pytest.mark.parametrize("path", APIS)
def test_a_template_that_wants_text_of_the_assistant_gets_a_blank(path: str):
    """As Mistral's."""
    wants = "{% if m.role == 'assistant' and not m.content and not m.tool_calls %}{{ raise_exception('no content') }}{% endif %}"
    name, more = "input" if path == RESPONSES else "messages", {"max_tokens": 5} if path == MESSAGES else {}
    with running_server(
        BEGIN.replace("<|", wants + "<|", 1) + TEMPLATES["tojson"] + END, fake_context_length=4096
    ) as strict:
        turn = [USER, {"role": "assistant", "content": ""}, {"role": "user", "content": "more"}]
        assert (
            prompt_of(strict, path, {name: turn, **more}) == "<|user|>hi\n<|assistant|> \n<|user|>more\n<|assistant|>"
        )
        assert "<call f>" in prompt_of(strict, path, called(path, "{}")), "calls are enough"


@pytest.mark.parametrize("path", APIS)
def test_results_and_replies_may_be_empty(server: Running, path: str):
    nothing: list[dict[str, Any]] = [{"content": None}, {"content": ""}]
    if path != RESPONSES:
        nothing.append({})
    nothing += [{"content": []}, {"content": [{"type": "text", "text": ""}]}]
    for result in nothing:
        assert "<|tool|>\n<|assistant|>" in prompt_of(server, path, called(path, "{}", result)), result
    name = "input" if path == RESPONSES else "messages"
    for content in nothing:
        for more in ({}, {"reasoning_content": "hm"} if path == CHAT else {}):
            turn = [USER, {"role": "assistant", **content, **more}, {"role": "user", "content": "more"}]
            prompt = prompt_of(server, path, {name: turn, **({"max_tokens": 5} if path == MESSAGES else {})})
            assert prompt == "<|user|>hi\n<|assistant|>\n<|user|>more\n<|assistant|>", (content, more)


def unasked(path: str) -> list[dict[str, Any]]:
    """Conversations with a result `sunny` whose call is not there."""
    match path:
        case "/v1/responses":
            result = {"type": "function_call_output", "call_id": "zz", "output": "sunny"}
            custom = result | {"type": "custom_tool_call_output"}
            return [
                {"input": [USER, one]} for one in (result, custom, {k: v for k, v in result.items() if k != "call_id"})
            ]
        case "/v1/messages":
            result = {"type": "tool_result", "tool_use_id": "zz", "content": "sunny"}
            return [
                {"messages": [*turn, {"role": "user", "content": [result]}], "max_tokens": 5} for turn in ([], [USER])
            ]
        case _:
            results: list[dict[str, Any]] = [{"tool_call_id": "zz"}, {}, {"name": "g"}]
            if path == OLLAMA:
                results.append({"tool_name": "g"})
            return [{"messages": [USER, {"role": "tool", "content": "sunny", **one}]} for one in results]


@pytest.mark.parametrize("path", APIS)
def test_a_result_may_have_lost_its_call(server: Running, path: str):
    for body in unasked(path):
        assert prompt_of(server, path, body).endswith("<|tool|>sunny\n<|assistant|>"), body
    with running_server(STRICT, fake_context_length=4096) as strict:
        for body in unasked(path):
            prompt = prompt_of(strict, path, body)
            assert "sunny" in prompt.partition("<|user|>")[2], "of a template that refuses it, as the user's"


@pytest.mark.parametrize("path", APIS)
def test_roles_of_one_s_own(server: Running, path: str):
    name = "input" if path == RESPONSES else "messages"
    more = {"max_tokens": 5} if path == MESSAGES else {}
    for role in ("critic", "king", "ipython"):
        turn = [USER, {"role": role, "content": "I say"}, {"role": "user", "content": "and?"}]
        assert f"<|{role}|>I say\n" in prompt_of(server, path, {name: turn, **more})
    with running_server(STRICT, fake_context_length=4096) as strict:
        for role in ("king", "critic"):  # one that the template refuses, and one that it leaves out
            turn = [{"role": "user", "content": "hi"}, {"role": role, "content": "I say"}]
            assert prompt_of(strict, path, {name: turn, **more}) == "<|user|>hi\n\nI say\n<|assistant|>"
    for role in ("", 5, None):
        reply = post(server, path, {name: [{"role": role, "content": "a"}], **more})
        assert (reply.status_code, "role" in reply.text) == (400, True), role


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    last = [] if role == "user" else [{"role": "user", "content": "and?"}]
    return {
        "messages": [*([] if role == "user" else [USER]), {"role": role, "content": list(blocks)}, *last],
        "max_tokens": 5,
    }


TEXT = base64.b64encode(b"dogs bark").decode()
DOCUMENTS: list[dict[str, Any]] = [
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "dogs bark"}, "title": "T", "context": "C"},
    {"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": TEXT}, "citations": {"enabled": True}},
    {"type": "document", "source": {"type": "content", "content": "dogs bark"}, "title": None},
    {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "dogs bark"}]}},
    {"type": "search_result", "source": "https://x", "title": "T", "content": [{"type": "text", "text": "dogs bark"}]},
]  # fmt: skip


def test_documents_are_shown_as_text(server: Running):
    prompt = prompt_of(server, MESSAGES, said(DOCUMENTS[0], {"type": "text", "text": "why?"}))
    assert prompt == "<|user|><document>\ntitle: T\ncontext: C\ndogs bark\n</document>\nwhy?\n<|assistant|>"
    for one in DOCUMENTS:
        assert "dogs bark\n</" in prompt_of(server, MESSAGES, said(one))
        body = called(MESSAGES, {}, {"content": [{"type": "text", "text": "see"}, one]})
        assert "dogs bark\n</" in prompt_of(server, MESSAGES, body).partition("<|tool|>see\n")[2]
    for source in (
        {"type": "base64", "data": base64.b64encode(b"%PDF-1.7").decode()},
        {"type": "url", "url": "http://x"},
        {"type": "file", "file_id": "f"},
        None,
    ):
        reply = post(server, MESSAGES, said({"type": "document", "source": source}))
        assert (reply.status_code, "messages[0].content[0].source" in reply.text) == (400, True), source


def test_files_of_text_are_shown(server: Running):
    for data in (f"data:text/plain;base64,{TEXT}", TEXT):
        file = {"filename": "dogs.txt", "file_data": data}
        for path, name, part in (
            (CHAT, "messages", {"type": "file", "file": file}),
            (RESPONSES, "input", {"type": "input_file", **file}),
        ):
            prompt = prompt_of(server, path, {name: [{"role": "user", "content": [part]}]})
            assert prompt == "<|user|><document>\ntitle: dogs.txt\ndogs bark\n</document>\n<|assistant|>"


SEARCH = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "dogs"}}
FOUND = {
    "type": "web_search_tool_result", "tool_use_id": "s",
    "content": [{"type": "web_search_result", "url": "https://x", "title": "Dogs", "encrypted_content": "QUJD", "page_age": "1 day"}],
}  # fmt: skip


def test_what_a_vendor_s_servers_did_is_shown_as_text(server: Running):
    answer = {
        "type": "text",
        "text": "They bark.",
        "citations": [{"type": "web_search_result_location", "url": "https://x"}],
    }
    prompt = prompt_of(server, MESSAGES, said(SEARCH, FOUND, answer, role="assistant"))
    assert prompt == (
        '<|user|>hi\n<|assistant|><server_tool_use>\n{"name": "web_search", "input": {"query": "dogs"}}\n</server_tool_use>\n'
        '<web_search_tool_result>\n{"content": [{"type": "web_search_result", "url": "https://x", "title": "Dogs", "page_age": "1 day"}]}\n'
        "</web_search_tool_result>\nThey bark.\n<|user|>and?\n<|assistant|>"
    )
    shell = {
        "type": "local_shell_call",
        "id": "l",
        "call_id": "c",
        "action": {"type": "exec", "command": ["ls"]},
        "status": "completed",
    }
    items = [
        USER,
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "dogs"}},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "They bark."}]},
        shell,
        {"type": "local_shell_call_output", "id": "o", "output": "a.txt"},
        {
            "type": "image_generation_call",
            "id": "i",
            "status": "completed",
            "result": "aGk=",
            "revised_prompt": "a dog",
        },
    ]
    assert prompt_of(server, RESPONSES, {"input": items}) == (
        '<|user|>hi\n<|assistant|><web_search_call>\n{"status": "completed", "action": {"type": "search", "query": "dogs"}}\n</web_search_call>\n'
        'They bark.\n<local_shell_call>\n{"action": {"type": "exec", "command": ["ls"]}, "status": "completed"}\n</local_shell_call>\n'
        '<|user|><local_shell_call_output>\n{"output": "a.txt"}\n</local_shell_call_output>\n'
        '<|assistant|><image_generation_call>\n{"status": "completed", "revised_prompt": "a dog"}\n</image_generation_call>\n<|assistant|>'
    )


def words_of(kind: object) -> set[str]:
    """The words of a Literal, wherever it is in the type."""
    inner = get_args(kind)
    return {kind} if isinstance(kind, str) else set().union(*map(words_of, inner)) if inner else set()


def types_of(union: object) -> set[str]:
    """The values that `type` has in the members of a union of the official package."""
    if members := get_args(union):
        return set().union(*map(types_of, members))
    if not isinstance(union, type) or union is str:
        return set()
    if issubclass(union, pydantic.BaseModel):
        return words_of(union.model_fields["type"].annotation)
    return words_of(get_type_hints(union)["type"])


@pytest.mark.parametrize("union", [ContentBlockParam, BetaContentBlockParam, ResultContent])
def test_every_block_of_the_official_package_is_read(server: Running, union: object):
    known = types_of(union)
    assert known
    assert known <= FIELDS_OF_TYPE.keys() | WRITTEN_BLOCKS
    for kind in known & WRITTEN_BLOCKS:
        block = {"type": kind, "id": "x", "surprise": "seen", "content": {"type": "base64", "data": "c2VjcmV0"}}
        for role in ("user", "assistant"):
            prompt = prompt_of(server, MESSAGES, said(block, role=role))
            assert f'<{kind}>\n{{"surprise": "seen", "content": {{"type": "base64"}}}}\n</{kind}>' in prompt


def test_every_item_of_the_official_package_is_read_or_refused_by_name(server: Running):
    read = {
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    }
    refused = {"item_reference", "compaction_trigger"}
    assert types_of(ResponseInputItemParam) == read | refused | WRITTEN_OUT.keys() | UNREADABLE
    for kind in WRITTEN_OUT:
        item = {"type": kind, "id": "x", "surprise": ["seen", "data:image/png;base64,aGk="]}
        assert f'<{kind}>\n{{"surprise": ["seen", "data:image/png;base64"]}}\n</{kind}>' in prompt_of(
            server, RESPONSES, {"input": [USER, item]}
        )
    for kind in UNREADABLE:
        assert prompt_of(server, RESPONSES, {"input": [USER, {"type": kind}]}) == "<|user|>hi\n<|assistant|>"
    for kind in refused:
        reply = post(server, RESPONSES, {"input": [USER, {"type": kind, "id": "x"}]})
        assert (reply.status_code, reply.json()["error"]["param"].startswith("input")) == (400, True)


def test_what_is_nested_too_deeply_is_refused(server: Running):
    deep: Any = "x"
    for _ in range(400):
        deep = [{"a": deep}]
    for path, body in (
        (MESSAGES, said(SEARCH | {"input": deep})),
        (RESPONSES, {"input": [{"type": "web_search_call", "action": deep}]}),
    ):
        reply = post(server, path, body)
        assert reply.status_code in (200, 400), reply.text
