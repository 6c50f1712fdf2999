"""Queued steps with rows that a grammar constrains: the tokens of the CPU's worker, and no further waiting."""

import contextlib
import threading
import weakref
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from device_harness import Elsewhere, FakeDevice, device_driver, reference
from msgspec.structs import replace
from runner_harness import CONTEXT, ids_by_row, prompt, save_llama
from turns_grammar import Turns, under

from headrace import kernels
from headrace.errors import ExecutionError
from headrace.kernels import triton
from headrace.messages.requests import LogprobSpec
from headrace.sampling import grammar_rows
from headrace.sampling.params import ResolvedSamplingParams
from headrace.sampling.sampler import BAD_LOGITS

A, B, C, D = prompt(40, 1), prompt(9, 2), prompt(17, 3), prompt(12, 4)
DRAWN = ResolvedSamplingParams(max_new_tokens=50, seed=7, temperature=1.5, top_k=20, top_p=0.9)
WEARY = replace(DRAWN, frequency_penalty=0.9, presence_penalty=-0.4, repetition_penalty=0.6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_llama(folder)


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint[0]


PROMPTS = (A, B, C, D)


def kinds() -> list[dict]:
    """One row that is free, and three under grammars."""
    return [{"sampling": DRAWN}, under(Turns(3)), under(Turns(2), DRAWN), under(Turns(2), WEARY)]


@pytest.fixture(scope="module")
def expected(folder):
    """12 tokens of each of `kinds`, each alone on the CPU's worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_rows, "PATIENCE_S", 60.0)
        driver = reference(folder)
        with contextlib.closing(driver.worker):
            return [driver.generate(seq, PROMPTS[seq], 12, **kind) for seq, kind in enumerate(kinds())]


@pytest.fixture(params=[(), (1, 2, 4)], ids=["eager", "graphs"])
def sizes(request):
    return request.param


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """No mask is late, or takes too long, because the machine is busy."""
    monkeypatch.setattr(grammar_rows, "PATIENCE_S", 60.0)
    monkeypatch.setattr(grammar_rows, "LIMIT_S", 600.0)


@pytest.fixture
def make(folder):
    """Makes a driver over the queued steps of a fake device."""
    with contextlib.ExitStack() as stack:

        def driver_of(sizes=(), device=None, **options):
            driver, runner, pool = device_driver(folder, sizes=sizes, device=device, **options)
            stack.callback(runner.runner.sampler.grammars.close)
            return driver, runner, pool

        yield driver_of


def enter(driver, *seqs: int):
    """Submit the prompts of `kinds` in these rows."""
    new = tuple(driver.new(seq, PROMPTS[seq], **kinds()[seq]) for seq in seqs)
    driver.submit([(seq, len(PROMPTS[seq]), True) for seq in seqs], new)


def decode(driver, *seqs: int) -> None:
    driver.submit([(seq, 1, True) for seq in seqs])


def collect(driver) -> list[int]:
    return ids_by_row(driver.worker.collect())


def test_the_reference_is_the_model_under_the_mask(checkpoint, expected):
    _, model = checkpoint
    tokens: list[int] = []
    with torch.inference_mode():
        for _ in range(12):
            logits = model(torch.tensor([[*B, *tokens]])).logits[0, -1].numpy()
            tokens.append(int(np.where(Turns(3).allowed(tokens), logits, -np.inf).argmax()))
    assert expected[1] == tokens


def test_two_steps_in_flight_wait_no_more_than_without_grammars(make, expected, sizes):
    device = FakeDevice()
    driver, _, _ = make(sizes, device)
    got: list[list[int]] = [[], [], [], []]
    enter(driver, 0, 1, 2, 3)
    for step in range(11):
        decode(driver, 0, 1, 2, 3)
        assert device.num_waits == step, "queued before the step before was waited for"
        for row, token in enumerate(collect(driver)):
            got[row].append(token)
    for row, token in enumerate(collect(driver)):
        got[row].append(token)

    assert got == expected
    assert device.num_waits == 12
    assert device.num_replays == (11 if sizes else 0)


def test_one_step_at_a_time_and_prompts_in_chunks_give_the_same(make, expected, sizes):
    device = FakeDevice()
    driver, _, _ = make(sizes, device)
    for seq, kind in enumerate(kinds()):
        assert driver.generate(seq, PROMPTS[seq], 12, chunks=(3, 4), **kind) == expected[seq]
    assert device.num_waits == 4 * (12 + 2)


def test_many_steps_may_be_queued_before_the_first_is_collected(make, expected, sizes):
    driver, _, _ = make(sizes)
    enter(driver, 0, 1, 2, 3)
    for _ in range(4):
        decode(driver, 0, 1, 2, 3)
    assert [list(tokens) for tokens in zip(*(collect(driver) for _ in range(5)), strict=True)] == [
        tokens[:5] for tokens in expected
    ]


def test_the_kernels_of_a_gpu_give_the_same(make, expected):
    if find_spec("triton") is None:
        pytest.skip("the package triton is not installed")
    if not triton.is_interpreted():
        pytest.skip("Triton was told to compile: tests/execution/test_execution_cuda.py runs grammars on a GPU")
    with kernels.prefer("triton"):
        driver, _, _ = make((1, 4))
        enter(driver, 0, 1, 2, 3)
        got = []
        for _ in range(3):
            decode(driver, 0, 1, 2, 3)
            got.append(collect(driver))
    assert [list(tokens) for tokens in zip(*got, strict=True)] == [tokens[:3] for tokens in expected]


def test_rows_come_and_go_and_steps_that_wait_are_in_between(make, expected, sizes):
    """A neighbour wants logprobs for a while; the steps with it go the long way."""
    device = FakeDevice()
    driver, _, _ = make(sizes, device)
    got: dict[int, list[int]] = {1: [], 3: []}

    def take(*seqs):
        for seq, token in zip(seqs, collect(driver), strict=False):
            got[seq].append(token)

    enter(driver, 1)
    enter(driver, 3)
    take(1)
    decode(driver, 3, 1)
    take(3)
    take(3, 1)
    decode(driver, 1, 3)
    replays = device.num_replays
    curious = driver.new(0, A, logprobs=LogprobSpec(prompt_start=40, top_num=2, token_ids=()))
    driver.submit([(1, 1, True), (3, 1, True), (0, 40, True)], (curious,))
    take(1, 3)
    driver.submit([(1, 1, True), (3, 1, True), (0, 1, True)])
    take(1, 3)
    assert device.num_replays == replays
    decode(driver, 1, 3)
    take(1, 3)
    take(1, 3)

    assert got == {1: expected[1][:6], 3: expected[3][:6]}


def test_a_mask_that_is_late_holds_up_only_its_row(make, expected, sizes, monkeypatch):
    gate = threading.Event()
    driver, _, _ = make(sizes)
    late = driver.new(3, B, **under(Turns(3, gate)))
    enter(driver, 0, 1)
    assert collect(driver) == [expected[0][0], expected[1][0]]
    monkeypatch.setattr(grammar_rows, "PATIENCE_S", 0.0)
    driver.submit([(0, 1, True), (3, len(B), True)], (late,))
    # Planned before it is known that the row sits out.
    decode(driver, 0, 3)
    first, second = driver.worker.collect(), driver.worker.collect()
    assert (ids_by_row(first), ids_by_row(second)) == ([expected[0][1], -1], [expected[0][2], -1])
    assert not first.errors
    assert not second.errors

    monkeypatch.setattr(grammar_rows, "PATIENCE_S", 60.0)
    gate.set()
    driver.computed[3] -= 2
    got = [until_sampled(driver, 3)]
    got += [ids_by_row(driver.step([(3, 1, True)]))[0] for _ in range(4)]
    assert got == expected[1][:5]
    # The row beside it had a step to go on with.
    assert ids_by_row(driver.step([(0, 1, True)])) == [expected[0][3]]


def until_sampled(driver, seq: int) -> int:
    """The token of a row that is planned until its mask is ready."""
    while (token := ids_by_row(driver.step([(seq, 1, True)]))[0]) < 0:
        driver.computed[seq] -= 1
    return token


def test_a_mask_has_as_long_as_the_layers_take(make, expected, sizes, monkeypatch):
    monkeypatch.setattr(grammar_rows, "PATIENCE_S", 0.0)
    gate = threading.Event()

    def is_computing() -> bool:
        gate.set()
        return True

    driver, _, _ = make(sizes, FakeDevice(is_computing))
    assert driver.generate(1, B, 4, **under(Turns(3, gate))) == expected[1][:4]


def test_an_error_of_a_grammar_ends_its_row_alone(make, expected, sizes):
    driver, runner, _ = make(sizes)
    broken = driver.new(3, B, **under(Turns(3, broken=1)))
    driver.submit([(0, 40, True), (3, len(B), True)], (driver.new(0, A, **kinds()[0]), broken))
    decode(driver, 0, 3)
    decode(driver, 0, 3)
    results = [driver.worker.collect() for _ in range(3)]

    assert [ids_by_row(result)[0] for result in results] == expected[0][:3]
    assert [ids_by_row(result)[1] for result in results] == [expected[1][0], -1, -1]
    assert [dict(result.errors) for result in results] == [{}, {1: "the grammar is broken"}, {}]
    assert int(runner.runner.table.tokens.min()) >= 0


def test_a_constrained_row_without_finite_logits_ends_alone(make, expected, sizes):
    driver, runner, pool = make(sizes)
    enter(driver, 0, 1)
    collect(driver)
    pool.v[0][CONTEXT] = torch.nan  # the first position of sequence 1
    decode(driver, 0, 1)
    decode(driver, 0, 1)
    first, second = driver.worker.collect(), driver.worker.collect()

    assert dict(first.errors) == {1: BAD_LOGITS}
    assert (ids_by_row(first), ids_by_row(second)) == ([expected[0][1], -1], [expected[0][2], -1])
    assert not second.errors
    assert int(runner.runner.table.tokens.min()) >= 0


def test_a_sequence_that_comes_back_goes_on_where_it_was_and_a_step_may_be_run_again(make, expected, sizes):
    driver, _, _ = make(sizes)
    want = expected[3]
    assert driver.generate(3, D, 5, **kinds()[3]) == want[:5]

    driver.submit(
        [(2, len(D) + 5, True)], (driver.new(2, [*D, *want[:5]], num_prompt_tokens=len(D), **kinds()[3]),), left=(3,)
    )
    got = collect(driver)
    got += [ids_by_row(driver.step([(2, 1, True)]))[0] for _ in range(4)]
    assert got == want[5:10]
    driver.computed[2] -= 3
    assert [ids_by_row(driver.step([(2, 1, True)]))[0] for _ in range(5)] == want[7:12]


def test_a_row_may_be_left_and_taken_over_before_its_last_token_is_known(make, expected, sizes):
    _, alone, beside, other = expected
    driver, _, _ = make(sizes)
    enter(driver, 1, 2)
    decode(driver, 1, 2)
    assert collect(driver) == [alone[0], beside[0]]
    driver.submit([(2, 1, True)], left=(1,))
    assert collect(driver) == [alone[1], beside[1]]
    driver.submit([(2, 1, True), (1, len(D), True)], (driver.new(1, D, **kinds()[3]),))
    assert collect(driver) == [beside[2]]
    decode(driver, 2, 1)
    assert collect(driver) == [beside[3], other[0]]
    driver.submit([(2, 1, True), (1, len(B), True)], (driver.new(1, B, **kinds()[1]),), left=(1,))
    assert collect(driver) == [beside[4], other[1]]
    decode(driver, 2, 1)
    assert collect(driver) == [beside[5], alone[0]]
    assert collect(driver) == [beside[6], alone[1]]


def test_a_step_is_forgotten_when_the_next_ones_are_collected(make):
    driver, _, _ = make()
    enter(driver, 1)
    first = weakref.ref(driver.worker.lane.in_flight[0][1])
    for _ in range(2):
        decode(driver, 1)
        collect(driver)
    collect(driver)
    assert first() is None


def test_nothing_holds_a_grammar_whose_sequence_has_left(make, expected):
    masks = []

    class Watched(Turns):
        def start(self) -> Turns:
            mask = super().start()
            masks.append(weakref.ref(mask))
            return mask

    driver, runner, _ = make()
    assert driver.generate(1, B, 3, **under(Watched(3))) == expected[1][:3]
    assert masks[0]() is not None
    driver.worker.idle((1,))
    # The thread that fills masks has gone on to another, so it does not hold the row for a moment more.
    sampler = runner.runner.sampler
    sampler.add(2, driver.new(2, B, **under(Turns(3))))
    sampler.grammars.begin([2], [len(B)])
    assert sampler.grammars.ready([2], [len(B)], lambda: False).tokens is not None
    assert masks[0]() is None


@pytest.mark.parametrize("sizes", [(), (2,)], ids=["eager", "graphs"])
def test_sampling_asks_the_device_for_no_value(make, sizes):
    with kernels.prefer("torch"):
        driver, _, _ = make(sizes, Elsewhere(), on="meta")
        enter(driver, 0, 2)
        decode(driver, 0, 2)
        # The first step's token is not known; the mask of the second was not begun.
        assert [pending._error for _, pending in driver.worker.lane.in_flight] == [None, None]
        assert [pending._unmasked is None for _, pending in driver.worker.lane.in_flight] == [True, False]
        driver.worker.close()


def test_what_fails_while_constrained_rows_are_sampled_ends_their_step(make, expected, sizes, monkeypatch):
    driver, runner, _ = make(sizes)
    enter(driver, 0, 1)
    collect(driver)

    def fail(*args):
        raise RuntimeError("out of memory")

    decode(driver, 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(runner.runner.sampler, "pick_allowed", fail)
        # The launch of the next step comes upon it.
        decode(driver, 0)
    decode(driver, 0, 1)
    with pytest.raises(ExecutionError, match="this step"):
        driver.worker.collect()
    assert collect(driver) == [expected[0][2]]
    last = driver.worker.collect()
    assert ids_by_row(last) == [expected[0][3], -1]
    assert not last.errors, "the row waits for the token that was not sampled"
