"""`/v1/score` in its two dialects, over scripted models."""

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_frontend import MODEL, Running, running_server
from fake_pooling import CLASSIFIER, CROSS_ENCODER, EMBEDDING, MAX_TOKENS, judge_server, pooling_server, vector_of

from error_bodies import checked_error
from headrace.messages.packing import pack_float32
from headrace.server.pooling.score import cosines

PATH = "/v1/score"
PAIR: dict[str, Any] = {"model": MODEL, "text_1": "a cat", "text_2": ["a dog", "a cat"]}
LABELS: dict[str, Any] = {
    "model": MODEL,
    "query": "Is it good? ",
    "items": ["yes", "no way"],
    "label_token_ids": [3, 5],
}


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    """It generates."""
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def cross_encoder() -> Iterator[Running]:
    with pooling_server(CROSS_ENCODER) as running:
        yield running


@pytest.fixture(scope="module")
def embedding() -> Iterator[Running]:
    with pooling_server(EMBEDDING) as running:
        yield running


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def refused(reply: httpx.Response, param: str | None, words: str = "") -> None:
    assert reply.status_code == 400, reply.text
    error = checked_error(PATH, reply.json())
    assert error["param"] == param, error
    assert words in error["message"], error


def scores(reply: httpx.Response) -> list[float]:
    """The scores of pairs; checks the shape of the reply."""
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert list(body) == ["id", "object", "created", "model", "data", "usage"]
    assert (body["object"], body["model"]) == ("list", MODEL)
    assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
    assert {item["object"] for item in body["data"]} == {"score"}
    return [item["score"] for item in body["data"]]


def ask(server: Running, body: dict[str, Any], path: str = PATH) -> httpx.Response:
    server.frontend.reset()
    return httpx.post(server.url + path, json=body)


# -- pairs


@pytest.mark.parametrize(
    "sides",
    [
        {"text_1": "a cat", "text_2": ["a dog", "a cat"]},
        {"text_1": ["a cat"], "text_2": ["a dog", "a cat"]},
        {"text_1": ["a cat", "a cat"], "text_2": ["a dog", "a cat"]},
        {"data_1": "a cat", "data_2": ["a dog", "a cat"]},
        {"queries": "a cat", "documents": ["a dog", "a cat"]},
        {"queries": ["a cat"], "items": ["a dog", "a cat"]},
    ],
)
def test_a_cross_encoder_scores_pairs(cross_encoder: Running, sides: dict[str, Any]):
    reply = ask(cross_encoder, {"model": MODEL} | sides)
    assert scores(reply) == [sigmoid(0.5), sigmoid(1.5)]
    assert reply.json()["usage"]["prompt_tokens"] == 2 * (5 + 5 + 3)
    assert cross_encoder.frontend.encoded[0].text == [["a cat", "a dog"], ["a cat", "a cat"]]


def test_one_pair_has_one_score(cross_encoder: Running):
    assert scores(ask(cross_encoder, {"text_1": "a cat", "text_2": "a cat"}, "/score")) == [sigmoid(1.5)]
    raw = {"text_1": "a cat", "text_2": "a cat", "raw_scores": True}
    assert scores(ask(cross_encoder, raw)) == [1.5]


def test_pairs_are_cut_only_if_the_client_asks(cross_encoder: Running):
    long = {"text_1": "a cat", "text_2": ["a", "a cat " + "x" * MAX_TOKENS]}
    refused(ask(cross_encoder, long), "text_2", "input 1 has")
    assert scores(ask(cross_encoder, long | {"truncate_prompt_tokens": -1})) == [sigmoid(0.5), sigmoid(1.5)]


def test_an_embedding_model_gives_cosines_and_embeds_each_text_once(embedding: Running):
    reply = ask(embedding, PAIR)
    want = [cosine(vector_of("a cat", "", 4), vector_of(text, "", 4)) for text in ("a dog", "a cat")]
    assert scores(reply) == want
    assert want[1] == pytest.approx(1.0)
    assert embedding.frontend.encoded[0].text == ["a cat", "a dog", "a cat"]
    refused(ask(embedding, PAIR | {"raw_scores": True}), "raw_scores")
    refused(ask(embedding, PAIR | {"instruction": "x"}), "instruction")


def cosine(first: list[float], second: list[float]) -> float:
    return cosines([pack_float32(first)], [pack_float32(second)])[0]


def test_the_cosine_of_nothing_is_zero():
    assert cosine([0.0, 0.0], [1.0, 2.0]) == 0.0
    assert cosine([3.0, 4.0], [6.0, 8.0]) == pytest.approx(1.0)
    assert cosine([1.0, 0.0], [-2.0, 0.0]) == pytest.approx(-1.0)


def test_a_model_that_generates_scores_pairs_as_it_ranks():
    with judge_server() as server:
        yes = server.frontend.tokenizer.token_to_id("yes")
        server.frontend.script.picked = lambda prompt, token: -1.0 if token == yes else -3.0
        found = scores(httpx.post(server.url + PATH, json=PAIR))
        ranked = httpx.post(server.url + "/v1/rerank", json={"query": "a cat", "documents": ["a dog"]}).json()
    assert found == [pytest.approx(sigmoid(2.0))] * 2
    assert ranked["results"][0]["relevance_score"] == found[0]


# -- labels


def test_labels_have_their_probabilities(client: httpx.Client, server: Running):
    server.frontend.script.picked = lambda prompt, token: -0.5 * token - len(prompt) / 100
    reply = client.post(PATH, json=LABELS)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert list(body) == ["scores", "model", "usage", "object"]
    assert (body["model"], body["object"]) == (MODEL, "scoring")
    lengths = [len("Is it good? yes"), len("Is it good? no way")]
    want = [[math.exp(-0.5 * token - length / 100) for token in (3, 5)] for length in lengths]
    assert body["scores"] == [pytest.approx(row) for row in want]
    assert body["usage"]["prompt_tokens"] >= sum(lengths)
    (call,) = server.frontend.calls
    assert call.text == ["Is it good? yes", "Is it good? no way"]
    assert (call.token_ids_logprob, call.return_logprob) == ([3, 5], True)
    among = client.post(PATH, json=LABELS | {"apply_softmax": True, "label_token_ids": [5, 3, 5]}).json()["scores"]
    assert [sum(row) for row in among] == [pytest.approx(1.0)] * 2
    assert among[0][1] / among[0][0] == pytest.approx(math.e)
    assert among[0][0] == among[0][2]


def test_the_item_may_come_first_and_be_token_ids(client: httpx.Client, server: Running):
    assert client.post("/score", json=LABELS | {"item_first": True, "items": "Good."}).status_code == 200
    assert server.frontend.calls[-1].text == ["Good.Is it good? "]
    assert client.post(PATH, json=LABELS | {"query": [1, 2], "items": [[3], [4, 5]]}).status_code == 200
    assert server.frontend.calls[-1].input_ids == [[1, 2, 3], [1, 2, 4, 5]]
    assert client.post(PATH, json=LABELS | {"query": [1], "items": [[3]], "item_first": True}).status_code == 200
    assert server.frontend.calls[-1].input_ids == [[3, 1]]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"label_token_ids": []}, "label_token_ids", "empty"),
        ({"label_token_ids": None}, "label_token_ids", "missing"),
        ({"label_token_ids": [100_000]}, "label_token_ids", "label_token_ids"),
        ({"items": []}, "items", "empty"),
        ({"items": None}, "items", "missing"),
        ({"query": None}, "query", "missing"),
        ({"items": [[1]]}, "items", "token ids if"),
        ({"query": [1], "items": ["a"]}, "items", "token ids if"),
        ({"query": [1], "items": [[100_000]]}, "items", ""),
        ({"text_1": "a"}, "query", "two dialects"),
        ({"documents": ["a"]}, "query", "two dialects"),
        ({"raw_scores": True}, "label_token_ids", ""),
        ({"truncate": True}, "truncate", "whole"),
        ({"query": "x" * 600}, "items", ""),
    ],
)
def test_other_requests_for_labels_are_refused_by_the_field(
    client: httpx.Client, fields: dict[str, Any], param: str, words: str
):
    refused(client.post(PATH, json=LABELS | fields), param, words)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "text_1", "none of them"),
        ({"text_1": "a"}, "text_1", "give text_1 and text_2"),
        ({"text_1": "a", "data_2": "b"}, "data_2", "give text_1 and text_2"),
        ({"text_1": "a", "text_2": "b", "data_1": "c"}, "data_1", "give"),
        ({"queries": "a", "documents": "b", "items": "c"}, "documents", "give"),
        ({"text_1": [], "text_2": ["b"]}, "text_1", "empty"),
        ({"text_1": "a", "text_2": []}, "text_2", "empty"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1", "2 texts and text_2 3"),
        ({"text_1": ["a", "b"], "text_2": "c"}, "text_1", "2 texts and text_2 1"),
        ({"text_1": "a", "text_2": "b", "apply_softmax": True}, "apply_softmax", "two dialects"),
        ({"queries": "a", "items": [[1]]}, "items", "string"),
    ],
)
def test_other_pairs_are_refused_by_the_field(cross_encoder: Running, body: dict[str, Any], param: str, words: str):
    refused(ask(cross_encoder, body), param, words)


def test_fields_that_ask_for_nothing_are_accepted(cross_encoder: Running, client: httpx.Client):
    nothing = {"apply_softmax": False, "item_first": False, "query": None, "label_token_ids": None, "priority": 0}
    assert scores(ask(cross_encoder, PAIR | nothing))
    assert client.post(PATH, json=LABELS | {"text_1": None, "documents": None, "user": "me"}).status_code == 200


# -- other models


def test_other_models_say_what_they_are(cross_encoder: Running, client: httpx.Client):
    refused(ask(cross_encoder, LABELS), "model", "gives no probabilities of tokens: it is a cross-encoder")
    refused(client.post(PATH, json=PAIR), "model", "'yes' is 3 tokens")
    with pooling_server(CLASSIFIER) as server:
        refused(ask(server, PAIR), "model", "a classifier (FakeModel); use /classify")
