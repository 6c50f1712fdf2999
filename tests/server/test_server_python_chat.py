"""`Engine.chat` and `Runtime.chat` over a scripted engine whose tokens are bytes. The reference is OpenAI's client on the same server."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_frontend import Running, running_server, served_model

from headrace.api.arguments import chat_fields
from headrace.api.chat_reply import ChatDelta, ChatReply, ChatUsage, ToolCall
from headrace.api.engine_chat import EngineChat
from headrace.api.native_client import NativeClient
from headrace.api.runtime import Runtime
from headrace.config.server_args import ServerArgs
from headrace.errors import ExecutionError, RequestError
from headrace.server.context import ServerStatus, ServingContext

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CUSTOM = {"type": "custom", "custom": {"name": "run"}}
USER = [{"role": "user", "content": "weather?"}]
TEXT = (
    '<think>hm 🙂</think>I look.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    '<tool_call>\n{"name": "run", "arguments": {"input": "ls\\n"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with running_server(fake_context_length=4096) as server:
        yield server


@pytest.fixture
def server(running: Running) -> Running:
    running.frontend.reset()
    running.frontend.script.text = TEXT
    return running


def given(fields: dict[str, Any], stream: bool) -> dict[str, Any]:
    options = {name: value for name, value in fields.items() if name not in ("messages", "tools")}
    return chat_fields(fields["messages"], fields.get("tools"), stream, options)


class Here:
    """As an Engine: the handler without HTTP."""

    def __init__(self, server: Running) -> None:
        model = served_model(server.frontend.tokenizer, context_length=4096)
        context = ServingContext(server.frontend, model, ServerArgs(), ServerStatus(started=True))
        self.chats = EngineChat(context)

    def whole(self, fields: dict[str, Any]) -> ChatReply:
        return asyncio.run(self.chats.whole(given(fields, False)))

    def stream(self, fields: dict[str, Any]) -> list[ChatDelta]:
        async def collect() -> list[ChatDelta]:
            return [delta async for delta in self.chats.stream(given(fields, True))]

        return asyncio.run(collect())

    def close(self) -> None:
        self.chats.close()


class There:
    """As a Runtime: a client of the server."""

    def __init__(self, server: Running) -> None:
        self.runtime = Runtime.__new__(Runtime)
        self.runtime._http = NativeClient(server.url)

    def whole(self, fields: dict[str, Any]) -> ChatReply:
        return self.runtime.chat(**fields)

    def stream(self, fields: dict[str, Any]) -> list[ChatDelta]:
        async def collect() -> list[ChatDelta]:
            return [delta async for delta in self.runtime.async_chat(**fields)]

        deltas = asyncio.run(collect())
        assert len(deltas) == len(list(self.runtime.chat(**fields, stream=True)))
        return deltas

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture(params=[Here, There])
def chats(request: pytest.FixtureRequest, server: Running) -> Iterator[Any]:
    made = request.param(server)
    yield made
    made.close()


def asked(messages: list[Any] = USER, **options: Any) -> dict[str, Any]:
    return {"messages": messages, "tools": [TOOL, CUSTOM], **options}


def test_a_reply_is_what_openai_s_client_gets(server: Running, chats: Any) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        want = client.chat.completions.create(model="default", messages=USER, tools=[TOOL, CUSTOM])  # type: ignore[call-overload]
    reply = chats.whole(asked())

    message = want.choices[0].message
    assert (reply.text, reply.reasoning) == (message.content, message.reasoning_content) == ("I look.", "hm 🙂")
    assert [(call.name, call.arguments, call.is_custom) for call in reply.tool_calls] == [
        ("get_weather", message.tool_calls[0].function.arguments, False),
        ("run", message.tool_calls[1].custom.input, True),
    ]
    assert reply.tool_calls[0].parsed() == {"city": "Zürich"}
    assert reply.finish_reason == want.choices[0].finish_reason == "tool_calls"
    details = want.usage.completion_tokens_details
    assert reply.usage == ChatUsage(want.usage.prompt_tokens, want.usage.completion_tokens, details.reasoning_tokens)
    first, second = server.frontend.calls
    assert first.input_ids == second.input_ids
    assert first.sampling_params == second.sampling_params


def test_fields_that_ask_for_nothing_more_are_accepted(chats: Any) -> None:
    plain = chats.whole(asked())
    assert chats.whole(asked(logprobs=False, top_logprobs=0, prompt_logprobs=0)).text == plain.text


def test_the_deltas_of_a_stream_add_up_to_the_reply(chats: Any) -> None:
    reply = chats.whole(asked())
    deltas = chats.stream(asked())

    assert len(deltas) > 20
    assert "".join(delta.text for delta in deltas) == reply.text
    assert "".join(delta.reasoning for delta in deltas) == reply.reasoning
    calls = [delta.tool_call for delta in deltas if delta.tool_call is not None]
    begun = [call for call in calls if call.id is not None]
    arguments = ["".join(call.arguments for call in calls if call.index == index) for index in range(2)]
    joined = [ToolCall("", call.name or "", arguments[call.index], call.is_custom) for call in begun]
    assert joined == [ToolCall("", call.name, call.arguments, call.is_custom) for call in reply.tool_calls]
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["tool_calls"]
    assert deltas[-1] == ChatDelta(usage=reply.usage)


def test_a_turn_goes_on_with_the_reply_s_message_and_the_results(server: Running, chats: Any) -> None:
    reply = chats.whole(asked())
    results = [call.result("sunny") for call in reply.tool_calls]

    server.frontend.script.text = "fine"
    last = chats.whole(asked([*USER, reply.message, *results], temperature=0.5, max_tokens=3))

    assert (last.text, last.finish_reason, last.tool_calls, last.reasoning) == ("fin", "length", (), None)
    prompt = server.frontend.tokenizer.decode(server.frontend.calls[-1].input_ids or [], False)
    assert "Zürich" in prompt
    assert prompt.count("sunny") == 2
    assert server.frontend.resolved[-1].temperature == 0.5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": USER, "max_tokens": -5}, "max_tokens"),
        ({"messages": USER, "max_tokens": "many"}, "max_tokens"),
        ({"messages": USER, "nonsense": 1}, "nonsense"),
        ({"messages": USER, "regex": "a", "ebnf": "b"}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
    ],
)
def test_what_is_wrong_is_named_as_over_http(chats: Any, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        chats.whole(fields)
    with pytest.raises(RequestError) as streamed:
        chats.stream(fields)
    assert caught.value.message == streamed.value.message
    assert param is None or caught.value.param == param


def test_what_a_reply_would_not_show_is_refused() -> None:
    runtime = Runtime.__new__(Runtime)
    for options in ({"n": 2}, {"logprobs": True}, {"return_token_ids": True}):
        with pytest.raises(RequestError, match=f"{next(iter(options))} is not for chat"):
            runtime.chat(USER, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_honoured_is_logged(server: Running, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    asked = {"messages": USER, "max_tokens": 10_000, "verbosity": "low"}
    with caplog.at_level("INFO"):
        Here(server).stream(asked) if stream else Here(server).whole(asked)
    assert [record.message for record in caplog.records if record.message.endswith(": verbosity, max_tokens")]


def test_a_failure_of_the_engine_is_raised(server: Running, chats: Any) -> None:
    server.frontend.script.error, server.frontend.script.fail_at = ExecutionError("it broke"), 3
    with pytest.raises(ExecutionError, match="it broke"):
        chats.stream(asked())


def test_a_call_that_was_cut_can_be_sent_back_and_functions_are_refused(server: Running):
    server.frontend.script.text = '<tool_call>\n{"name": "get_weather", "arguments": {"ci'
    fields = {"messages": USER, "tools": [TOOL]}
    for side in (Here(server), There(server)):
        reply = side.whole(fields)
        assert reply.tool_calls[0].arguments == '{"ci'
        assert side.whole(fields | {"messages": [*USER, reply.message, reply.tool_calls[0].result("")]}).text == ""
        assert '{"invalid_arguments": "{\\"ci"}' in server.frontend.tokenizer.decode(
            server.frontend.calls[-1].input_ids or [], False
        )
        with pytest.raises(RequestError, match="functions is not for chat: give tools"):
            side.whole({"messages": USER, "functions": [TOOL["function"]]})
