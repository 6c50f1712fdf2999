"""The official client against a scripted engine, and the fields that it knows."""

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic_messages import CALL
from fake_frontend import MODEL, Running, running_server

from headrace.errors import CapacityError
from headrace.server.anthropic.protocol import CountTokensRequest, MessagesRequest

TOOL = {"name": "get_weather", "input_schema": {"type": "object"}}
anthropic = pytest.importorskip("anthropic")


@pytest.fixture
def server() -> Iterator[Running]:
    with running_server(fake_context_length=4096) as running:
        yield running


def test_the_official_client_runs_a_tool_turn(server: Running):
    script = server.frontend.script
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        asked: list[Any] = [{"role": "user", "content": "weather?"}]
        common: Any = {"model": MODEL, "max_tokens": 400, "tools": [TOOL]}
        script.text = f"<think>hm</think>Let me look. {CALL}"
        with client.messages.stream(messages=asked, **common) as stream:
            seen = {event.type for event in stream}
            message = stream.get_final_message()
        assert {"message_start", "text", "thinking", "signature", "input_json", "message_stop"} <= seen
        use = message.content[-1]
        assert use.type == "tool_use"
        assert use.input == {"city": "Zürich"}
        assert message.stop_reason == "tool_use"
        results: list[Any] = [
            message.to_param(),
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]},
        ]
        script.text = "It is sunny."
        answer = client.messages.create(messages=[*asked, *results], **common)
        assert answer.content[0].type == "text"
        assert answer.content[0].text == script.text
        assert answer._request_id == answer.id
        count = client.messages.count_tokens(model=MODEL, messages=[*asked, *results], tools=common["tools"])
        usage = answer.usage
        assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).max_input_tokens == 4096
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="claude", max_tokens=5, messages=asked)
        script.error, script.fail_at = CapacityError("full"), 2
        with pytest.raises(anthropic.APIStatusError), client.messages.stream(messages=asked, **common) as stream:
            stream.until_done()


def test_every_field_of_the_client_is_known():
    beta = anthropic.types.beta.message_create_params
    own, both = set(MessagesRequest.__struct_fields__), set(CountTokensRequest.__struct_fields__)
    for kind in (anthropic.types.MessageCreateParams, beta.MessageCreateParams):
        for variant in kind.__args__:
            # `betas` is sent as a header.
            assert set(variant.__annotations__) - {"betas"} <= own
    for kind in (anthropic.types.MessageCountTokensParams, anthropic.types.beta.MessageCountTokensParams):
        assert set(kind.__annotations__) - {"betas"} <= both
