"""`/embed`, `/info` and the body of `/rerank` as Text Embeddings Inference has them, `/v2/embed` and `/v1/embed` as Cohere does."""

import base64
import math
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from fake_frontend import CONTEXT_LENGTH, MODEL, Running, running_server
from fake_pooling import CLASSIFIER, CROSS_ENCODER, EMBEDDING, MAX_TOKENS, REWARD, pooling_server, vector_of

from error_bodies import checked_error
from headrace.version import VERSION

TEXTS = ["one two", "eee"]
COHERE: dict[str, Any] = {"model": MODEL, "texts": TEXTS, "input_type": "search_document"}
V1, V2 = "/v1/embed", "/v2/embed"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with pooling_server(EMBEDDING) as running:
        yield running


@pytest.fixture(scope="module")
def reranker() -> Iterator[Running]:
    with pooling_server(CROSS_ENCODER) as running:
        yield running


def refused(reply: httpx.Response, param: str | None, words: str = "", status: int = 400) -> None:
    assert reply.status_code == status, reply.text
    error = checked_error("/embed", reply.json())
    assert error["param"] == param, error
    assert words in error["message"], error


def good(reply: httpx.Response) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()


WANT = [vector_of(text, "", 4) for text in TEXTS]


# -- TEI


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("one two", WANT[:1]),
        (TEXTS, WANT),
        ([104, 105], [vector_of("hi", "", 4)]),
        ([[104, 105]], [vector_of("hi", "", 4)]),
    ],
)
def test_tei_gets_a_list_of_vectors(client: httpx.Client, server: Running, given: Any, want: list[list[float]]):
    if given != "one two" and isinstance(given[0], (int, list)):
        ids = server.frontend.tokenizer.encode("hi")
        given = ids if isinstance(given[0], int) else [ids]
    assert good(client.post("/embed", json={"inputs": given})) == want


def test_tei_has_vectors_of_length_one_whatever_the_model_does(client: httpx.Client):
    with pooling_server(msgspec.structs.replace(EMBEDDING, normalize=False)) as server:
        url = f"{server.url}/embed"
        (vector,) = good(httpx.post(url, json={"inputs": "one two"}))
        assert math.isclose(math.hypot(*vector), 1.0, rel_tol=1e-6)
        assert good(httpx.post(url, json={"inputs": TEXTS, "normalize": False})) == WANT
    refused(client.post("/embed", json={"inputs": TEXTS, "normalize": False}), "normalize", "always normalized")


def test_what_teis_clients_send(client: httpx.Client, server: Running):
    """Of llama-index, langchain and huggingface_hub."""
    long = "a" * 3 + "b" * MAX_TOKENS
    for fields, side in (
        ({}, "right"),
        ({"truncate": True}, "right"),
        ({"truncate": True, "truncation_direction": "Left"}, "left"),
        ({"normalize": True, "prompt_name": None, "truncation_direction": "Right"}, "right"),
    ):
        good(client.post("/embed", json={"inputs": [long]} | fields))
        call = server.frontend.encoded[-1]
        assert (call.truncate_prompt_tokens, call.truncation_side) == (-1, side)
    refused(client.post("/embed", json={"inputs": [long], "truncate": False}), "inputs", "input 0 has")
    assert good(client.post("/embed", json={"inputs": "one two", "dimensions": 2})) == [WANT[0][:2]]
    refused(client.post("/embed", json={"inputs": "a", "dimensions": 9}), "dimensions")
    refused(client.post("/embed", json={"inputs": "a", "prompt_name": "query"}), "prompt_name")
    refused(client.post("/embed", json={"inputs": []}), "inputs", "empty")
    refused(client.post("/embed", json={"text": "a"}), "text")
    assert client.post("/embed", json={"inputs": "a"}).headers["x-request-id"].startswith("embd-")


def test_tei_ranks_texts(reranker: Running):
    url = f"{reranker.url}/rerank"
    asked = {"query": "a cat", "texts": ["a dog", "a cat on a mat", "nothing"]}
    sigmoid = [1 / (1 + math.exp(-x)) for x in (1.5, 0.5, -0.5)]
    ranked = good(httpx.post(url, json=asked))
    assert [list(item) for item in ranked] == [["index", "score"]] * 3
    assert [(item["index"], item["score"]) for item in ranked] == list(
        zip((1, 0, 2), map(pytest.approx, sigmoid), strict=True)
    )
    sent = {"raw_scores": True, "return_text": True, "truncate": True, "truncation_direction": "Right"}
    assert good(httpx.post(url, json=asked | sent)) == [
        {"index": 1, "score": 1.5, "text": "a cat on a mat"},
        {"index": 0, "score": 0.5, "text": "a dog"},
        {"index": 2, "score": -0.5, "text": "nothing"},
    ]
    refused(httpx.post(url, json=asked | {"documents": ["a"]}), "texts", "documents")
    refused(httpx.post(url, json=asked | {"return_documents": True}), "texts", "return_documents")
    refused(httpx.post(url, json={"query": "a", "documents": ["a"], "return_text": True}), "return_text")
    refused(httpx.post(url, json={"query": "a"}), "documents", "missing")
    refused(httpx.post(url, json=asked | {"texts": []}), "texts", "empty")
    long = asked | {"texts": ["a " * MAX_TOKENS], "truncate": False}
    refused(httpx.post(url, json=long), "texts", "input 0 has")


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        (EMBEDDING, {"embedding": {"pooling": "mean"}}),
        (msgspec.structs.replace(EMBEDDING, pooling="last"), {"embedding": {"pooling": "last_token"}}),
        (CROSS_ENCODER, {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}),
        (REWARD, {"classifier": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}),
        (
            CLASSIFIER,
            {
                "classifier": {
                    "id2label": {"0": "bad", "1": "fair", "2": "good"},
                    "label2id": {"bad": 0, "fair": 1, "good": 2},
                }
            },
        ),
        (None, None),
    ],
)
def test_info_says_what_the_model_is_and_the_limits(pooling: Any, kind: Any):
    with running_server() if pooling is None else pooling_server(pooling) as server:
        info = good(httpx.get(f"{server.url}/info"))
    assert (info["model_id"], info["model_type"], info["max_input_length"]) == (MODEL, kind, CONTEXT_LENGTH)
    assert (info["version"], info["auto_truncate"], info["max_client_batch_size"]) == (VERSION, True, 16384)


# -- Cohere


def test_cohere_gets_each_type_that_it_asks_for(client: httpx.Client):
    types = ["float", "base64", "binary", "ubinary", "float"]
    reply = good(client.post(V2, json=COHERE | {"embedding_types": types}))
    tokens = sum(len(text) + 2 for text in TEXTS)
    assert reply.pop("id")
    assert reply.pop("embeddings") == {
        "float": WANT,
        "base64": [base64.b64encode(struct.pack("<4f", *vector)).decode() for vector in WANT],
        "binary": [[0b11110000 - 128], [0b11010000 - 128]],
        "ubinary": [[0b11110000], [0b11010000]],
    }
    assert reply == {
        "texts": TEXTS,
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}},
        "response_type": "embeddings_by_type",
    }
    assert good(client.post(V2, json=COHERE))["embeddings"] == {"float": WANT}


def test_coheres_older_route_gives_a_list_unless_types_are_asked_for(client: httpx.Client):
    reply = good(client.post(V1, json=COHERE))
    assert (reply["embeddings"], reply["response_type"]) == (WANT, "embeddings_floats")
    assert reply["meta"]["api_version"] == {"version": "1"}
    reply = good(client.post(V1, json=COHERE | {"embedding_types": ["ubinary"]}))
    assert (list(reply["embeddings"]), reply["response_type"]) == (["ubinary"], "embeddings_by_type")


@pytest.mark.parametrize("numbers", [1, 8, 9])
def test_eight_signs_are_a_number(numbers: int):
    with pooling_server(msgspec.structs.replace(EMBEDDING, dimensions=numbers)) as server:
        asked = COHERE | {"texts": ["bbb"], "embedding_types": ["float", "ubinary"]}
        found = good(httpx.post(server.url + V2, json=asked))["embeddings"]
    bits = "".join("1" if value > 0 else "0" for value in found["float"][0])
    assert found["ubinary"][0] == [int(bits[at : at + 8].ljust(8, "0"), 2) for at in range(0, len(bits), 8)]


def test_what_coheres_clients_send(client: httpx.Client, server: Running):
    long = "b" * MAX_TOKENS
    for fields, most, side in (
        ({}, -1, "right"),
        ({"truncate": "END"}, -1, "right"),
        ({"truncate": "START"}, -1, "left"),
        ({"max_tokens": 9}, 9, "right"),
        ({"max_tokens": 128_000}, -1, "right"),
        ({"truncate": "NONE", "texts": TEXTS}, None, "right"),
        ({"input_type": "classification", "priority": 0}, -1, "right"),
    ):
        good(client.post(V2, json=COHERE | {"texts": [long]} | fields))
        call = server.frontend.encoded[-1]
        assert (call.truncate_prompt_tokens, call.truncation_side) == (most, side)
    assert good(client.post(V2, json=COHERE | {"output_dimension": 2}))["embeddings"]["float"] == [v[:2] for v in WANT]
    parts = [{"content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    good(client.post(V2, json={"model": MODEL, "input_type": "search_query", "inputs": parts}))
    assert server.frontend.encoded[-1].text == ["one\ntwo"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"texts": []}, "texts", "empty"),
        ({"texts": None}, "texts", "exactly one"),
        ({"inputs": []}, "texts", "exactly one"),
        ({"texts": ["b" * MAX_TOKENS], "truncate": "NONE"}, "texts", "input 0 has"),
        ({"truncate": "MIDDLE"}, "truncate", ""),
        ({"embedding_types": ["int8"]}, "embedding_types", "int8 is not supported"),
        ({"embedding_types": ["int4"]}, "embedding_types[0]", ""),
        ({"texts": None, "images": ["data:image/png;base64,AA=="]}, "images", "texts"),
        ({"texts": None, "inputs": [{"content": [{"type": "image_url", "image_url": {}}]}]}, "inputs[0].content", ""),
        ({"output_dimension": 99}, "output_dimension", "between 1 and 4"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"wrong": 1}, "wrong", ""),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client: httpx.Client, fields: Any, param: str, words: str):
    for path in (V1, V2):
        refused(client.post(path, json=COHERE | fields), param, words)


def test_other_models_make_no_embeddings_and_unknown_names_are_not_found(client: httpx.Client, reranker: Running):
    for path, body in (("/embed", {"inputs": "a"}), (V2, COHERE), (V1, COHERE)):
        refused(httpx.post(reranker.url + path, json=body), "model", "makes no embeddings")
        refused(client.post(path, json=body | {"model": "nope"}), "model", "not served", 404)
