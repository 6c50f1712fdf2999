"""Steps queued on a device, with and without graphs: the tokens of the CPU's worker, and nothing waits in between."""

import contextlib
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from device_harness import NUM_SEQS, Elsewhere, FakeDevice, device_driver, reference
from lora_harness import tiny_adapter
from runner_harness import CONTEXT, DRAWN, GREEDY, WEARY, ids_by_row, int32, prompt, save_llama

from headrace import kernels
from headrace.errors import ExecutionError
from headrace.execution.faults import FaultyRunner
from headrace.kernels import triton
from headrace.messages.control import FaultReq
from headrace.messages.requests import LogprobSpec
from headrace.sampling.params import ResolvedSamplingParams, ThinkingBudget
from headrace.sampling.penalties import count_dtype, penalty_bytes

A, B, C = prompt(40, 1), prompt(9, 2), prompt(17, 3)
PENALISED = ResolvedSamplingParams(max_new_tokens=50, seed=0, temperature=0.0, repetition_penalty=1.7)
BANNED = ResolvedSamplingParams(
    max_new_tokens=50,
    seed=0,
    temperature=0.0,
    repetition_penalty=1.7,
    bad_words=((5, 6),),
    min_new_tokens=2,
    thinking_budget=ThinkingBudget(num_tokens=3, end_id=11, is_open=True),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_llama(folder)


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint[0]


@pytest.fixture(scope="module")
def expected(folder):
    """Tokens of A greedy, B drawn, C with a penalty and C with edits that the host makes, each alone on the CPU's worker."""
    driver = reference(folder)
    with contextlib.closing(driver.worker):
        return [
            driver.generate(0, A, 8),
            driver.generate(1, B, 8, sampling=DRAWN),
            driver.generate(2, C, 8, sampling=PENALISED),
            driver.generate(3, C, 8, sampling=BANNED),
        ]


@pytest.fixture(params=[(), (1, 2, 4)], ids=["eager", "graphs"])
def sizes(request):
    return request.param


def test_tokens_are_those_of_the_cpu(folder, expected, sizes):
    device = FakeDevice()
    driver, _, _ = device_driver(folder, sizes=sizes, device=device)

    assert driver.generate(0, A, 8, chunks=(7, 16)) == expected[0]
    assert device.num_waits == 10, "each step is waited for once, a chunk that samples nothing, too"
    assert driver.generate(1, B, 8, sampling=DRAWN) == expected[1]
    assert device.num_replays == (14 if sizes else 0)
    assert driver.generate(2, C, 8, sampling=PENALISED) == expected[2]
    assert device.num_waits == 26, "penalties are applied on the device"
    assert device.num_replays == (21 if sizes else 0)
    assert driver.generate(3, A, 8, prefix_slots=int32(range(32))) == expected[0]
    assert driver.generate(2, C, 8, sampling=BANNED) == expected[3]
    assert expected[3].index(11) == 3, "the end of reasoning"


def test_the_triton_backend_can_be_captured(folder, expected):
    if find_spec("triton") is None:
        pytest.skip("the package triton is not installed")
    if not triton.is_interpreted():
        pytest.skip("Triton was told to compile: tests/execution/test_execution_cuda.py runs graphs on a GPU")
    from headrace.attention.triton import TritonAttention

    device = FakeDevice()
    with kernels.prefer("triton"):
        attention = TritonAttention(deterministic=False)
        driver, _, _ = device_driver(folder, sizes=(1, 4), device=device, attention=attention)
        new = driver.new(0, A), driver.new(1, B, sampling=DRAWN)
        driver.step([(0, 7, False)], new[:1])
        steps = [driver.step([(0, 33, True), (1, 9, True)], new[1:])]
        steps += [driver.step([(0, 1, True), (1, 1, True)]) for _ in range(4)]

    assert device.num_replays == 4
    assert [ids_by_row(step)[0] for step in steps] == expected[0][:5]
    assert [ids_by_row(step)[1] for step in steps] == expected[1][:5]


def test_two_steps_in_flight_read_the_tokens_on_the_device(folder, expected, sizes):
    device = FakeDevice()
    driver, _, _ = device_driver(folder, sizes=sizes, device=device)
    got: list[list[int]] = [[], [], []]

    def collect(seqs):
        for seq, token in zip(seqs, ids_by_row(driver.worker.collect()), strict=True):
            got[seq].append(int(token))

    driver.submit([(0, 40, True), (1, 9, True)], (driver.new(0, A), driver.new(1, B, sampling=DRAWN)))
    driver.submit([(0, 1, True), (1, 1, True)])
    assert device.num_waits == 0, "both are queued before anybody has waited"
    collect((0, 1))
    for _ in range(3):
        driver.submit([(0, 1, True), (1, 1, True)])
        collect((0, 1))
    # A row whose logits are edited on the host enters: its steps wait, and the others' tokens stay the same.
    driver.submit([(2, 17, True), (0, 1, True), (1, 1, True)], (driver.new(2, C, sampling=BANNED),))
    collect((0, 1))
    driver.submit([(2, 1, True), (0, 1, True), (1, 1, True)])
    collect((2, 0, 1))
    collect((2, 0, 1))

    assert got[0] == expected[0][:7]
    assert got[1] == expected[1][:7]
    assert got[2] == expected[2][:2]


def test_penalties_count_tokens_that_the_host_has_not_seen(folder, expected, sizes):
    """Three sequences with penalties and one without, two steps in flight, then a row that is reused."""
    prompts, params = (A, B, C, B), (PENALISED, WEARY, GREEDY, WEARY)
    driver = reference(folder)
    with contextlib.closing(driver.worker):
        want = [driver.generate(seq, prompts[seq], 12, sampling=params[seq]) for seq in range(4)]
        want_next = driver.generate(0, C, 6, sampling=WEARY)
    device = FakeDevice()
    driver, _, _ = device_driver(folder, sizes=sizes, device=device)
    got: list[list[int]] = [[], [], [], []]

    def collect():
        for row, token in enumerate(ids_by_row(driver.worker.collect())):
            got[row].append(token)

    new = tuple(driver.new(seq, prompts[seq], sampling=params[seq]) for seq in range(4))
    driver.submit([(seq, len(prompts[seq]), True) for seq in range(4)], new)
    for step in range(11):
        driver.submit([(seq, 1, True) for seq in range(4)])
        assert device.num_waits == step, "queued before the step before was waited for"
        collect()
    collect()

    assert got == want
    assert want[0][:8] != expected[0], "the penalties change something"
    assert device.num_replays == (11 if sizes else 0)
    assert driver.generate(0, C, 6, sampling=WEARY) == want_next
    assert driver.generate(0, A, 4) == expected[0][:4], "a row without penalties forgets them"


def test_penalties_count_again_after_a_retraction_and_a_step_that_is_run_again(folder, sizes):
    driver = reference(folder)
    with contextlib.closing(driver.worker):
        want = driver.generate(0, B, 12, sampling=WEARY)
    driver, _, _ = device_driver(folder, sizes=sizes)
    assert driver.generate(0, B, 5, sampling=WEARY) == want[:5]

    # It comes back in another row, with what it has said.
    new = driver.new(1, [*B, *want[:5]], sampling=WEARY, num_prompt_tokens=len(B))
    got = [ids_by_row(driver.step([(1, len(B) + 5, True)], (new,)))[0]]
    got += [ids_by_row(driver.step([(1, 1, True)]))[0] for _ in range(4)]
    assert got == want[5:10]
    driver.computed[1] -= 3
    again = [ids_by_row(driver.step([(1, 1, True)]))[0] for _ in range(5)]
    assert again == want[7:12]


def test_a_step_that_waits_applies_penalties_and_reports_logprobs_without_them(folder):
    """A neighbour wants logprobs now and then: the row with penalties goes either way, with the same tokens."""
    spec = LogprobSpec(prompt_start=40, top_num=2, token_ids=())
    driver = reference(folder)
    with contextlib.closing(driver.worker):
        want = driver.generate(0, B, 8, sampling=WEARY)
        driver.step([(1, 40, True)], (driver.new(1, A, logprobs=spec, sampling=PENALISED),))
        blocks = [driver.step([(1, 1, True)]).logprobs[0] for _ in range(3)]
    device = FakeDevice()
    driver, _, _ = device_driver(folder, sizes=(1, 2), device=device)
    got = driver.generate(0, B, 2, sampling=WEARY)
    waits = device.num_waits
    new = driver.new(1, A, logprobs=spec, sampling=PENALISED)
    steps = [driver.step([(0, 1, True), (1, 40, True)], (new,))]
    steps += [driver.step([(0, 1, True), (1, 1, True)]) for _ in range(3)]
    assert device.num_waits == waits, "these steps went the long way"
    got += [ids_by_row(step)[0] for step in steps]
    got += [ids_by_row(driver.step([(0, 1, True)]))[0] for _ in range(2)]

    assert got == want
    for step, block in zip(steps[1:], blocks, strict=True):
        mine = step.logprobs[1]
        assert np.frombuffer(mine.token_ids, np.int32).tolist() == np.frombuffer(block.token_ids, np.int32).tolist()
        np.testing.assert_allclose(
            np.frombuffer(mine.values, np.float32), np.frombuffer(block.values, np.float32), atol=1e-5
        )


def test_penalties_have_their_share_of_the_memory():
    assert count_dtype(16_383) == torch.int16
    assert count_dtype(16_384) == torch.int32
    assert penalty_bytes(256, 1000, 8192) - penalty_bytes(255, 1000, 8192) == 2 * 1000
    assert penalty_bytes(256, 1000, 32768) - penalty_bytes(255, 1000, 32768) == 4 * 1000


def test_padding_of_a_graph_touches_nobody(folder):
    driver, runner, pool = device_driver(folder, sizes=(4,))
    driver.step([(0, 40, True), (1, 9, True)], (driver.new(0, A), driver.new(1, B)))
    table = runner.runner.table
    before = [tensor.clone() for tensor in (*pool.k, *pool.v)]
    tokens, slots = table.tokens.clone(), table.slots.clone()

    driver.step([(0, 1, True)])

    assert runner.graphs is not None
    for old, new in zip(before, (*pool.k, *pool.v), strict=True):
        changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= {40, NUM_SEQS * CONTEXT}, "the row's own slot, and the one that nobody has"
        assert 40 in changed
    assert (tokens != table.tokens)[:NUM_SEQS].nonzero().tolist() == [[0, 41]]
    assert (slots != table.slots)[:NUM_SEQS].nonzero().tolist() == [[0, 40]]


def test_the_smallest_size_that_fits_runs_and_larger_batches_go_without(folder):
    device = FakeDevice()
    driver, runner, _ = device_driver(folder, sizes=(1, 3), device=device)
    assert device.num_captures == 2
    assert runner.graphs is not None
    assert [runner.graphs.size_for(n) for n in (1, 2, 3, 4)] == [1, 3, 3, None]

    new = tuple(driver.new(seq, tokens) for seq, tokens in enumerate((A, B, C, A)))
    driver.step([(0, 40, True), (1, 9, True), (2, 17, True), (3, 40, True)], new)
    driver.step([(seq, 1, True) for seq in range(4)])
    assert device.num_replays == 0
    driver.step([(seq, 1, True) for seq in range(3)])
    assert device.num_replays == 1
    driver.step([(0, 1, True), (1, 1, False)])
    assert device.num_replays == 1, "a row that does not sample"


def test_what_a_graph_does_not_give_goes_the_long_way(folder, expected):
    device = FakeDevice()
    driver, _, _ = device_driver(folder, sizes=(1, 2, 4), device=device)
    spec = LogprobSpec(prompt_start=39, top_num=2, token_ids=())
    driver.step([(0, 40, True)], (driver.new(0, A, logprobs=spec, return_hidden_states=True),))

    result = driver.step([(0, 1, True)])

    assert device.num_replays == 0
    assert np.frombuffer(result.logprobs[0].token_ids, np.int32).tolist() == ids_by_row(result) == expected[0][1:2]
    assert len(result.hidden_states[0]) == 32 * 4


def test_steps_with_an_adapter_go_the_long_way_and_leave_no_trace(checkpoint, expected, tmp_path):
    folder, model = checkpoint
    adapter = tiny_adapter(model)
    merged = adapter.merged(model)
    want = list(A)
    with torch.inference_mode():
        for _ in range(3):
            want.append(int(merged(torch.tensor([want])).logits[0, -1].argmax()))
    device = FakeDevice()
    driver, _, _ = device_driver(folder, sizes=(1, 2), device=device)
    driver.worker.loras.load(1, adapter.save(tmp_path), "")
    assert 1 in driver.worker.loras

    got = driver.generate(1, A, 3, lora_id=1)

    assert got == want[len(A) :] != expected[0][:3]
    assert device.num_replays == 0
    assert driver.generate(0, A, 4) == expected[0][:4]
    assert device.num_replays == 3
    driver.worker.loras.unload(1)
    assert 1 not in driver.worker.loras


def test_a_row_without_finite_logits_ends_alone(folder, expected, sizes):
    driver, runner, pool = device_driver(folder, sizes=sizes)
    driver.step([(0, 40, True), (1, 9, True)], (driver.new(0, A), driver.new(1, B)))
    pool.v[0][CONTEXT] = torch.nan  # the first position of sequence 1

    driver.submit([(0, 1, True), (1, 1, True)])
    driver.submit([(0, 1, True), (1, 1, True)])
    first, second = driver.worker.collect(), driver.worker.collect()

    assert list(first.errors) == [1]
    assert "NaN" in first.errors[1]
    assert (ids_by_row(first), ids_by_row(second)[0]) == ([expected[0][1], -1], expected[0][2])
    assert int(runner.runner.table.tokens.min()) >= 0


def test_a_step_that_fails_is_the_only_one(folder, expected, sizes):
    driver, _, _ = device_driver(folder, sizes=sizes, make_runner=FaultyRunner)
    driver.step([(0, 40, True), (1, 9, True)], (driver.new(0, A), driver.new(1, B)))
    driver.submit([(1, 1, True)], faults=(FaultReq(stage="forward", kind="raise", rid="r1", at_token=1),))
    driver.submit([(0, 1, True)])

    with pytest.raises(ExecutionError, match="injected"):
        driver.worker.collect()
    assert ids_by_row(driver.worker.collect()) == expected[0][1:2]


def test_a_fault_of_the_device_ends_the_process_of_the_scheduler(folder, monkeypatch):
    driver, runner, _ = device_driver(folder)
    driver.step([(0, 40, True)], (driver.new(0, A),))

    def fail(*args):
        raise torch.AcceleratorError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(runner.runner.model, "forward", fail)
        with pytest.raises(torch.AcceleratorError):  # no ExecutionError: that would fail step after step for ever
            driver.step([(0, 1, True)])


def test_weights_that_moved_are_captured_again(folder, expected):
    device = FakeDevice()
    driver, runner, _ = device_driver(folder, sizes=(1, 2), device=device)
    assert runner.graphs is not None
    assert driver.generate(0, A, 4) == expected[0][:4]

    runner.graphs.capture()

    assert device.num_captures == 4
    assert driver.generate(1, A, 4) == expected[0][:4]


@pytest.mark.parametrize("sizes", [(), (2,)], ids=["eager", "graphs"])
def test_no_step_asks_the_device_for_a_value(folder, sizes):
    with kernels.prefer("torch"):
        driver, runner, _ = device_driver(folder, sizes=sizes, device=Elsewhere(), on="meta")
        driver.submit(
            [(0, 40, True), (1, 5, False)], (driver.new(0, A, sampling=PENALISED), driver.new(1, B, sampling=DRAWN))
        )
        driver.submit([(0, 1, True), (1, 4, True)])
        for _ in range(2):
            driver.submit([(0, 1, True), (1, 1, True)])
        assert [type(pending).__name__ for _, pending in driver.worker.lane.in_flight] == ["QueuedStep"] * 4
        for ask in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.nonzero, bool):
            with pytest.raises((RuntimeError, NotImplementedError)):
                ask(runner.runner.table.tokens[0, 0])
