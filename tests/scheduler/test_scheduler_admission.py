"""How much a step may hold, and how many requests are admitted on an estimate of their outputs."""

import numpy as np
import pytest
from fake_worker import Rig, expected_outputs
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduler.admission import DECAY_STEPS, FIRST_GUESS_TOKENS, NewTokenRatio

NEVER = 1_000_000_000  # EOS about once in so many tokens


def prompt(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2, n).tolist()


def prompt_tokens_by_step(rig: Rig) -> list[int]:
    """Drain, and count the prompt tokens that each step computed."""
    counts: list[int] = []
    submit = rig.worker.submit

    def counting(batch):
        rows = rig.state.running
        by_seq = {req.seq: req for req in rows}
        ends = np.minimum(batch.starts + batch.counts, [by_seq[seq].num_prompt_tokens for seq in batch.seqs.tolist()])
        counts.append(int(np.maximum(ends - batch.starts, 0).sum()))
        submit(batch)

    rig.worker.submit = counting
    rig.drain()
    return counts


def test_eight_prompts_at_once_are_computed_in_steps_of_the_chunk():
    rig = Rig(num_pages=4000, chunk=128, step_tokens=2048, radix=False)
    for i in range(8):
        rig.add(f"r{i}", prompt(i, 128), 4, ignore_eos=True)
    counts = prompt_tokens_by_step(rig)

    assert max(counts) == 128
    assert sum(counts) == 8 * 128
    assert len(rig.finish) == 8


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    chunk=st.integers(1, 20),
    step_tokens=st.integers(8, 40),
    overlap=st.booleans(),
    radix=st.booleans(),
)
def test_no_step_has_more_prompt_tokens_than_the_chunk(lengths, chunk, step_tokens, overlap, radix):
    rig = Rig(num_pages=2000, chunk=chunk, step_tokens=step_tokens, overlap=overlap, radix=radix)
    for i, length in enumerate(lengths):
        rig.add(f"r{i}", prompt(i, length), 5, ignore_eos=True)
    counts = prompt_tokens_by_step(rig)

    assert max(counts) <= chunk
    for i, length in enumerate(lengths):
        assert rig.ids[f"r{i}"] == expected_outputs(prompt(i, length), 5, 9, True)


@pytest.mark.parametrize("conservativeness", [0.01, 0.3, 1.0, 3.0])
def test_after_a_retraction_the_ratio_comes_back_to_what_was_asked_for(conservativeness):
    rig = Rig(num_pages=100, eos_every=NEVER)
    ratio = rig.state.ratio = NewTokenRatio(conservativeness)
    for i in range(6):
        rig.add(f"r{i}", prompt(i, 4), 60, ignore_eos=True)
    while not rig.state.counters.num_retracted:
        rig.turn()
    never_retracted = NewTokenRatio(conservativeness)
    for _ in range(DECAY_STEPS + 1):
        ratio.step()
        never_retracted.step()

    assert ratio.value == pytest.approx(never_retracted.value)


def test_a_small_factor_makes_the_jump_of_a_retraction_small_too():
    rig = Rig(num_pages=1000, eos_every=NEVER)
    for i in range(4):
        rig.add(f"r{i}", prompt(i, 4), 200, ignore_eos=True)
    for _ in range(180):
        rig.turn()
    cautious, bold = NewTokenRatio(1.0), NewTokenRatio(0.1)
    for ratio in (cautious, bold):
        ratio.retracted(rig.state.running)

    assert cautious.value > 0.9
    assert 20 / 200 < bold.value < 0.3  # a tenth of what they made, and the margin


def test_chats_without_a_limit_of_their_own_run_together():
    rig = Rig(num_pages=16384, max_running=64, chunk=512, step_tokens=2048, eos_every=NEVER)
    for i in range(12):
        rig.add(f"chat{i}", prompt(i, 30), 8000)
    for _ in range(3):
        rig.turn()

    assert len(rig.state.running) == 12


def test_the_usual_length_is_learned_from_outputs_that_stop():
    rig = Rig(num_pages=4000, max_running=8, eos_every=9)
    usual = rig.state.ratio.usual
    for i in range(60):
        rig.add(f"r{i}", prompt(i, 8), 2000)
    rig.drain()
    lengths = sorted(len(ids) for ids in rig.ids.values())

    assert lengths[0] <= usual.tokens <= lengths[-1] < FIRST_GUESS_TOKENS


def test_outputs_that_are_cut_off_do_not_make_the_usual_length_shorter():
    rig = Rig(num_pages=4000, eos_every=NEVER)
    for i in range(100):
        rig.add(f"short{i}", prompt(i, 8), 1)
        rig.add(f"bench{i}", prompt(100 + i, 8), 1, ignore_eos=True)
    rig.drain()

    assert rig.state.ratio.usual.tokens == FIRST_GUESS_TOKENS


@pytest.mark.parametrize("radix", [True, False])
def test_outputs_longer_than_usual_are_retracted_a_few_times_and_not_in_a_storm(radix):
    rig = Rig(num_pages=600, max_running=16, chunk=64, step_tokens=128, radix=radix)
    for i in range(60):
        rig.add(f"short{i}", prompt(i, 8), 300)
    rig.drain()
    retracted = rig.state.counters.num_retracted
    rig.worker.eos_every = NEVER
    for i in range(12):
        rig.add(f"long{i}", prompt(100 + i, 8), 250)
    for _ in range(3):
        rig.turn()
    assert len(rig.state.running) == 12
    rig.drain()

    assert {rig.finish[f"long{i}"].type for i in range(12)} == {"length"}
    # Each was too many once; what came back stayed.
    assert 0 < rig.state.counters.num_retracted - retracted <= 2 * 12
    rig.check_idle()


def test_the_clip_bounds_what_is_reserved_for_a_request():
    running = {}
    for clip in (10, 4096):
        rig = Rig(num_pages=1000, max_running=16, chunk=64, step_tokens=256, eos_every=NEVER)
        rig.state.ratio = NewTokenRatio(1.0, clip)
        for i in range(12):
            rig.add(f"r{i}", prompt(i, 8), 500, ignore_eos=True)
        rig.turn()
        rig.turn()
        running[clip] = len(rig.state.running)

    assert running[10] == 12
    assert running[4096] == 2
