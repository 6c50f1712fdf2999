"""`/v1/embeddings` and `/encode` over a scripted engine whose vectors can be told from the texts."""

import asyncio
import base64
import json
import struct
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_frontend import MODEL, Running, running_server
from fake_pooling import CROSS_ENCODER, EMBEDDING, MAX_TOKENS, pooling_server, vector_of

from error_bodies import checked_error
from headrace.messages.outputs import FinishReason
from headrace.server.pooling.calls import CHUNK_INPUTS

PATH = "/v1/embeddings"
ASKED: dict[str, Any] = {"model": MODEL, "input": "hello"}


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with pooling_server(EMBEDDING) as running:
        yield running


def refused(reply: httpx.Response, param: str | None, words: str = "", status: int = 400) -> None:
    assert reply.status_code == status, reply.text
    error = checked_error(PATH, reply.json())
    assert error["param"] == param, error
    assert words in error["message"], error


def vectors(reply: httpx.Response) -> list[list[float]]:
    """The embeddings in order; checks the shape of the reply."""
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert list(body) == ["object", "model", "data", "usage"]
    assert (body["object"], body["model"]) == ("list", MODEL)
    assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
    assert {item["object"] for item in body["data"]} == {"embedding"}
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"]
    return [item["embedding"] for item in body["data"]]


# -- inputs and replies


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("hello", ["hello"]),
        ("", [""]),
        (["one two", "", "three"], ["one two", "", "three"]),
        (["one"], ["one"]),
    ],
)
def test_each_input_has_its_vector(client: httpx.Client, given: Any, texts: list[str]):
    reply = client.post(PATH, json=ASKED | {"input": given})
    assert vectors(reply) == [vector_of(text, "", 4) for text in texts]
    assert reply.json()["usage"]["prompt_tokens"] == sum(len(text) + 2 for text in texts), "special tokens count"


def test_token_ids_are_taken_as_they_are(client: httpx.Client, server: Running):
    ids = server.frontend.tokenizer.encode("hello")
    assert vectors(client.post(PATH, json=ASKED | {"input": ids})) == [vector_of("hello", "", 4)]
    reply = client.post(PATH, json=ASKED | {"input": [ids, ids[:2]]})
    assert vectors(reply) == [vector_of("hello", "", 4), vector_of("he", "", 4)]
    assert reply.json()["usage"]["prompt_tokens"] == 7
    assert server.frontend.encoded[-1].input_ids == [ids, ids[:2]]


def test_base64_holds_the_same_numbers(client: httpx.Client):
    (text,) = vectors(client.post(PATH, json=ASKED | {"encoding_format": "base64"}))
    assert struct.unpack("<4f", base64.b64decode(text)) == (5.0, 2.0, 0.0, 1.0)
    for same in ("float", None, ""):
        assert vectors(client.post(PATH, json=ASKED | {"encoding_format": same})) == [[5.0, 2.0, 0.0, 1.0]]
    refused(client.post(PATH, json=ASKED | {"encoding_format": "hex"}), "encoding_format", "float")


def test_the_official_client_gets_numbers(server: Running):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        reply = client.embeddings.create(model=MODEL, input=["hello", "a b"], dimensions=2, user="me")
        floats = client.embeddings.create(model=MODEL, input="hello", encoding_format="float")
    assert [item.embedding for item in reply.data] == [[5.0, 2.0], [3.0, 1.0]]
    assert floats.data[0].embedding == [5.0, 2.0, 0.0, 1.0]
    assert reply.usage.prompt_tokens == 12
    assert server.frontend.encoded[0].dimensions == 2


def test_float_vectors_keep_every_bit(client: httpx.Client, server: Running, monkeypatch: pytest.MonkeyPatch):
    third = struct.unpack("<f", struct.pack("<f", 1 / 3))[0]
    monkeypatch.setattr("fake_pooling.vector_of", lambda *_: [1 / 3, -1e-38])
    (vector,) = vectors(client.post(PATH, json=ASKED))
    assert vector[0] == third
    assert struct.pack("<2f", *vector) == struct.pack("<2f", 1 / 3, -1e-38)


# -- what a request may say


def test_fields_reach_the_engine(client: httpx.Client, server: Running):
    body = ASKED | {"rid": "r1", "dimensions": 2, "truncate_prompt_tokens": 4, "truncation_side": "left", "user": "me"}
    body |= {"cache_salt": "s", "priority": 3, "routed_dp_rank": 0}
    reply = client.post(PATH, json=body)
    assert vectors(reply) == [vector_of("lo", "", 2)]
    assert reply.headers["x-request-id"] == "r1"
    (call,) = server.frontend.encoded
    assert (call.rid, call.cache_salt, call.priority, call.routed_dp_rank) == ("r1", "s", 3, 0)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, None),
        ({"truncate": True}, -1),
        ({"truncate": False}, None),
        ({"truncate": True, "truncation_direction": "Left"}, -1),
        ({"truncate_prompt_tokens": -1}, -1),
        ({"truncate_prompt_tokens": 7, "truncate": True}, 7),
    ],
)
def test_inputs_are_cut_only_if_the_client_asks(
    client: httpx.Client, server: Running, fields: dict[str, Any], tokens: int | None
):
    assert client.post(PATH, json=ASKED | fields).status_code == 200
    (call,) = server.frontend.encoded
    assert call.truncate_prompt_tokens == tokens
    assert call.truncation_side == ("left" if "truncation_direction" in fields else "right")


@pytest.mark.parametrize(
    "fields",
    [
        {"normalize": True},
        {"add_special_tokens": True},
        {"embed_dtype": "float32", "endianness": "little"},
        {"prompt_name": None, "encoding_format": None, "dimensions": None},
        {"model": "default"},
        {"model": ""},
        {"extra_body": {}},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(client: httpx.Client, fields: dict[str, Any]):
    assert client.post(PATH, json=ASKED | fields).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "null"),
        ({"input": []}, "input", "empty"),
        ({"input": [[]]}, "input", ""),
        ({"input": [1, "a"]}, "input", "mixes"),
        ({"input": [[1], "a"]}, "input", "mixes"),
        ({"input": {"text": "a"}}, "input", "expected"),
        ({"input": [1.5]}, "input[0]", "expected"),
        ({"input": [100_000]}, "input", "vocabulary"),
        ({"input": "x" * MAX_TOKENS}, "input", f"maximum context length is {MAX_TOKENS}"),
        ({"input": ["a"] * 20_000}, "input", "at most 16384 inputs in one request (--max-inputs)"),
        ({"dimensions": 0}, "dimensions", "between 1 and 4"),
        ({"dimensions": 5}, "dimensions", "between 1 and 4"),
        ({"dimensions": 1.5}, "dimensions", "integer"),
        ({"dimensions": True}, "dimensions", "integer"),
        ({"normalize": False}, "normalize", "always"),
        ({"truncate": False, "truncate_prompt_tokens": 3}, "truncate", ""),
        ({"truncation_side": "left", "truncation_direction": "right"}, "truncation_side", "differ"),
        ({"input_type": "query"}, "input_type", "unknown field"),
    ],
)
def test_other_requests_are_refused_by_the_field(
    client: httpx.Client, server: Running, fields: dict[str, Any], param: str, words: str
):
    refused(client.post(PATH, json=ASKED | fields), param, words)
    assert not server.frontend.sizes


def test_an_input_is_required(client: httpx.Client):
    refused(client.post(PATH, json={"model": MODEL}), "input", "missing")
    nan = client.post(PATH, content=b'{"input": "a", "dimensions": NaN}', headers={"content-type": "application/json"})
    refused(nan, None, "not valid JSON")


def test_a_model_that_is_not_served_is_a_404(client: httpx.Client):
    refused(client.post(PATH, json=ASKED | {"model": "other"}), "model", "not served", 404)


def test_adapters_are_named_as_models(client: httpx.Client, server: Running):
    server.frontend.adapters.names = ["poet"]
    reply = client.post(PATH, json=ASKED | {"model": "poet"})
    assert reply.json()["model"] == "poet"
    assert client.post(PATH, json=ASKED | {"lora_path": "poet"}).status_code == 200
    assert [call.lora_path for call in server.frontend.encoded] == ["poet", "poet"]


# -- many inputs


def test_thousands_of_inputs_are_sent_in_chunks(client: httpx.Client, server: Running):
    texts = [f"text {number} " + "e" * (number % 7) for number in range(2048)]
    reply = client.post(PATH, json=ASKED | {"input": texts, "rid": "r"})
    assert vectors(reply) == [vector_of(text, "", 4) for text in texts]
    assert len(server.frontend.sizes) >= 16
    assert max(server.frontend.sizes) <= CHUNK_INPUTS
    assert server.frontend.most_in_flight == 2
    assert server.frontend.encoded[1].rid[0] == f"r/{CHUNK_INPUTS}"
    assert sum(server.frontend.sizes) == len(texts)


def test_no_text_is_tokenized_whole_that_cannot_fit(client: httpx.Client, server: Running):
    most = server.app.state.context.max_text_chars
    long = ASKED | {"input": ["a", "b" * most + "end"]}
    refused(client.post(PATH, json=long), "input", f"input 1 has {most + 3} characters")
    refused(client.post(PATH, json=ASKED | {"input": "b" * (most + 1)}), "input", "the input has")
    assert not server.frontend.encoded
    for side, last in (("right", "b"), ("left", "d")):
        assert client.post(PATH, json=long | {"truncate": True, "truncation_side": side}).status_code == 200
        text = server.frontend.encoded[-1].text[1]
        assert (len(text), text[-1]) == (most, last)


def test_long_inputs_make_smaller_chunks(client: httpx.Client, server: Running):
    texts = ["x" * 12_000] * 7
    assert len(vectors(client.post(PATH, json=ASKED | {"input": texts, "truncate": True}))) == 7
    assert sorted(server.frontend.sizes) == [1, 2, 2, 2]


def test_an_error_counts_inputs_as_the_request_does(client: httpx.Client):
    texts = ["a"] * 300 + ["x" * MAX_TOKENS] + ["a"] * 300
    refused(client.post(PATH, json=ASKED | {"input": texts}), "input", f"input 300 has {MAX_TOKENS + 2} tokens")


def test_a_queue_with_little_room_takes_smaller_chunks(client: httpx.Client, server: Running):
    server.frontend.room = 20
    texts = [f"text {number}" for number in range(300)]
    assert vectors(client.post(PATH, json=ASKED | {"input": texts})) == [vector_of(text, "", 4) for text in texts]
    assert server.frontend.refusals > 0
    assert max(server.frontend.sizes) <= 20


def test_no_chunk_waits_for_a_server_that_stops(client: httpx.Client, server: Running):
    async def stop(_: Any) -> None:
        server.status.draining = True
        server.frontend.room = -10_000

    server.frontend.before_answer = stop
    try:
        assert client.post(PATH, json=ASKED | {"input": ["a"] * 1000}).status_code == 503
    finally:
        server.status.draining = False


def test_a_full_queue_is_a_503(client: httpx.Client, server: Running):
    server.frontend.room = 0
    reply = client.post(PATH, json=ASKED | {"input": ["a"] * 300})
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) >= 1


def test_a_failed_input_fails_the_request(client: httpx.Client, server: Running):
    server.frontend.fails["bad"] = FinishReason("abort", message="NaN in the output", status_code=500)
    reply = client.post(PATH, json=ASKED | {"input": ["a", "bad", "b"]})
    assert reply.status_code == 500
    assert "NaN" in reply.json()["error"]["message"]


def test_a_client_that_leaves_ends_all_chunks(server: Running):
    server.frontend.before_answer = lambda _: asyncio.Event().wait()
    with httpx.Client(base_url=server.url, timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.post(PATH, json=ASKED | {"input": ["a"] * 1000})
    assert server.frontend.closed_early.wait(10)
    for _ in range(100):
        if server.frontend.num_in_flight == 0:
            break
        threading.Event().wait(0.05)
    assert server.frontend.num_in_flight == 0


def test_long_replies_arrive_whole(client: httpx.Client, server: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fake_pooling.vector_of", lambda text, *_: [len(text) + place / 7 for place in range(384)])
    texts = ["x" * (number % 50) for number in range(500)]
    found = vectors(client.post(PATH, json=ASKED | {"input": texts}))
    assert [round(row[0]) for row in found] == [len(text) for text in texts]
    assert all(len(row) == 384 for row in found)
    coded = client.post(PATH, json=ASKED | {"input": texts, "encoding_format": "base64"})
    assert [list(struct.unpack("<384f", base64.b64decode(row))) for row in vectors(coded)] == found  # type: ignore[arg-type]


def test_a_reply_of_too_many_numbers_is_refused(client: httpx.Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.server.pooling.calls.MAX_NUMBERS", 100)
    refused(client.post(PATH, json=ASKED | {"input": ["a"] * 26}), "input", "at most 25")
    assert client.post(PATH, json=ASKED | {"input": ["a"] * 26, "dimensions": 2}).status_code == 200


# -- other models


@pytest.mark.parametrize("kind", ["generates", "classifies"])
def test_other_models_say_what_they_are(kind: str):
    other = running_server() if kind == "generates" else pooling_server(CROSS_ENCODER)
    with other as server, httpx.Client(base_url=server.url) as client:
        reply = client.post(PATH, json=ASKED)
        words = (
            "generates text (FakeForCausalLM); use /v1/chat"
            if kind == "generates"
            else "a cross-encoder (FakeModel); use /v1/rerank"
        )
        refused(reply, "model", words)
        assert reply.json()["error"]["code"] == "wrong_model_type"
        assert json.loads(reply.content)
