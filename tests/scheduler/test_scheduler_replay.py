"""A request that goes on after the outputs of an earlier life, and a scheduler that begins again."""

import numpy as np
import pytest
from fake_worker import Rig, expected_outputs

from headrace.messages.control import ResetReq
from headrace.messages.requests import LogprobSpec

PROMPT = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0]


def packed(ids: list[int]) -> bytes:
    return np.array(ids, np.int32).tobytes()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_delivered", [1, 2, 7, 19])
def test_only_what_is_missing_is_made_and_said(num_delivered: int, overlap: bool):
    want = expected_outputs(PROMPT, 20, 9, ignore_eos=True)
    rig = Rig(overlap=overlap)
    rig.add("r", PROMPT, 20, ignore_eos=True, output_ids=packed(want[:num_delivered]), attempt=1)
    # The harness counts what it hears; the rest was heard before.
    rig.ids["r"] = want[:num_delivered]
    rig.drain()

    assert rig.ids["r"] == want
    assert rig.finish["r"].length == 20
    assert rig.state.counters.generation_tokens == 20 - num_delivered
    options = rig.rows["r"][0].options
    assert (options.output_ids, options.attempt) == (packed(want[:num_delivered]), 1)
    rig.check_idle()


def test_logprobs_are_of_the_new_tokens_only():
    want = expected_outputs(PROMPT, 12, 9, ignore_eos=True)
    rig = Rig()
    spec = LogprobSpec(len(PROMPT) + 1)
    rig.add("r", PROMPT, 12, ignore_eos=True, output_ids=packed(want[:5]), attempt=1, logprobs=spec)
    rig.ids["r"] = want[:5]
    rig.drain()

    assert rig.num_logprobs["r"] == 7
    assert all(row.prompt_logprobs is None for row in rig.rows["r"])


def test_one_that_was_accepted_once_is_not_refused_because_the_queue_is_full():
    rig = Rig(max_running=1, max_queued=1)
    for i in range(3):
        rig.add(f"r{i}", PROMPT, 4, ignore_eos=True, attempt=1)
    rig.add("late", PROMPT, 4, ignore_eos=True)
    rig.drain()

    assert [rig.finish[f"r{i}"].type for i in range(3)] == ["length"] * 3
    assert rig.finish["late"].status_code == 503


def test_outputs_of_an_earlier_life_that_are_no_tokens_end_that_request_alone():
    rig = Rig()
    rig.add("broken", PROMPT, 4, output_ids=b"\x00\x00\x00", attempt=1)
    rig.add("outside", PROMPT, 4, output_ids=packed([9]), attempt=1)
    rig.ids["outside"] = [9]
    rig.add("well", PROMPT, 4, ignore_eos=True)
    rig.drain()

    assert rig.finish["broken"].status_code == rig.finish["outside"].status_code == 400
    assert rig.finish["well"].type == "length"


@pytest.mark.parametrize("overlap", [True, False])
def test_a_reset_forgets_everything_in_silence_and_signs_anew(overlap: bool):
    rig = Rig(max_running=3, overlap=overlap, num_pages=200)
    for i in range(6):
        rig.add(f"r{i}", [*PROMPT, i % 2], 20, ignore_eos=True)
    for _ in range(6):
        rig.turn()
    assert bool(rig.state.in_flight) == overlap
    heard = {rid: list(ids) for rid, ids in rig.ids.items()}
    rig.inbox.send(ResetReq(7))
    for i in range(6):
        rid = f"r{i}"
        rig.add(rid, [*PROMPT, i % 2], 20, ignore_eos=True, output_ids=packed(heard.get(rid, [])), attempt=1)
    rig.scheduler.run_once()

    messages = list(rig.out.messages)
    rig.drain()

    assert all(message.source == 7 for message in messages)
    for i in range(6):
        assert rig.ids[f"r{i}"] == expected_outputs([*PROMPT, i % 2], 20, 9, ignore_eos=True)
    assert rig.state.counters.num_finished == 6, "the forgotten ones are not counted as ended"
    rig.check_idle()
