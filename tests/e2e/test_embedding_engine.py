"""Models that make vectors, through the whole engine: the vectors are those of transformers, and nothing around a text changes a bit of its own."""

import asyncio
import os
import random
import signal
import time

import pytest
import torch
import transformers
from lora_harness import tiny_adapter

from headrace import Engine
from headrace.errors import ContextLengthError, RequestError
from tiny_encoder import WORDS, tiny_encoder


def texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(0, longest))) for _ in range(count)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of models, and what transformers makes of texts with them."""
    root = tmp_path_factory.mktemp("models")
    return {
        "bert": (root / "bert", tiny_encoder(root / "bert", "bert")),
        "pairs": (root / "pairs", tiny_encoder(root / "pairs", "bert", num_labels=1)),
        "qwen3": (root / "qwen3", tiny_encoder(root / "qwen3", "qwen3", pooling="lasttoken")),
        "qwen3 mean": (root / "mean", tiny_encoder(root / "mean", "qwen3", pooling="mean")),
    }


def engine_of(folder, **options):
    options = {"single_process": True, "dtype": "float32", "log_level": "error", "max_running_requests": 16} | options
    return Engine(model_path=str(folder), **options)


def theirs(folder, model, given, pooling="mean"):
    """[texts, size] by transformers, one text at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    rows = []
    for item in given:
        pair = (item,) if isinstance(item, str) else item
        inputs = tokenizer(*pair, return_tensors="pt", return_token_type_ids=model.config.model_type == "bert")
        with torch.no_grad():
            out = model(**inputs)
        if hasattr(out, "logits"):
            rows.append(out.logits[0])
            continue
        hidden = out.last_hidden_state[0]
        pooled = hidden.mean(0) if pooling == "mean" else hidden[-1]
        rows.append(torch.nn.functional.normalize(pooled, dim=0))
    return torch.stack(rows)


def vectors(answers) -> torch.Tensor:
    return torch.tensor([answer["embedding"] for answer in answers])


def test_an_encoder_gives_the_vectors_of_transformers_and_the_same_bits_in_any_company(folders):
    folder, model = folders["bert"]
    given = texts(64)
    with engine_of(folder) as engine:
        together = engine.encode(given)
        alone = [engine.encode(text) for text in given[::9]]
        again = engine.encode(list(reversed(given)))

        assert vectors(together).sub(theirs(folder, model, given)).abs().max() < 2e-6
        assert [answer["embedding"] for answer in alone] == [answer["embedding"] for answer in together[::9]]
        assert [answer["embedding"] for answer in reversed(again)] == [answer["embedding"] for answer in together]
        assert [answer["index"] for answer in together] == list(range(64))
        state = engine.internal_state().pool
        assert state.consistent
        assert state.leased_tokens == 0


@pytest.mark.parametrize("name", ["qwen3", "qwen3 mean"])
def test_a_decoder_that_pools_gives_the_vectors_of_transformers_in_chunks_and_from_the_cache(folders, name):
    folder, model = folders[name]
    given = [text for text in texts(24, seed=1) if text]
    prefix = "the cat sat on the mat in the rain in spain and "
    given += [prefix * 2 + text for text in given[:6]]
    with engine_of(folder, context_length=96) as engine:
        whole = engine.encode(given)
        cached = engine.encode(given)
    with engine_of(folder, context_length=96, chunked_prefill_size=7, disable_radix_cache=True) as engine:
        chunked = engine.encode(given)

    pooling = "mean" if name.endswith("mean") else "last"
    assert vectors(whole).sub(theirs(folder, model, given, pooling)).abs().max() < 1e-5
    assert [answer["embedding"] for answer in cached] == [answer["embedding"] for answer in whole]
    assert [answer["embedding"] for answer in chunked] == [answer["embedding"] for answer in whole]
    # Pooling of all tokens needs them all, so nothing may come from the cache.
    assert any(answer["meta_info"]["cached_tokens"] for answer in cached) is (pooling == "last")


def test_a_decoder_that_pools_takes_adapters(folders, tmp_path):
    folder, model = folders["qwen3"]
    adapter = tiny_adapter(model)
    path = adapter.save(tmp_path / "tuned", task_type="FEATURE_EXTRACTION")
    given = [text for text in texts(8, seed=2) if text]
    with engine_of(folder, context_length=96, lora_paths=f"tuned={path}") as engine:
        mixed = engine.encode([*given, *given], lora_path=[None] * len(given) + ["tuned"] * len(given))
        tuned = engine.encode(given, lora_path="tuned")

    assert vectors(mixed[: len(given)]).sub(theirs(folder, model, given, "last")).abs().max() < 1e-5
    assert vectors(tuned).sub(theirs(folder, adapter.merged(model), given, "last")).abs().max() < 1e-5
    assert [answer["embedding"] for answer in mixed[len(given) :]] == [answer["embedding"] for answer in tuned]


def test_pairs_and_their_types(folders):
    folder, model = folders["pairs"]
    pairs = [[a, b] for a, b in zip(texts(12, 2, 20), texts(12, 3, 20), strict=True) if b]
    with engine_of(folder) as engine:
        found = vectors(engine.encode(pairs))
        one = engine.encode(pairs[0], is_cross_encoder_request=True)
        mixed = engine.encode([pairs[0], "the cat", pairs[1]])

    expected = theirs(folder, model, pairs)
    assert found.sub(expected).abs().max() < 2e-6
    assert expected.std() > 1e-3, "the scores must tell pairs apart"
    assert one["embedding"] == found[0].tolist()
    assert vectors(mixed)[[0, 2]].tolist() == found[:2].tolist()


def test_what_is_too_long_is_refused_or_cut(folders):
    folder, model = folders["bert"]
    long = " ".join(["the cat sat"] * 60)
    with engine_of(folder) as engine:
        with pytest.raises(ContextLengthError, match="input 1 has 182 tokens") as caught:
            engine.encode(["a", long])
        assert caught.value.param == "text"
        with pytest.raises(ContextLengthError, match="the input has 400000 characters"):
            engine.encode("the " * 100_000)
        cut = engine.encode(long, truncate_prompt_tokens=-1)
        shorter = engine.encode(["the " * 100_000, "a"], truncate_prompt_tokens=10)
        ids = engine.encode(input_ids=list(range(5, 35)), truncate_prompt_tokens=10)

    assert cut["meta_info"]["prompt_tokens"] == 96
    assert [answer["meta_info"]["prompt_tokens"] for answer in shorter] == [10, 3]
    assert ids["meta_info"]["prompt_tokens"] == 10
    words = " ".join(["the cat sat"] * 60).split()[:94]
    assert vectors([cut]).sub(theirs(folder, model, [" ".join(words)])).abs().max() < 2e-6


def test_shorter_embeddings_where_they_are_allowed(folders):
    folder, _ = folders["bert"]
    with engine_of(folder, allow_dimensions=True) as engine:
        whole, part = engine.encode("the cat"), engine.encode("the cat", dimensions=8)

    expected = torch.nn.functional.normalize(torch.tensor(whole["embedding"])[:8], dim=0)
    assert torch.equal(torch.tensor(part["embedding"]), expected)


def test_each_kind_of_call_needs_its_kind_of_model(folders):
    with engine_of(folders["bert"][0]) as engine:
        with pytest.raises(RequestError, match="does not generate text: it makes embeddings"):
            engine.generate("the cat")
        assert engine.health(generate=True)
        assert engine.get_model_info()["is_generation"] is False
    with engine_of(folders["pairs"][0]) as engine:
        with pytest.raises(RequestError, match="does not generate text: it makes scores"):
            engine.generate("the cat")
        with pytest.raises(RequestError, match="this model classifies"):
            engine.encode("the cat", dimensions=1)


def test_async_calls_share_steps(folders):
    folder, _ = folders["bert"]
    given = texts(40, seed=5)
    with engine_of(folder) as engine:

        async def all_at_once():
            return await asyncio.gather(*(engine.async_encode(text) for text in given))

        found = asyncio.run(all_at_once())
        assert [answer["embedding"] for answer in found] == [answer["embedding"] for answer in engine.encode(given)]


def test_a_scheduler_that_dies_costs_no_embedding(folders):
    folder, _ = folders["bert"]
    given = texts(400, seed=6)
    with engine_of(folder, single_process=False) as engine:
        expected = [answer["embedding"] for answer in engine.encode(given)]
        pids = dict(engine._running.parts.processes())

        async def meanwhile():
            calls = asyncio.create_task(engine.async_encode(given))
            await asyncio.sleep(0)
            os.kill(next(pid for name, pid in pids.items() if name.startswith("scheduler")), signal.SIGKILL)
            return await calls

        found = asyncio.run(meanwhile())
        assert [answer["embedding"] for answer in found] == expected
        deadline_s = time.monotonic() + 60
        while "headrace:restarts_total" not in engine.metrics() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert engine.encode("the cat")["embedding"] == engine.encode(["the cat"])[0]["embedding"]
