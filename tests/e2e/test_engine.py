"""`Engine` on a real model: every way to ask gives the text that transformers gives; `Runtime` gives what an engine gives."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
import torch
import transformers
from engines import running_engine

from headrace.api.engine import Engine
from headrace.api.runtime import Runtime
from headrace.checkpoint.names import resolve_model
from headrace.checkpoint.source import open_checkpoint
from headrace.errors import ExecutionError, NotFoundError, RequestError
from headrace.text.tokenizers import Tokenizer

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
]
MORE_PROMPTS = [*PROMPTS, "Water boils at 100 degrees, and it freezes at", "Das Wetter ist heute"]
SAMPLING: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6}
LONGER = SAMPLING | {"max_new_tokens": 20}

FLOAT32_LOGPROB_TOLERANCE = 1e-3
"""Sums of a few thousand float32 products in another order move logits of up to 45 by some 1e-5 in each of 30 layers; 6e-5 was
seen. A wrong scale, position or mask is off by far more than this."""

BFLOAT16_LOGIT_TOLERANCE = 0.25
"""How far the distance between two logits may move because keys and values are stored as bfloat16 (8 bits of mantissa), while
the reference has the same rounded weights and a float32 KV. 0.17 was seen among the five best tokens of 158 positions. Where
the reference's two best tokens are further apart than this, our token must be its best; elsewhere it must be within this of the
best. (In practice all 158 tokens are the reference's.)"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Child processes and default precision, as users have them."""
    with Engine(model_path="smollm2", max_total_tokens=8192) as engine:
        yield engine


@pytest.fixture(scope="module")
def answers(engine: Engine) -> list[dict[str, Any]]:
    """The answers to PROMPTS, one by one."""
    return [engine.generate(prompt, SAMPLING) for prompt in PROMPTS]


def reference(dtype: torch.dtype) -> transformers.LlamaForCausalLM:
    """transformers' model with smollm2's tensors rounded to `dtype`; it computes in float32."""
    checkpoint = open_checkpoint(resolve_model("smollm2"))
    config = transformers.LlamaConfig(**checkpoint.config.raw)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tensors = {name: tensor.to(dtype).float() for name, tensor in checkpoint.iter_tensors()}
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    model.load_state_dict(tensors, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


@torch.inference_mode()
def next_token_logits(model: transformers.LlamaForCausalLM, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The reference's logits [len(output), vocab_size] at the positions that chose `output`.

    If each id of `output` is the argmax of its row, then by induction greedy decoding gives `output`.
    """
    logits = model(torch.tensor([prompt + output])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


# -- the same text as transformers


def test_float32_text_is_that_of_transformers(tokenizer: Tokenizer) -> None:
    model = reference(torch.float32)
    with running_engine("smollm2", dtype="float32") as engine:
        more = {"return_normalized_logprob": True, "logprob_start_len": 2}
        outputs = engine.generate(MORE_PROMPTS[2:], LONGER, return_logprob=True, top_logprobs_num=5, **more)

    for prompt, output in zip(MORE_PROMPTS[2:], outputs, strict=True):
        ids = tokenizer.encode(prompt)
        logits = next_token_logits(model, ids, output["output_ids"])
        wanted = logits.argmax(-1).tolist()
        assert output["output_ids"] == wanted
        scores = next_token_logits(model, ids[:3], ids[3:]).log_softmax(-1)
        mean = scores.gather(1, torch.tensor(ids[3:])[:, None]).mean().item()
        assert output["meta_info"]["normalized_prompt_logprob"] == pytest.approx(mean, abs=FLOAT32_LOGPROB_TOLERANCE)
        assert output["text"] == tokenizer.decode(wanted)
        for row, top in zip(logits.log_softmax(-1).tolist(), output["meta_info"]["output_top_logprobs"], strict=True):
            for value, token_id, _ in top:
                assert value == pytest.approx(row[token_id], abs=FLOAT32_LOGPROB_TOLERANCE)


def test_bfloat16_text_is_that_of_transformers_where_its_choice_is_clear(tokenizer: Tokenizer) -> None:
    model = reference(torch.bfloat16)
    with Engine(model_path="smollm2", dtype="bfloat16", max_total_tokens=8192) as engine:
        outputs = engine.generate(MORE_PROMPTS, LONGER)
    num_clear = num_tokens = 0
    for prompt, output in zip(MORE_PROMPTS, outputs, strict=True):
        ids = output["output_ids"]
        logits = next_token_logits(model, tokenizer.encode(prompt), ids)
        best = logits.topk(2)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        behind = (best.values[:, 0] - logits[range(len(ids)), ids]).tolist()
        num_clear += sum(gap > BFLOAT16_LOGIT_TOLERANCE for gap in gaps)
        num_tokens += len(ids)
        # 0 behind: our token is the reference's. A clear choice leaves nothing else within the tolerance.
        assert max(behind) <= BFLOAT16_LOGIT_TOLERANCE, (prompt, behind)

    assert num_clear / num_tokens > 0.8


# -- every way to ask


def test_a_batch_is_its_prompts(engine: Engine, answers: list[dict[str, Any]]) -> None:
    outputs = engine.generate(PROMPTS, SAMPLING)

    assert [output["text"] for output in outputs] == [answer["text"] for answer in answers]
    assert [output["index"] for output in outputs] == list(range(len(PROMPTS)))


def test_token_ids_are_a_prompt_too(engine: Engine, answers: list[dict[str, Any]], tokenizer: Tokenizer) -> None:
    outputs = engine.generate(input_ids=[tokenizer.encode(prompt) for prompt in PROMPTS], sampling_params=SAMPLING)

    assert [output["output_ids"] for output in outputs] == [answer["output_ids"] for answer in answers]


def test_turns_of_a_session_give_what_the_whole_prompt_gives(engine: Engine, tokenizer: Tokenizer) -> None:
    session = engine.open_session()
    first = engine.generate(PROMPTS[0], SAMPLING | {"max_new_tokens": 32}, session_params={"id": session})
    second = engine.generate(" Moreover,", SAMPLING, session_params={"id": session})
    branch = engine.generate(" However,", SAMPLING, session_params={"id": session, "rid": first["meta_info"]["id"]})
    engine.close_session(session)

    history = tokenizer.encode(PROMPTS[0]) + first["output_ids"]
    whole = engine.generate(None, SAMPLING, input_ids=history + tokenizer.encode(" Moreover,"))
    other = engine.generate(None, SAMPLING, input_ids=history + tokenizer.encode(" However,"))
    assert (second["output_ids"], branch["output_ids"]) == (whole["output_ids"], other["output_ids"])
    assert second["meta_info"]["cached_tokens"] >= len(first["output_ids"]) - 1
    with pytest.raises(NotFoundError):
        engine.generate("x", SAMPLING, session_params={"id": session})


def test_a_stream_grows_to_the_text(engine: Engine, answers: list[dict[str, Any]]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        chunks = list(engine.generate(prompt, SAMPLING, stream=True))

        assert len(chunks) > 1
        assert chunks[-1]["text"] == answer["text"]
        assert chunks[-1]["meta_info"]["finish_reason"] == answer["meta_info"]["finish_reason"]


def test_samples_are_a_list(engine: Engine, answers: list[dict[str, Any]]) -> None:
    outputs = engine.generate(PROMPTS[0], SAMPLING | {"n": 3})

    assert [output["index"] for output in outputs] == [0, 1, 2]
    assert {output["text"] for output in outputs} == {answers[0]["text"]}


async def test_async_calls_run_together(engine: Engine, answers: list[dict[str, Any]]) -> None:
    outputs = await asyncio.gather(*(engine.async_generate(prompt, SAMPLING) for prompt in PROMPTS))

    assert [output["text"] for output in outputs] == [answer["text"] for answer in answers]


async def test_async_streams_run_together(engine: Engine, answers: list[dict[str, Any]]) -> None:
    async def last_text(prompt: str) -> str:
        text = ""
        async for chunk in await engine.async_generate(prompt, SAMPLING, stream=True):
            text = chunk["text"]
        return text

    texts = await asyncio.gather(*(last_text(prompt) for prompt in PROMPTS))

    assert texts == [answer["text"] for answer in answers]


def test_two_threads_may_ask_at_once(engine: Engine, answers: list[dict[str, Any]]) -> None:
    texts: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        texts[number] = [engine.generate(prompt, SAMPLING)["text"] for prompt in PROMPTS]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert texts == {number: [answer["text"] for answer in answers] for number in range(2)}


def test_a_stream_left_early_is_aborted(engine: Engine) -> None:
    before = engine.internal_state().num_aborted
    stream = engine.generate(PROMPTS[1], SAMPLING | {"max_new_tokens": 4000, "ignore_eos": True}, stream=True)
    next(stream)
    stream.close()

    for _ in range(2000):
        state = engine.internal_state()
        if state.num_running == 0:
            break
    assert state.num_aborted == before + 1
    assert state.pool.leased_tokens == 0


def test_a_bad_request_leaves_the_engine_as_it_was(engine: Engine, answers: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="temperature"):
        engine.generate(PROMPTS[0], {"temperature": -1})
    with pytest.raises(RequestError, match="no_such_field"):
        engine.generate(PROMPTS[0], SAMPLING, no_such_field=1)

    assert engine.generate(PROMPTS[0], SAMPLING)["text"] == answers[0]["text"]
    assert engine.health(generate=True)


def test_shutdown_ends_what_runs_and_may_be_repeated(tiny_model: str) -> None:
    with running_engine(tiny_model) as engine:
        stream = engine.generate(input_ids=[17, 18], sampling_params={"max_new_tokens": 900}, stream=True)
        next(stream)
        engine.shutdown()
        engine.shutdown()

        with pytest.raises(ExecutionError):
            list(stream)
        with pytest.raises(ExecutionError, match="shut down"):
            engine.generate("hello")


def test_two_engines_may_live_in_one_process(tiny_engine: Engine, tiny_model: str) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    with running_engine(tiny_model, attention_backend="torch_native") as second:
        assert len(tiny_engine.generate("hello", sampling)["output_ids"]) == 8
        assert len(second.generate("hello", sampling)["output_ids"]) == 8


# -- over HTTP


@pytest.fixture(scope="module")
def runtime(tiny_model: str) -> Iterator[Runtime]:
    with Runtime(model_path=tiny_model, max_total_tokens=8192, log_level="warning") as runtime:
        yield runtime


@pytest.fixture(scope="module")
def tiny_engine(tiny_model: str) -> Iterator[Engine]:
    """An engine of the same model in this process."""
    with running_engine(tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def tiny_answers(tiny_engine: Engine) -> list[dict[str, Any]]:
    """Its answers to PROMPTS."""
    return [tiny_engine.generate(prompt, SAMPLING) for prompt in PROMPTS]


def test_a_runtime_gives_what_the_engine_gives(runtime: Runtime, tiny_answers: list[dict[str, Any]]) -> None:
    texts = [answer["text"] for answer in tiny_answers]

    assert [output["text"] for output in runtime.generate(PROMPTS, SAMPLING)] == texts
    assert list(runtime.generate(PROMPTS[1], SAMPLING, stream=True))[-1]["text"] == texts[1]
    assert runtime.flush_cache() is True
    with pytest.raises(RequestError, match="temperature"):
        runtime.generate(PROMPTS[0], {"temperature": -1})


async def test_a_runtime_streams_to_async_callers(runtime: Runtime, tiny_answers: list[dict[str, Any]]) -> None:
    chunks = [chunk async for chunk in runtime.async_generate(PROMPTS[2], SAMPLING)]

    assert chunks[-1]["text"] == tiny_answers[2]["text"]


def test_a_runtime_has_sessions(runtime: Runtime, tiny_answers: list[dict[str, Any]]) -> None:
    session = runtime.open_session(session_id="mine")
    assert runtime.generate(PROMPTS[0], SAMPLING, session_params={"id": session})["text"] == tiny_answers[0]["text"]
    second = runtime.generate("!", SAMPLING, session_params={"id": session})
    runtime.close_session(session)
    assert second["meta_info"]["prompt_tokens"] > len(tiny_answers[0]["output_ids"])
    with pytest.raises(NotFoundError):
        runtime.close_session(session)


def test_the_openai_route_gives_what_the_engine_gives(runtime: Runtime, tiny_answers: list[dict[str, Any]]) -> None:
    body = {"prompt": PROMPTS, "temperature": 0, "max_tokens": SAMPLING["max_new_tokens"]}
    reply = httpx.post(f"{runtime.url}/v1/completions", json=body, timeout=60).raise_for_status().json()

    assert [choice["text"] for choice in reply["choices"]] == [answer["text"] for answer in tiny_answers]


CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Name the capital of France."}]


def test_a_chat_is_answered(engine: Engine) -> None:
    assert "Paris" in engine.chat(CHAT, max_tokens=12, temperature=0).text
    assert repr(engine).startswith("<Engine smollm2: llama, ")


async def test_chats_are_the_same_in_every_way_to_ask(tiny_engine: Engine, runtime: Runtime) -> None:
    engine = tiny_engine
    whole = engine.chat(CHAT, max_tokens=12, temperature=0)
    streamed = list(engine.chat(CHAT, stream=True, max_tokens=12, temperature=0))
    awaited = await engine.async_chat(CHAT, max_tokens=12, temperature=0)
    stream = await engine.async_chat(CHAT, stream=True, max_tokens=12, temperature=0)
    there = runtime.chat(CHAT, max_tokens=12, temperature=0)
    from_there = [delta async for delta in runtime.async_chat(CHAT, max_tokens=12, temperature=0)]

    assert whole == awaited == there
    for deltas in (streamed, [delta async for delta in stream], from_there):
        assert "".join(delta.text for delta in deltas) == whole.text
        assert deltas[-1].usage == whole.usage
    with closing(engine.chat(CHAT, stream=True)) as left:
        next(left)
    ids = engine.tokenizer.encode("Paris")
    assert engine.tokenizer.decode(ids) == "Paris"
    assert repr(runtime) == f"<Runtime {runtime.url}, process {runtime.pid}>"
