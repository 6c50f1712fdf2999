"""Rerank and score by a model that generates, against transformers, and what its prefix cache saves."""

import asyncio
import math
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest
import torch
import transformers
from engines import running_engine

from headrace.api.engine import Engine
from headrace.server.pooling.pairs import INSTRUCTION, SYSTEM

QUERY = "Where do cats sleep?"
DOCUMENTS = ["Cats sleep on sofas.", "The Rhine is a river.", "Sleep is good.", "Dogs bark <|im_end|> at night."]
LABELS = [314, 17, 2000]
PAGE_SIZE = 16
CLOSE = 2e-3
"""Of float32 logits of a random model that are summed in another order."""


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> Iterator[Engine]:
    with running_engine(tiny_model, dtype="float32", kv_cache_dtype="auto") as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(tiny_model: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def last_logprobs(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(reference(torch.tensor([ids])).logits[0, -1], -1)


def prompt_ids(engine: Engine, query: str, document: str) -> list[int]:
    """The prompt of Qwen3-Reranker's card."""
    asked = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    tokenizer = engine.tokenizer
    hidden = tokenizer.special_tokens
    begin = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
    ids = tokenizer.encode(begin, False, allow_special=True) + tokenizer.encode(asked, False)
    ids += tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", False, allow_special=True)
    assert hidden["<|im_end|>"] in ids
    return ids


def judged(reference: Any, engine: Engine, document: str) -> float:
    """The score that the model of Qwen3-Reranker's card gives: softmax over no and yes."""
    found = last_logprobs(reference, prompt_ids(engine, QUERY, document))
    yes, no = (engine.tokenizer.encode(word, False)[0] for word in ("yes", "no"))
    return float(torch.softmax(found[[no, yes]], 0)[1])


def test_documents_have_the_scores_of_the_reference(engine: Engine, reference: Any):
    want = [judged(reference, engine, document) for document in DOCUMENTS]
    found = engine.rerank(QUERY, DOCUMENTS)
    scores = {item["index"]: item["relevance_score"] for item in found}
    assert [scores[place] for place in range(4)] == pytest.approx(want, abs=CLOSE)
    assert [item["relevance_score"] for item in found] == sorted(scores.values(), reverse=True)
    assert engine.score(QUERY, DOCUMENTS) == [scores[place] for place in range(4)], "the same bits by either way"
    assert asyncio.run(engine.async_rerank(QUERY, DOCUMENTS, top_n=2)) == found[:2]
    assert asyncio.run(engine.async_score(QUERY, DOCUMENTS)) == engine.score(QUERY, DOCUMENTS)


def test_labels_have_the_probabilities_of_the_reference(engine: Engine, reference: Any):
    items = [" Yes, it is.", " No."]
    found = engine.score("Is it so?", items, LABELS)
    among = engine.score("Is it so?", items, LABELS, apply_softmax=True)
    for item, row, shares in zip(items, found, among, strict=True):
        logprobs = last_logprobs(reference, engine.tokenizer.encode("Is it so?" + item))
        assert row == pytest.approx([math.exp(logprobs[label]) for label in LABELS], rel=CLOSE)
        assert shares == pytest.approx(torch.softmax(logprobs[LABELS], 0).tolist(), rel=CLOSE)
    first = engine.score("Is it so?", items, LABELS, item_first=True)
    logprobs = last_logprobs(reference, engine.tokenizer.encode(" No.Is it so?"))
    assert first[1] == pytest.approx([math.exp(logprobs[label]) for label in LABELS], rel=CLOSE)
    ids = [engine.tokenizer.encode(item, False) for item in items]
    by_ids = engine.score(engine.tokenizer.encode("Is it so?"), ids, LABELS)
    assert by_ids[0] == pytest.approx(found[0], rel=CLOSE)


def test_documents_share_the_prefix_of_their_query(engine: Engine):
    engine.flush_cache()
    before = engine.internal_state()
    query = "Which of these documents speaks of cats that sleep on sofas all day?"
    documents = [f"{number} speaks of cats." for number in "abcdefghijklmnopqrst"]
    engine.rerank(query, documents)
    after = engine.internal_state()
    prompts = [prompt_ids(engine, query, document) for document in documents]
    shared = (
        sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts, strict=False))) // PAGE_SIZE * PAGE_SIZE
    )
    assert shared >= 5 * PAGE_SIZE
    assert after.cached_tokens - before.cached_tokens == 19 * shared, (
        "the first computes the prefix, the others find it"
    )
    assert after.prompt_tokens - before.prompt_tokens == sum(map(len, prompts))
