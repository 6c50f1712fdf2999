"""A second model guesses: it changes no answer, and where it is the model itself, every guess is right."""

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    FILTERED,
    GREEDY,
    PENALISED,
    SEEDED,
    Answer,
    Case,
    drafts_after_transfer,
    drafts_of,
    make_cases,
    one_by_one,
    random_ids,
    running_engine,
    running_pair,
    together,
)

from headrace.api.engine import Engine
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.execution import pool_plan
from headrace.execution.build_draft import LoadedDraft
from headrace.execution.drafting import DeviceDraftSteps
from headrace.execution.forward_batch import ForwardBatch
from headrace.execution.released import DraftMemory
from headrace.speculative import base

sys.path.insert(0, str(Path(__file__).parent.parent / "execution"))

from device_harness import FakeDevice, queue_on

SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED, "filtered": FILTERED, "penalised": PENALISED}
CASES = make_cases([1, 130], SAMPLINGS)


@pytest.fixture(autouse=True)
def _always_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the draft model is."""
    monkeypatch.setattr(base, "worthwhile", lambda chances, counts, times, pass_time: counts)


@pytest.fixture(scope="module")
def plain(tiny_model: str) -> dict[str, Answer]:
    with running_engine(tiny_model, speculative_algorithm="off") as engine:
        return one_by_one(engine, CASES)


def drafting(model: str, **options: Any) -> dict[str, Any]:
    return {"speculative_algorithm": "draft", "speculative_draft_model_path": model, **options}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 16, "speculative_num_draft_tokens": 3},
        {"max_total_tokens": 448},
        {"attention_backend": "torch_native", "disable_radix_cache": True},
    ],
    ids=lambda options: " ".join(options) or "defaults",
)
def test_answers_are_those_without_a_draft_model(
    tiny_model: str, tiny_mixture: str, plain: dict[str, Answer], options: dict[str, Any]
) -> None:
    cases = CASES
    if "attention_backend" in options:
        cases = [case for case in CASES if len(case.ids) > 1]
        with running_engine(tiny_model, speculative_algorithm="off", **options) as engine:
            plain = one_by_one(engine, cases)
    for draft in (tiny_model, tiny_mixture):
        with running_engine(tiny_model, **drafting(draft, **options)) as engine:
            assert one_by_one(engine, cases) == plain
            assert together(engine, cases) == plain


def test_a_draft_model_on_a_device_is_queued_with_the_steps(
    tiny_model: str, tiny_mixture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device of the tests: the same answers, guesses that are right as on the CPU, and no step waits when it is submitted."""
    own: dict[str, Any] = {"attention_backend": "torch_native", "dtype": "float32"}
    samplings = {"greedy": GREEDY, "seeded": SEEDED}
    cases = [Case(f"{name} {n}", [*range(50, 50 + n)], samplings[name]) for name in samplings for n in (3, 90)]
    penalised = [Case("penalised", [*range(50, 70)], PENALISED)]
    with running_engine(tiny_model, speculative_algorithm="off", **own) as engine:
        plain = one_by_one(engine, cases)
        plain_penalised = one_by_one(engine, penalised)
    device = FakeDevice()
    waits = queue_on(device, monkeypatch)
    num_tokens: list[int] = []
    batch_of = DeviceDraftSteps.batch

    def counting(steps: DeviceDraftSteps, *arguments: Any) -> ForwardBatch:
        batch = batch_of(steps, *arguments)
        num_tokens.append(len(batch.token_ids))
        return batch

    monkeypatch.setattr(DeviceDraftSteps, "batch", counting)
    for draft in (tiny_model, tiny_mixture):
        waits.clear()
        options = drafting(
            draft,
            speculative_num_draft_tokens=3,
            context_length=128,
            max_total_tokens=256,
            chunked_prefill_size=16,
            **own,
        )
        with running_engine(tiny_model, **options) as engine:
            assert one_by_one(engine, cases) == plain
            alone = len(waits)
            assert together(engine, cases) == plain
            assert sum(waits) == 0
            assert one_by_one(engine, penalised) == plain_penalised
        assert device.num_replays > 0
        if draft == tiny_model:
            num_chunks = 2 * (1 + 6)
            assert alone - num_chunks < 0.5 * sum(len(answer.ids) for answer in plain.values()), (
                "most guesses are right"
            )
    assert 16 <= max(num_tokens) < 24, "the draft model computes a prompt in the chunks of the steps"


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, FILTERED], ids=["greedy", "seeded", "filtered"])
def test_a_model_that_guesses_for_itself_is_always_right(tiny_model: str, sampling: dict[str, Any]) -> None:
    """Of one prompt, of one that is cached, and of several at a time, whose rows leave the steps at different times."""
    prompts = [list(range(40, 40 + length)) for length in (1, 33, 60)]
    samplings = [{**sampling, "max_new_tokens": count, "ignore_eos": True} for count in (40, 25, 50)]
    with running_engine(tiny_model, **drafting(tiny_model, speculative_num_draft_tokens=4)) as engine:
        alone = [
            engine.generate(input_ids=ids, sampling_params=params)
            for ids, params in [*zip(prompts, samplings, strict=True), (prompts[2], samplings[2])]
        ]
        beside = engine.generate(input_ids=prompts, sampling_params=samplings)

    for output in [*alone, *beside]:
        meta = output["meta_info"]
        assert meta["spec_accept_rate"] == 1.0
        assert meta["spec_verify_ct"] <= -(-meta["completion_tokens"] // 5) + 1
    assert [output["output_ids"] for output in alone[:3]] == [output["output_ids"] for output in beside]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_algorithm": "draft"}, "needs --speculative-draft-model-path"),
        ({"speculative_draft_model_path": "smollm2"}, "needs --speculative-algorithm draft"),
        (
            {"speculative_algorithm": "draft", "speculative_draft_model_path": "smollm2", "tp_size": 2},
            "cannot be combined with --tp-size",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerArgs(**options)


def test_a_draft_model_for_fewer_positions_is_refused(tiny_model: str) -> None:
    with pytest.raises(ConfigError, match=r"fewer than the model's 8192.*--context-length 1024"):
        running_engine("smollm2", **drafting(tiny_model)).__enter__()


def test_the_kv_cache_leaves_room_for_what_the_draft_model_computes(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its largest step: activations of the prompts' tokens, and logits."""
    reserved: list[int] = []
    budget = pool_plan.kv_token_budget

    def note(**facts: Any) -> Any:
        reserved.append(facts["reserved_bytes"])
        return budget(**facts)

    monkeypatch.setattr(pool_plan, "kv_token_budget", note)
    options: dict[str, Any] = {"max_total_tokens": None, "max_running_requests": 2, "chunked_prefill_size": 64}
    for own in ({}, drafting(tiny_model), drafting(tiny_model, chunked_prefill_size=128)):
        with running_engine(tiny_model, **(options | own)) as engine:
            hidden_size, vocab_size = (engine.get_model_info()[name] for name in ("hidden_size", "vocab_size"))
    without, small, large = reserved

    assert small - without > 4 * (64 * 4 * hidden_size + 2 * vocab_size)
    assert large - small > 4 * 64 * 4 * hidden_size


def test_nothing_holds_the_weights_of_a_draft_model_that_were_released(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[DraftMemory] = []
    with_cache = LoadedDraft.with_cache
    monkeypatch.setattr(
        LoadedDraft, "with_cache", lambda self, num_slots: held.append(with_cache(self, num_slots)) or held[0]
    )
    with running_engine(tiny_model, **drafting(tiny_model)) as engine:
        tensors = [value for keeper in held[0].keepers for value in keeper.kept().values()]
        weights = [weakref.ref(value) for value in tensors if isinstance(value, torch.Tensor)]
        del tensors
        assert all(weight() is not None for weight in weights)
        assert engine.release_memory_occupation(["weights"])[0]
        for _ in range(20_000):  # the thread that has answered lets go a moment later; each look asks it
            engine.internal_state()
            left = [weight for weight in weights if weight() is not None]
            if not left:
                break
        engine.resume_memory_occupation()
    assert not left


def test_a_draft_model_lets_its_memory_go_with_the_models_and_guesses_on(tiny_model: str, tiny_mixture: str) -> None:
    def answer(engine: Engine) -> dict[str, Any]:
        return engine.generate(input_ids=[40, 41, 42], sampling_params={**GREEDY, "max_new_tokens": 40})

    def released_bytes(engine: Engine) -> list[int]:
        found = [int(engine.release_memory_occupation([tag])[1].split()[0]) for tag in ("kv_cache", "weights")]
        engine.resume_memory_occupation()
        return found

    with running_engine(tiny_model, speculative_algorithm="off", quantization="int8") as engine:
        alone = released_bytes(engine)
    for draft in (tiny_model, tiny_mixture):
        with running_engine(tiny_model, **drafting(draft, quantization="int8")) as engine:
            before = answer(engine)
            released = released_bytes(engine)
            after = answer(engine)
        assert released[0] >= 1.5 * alone[0]
        assert released[1] >= 1.5 * alone[1]
        assert after["output_ids"] == before["output_ids"]
        assert drafts_of(before) == drafts_of(after)
        assert drafts_of(before)[1] > 0


SCATTERED: dict[str, Any] = {"attention_backend": "torch_native", "dtype": "float32"}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [({}, {}), (SCATTERED | {"page_size": 1}, SCATTERED | {"page_size": 16})],
    ids=["as they lie", "pages of 1 to 16"],
)
def test_kv_of_a_draft_model_comes_with_that_of_the_prompt(
    tiny_model: str, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    """From another server: it guesses as in one server, always right. What is in the cache of decode already need not come."""
    own = drafting(tiny_model, speculative_num_draft_tokens=4)
    prompts = [random_ids(count, seed=count) for count in (2, 33, 50)]
    prompts.append([*prompts[2][:40], 8, 9])
    with (
        running_engine(tiny_model, **own, **decode) as alone,
        running_pair(tiny_model, own | prefill, own | decode) as pair,
    ):
        got, want = drafts_after_transfer(pair, alone, prompts, 16)
    assert got == want
    assert got[1] == got[2] > 30


@pytest.mark.usefixtures("patient")
def test_without_kv_of_the_draft_model_a_prompt_comes_and_fewer_guesses_are_right(
    tiny_model: str, tiny_mixture: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The prefill side has no draft model, or another one. It may have one that the decode side does not have."""
    own, off = drafting(tiny_model, speculative_num_draft_tokens=4), {"speculative_algorithm": "off"}
    prompts = [random_ids(count, seed=count) for count in (33, 100)]
    with running_engine(tiny_model, **own) as alone:
        for prefill, words in ((off, "has no draft model"), (drafting(tiny_mixture), "has another draft model")):
            caplog.clear()
            with running_pair(tiny_model, prefill, own) as pair:
                got, want = drafts_after_transfer(pair, alone, prompts, 40)
            assert want[2] == want[1]
            assert got[2] < 0.9 * got[1]
            assert words in caplog.text
        with running_pair(tiny_model, own, {"speculative_algorithm": "ngram"}) as pair:
            drafts_after_transfer(pair, alone, prompts, 40)


@pytest.mark.usefixtures("patient_tier")
def test_kv_of_a_draft_model_is_kept_with_that_of_the_model(tiny_model: str, tmp_path: Path) -> None:
    """In files: what is read again gives right guesses, and an engine without the draft model has files of its own."""
    own = drafting(tiny_model, speculative_num_draft_tokens=4, kv_cache_dir=str(tmp_path / "kv"))
    call: dict[str, Any] = {"input_ids": random_ids(100, seed=1), "sampling_params": GREEDY | {"max_new_tokens": 40}}
    found = []
    for options in (own, own, {"kv_cache_dir": own["kv_cache_dir"]}):
        with running_engine(tiny_model, **options) as engine:
            found.append(engine.generate(**call))
    assert [output["meta_info"]["cached_tokens"] for output in found] == [0, 96, 0]
    assert drafts_of(found[0]) == drafts_of(found[1])
    assert found[1]["meta_info"]["spec_accept_rate"] == 1.0
