"""Updates that wait for no request (--kv-on-update recompute and keep), on the real engine."""

import os
import signal

import pytest
from test_weights_serving import PROMPTS, InFlight, whole_pool
from weights_harness import LONG, engine_of, fresh, tensors_of, tokens

FIRST = {"start": 0, "weight_version": "default", "kv_version": "default", "kv_age": 0}


def updated_meanwhile(engine, update) -> list[dict]:
    """The outputs of requests that run on when `update` has been carried out. Steps are slow until then."""
    engine.slow_down(0.02)
    flight = InFlight(engine)
    update()
    engine.slow_down()
    outputs = flight.join()
    assert all(len(output["output_ids"]) == LONG["max_new_tokens"] for output in outputs)
    return outputs


def continued(model: str, outputs: list[dict], starts: list[int], **options) -> list[list[int]]:
    """What a new engine with this model gives after the first tokens of these outputs."""
    known = [output["output_ids"][:start] for output, start in zip(outputs, starts, strict=True)]
    left = [LONG | {"max_new_tokens": LONG["max_new_tokens"] - start} for start in starts]
    with engine_of(model, max_total_tokens=8192, **options) as engine:
        prompts = [prompt + ids for prompt, ids in zip(PROMPTS, known, strict=True)]
        answers = engine.generate(input_ids=prompts, sampling_params=left)
    return [ids + answer["output_ids"] for ids, answer in zip(known, answers, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"disable_overlap_schedule": True, "speculative_algorithm": "ngram", "page_size": 16},
        pytest.param({"single_process": False, "tp_size": 2}, marks=pytest.mark.slow),
        pytest.param({"single_process": False, "pp_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["overlap", "drafts", "ranks", "stages"],
)
def test_recompute_gives_the_tokens_of_a_new_server_with_the_same_tokens_before(old, new, options):
    with engine_of(old, max_total_tokens=8192, kv_on_update="recompute", **options) as engine:

        def update() -> None:
            assert engine.update_weights_from_tensor(tensors_of(new).items(), weight_version="2")[0]

        outputs = updated_meanwhile(engine, update)
        assert tokens(engine) == fresh(new)
        assert whole_pool(engine)
    starts = []
    for output in outputs:
        first, second = output["meta_info"]["weight_versions"]
        starts.append(second["start"])
        assert first == FIRST
        assert second == {"start": starts[-1], "weight_version": "2", "kv_version": "2", "kv_age": 0}
        assert 0 < starts[-1] < LONG["max_new_tokens"]
        assert output["meta_info"]["num_retractions"] == 1
    ids = [output["output_ids"] for output in outputs]
    # By as many ranks: one process adds in another order, and what it takes of two nearly equal tokens depends on where the update came.
    ranks = options if "tp_size" in options else {}
    assert continued(new, outputs, starts, **ranks) == ids
    undisturbed = continued(old, outputs, [0] * len(outputs), **ranks)
    assert [one[:start] for one, start in zip(undisturbed, starts, strict=True)] == [
        one[:start] for one, start in zip(ids, starts, strict=True)
    ]


def test_keep_goes_on_with_the_kv_that_there_is_and_says_so(old, new):
    with engine_of(old, max_total_tokens=8192, kv_on_update="keep") as engine:

        def update() -> None:
            assert engine.update_weights_from_disk(new, weight_version="2")[0]

        for output in updated_meanwhile(engine, update):
            first, second = output["meta_info"]["weight_versions"]
            assert first == FIRST
            assert second | {"start": 0} == {"start": 0, "weight_version": "2", "kv_version": "default", "kv_age": 1}
            assert output["meta_info"]["num_retractions"] == 0
        prompt = PROMPTS[-1] + output["output_ids"]
        hit = engine.generate(input_ids=prompt, sampling_params=LONG | {"max_new_tokens": 2})["meta_info"]
        assert hit["cached_tokens"] > 0
        assert hit["weight_versions"] == [second | {"start": 0}]
        engine.flush_cache()
        assert tokens(engine) == fresh(new)
        assert whole_pool(engine)


@pytest.mark.slow
def test_replicas_switch_together_and_a_dead_one_goes_on_with_the_new_weights(old, new):
    options = {"single_process": False, "dp_size": 2}
    with engine_of(old, max_total_tokens=8192, kv_on_update="recompute", **options) as engine:

        def update() -> None:
            assert engine.update_weights_from_disk(new, weight_version="2")[0]
            victim = next(child for child in engine._running.parts.children if child.name == "scheduler 1")
            os.kill(victim.pid, signal.SIGKILL)

        outputs = updated_meanwhile(engine, update)
        told = [engine.explain_request(output["meta_info"]["id"])[0] for output in outputs]
        assert sum(one["num_replays"] for one in told) > 0
    versions = [output["meta_info"]["weight_versions"] for output in outputs]
    assert all(one["weight_version"] == one["kv_version"] == "2" for _, *later in versions for one in later)
    assert all(first == FIRST for first, *_ in versions)
    starts = [later[0]["start"] for _, *later in versions]
    assert continued(new, outputs, starts) == [output["output_ids"] for output in outputs]
