"""The same request gives the same answer, to the last bit, however it was computed: deterministic by default.

Compared are ids, text, finish reason, usage and every logprob, for greedy and for seeded sampling, as equal floats: no tolerance.
What is promised is one answer for one set of kernels. Another attention backend or the torch fallbacks add numbers in another
order, so they have an answer of their own, and the same promise holds within each.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from engines import (
    FILTERED,
    GREEDY,
    PENALISED,
    SEEDED,
    Answer,
    Case,
    answer_of,
    joined,
    make_cases,
    one_by_one,
    outputs_together,
    random_ids,
    request_of,
    running_engine,
    together,
)

from headrace.api.engine import Engine
from headrace.text.tokenizers import Tokenizer

SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED, "filtered": FILTERED, "penalised": PENALISED}
CASES = make_cases([1, 17, 64, 130, 200], SAMPLINGS)
FEW_CASES = [case for case in CASES if len(case.ids) in (17, 130)]
FOUR_CASES = [case for case in FEW_CASES if case.name.startswith(("seeded", "filtered"))]

PLAIN: dict[str, Any] = {
    "chunked_prefill_size": -1,
    "disable_radix_cache": True,
    "disable_overlap_schedule": True,
}
"""Whole prompts, nothing shared, one step at a time: with requests one by one, the simplest way to an answer."""

Answers = dict[str, Answer]


@pytest.fixture(scope="module")
def plain(tiny_model: str) -> Answers:
    """What every other way of computing must give on the tiny model."""
    with running_engine(tiny_model, **PLAIN) as engine:
        return one_by_one(engine, CASES)


@pytest.fixture(scope="module")
def shared_engine(tiny_model: str) -> Iterator[Engine]:
    """The tiny model with default options, for tests that need no others."""
    with running_engine(tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module", params=[1, 4, 100])
def engine_of_deltas(tiny_model: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each chunk of its streams holds what is new, after so many tokens."""
    with running_engine(tiny_model, incremental_streaming_output=True, stream_interval=request.param) as engine:
        yield engine


def test_the_cases_differ_from_each_other(plain: Answers) -> None:
    sampled = [tuple(answer.ids) for answer in plain.values()]

    assert len(set(sampled)) == len(sampled)
    assert all(answer.ids[5] == 42 for name, answer in plain.items() if "penalised" in name), "the end of reasoning"


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_prompts_in_chunks_give_what_whole_prompts_give(tiny_model: str, plain: Answers, chunk: int) -> None:
    cases = CASES if chunk > 1 else FEW_CASES
    with running_engine(tiny_model, chunked_prefill_size=chunk) as engine:
        cold = together(engine, cases)
        warm = together(engine, cases)

    assert cold == warm == {case.name: plain[case.name] for case in cases}


def test_a_step_that_mixes_prompts_and_decodes_changes_nothing(tiny_model: str, plain: Answers) -> None:
    # Few tokens a step: prompts wait for each other and are cut at odd places among the decode rows.
    with running_engine(tiny_model, chunked_prefill_size=24, max_prefill_tokens=40, max_running_requests=9) as engine:
        assert together(engine, CASES) == plain


@pytest.mark.parametrize("limit", [1, -1])
def test_the_bound_on_the_time_of_a_step_changes_nothing(tiny_model: str, plain: Answers, limit: int) -> None:
    with running_engine(tiny_model, max_step_ms=limit) as engine:
        assert together(engine, CASES) == plain


def test_a_cached_prompt_gives_what_a_cold_one_gives(shared_engine: Engine, plain: Answers) -> None:
    shared_engine.flush_cache()
    cold = one_by_one(shared_engine, CASES)
    outputs = {case.name: shared_engine.generate(**request_of(case)) for case in CASES}

    assert cold == plain
    assert {name: answer_of(output) for name, output in outputs.items()} == plain
    assert outputs["greedy, 200 tokens"]["meta_info"]["cached_tokens"] >= 192


@pytest.mark.parametrize(
    "options",
    [
        {"disable_radix_cache": True, "num_threads": 1},
        {"disable_overlap_schedule": True, "schedule_policy": "lpm", "stream_interval": 5},
    ],
    ids=lambda options: " ".join(options),
)
def test_options_of_the_schedule_change_no_answer(tiny_model: str, plain: Answers, options: dict[str, Any]) -> None:
    with running_engine(tiny_model, **options) as engine:
        assert together(engine, CASES) == plain
        assert one_by_one(engine, FEW_CASES) == {case.name: plain[case.name] for case in FEW_CASES}


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_gives_what_each_request_gives_alone(shared_engine: Engine, plain: Answers, seed: int) -> None:
    strangers = [
        Case(
            f"stranger {i}",
            random_ids(1 + (37 * i + 11 * seed) % 150, seed=1000 * seed + i),
            {"temperature": 0.5 * (i % 4), "max_new_tokens": 1 + (5 * i) % 30, "seed": i},
            logprob_start=0 if i % 3 == 0 else None,
        )
        for i in range(12)
    ]
    # Every third is a stranger, so that the neighbours of a case are others in each run.
    own = CASES[seed::3]
    mixed = [case for pair in zip(own, strangers, strict=False) for case in pair] + own[len(strangers) :]

    answers = together(shared_engine, mixed)

    assert {case.name: answers[case.name] for case in own} == {case.name: plain[case.name] for case in own}


def test_a_stream_ends_with_what_a_call_without_stream_gives(shared_engine: Engine, plain: Answers) -> None:
    for case in CASES:
        chunks = list(shared_engine.generate(**request_of(case), stream=True))

        assert answer_of(chunks[-1]) == plain[case.name]
        for earlier, later in itertools.pairwise(chunks):
            assert later["text"].startswith(earlier["text"])
            assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]


def test_joined_deltas_are_the_answer(engine_of_deltas: Engine, plain: Answers) -> None:
    for case in CASES:
        chunks = list(engine_of_deltas.generate(**request_of(case), stream=True))

        assert joined(chunks) == plain[case.name]


def test_joined_deltas_of_several_samples_with_stops_are_the_answer(engine_of_deltas: Engine) -> None:
    seen = engine_of_deltas.generate(input_ids=random_ids(6, seed=1), sampling_params=SEEDED)
    for stops in ({}, {"stop": [seen["text"][3:6]]}, {"stop_token_ids": seen["output_ids"][4:6]}):
        wanted: dict[str, Any] = {
            "input_ids": [random_ids(6, seed=1), random_ids(20, seed=2)],
            "sampling_params": SEEDED | {"n": 3} | stops,
            "return_logprob": True,
            "logprob_start_len": 2,
            "top_logprobs_num": 2,
            "token_ids_logprob": [5],
        }
        whole = engine_of_deltas.generate(**wanted)
        chunks = list(engine_of_deltas.generate(**wanted, stream=True))

        for index, output in enumerate(whole):
            assert joined([chunk for chunk in chunks if chunk["index"] == index]) == answer_of(output)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "lengths", "num_tokens"), [("auto", [5, 17, 64], 320), ("int8", [40], 160)], ids=["auto", "int8"]
)
def test_retracted_requests_give_the_same_answers(
    tiny_model: str, kv_cache_dtype: str, lengths: list[int], num_tokens: int
) -> None:
    cases = make_cases(lengths, {kind: sampling | {"max_new_tokens": 60} for kind, sampling in SAMPLINGS.items()})
    options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype}
    with running_engine(tiny_model, **PLAIN, **options) as engine:
        unpressured = one_by_one(engine, cases)

    with running_engine(tiny_model, max_total_tokens=num_tokens, schedule_conservativeness=0.01, **options) as engine:
        outputs = outputs_together(engine, cases)
        state = engine.internal_state()

    answers = {case.name: answer_of(output) for case, output in zip(cases, outputs, strict=True)}
    assert answers == unpressured
    assert state.num_retracted > 0
    assert sum(output["meta_info"]["num_retractions"] for output in outputs) == state.num_retracted
    assert state.pool.consistent
    assert state.memory_repairs == 0
    for answer in answers.values():
        for name, entries in answer.logprobs.items():
            if name.startswith("output_"):
                assert len(entries) == len(answer.ids)


@pytest.mark.parametrize(
    ("options", "page_sizes"),
    [
        ({"attention_backend": "torch_native"}, [16]),
        ({"attention_backend": "cpu"}, [1, 16]),
        ({"kv_cache_dtype": "int8"}, [16]),
    ],
    ids=str,
)
def test_pages_of_16_give_what_pages_of_1_give(tiny_model: str, options: dict[str, Any], page_sizes: list[int]) -> None:
    with running_engine(tiny_model, **PLAIN, **options, page_size=1) as engine:
        want = one_by_one(engine, FOUR_CASES)

    for page_size in page_sizes:
        with running_engine(tiny_model, **options, page_size=page_size, chunked_prefill_size=48) as engine:
            assert together(engine, FOUR_CASES) == want
            assert together(engine, FOUR_CASES) == want


def test_attention_backends_agree_but_for_rounding(tiny_model: str) -> None:
    # Not promised to the bit: the kernels add in another order. In float32, with the weights of this model, that moves a
    # logprob by a few units in the last place, so greedy ids are the same wherever the two best are further apart.
    rounding = 1e-4
    greedy = [case for case in CASES if case.name.startswith("greedy")]
    answers = {}
    for backend in ("cpu", "torch_native"):
        with running_engine(tiny_model, attention_backend=backend, dtype="float32") as engine:
            answers[backend] = together(engine, greedy)

    num_compared = 0
    for case in greedy:
        ours, reference = answers["cpu"][case.name], answers["torch_native"][case.name]
        pairs = zip(
            ours.logprobs["output_top_logprobs"], reference.logprobs["output_top_logprobs"], ours.ids, strict=True
        )
        for mine, theirs, _ in pairs:
            assert mine[0][0] == pytest.approx(theirs[0][0], abs=rounding)
            if theirs[0][0] - theirs[1][0] <= 2 * rounding:
                break  # from a near tie on the two may go different ways
            assert mine[0][1] == theirs[0][1]
            num_compared += 1
    assert num_compared > 50


@pytest.mark.parametrize(
    "precision", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}], ids=str
)
def test_torch_kernels_are_as_deterministic_as_the_native_ones(tiny_model: str, precision: dict[str, str]) -> None:
    options: dict[str, Any] = {"disable_native_kernels": True, **precision}
    # Of a short prompt the logprobs, too: without the native kernels they take long.
    cases = [
        case for case in FEW_CASES if case.name in ("filtered, 17 tokens", "greedy, 130 tokens", "seeded, 130 tokens")
    ]
    with running_engine(tiny_model, **PLAIN, **options) as engine:
        want = one_by_one(engine, cases)

    with running_engine(tiny_model, **options, chunked_prefill_size=19) as engine:
        assert together(engine, cases) == want
        assert together(engine, cases) == want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16"])
def test_the_kv_cache_type_changes_nothing_of_the_promise(tiny_model: str, dtype: str) -> None:
    with running_engine(tiny_model, **PLAIN, kv_cache_dtype=dtype) as engine:
        want = one_by_one(engine, FOUR_CASES)

    with running_engine(tiny_model, kv_cache_dtype=dtype, chunked_prefill_size=16) as engine:
        assert together(engine, FOUR_CASES) == want
        assert together(engine, FOUR_CASES) == want


def test_child_processes_give_what_one_process_gives(tiny_model: str, plain: Answers) -> None:
    with running_engine(tiny_model, single_process=False) as engine:
        assert together(engine, CASES) == plain
        chunks = list(engine.generate(**request_of(CASES[-1]), stream=True))

    assert answer_of(chunks[-1]) == plain[CASES[-1].name]


def test_samples_of_one_prompt_are_the_requests_with_the_next_seeds(shared_engine: Engine) -> None:
    prompt = random_ids(40, seed=40)
    samples = shared_engine.generate(input_ids=prompt, sampling_params=SEEDED | {"n": 4})

    alone = [
        shared_engine.generate(input_ids=prompt, sampling_params=SEEDED | {"seed": SEEDED["seed"] + j})
        for j in range(4)
    ]
    assert [answer_of(sample).ids for sample in samples] == [answer_of(output).ids for output in alone]
    assert len({tuple(sample["output_ids"]) for sample in samples}) == 4


def test_a_real_model_is_deterministic_too(tokenizer: Tokenizer) -> None:
    """In chunks, beside others, with cached beginnings and when retracted."""
    story = "Once upon a time there was a lighthouse keeper who spoke with the sea every night. " * 3
    cases = [
        Case(f"{kind}, {end}", tokenizer.encode(story + end), sampling | {"max_new_tokens": 10}, logprob_start)
        for end in ("One day", "The keeper said 你好")
        for kind, sampling, logprob_start in (("greedy", GREEDY, -1), ("seeded", SEEDED, None))
    ]
    prompt = tokenizer.encode("The lighthouse keeper said:")
    samplings = [GREEDY, *(SEEDED | {"seed": seed} for seed in range(5))]
    longer = [Case(f"request {i}", prompt, s | {"max_new_tokens": 40}) for i, s in enumerate(samplings)]
    with running_engine("smollm2", **PLAIN) as engine:
        plain = one_by_one(engine, cases)
        unpressured = together(engine, longer)

    # Eight pages: the longer ones take three each.
    with running_engine(
        "smollm2", chunked_prefill_size=19, max_total_tokens=128, schedule_conservativeness=0.01
    ) as engine:
        cold = together(engine, cases)
        warm = together(engine, cases[:2])
        cached = engine.internal_state().cached_tokens
        answers = together(engine, longer)
        state = engine.internal_state()

    assert cold == plain
    assert warm == {case.name: plain[case.name] for case in cases[:2]}
    assert cached > 0
    assert answers == unpressured
    assert state.num_retracted > 0
    assert state.pool.consistent
