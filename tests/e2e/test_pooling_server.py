"""Servers of embedding models, rerankers and classifiers: what their routes say is what transformers computes."""

import base64
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
import torch
import transformers
from engines import running_engine
from server_process import ServerProcess, serving

from tiny_encoder import WORDS, tiny_encoder

CLOSE = 1e-5
"""Of float32 numbers that are summed in another order."""
LIMIT = 64
"""Of the tokens of a text, by sentence_bert_config.json: fewer than the positions of the model."""
OPTIONS = ("--dtype", "float32", "--num-threads", "2", "--disable-metrics")


def texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(count)]


def reference(folder: Path, model: Any, *given: str) -> torch.Tensor:
    """The last hidden states, or the logits, of a text or a pair."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    with torch.no_grad():
        out = model(**tokenizer(*given, return_tensors="pt", return_token_type_ids=True))
    return out.logits[0] if hasattr(out, "logits") else out.last_hidden_state[0]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("bert")
    return folder, tiny_encoder(folder, "bert", pooling="mean", normalize=True, max_tokens=LIMIT)


@pytest.fixture(scope="module")
def embedding(bert: tuple[Path, Any]) -> Iterator[ServerProcess]:
    """With HTTP workers, so that calls cross a process."""
    with serving(str(bert[0]), *OPTIONS, "--tokenizer-worker-num", "2", "--max-queued-requests", "64") as server:
        yield server


def test_the_official_client_gets_the_vectors_of_the_reference(embedding: ServerProcess, bert: tuple[Path, Any]):
    folder, model = bert
    given = texts(8, 0)
    with openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="none") as client:
        found = client.embeddings.create(model=folder.name, input=given)
    want = [torch.nn.functional.normalize(reference(folder, model, text).mean(0), dim=0) for text in given]
    vectors = torch.tensor([item.embedding for item in found.data])
    assert vectors.sub(torch.stack(want)).abs().max() < CLOSE
    assert [item.index for item in found.data] == list(range(8))


def test_thousands_of_texts_have_the_bits_that_each_has_alone(embedding: ServerProcess):
    given = texts(2048, 1)
    together = embedding.post("/v1/embeddings", {"input": given})
    coded = embedding.post("/v1/embeddings", {"input": given[:3], "encoding_format": "base64"})
    vectors = [item["embedding"] for item in together["data"]]
    assert len(vectors) == 2048
    for place in (0, 127, 128, 1000, 2047):
        (alone,) = embedding.post("/v1/embeddings", {"input": given[place]})["data"]
        assert alone["embedding"] == vectors[place]
    for item, vector in zip(coded["data"], vectors, strict=False):
        assert torch.frombuffer(bytearray(base64.b64decode(item["embedding"])), dtype=torch.float32).tolist() == vector
    with ollama.Client(host=embedding.url) as client:
        assert [list(row) for row in client.embed("default", given[:3]).embeddings] == vectors[:3]
    assert [answer["embedding"] for answer in embedding.post("/encode", {"text": given[:3]})] == vectors[:3]
    assert embedding.wait_until_idle()["num_running"] == 0


def test_the_server_is_well_and_says_what_it_is(embedding: ServerProcess):
    assert httpx.get(f"{embedding.url}/health_generate", timeout=30).status_code == 200
    asked = {"messages": [{"role": "user", "content": "Hi"}]}
    reply = httpx.post(f"{embedding.url}/v1/chat/completions", json=asked, timeout=30)
    assert reply.status_code == 400
    assert "it is an embedding model (BertModel); use /v1/embeddings" in reply.json()["error"]["message"]
    too_long = {"input": ["the cat", "the cat " * 60]}
    refusal = httpx.post(f"{embedding.url}/v1/embeddings", json=too_long, timeout=30).json()["error"]
    assert refusal["param"] == "input"
    assert "input 1 has 122 tokens" in refusal["message"]
    cut = embedding.post("/v1/embeddings", too_long | {"truncate": True})
    assert cut["usage"]["prompt_tokens"] == 4 + LIMIT


def test_the_longest_text_is_one_number_everywhere(embedding: ServerProcess):
    refusals = [
        httpx.post(f"{embedding.url}{path}", json=body, timeout=30).json()["error"]
        for path, body in (
            ("/v1/embeddings", {"input": "cat " * (LIMIT - 1)}),
            ("/v1/embeddings", {"input": "cat " * 300 * LIMIT}),
            ("/v1/embeddings", {"input": "cat", "truncate_prompt_tokens": LIMIT + 1}),
            ("/encode", {"text": "cat " * (LIMIT - 1)}),
            ("/api/embed", {"input": "cat " * (LIMIT - 1), "truncate": False}),
        )
    ]
    messages = [error if isinstance(error, str) else error["message"] for error in refusals]
    assert all(str(LIMIT) in message for message in messages), messages
    (card,) = httpx.get(f"{embedding.url}/v1/models").json()["data"]
    info = httpx.get(f"{embedding.url}/model_info").json()
    shown = httpx.post(f"{embedding.url}/api/show", json={"model": card["id"]}).json()["model_info"]
    (loaded,) = httpx.get(f"{embedding.url}/api/ps").json()["models"]
    tokens = embedding.post("/tokenize", {"prompt": "cat"})
    found = [card["max_model_len"], info["context_length"], info["pooling"]["max_tokens"], shown["bert.context_length"]]
    assert [*found, loaded["context_length"], tokens["max_model_len"]] == [LIMIT] * 6


def test_a_cross_encoder_ranks_and_scores_as_the_reference(tmp_path: Path):
    model = tiny_encoder(tmp_path, "bert", num_labels=1)
    query, documents = "what is the capital of france", texts(12, 2)
    logits = [float(reference(tmp_path, model, query, document)) for document in documents]
    want = torch.sigmoid(torch.tensor(logits)).tolist()
    with running_engine(str(tmp_path), dtype="float32", max_total_tokens=None) as engine:
        ranked = engine.rerank(query, documents)
        scores = engine.score(query, documents, raw_scores=True)
        long = engine.rerank(query, [*documents, "the cat " * 60], top_n=13)

    assert scores == pytest.approx(logits, abs=CLOSE)
    assert [item["relevance_score"] for item in ranked] == pytest.approx(sorted(want, reverse=True), abs=CLOSE)
    assert [item["index"] for item in ranked] == sorted(range(12), key=lambda place: -scores[place])
    assert len(long) == 13, "what does not fit is cut"


def test_a_classifier_labels_as_the_reference(tmp_path: Path):
    model = tiny_encoder(tmp_path, "bert", num_labels=3, id2label={0: "bad", 1: "fair", 2: "good"})
    given = texts(6, 3)
    logits = torch.stack([reference(tmp_path, model, text) for text in given])
    with serving(str(tmp_path), *OPTIONS, "--single-process") as server:
        labelled = server.post("/classify", {"input": given})["data"]
        numbers = server.post("/classify", {"text": given})

    want = torch.softmax(logits, -1)
    assert torch.tensor([item["probs"] for item in labelled]).sub(want).abs().max() < CLOSE
    assert [item["label"] for item in labelled] == [("bad", "fair", "good")[row.argmax()] for row in logits]
    assert torch.tensor([answer["embedding"] for answer in numbers]).sub(logits).abs().max() < CLOSE
