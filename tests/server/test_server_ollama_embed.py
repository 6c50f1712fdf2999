"""Embeddings by Ollama's API over a scripted model, and what the API says of such a model."""

import math
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from fake_frontend import CONTEXT_LENGTH, MODEL, Running
from fake_pooling import CROSS_ENCODER, EMBEDDING, MAX_TOKENS, pooling_server, vector_of

PATH = "/api/embed"
ASKED: dict[str, Any] = {"model": MODEL, "input": "hello"}
PLAIN = type(EMBEDDING)(task="embed", pooling="mean", dimensions=4)
"""Its vectors have any length."""


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with pooling_server(EMBEDDING) as running:
        yield running


def refused(reply: httpx.Response, words: str = "", status: int = 400) -> None:
    """A refusal in Ollama's form that says `words`."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert list(body) == ["error"]
    assert words in body["error"]


def test_texts_are_embedded(client: httpx.Client, server: Running):
    reply = client.post(PATH, content=b'{"model": "org/tiny", "input": ["hello", "a b"]}')
    body = reply.json()
    assert list(body) == ["model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"]
    assert body["model"] == MODEL
    assert body["embeddings"] == [vector_of("hello", "", 4), vector_of("a b", "", 4)]
    assert (body["prompt_eval_count"], body["load_duration"]) == (12, 0)
    assert body["total_duration"] > 0
    one = client.post(PATH, json=ASKED | {"dimensions": 2}).json()
    assert one["embeddings"] == [[5.0, 2.0]]
    assert client.post(PATH, json=ASKED | {"dimensions": 0}).json()["embeddings"] == [vector_of("hello", "", 4)]
    assert reply.headers["x-request-id"].startswith("ollama-")


def test_vectors_have_length_one_as_ollamas_always_have():
    with pooling_server(PLAIN) as server:
        (vector,) = httpx.post(server.url + PATH, json=ASKED).json()["embeddings"]
        old = httpx.post(server.url + "/api/embeddings", json={"prompt": "hello"}).json()
    length = math.sqrt(25 + 4 + 1)
    assert vector == pytest.approx([5 / length, 2 / length, 0.0, 1 / length])
    assert old["embedding"] == [5.0, 2.0, 0.0, 1.0], "the older route leaves them as they are"


def test_long_texts_are_cut_unless_the_client_forbids_it(client: httpx.Client):
    long = {"input": "x" * MAX_TOKENS}
    assert client.post(PATH, json=ASKED | long).json()["embeddings"][0][0] == MAX_TOKENS - 2
    refused(client.post(PATH, json=ASKED | long | {"truncate": False}), "maximum context length")
    old = client.post("/api/embeddings", json={"model": MODEL, "prompt": "x" * MAX_TOKENS})
    assert old.json()["embedding"][0] == MAX_TOKENS - 2


def test_no_text_has_no_embedding(client: httpx.Client):
    assert client.post(PATH, json={"model": MODEL}).json()["embeddings"] == []
    assert client.post(PATH, json=ASKED | {"input": []}).json()["embeddings"] == []
    assert client.post(PATH, json=ASKED | {"input": ""}).json()["embeddings"] == [vector_of("", "", 4)]
    assert client.post("/api/embeddings", json={"model": MODEL, "prompt": ""}).json() == {"embedding": []}


def test_the_official_client(server: Running):
    with ollama.Client(host=server.url) as client:
        reply = client.embed(model=MODEL, input=["hello", "a b"], keep_alive="5m", options={"num_ctx": 128})
        assert [list(row) for row in reply.embeddings] == [vector_of("hello", "", 4), vector_of("a b", "", 4)]
        assert reply.prompt_eval_count == 12
        assert list(client.embeddings(model=MODEL, prompt="hello").embedding) == vector_of("hello", "", 4)
        assert client.show(MODEL).capabilities == ["embedding"]


@pytest.mark.parametrize(
    ("fields", "words", "status"),
    [
        ({"input": 3}, "input", 400),
        ({"input": [1]}, "input", 400),
        ({"dimensions": 5}, "dimensions", 400),
        ({"model": "other"}, "other", 404),
        ({"keep_alive": "soon"}, "keep_alive", 400),
        ({"options": {"mirostat": 1}}, "mirostat", 400),
    ],
)
def test_other_requests_are_refused(client: httpx.Client, fields: dict[str, Any], words: str, status: int):
    refused(client.post(PATH, json=ASKED | fields), words, status)


@pytest.mark.parametrize(
    ("fields", "noted"),
    [
        ({"options": {"num_ctx": 1000}}, f"options.num_ctx={CONTEXT_LENGTH}"),  # AnythingLLM with minilm
        ({"options": {"num_ctx": 1000.0, "useMLock": True}}, f"options.useMLock, options.num_ctx={CONTEXT_LENGTH}"),
        ({"format": "json"}, "format"),
        ({"options": {"num_ctx": 1}}, ""),
    ],
)
def test_what_has_no_effect_is_noted(client: httpx.Client, fields: dict[str, Any], noted: str):
    for path, body in ((PATH, ASKED), ("/api/embeddings", {"model": MODEL, "prompt": "hello"})):
        reply = client.post(path, json=body | fields)
        assert (reply.status_code, reply.headers.get("x-headrace-noted", "")) == (200, noted)
    many = client.post(PATH, json={"model": MODEL, "input": ["hello"] * 5000} | fields)
    assert (len(many.json()["embeddings"]), many.headers.get("x-headrace-noted", "")) == (5000, noted)


def test_other_models_say_what_they_are(client: httpx.Client):
    refused(client.post("/api/chat", json={"model": MODEL, "messages": []}), "does not generate text")
    with pooling_server(CROSS_ENCODER) as server:
        for path in (PATH, "/api/embeddings"):
            refused(httpx.post(server.url + path, json=ASKED | {"input": None}), "a cross-encoder")
        assert httpx.post(server.url + "/api/show", json={"model": MODEL}).json()["capabilities"] == []
