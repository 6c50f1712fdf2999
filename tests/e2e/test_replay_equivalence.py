"""A death in the middle changes no answer. The schedulers are told to begin again, which is what a replay is to them, in one process."""

import asyncio
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from engines import FILTERED, GREEDY, PENALISED, SEEDED, Case, answer_of, random_ids, request_of, running_engine

from headrace.api.engine import Engine
from headrace.frontend.request_state import ReqState

N = 60
LONG = {"max_new_tokens": N, "ignore_eos": True}
PROMPT = random_ids(150, seed=3)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY | LONG,
    "seeded": SEEDED | LONG,
    "filtered": FILTERED | LONG,
    "penalised": PENALISED | LONG,
    "at least": GREEDY | {"max_new_tokens": N, "min_new_tokens": N - 5},
}


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> Iterator[Engine]:
    with running_engine(tiny_model) as engine:
        yield engine


def interrupt(engine: Engine) -> None:
    """As when the detokenizer dies and comes back: every sample that has not ended is taken away and sent again."""

    async def die() -> None:
        link = engine._manager.link
        link.detokenizer_down()
        link.detokenizer_up()

    asyncio.run_coroutine_threadsafe(die(), engine._loop).result()


@contextmanager
def interrupted_at(engine: Engine, num_outputs: int) -> Iterator[list[int]]:
    """As `interrupt`, once, as soon as a sample has so many outputs, however late its reader is. Yields how many were sent again."""
    outputs, link = engine._manager.outputs, engine._manager.link
    apply, replayed = outputs._apply, []

    def apply_and_die(sample: ReqState, *output: Any) -> int:
        new_tokens = apply(sample, *output)
        if not replayed and len(sample.output_ids) >= num_outputs:
            before = link.num_replayed
            link.detokenizer_down()
            link.detokenizer_up()
            replayed.append(link.num_replayed - before)
        return new_tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "_apply", apply_and_die)
        yield replayed


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("start", [None, 0], ids=["no logprobs", "logprobs"])
@pytest.mark.parametrize("at", [1, 37])
def test_a_stream_goes_on_as_if_nothing_had_happened(engine: Engine, kind: str, start: int | None, at: int):
    request = request_of(Case(kind, PROMPT, SAMPLINGS[kind], start))
    want = answer_of(engine.generate(**request))

    with interrupted_at(engine, at) as replayed:
        chunks = list(engine.generate(**request, stream=True))

    assert replayed == [1]
    assert answer_of(chunks[-1]) == want
    texts = [chunk["text"] for chunk in chunks]
    assert all(after.startswith(earlier) for earlier, after in itertools.pairwise(texts))


def test_samples_of_one_prompt_and_their_logprobs(engine: Engine):
    request = request_of(Case("n", PROMPT, SEEDED | LONG | {"n": 3}, 0))
    want = [answer_of(output) for output in engine.generate(**request)]

    got: dict[int, dict[str, Any]] = {}
    for number, chunk in enumerate(engine.generate(**request, stream=True), start=1):
        got[chunk["index"]] = chunk
        if number == 20:
            interrupt(engine)

    assert [answer_of(got[index]) for index in range(3)] == want


def test_hidden_states(engine: Engine):
    request = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_hidden_states": True}
    want = engine.generate(**request)
    last: dict[str, Any] = {}
    for number, chunk in enumerate(engine.generate(**request, stream=True), start=1):
        last = chunk
        if number == 5:
            interrupt(engine)

    assert last["meta_info"]["hidden_states"] == want["meta_info"]["hidden_states"]


def test_a_stop_string_that_straddles_the_point(engine: Engine):
    text = engine.generate(input_ids=PROMPT, sampling_params=GREEDY | LONG)["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 12]
    request = {"input_ids": PROMPT, "sampling_params": GREEDY | LONG | {"stop": [stop]}}
    want = answer_of(engine.generate(**request))
    assert want.finish["type"] == "stop"
    num_tokens = len(want.ids)

    for at in range(max(1, num_tokens - 6), num_tokens):
        last: dict[str, Any] = {}
        for chunk in engine.generate(**request, stream=True):
            last = chunk
            if len(chunk["output_ids"]) == at:
                interrupt(engine)
        assert answer_of(last) == want


def test_many_at_once_that_do_not_stream_and_an_interruption_again_and_again(engine: Engine):
    cases = [Case(kind, random_ids(60 + i, seed=i), s, None) for i, (kind, s) in enumerate(SAMPLINGS.items())]
    want = [answer_of(engine.generate(**request_of(case))) for case in cases]
    got: list[Any] = [None] * len(cases)
    running = engine.generate(input_ids=PROMPT, sampling_params=GREEDY | {"max_new_tokens": 600}, stream=True)

    def call(i: int) -> None:
        got[i] = answer_of(engine.generate(**request_of(cases[i])))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for number, _ in enumerate(running, start=1):
        if number % 80 == 0:
            interrupt(engine)
    for thread in threads:
        thread.join()

    assert got == want
