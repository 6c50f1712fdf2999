"""A real server and the official client of Anthropic."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_process import ServerProcess

anthropic = pytest.importorskip("anthropic")

MODEL = "smollm2"
ASKED: dict[str, Any] = {
    "model": MODEL,
    "system": "You answer in one short sentence.",
    "messages": [{"role": "user", "content": "What is the capital of France, and which river flows through it?"}],
}
GREEDY = ASKED | {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def server(smollm2_server: ServerProcess) -> ServerProcess:
    return smollm2_server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as it:
        yield it


def post(server: ServerProcess, body: dict[str, Any]) -> dict[str, Any]:
    """The message itself: newer clients know no sampling parameters."""
    reply = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_message_has_the_text_of_the_same_chat(server: ServerProcess):
    message = post(server, GREEDY)
    system = {"role": "system", "content": GREEDY["system"]}
    chat = {"messages": [system, *GREEDY["messages"]], "temperature": 0, "max_tokens": 24}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).json()
    assert message["content"] == [{"type": "text", "text": reply["choices"][0]["message"]["content"]}]
    assert message["stop_reason"] == {"length": "max_tokens", "stop": "end_turn"}[reply["choices"][0]["finish_reason"]]
    assert message["usage"]["output_tokens"] == reply["usage"]["completion_tokens"]


def test_a_stream_is_the_same_message(server: ServerProcess, client: Any):
    whole = post(server, GREEDY)
    with client.messages.stream(**ASKED, max_tokens=24, extra_body={"temperature": 0}) as stream:
        message = stream.get_final_message()
    assert [block.to_dict() for block in message.content] == whole["content"]
    assert (message.stop_reason, message.model) == (whole["stop_reason"], MODEL)
    assert message.usage.output_tokens == whole["usage"]["output_tokens"]
    assert message.usage.cache_read_input_tokens > 0, "of the message before"


def test_counted_tokens_are_those_of_the_prompt(client: Any):
    tool = {"name": "look", "description": "Looks", "input_schema": {"type": "object", "properties": {}}}
    for fields in ({}, {"tools": [tool]}):
        counted = client.messages.count_tokens(**ASKED, **fields)
        usage = client.messages.create(**ASKED, **fields, max_tokens=1).usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_the_text_matches_the_output_format(client: Any):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "rivers": {"type": "integer"}},
        "required": ["city", "rivers"],
        "additionalProperties": False,
    }
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = client.messages.create(**ASKED, max_tokens=60, output_config=config, extra_body={"temperature": 0})
    found = json.loads(message.content[0].text)
    assert found["city"] in ("Paris", "Rome")
    assert isinstance(found["rivers"], int)
    assert message.stop_reason == "end_turn"


def test_a_stop_sequence_is_named_and_left_out(server: ServerProcess):
    text = post(server, GREEDY)["content"][0]["text"]
    word = text.split()[2]
    message = post(server, GREEDY | {"stop_sequences": [word, "never"]})
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", word)
    assert message["content"][0]["text"] == text[: text.index(word)]


def test_a_prefilled_answer_is_continued(server: ServerProcess):
    text = post(server, GREEDY)["content"][0]["text"]
    begun = " ".join(text.split()[:4])
    messages = [*GREEDY["messages"], {"role": "assistant", "content": begun}]
    rest = post(server, GREEDY | {"messages": messages, "max_tokens": 40})["content"][0]["text"]
    assert (begun + rest).startswith(text[: len(begun) + 10])


def test_models_and_errors_are_the_clients_own(client: Any):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).display_name == MODEL
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude")
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "word " * 9000}])
