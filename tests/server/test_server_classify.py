"""`/classify` in its two dialects, `/encode`, and what routes for other models say, over scripted models."""

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_frontend import MODEL, Running, make_app, running_server
from fake_pooling import CLASSIFIER, CROSS_ENCODER, EMBEDDING, REWARD, PoolingFrontend, pooling_server, vector_of

from error_bodies import checked_error
from headrace.errors import ConfigError
from headrace.messages.outputs import FinishReason

ASKED: dict[str, Any] = {"model": MODEL, "input": ["a cat", "eee"]}


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with pooling_server(CLASSIFIER) as running:
        yield running


@pytest.fixture(scope="module")
def embedding() -> Iterator[Running]:
    with pooling_server(EMBEDDING) as running:
        yield running


def refused(reply: httpx.Response, param: str | None, words: str = "", path: str = "/classify") -> None:
    assert reply.status_code == 400, reply.text
    error = checked_error(path, reply.json())
    assert error["param"] == param, error
    assert words in error["message"], error


def softmax(logits: list[float]) -> list[float]:
    total = sum(map(math.exp, logits))
    return [math.exp(logit) / total for logit in logits]


# -- /classify, vLLM's


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_each_input_has_a_label_and_probabilities(client: httpx.Client, path: str):
    reply = client.post(path, json=ASKED)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert list(body) == ["id", "object", "created", "model", "data", "usage"]
    assert body["id"] == reply.headers["x-request-id"]
    assert body["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
    first, second = body["data"]
    assert (first["index"], first["label"], first["num_classes"]) == (0, "bad", 3)
    assert first["probs"] == pytest.approx(softmax([5.0, 2.0, 1.0]))
    assert second["probs"] == pytest.approx(softmax([3.0, 3.0, 0.0]))
    assert second["label"] == "bad", "of equal ones the first"


def test_the_models_numbers_instead(client: httpx.Client):
    (item,) = client.post("/classify", json=ASKED | {"input": "a cat", "use_activation": False}).json()["data"]
    assert item["probs"] == [5.0, 2.0, 1.0]


def test_a_sigmoid_looks_at_each_label_alone():
    pooling = type(CLASSIFIER)(
        task="classify", pooling="cls", dimensions=2, labels=("long", "loud"), activation="sigmoid"
    )
    with pooling_server(pooling) as server:
        (item,) = httpx.post(server.url + "/classify", json={"input": "eee"}).json()["data"]
    assert item["probs"] == pytest.approx([1 / (1 + math.exp(-3.0))] * 2)
    assert item["label"] == "long"


def test_a_reward_is_the_models_number():
    with pooling_server(REWARD) as server:
        (item,) = httpx.post(server.url + "/classify", json={"input": "eee"}).json()["data"]
        native = httpx.post(server.url + "/classify", json={"text": ["eee", "a"]}).json()
    assert (item["probs"], item["label"], item["num_classes"]) == ([3.0], "LABEL_0", 1)
    assert [answer["embedding"] for answer in native] == [[3.0], [1.0]]


# -- /classify, SGLang's, and /encode


def test_sglangs_dialect_has_the_numbers(client: httpx.Client, server: Running):
    answer = client.post("/classify", json={"text": "a cat"}).json()
    assert answer["embedding"] == [5.0, 2.0, 1.0]
    assert answer["meta_info"]["prompt_tokens"] == 7
    assert answer["meta_info"]["e2e_latency"] == 0.5
    ids = server.frontend.tokenizer.encode("a cat")
    answers = client.post("/classify", json={"input_ids": [ids, ids], "rid": "r"}).json()
    assert [(a["embedding"], a["index"], a["meta_info"]["id"]) for a in answers] == [
        ([5.0, 2.0, 1.0], 0, "r/0"),
        ([5.0, 2.0, 1.0], 1, "r/1"),
    ]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "missing"),
        ({"input": "a", "text": "b"}, "text", "two dialects"),
        ({"input": "a", "is_cross_encoder_request": True}, "is_cross_encoder_request", "two dialects"),
        ({"text": "a", "input_ids": [1]}, "input_ids", "exactly one"),
        ({"input": []}, "input", "empty"),
        ({"input": "a", "use_activation": "no"}, "use_activation", "boolean"),
    ],
)
def test_other_requests_are_refused_by_the_field(client: httpx.Client, body: dict[str, Any], param: str, words: str):
    refused(client.post("/classify", json=body), param, words)


def test_encode_answers_one_text_with_an_object_and_several_with_a_list(embedding: Running):
    embedding.frontend.reset()
    with httpx.Client(base_url=embedding.url) as client:
        one = client.post("/encode", json={"text": "hello", "rid": "r1"})
        several = client.post("/encode", json={"text": ["hello", ""], "dimensions": 2, "log_metrics": True}).json()
        many = client.post("/encode", json={"text": [str(number) for number in range(200)], "rid": "m"}).json()
    assert one.headers["x-request-id"] == "r1"
    assert one.json()["embedding"] == vector_of("hello", "", 4)
    assert {"id", "prompt_tokens", "e2e_latency", "finish_reason"} <= one.json()["meta_info"].keys()
    assert "index" not in one.json()
    assert [answer["embedding"] for answer in several] == [[5.0, 2.0], [0.0, 0.0]]
    assert [answer["index"] for answer in many] == list(range(200))
    assert [answer["meta_info"]["id"] for answer in many] == [f"m/{number}" for number in range(200)]


def test_encode_gives_lists_of_fields_to_their_inputs(embedding: Running):
    embedding.frontend.reset()
    texts = [str(number) for number in range(130)]
    body = {"text": texts, "rid": [f"r{text}" for text in texts], "cache_salt": [f"s{text}" for text in texts]}
    answers = httpx.post(embedding.url + "/encode", json=body).json()
    assert [answer["meta_info"]["id"] for answer in answers] == body["rid"]
    assert embedding.frontend.encoded[-1].cache_salt == ["s128", "s129"]
    refused(httpx.post(embedding.url + "/encode", json=body | {"rid": ["a"]}), "rid", "must equal", "/encode")


def test_a_failed_input_of_a_list_has_no_embedding(embedding: Running):
    embedding.frontend.reset()
    embedding.frontend.fails["bad"] = FinishReason("abort", message="NaN", status_code=500)
    good, bad = httpx.post(embedding.url + "/encode", json={"text": ["good", "bad"]}).json()
    assert good["embedding"] == vector_of("good", "", 4)
    assert (bad["embedding"], bad["meta_info"]["finish_reason"]["message"]) == (None, "NaN")


def test_encode_takes_pairs_of_a_cross_encoder():
    with pooling_server(CROSS_ENCODER) as server:
        body = {"text": ["a cat", "the cat"], "is_cross_encoder_request": True}
        assert httpx.post(server.url + "/encode", json=body).json()["embedding"] == [0.5]
        pairs = {"text": [["a cat", "the cat"], ["a cat", "a cat"]]}
        assert [a["embedding"] for a in httpx.post(server.url + "/encode", json=pairs).json()] == [[0.5], [1.5]]


# -- other models

GENERATING = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/generate",
    "/api/chat",
    "/api/generate",
)


@pytest.mark.parametrize("path", GENERATING)
def test_routes_that_generate_say_what_the_model_is(embedding: Running, path: str):
    reply = httpx.post(embedding.url + path, json={"model": MODEL})
    assert reply.status_code == 400, reply.text
    assert "this model does not generate text: it is an embedding model (FakeModel); use /v1/embeddings" in reply.text
    checked_error(path, reply.json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/encode", {"text": "a"}),
        ("/classify", {"input": "a"}),
        ("/classify", {"text": "a"}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_routes_that_do_not_generate_say_so(path: str, body: dict[str, Any], generating: Running):
    reply = httpx.post(generating.url + path, json=body)
    refused(reply, "model", "it is a model that generates text (FakeForCausalLM); use /v1/chat/completions", path)


@pytest.fixture(scope="module")
def generating() -> Iterator[Running]:
    with running_server() as running:
        yield running


def test_an_embedding_model_does_not_classify(embedding: Running):
    refused(httpx.post(embedding.url + "/classify", json={"input": "a"}), "model", "use /v1/embeddings")


def test_the_server_says_whether_its_model_generates(embedding: Running, generating: Running):
    info = httpx.get(embedding.url + "/model_info").json()
    assert info["is_generation"] is False
    assert (info["pooling"]["task"], info["pooling"]["dimensions"]) == ("embed", 4)
    info = httpx.get(generating.url + "/model_info").json()
    assert (info["is_generation"], info["pooling"]) == (True, None)


def test_the_warm_up_makes_a_vector():
    frontend = PoolingFrontend(EMBEDDING)
    seen: list[Any] = []
    frontend.before_answer = lambda obj: _note(seen, obj.text)
    with running_server(frontend=frontend, pooling=EMBEDDING):
        assert seen == ["Hello"]
    with pytest.raises(ConfigError, match="does not chat, it is an embedding model"):
        make_app(PoolingFrontend(EMBEDDING), pooling=EMBEDDING, warmups="chat")


async def _note(seen: list[Any], what: Any) -> None:
    seen.append(what)
