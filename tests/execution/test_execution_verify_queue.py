"""Steps that verify drafts in captured graphs: the tokens of the CPU's worker, whatever is guessed, and nothing waits where the device can choose."""

import contextlib
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
import torch
from captured_work import CapturedWork
from device_harness import NUM_SEQS, Elsewhere, FakeDevice, device_driver, reference
from runner_harness import CONTEXT, DRAWN, GREEDY, WEARY, Driver, prompt, save_llama
from turns_grammar import Turns, under

from headrace import kernels
from headrace.errors import ExecutionError
from headrace.execution.device_runner import DeviceRunner
from headrace.execution.graphs import graph_bytes, num_right, verifying_sizes
from headrace.kernels import triton
from headrace.messages.requests import LogprobSpec
from headrace.messages.step import StepResult
from headrace.sampling import grammar_rows
from headrace.sampling.params import ResolvedSamplingParams
from headrace.sampling.sampler import BAD_LOGITS

A, B, C, D = prompt(40, 1), prompt(9, 2), prompt(17, 3), prompt(12, 4)
PROMPTS = (A, B, C, D)
SIZES, VERIFYING = (1, 2, 4), (4, 8, 16)
COUNT = 18
BANNED = ResolvedSamplingParams(max_new_tokens=50, seed=0, temperature=0.0, bad_words=((5, 6),), min_new_tokens=2)
LOGPROBS = LogprobSpec(prompt_start=40, top_num=2, token_ids=())

FREE = [{"sampling": GREEDY}, {"sampling": DRAWN}, {"sampling": GREEDY}, {"sampling": DRAWN}]


def bound() -> list[dict]:
    """Rows that the host samples, and one that it need not."""
    return [
        {"sampling": GREEDY},
        {"sampling": WEARY},
        {"sampling": BANNED, "logprobs": LOGPROBS},
        under(Turns(2), DRAWN),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def patient():
    """No mask is late because the machine is busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_rows, "PATIENCE_S", 60.0)
        yield


def alone(folder, kinds: list[dict]) -> list[list[int]]:
    driver = reference(folder)
    with contextlib.closing(driver.worker):
        return [driver.generate(seq, PROMPTS[seq], COUNT, **kind) for seq, kind in enumerate(kinds)]


@pytest.fixture(scope="module")
def free(folder):
    """Tokens of each of `FREE`, each alone on the CPU's worker."""
    return alone(folder, FREE)


@pytest.fixture
def make(folder):
    """Makes a driver with graphs, its runner and its pool."""
    with contextlib.ExitStack() as stack:

        def driver_of(device=None, sizes=SIZES, verifying=VERIFYING, **options):
            made = device_driver(folder, sizes=sizes, verifying=verifying, device=device, **options)
            stack.callback(made[1].runner.sampler.grammars.close)
            return made

        yield driver_of


def enter(driver: Driver, kinds: list[dict], seqs=range(NUM_SEQS)) -> StepResult:
    """The prompts' step; each samples its first token."""
    new = tuple(driver.new(seq, PROMPTS[seq], **kinds[seq]) for seq in seqs)
    return driver.step([(seq, len(PROMPTS[seq]), True) for seq in seqs], new)


def submit(driver: Driver, runner: DeviceRunner, drafts: dict[int, list[int]]) -> None:
    """A step of these sequences, with these drafts in the token buffer."""
    tokens = runner.runner.table.tokens
    for seq, guess in drafts.items():
        first = driver.computed[seq] + 1
        tokens[seq, first : first + len(guess)] = torch.tensor(guess, dtype=torch.int64, device=tokens.device)
    driver.submit([(seq, 1 + len(guess), 1 + len(guess)) for seq, guess in drafts.items()])


def collect(driver: Driver, drafts: dict[int, list[int]]) -> StepResult:
    """Its result. The sequences go on after the ids that they got."""
    result = driver.worker.collect()
    for seq, guess, ids in zip(drafts, drafts.values(), ids_of(result), strict=True):
        driver.computed[seq] += len(ids) - 1 - len(guess)
    return result


def verify(driver: Driver, runner: DeviceRunner, drafts: dict[int, list[int]]) -> StepResult:
    submit(driver, runner, drafts)
    return collect(driver, drafts)


def ids_of(result: StepResult) -> list[list[int]]:
    return [result.ids[begin:end].tolist() for begin, end in pairwise(result.id_starts.tolist())]


def guesses(answers: dict[int, list[int]], counts: dict[int, int], number: int) -> dict[int, list[int]]:
    """None to four tokens of each answer after its first counts[seq]; of every third guess one is wrong."""
    found = {}
    for seq, answer in answers.items():
        guess = list(answer[counts[seq] : counts[seq] + (number + 2 * seq) % 5])[: COUNT - counts[seq] - 1]
        if guess and (number + seq) % 3 == 0:
            guess[number % len(guess)] = (guess[number % len(guess)] + 1) % 131
        found[seq] = guess
    return found


def run(
    driver: Driver, runner: DeviceRunner, kinds: list[dict], answers: list[list[int]]
) -> tuple[list[list[int]], int]:
    """What the sequences give beside each other, and in how many steps with drafts."""
    got = ids_of(enter(driver, kinds))
    num_verifying = 0
    for number in range(100):
        left = {seq: answers[seq] for seq in range(len(kinds)) if len(got[seq]) < COUNT}
        if not left:
            return got, num_verifying
        drafts = guesses(left, {seq: len(ids) for seq, ids in enumerate(got)}, number)
        num_verifying += any(drafts.values())
        for seq, ids in zip(drafts, ids_of(verify(driver, runner, drafts)), strict=True):
            got[seq] += ids
    raise AssertionError(got)


def test_tokens_are_those_without_guesses_in_fewer_steps(make, free):
    """Greedy and drawn rows, ragged numbers of drafts, right and wrong ones, rows without."""
    device = FakeDevice()
    driver, runner, _ = make(device)
    got, num_verifying = run(driver, runner, FREE, free)

    assert got == free
    assert device.num_replays == driver.num_steps - 1, "all but the prompts' step"
    assert 3 < num_verifying <= driver.num_steps - 1 < COUNT - 4
    assert device.num_waits == driver.num_steps, "once for each step"


def test_rows_that_the_host_samples_take_the_logits_of_the_graph(make, folder):
    """Penalties, other edits with logprobs, and a grammar, beside a greedy row."""
    answers = alone(folder, bound())
    device = FakeDevice()
    driver, runner, _ = make(device)
    got, num_verifying = run(driver, runner, bound(), answers)

    assert got == answers
    assert num_verifying > 3
    assert device.num_replays >= num_verifying


def test_logprobs_are_those_without_guesses(make, folder):
    kind = {"sampling": DRAWN, "logprobs": LOGPROBS}
    driver = reference(folder)
    with contextlib.closing(driver.worker):
        first = driver.step([(0, 40, True)], (driver.new(0, A, **kind),))
        steps = [driver.step([(0, 1, True)]) for _ in range(4)]
    want = steps[0].logprobs[0]
    for step in steps[1:]:
        want = step.logprobs[0].after(want)
    driver, runner, _ = make()
    assert ids_of(enter(driver, [kind], [0])) == ids_of(first)
    answer = [int(step.ids[0]) for step in steps]

    result = verify(driver, runner, {0: answer[:3]})

    assert ids_of(result) == [answer]
    assert result.logprobs[0].token_ids == want.token_ids
    np.testing.assert_allclose(
        np.frombuffer(result.logprobs[0].values, np.float32), np.frombuffer(want.values, np.float32), atol=1e-5
    )


@pytest.mark.parametrize("kinds", [FREE[:1], FREE[1:2]], ids=["greedy", "drawn"])
def test_nothing_waits_before_the_result_is_asked_for(make, free, kinds):
    device = FakeDevice()
    driver, runner, _ = make(device)
    answer = free[0] if kinds == FREE[:1] else alone_as(make, kinds)
    enter(driver, kinds, [0])
    before = device.num_waits, device.num_replays, device.num_uploads

    submit(driver, runner, {0: [*answer[1:4], 1 + answer[4], answer[5]]})
    after = device.num_waits, device.num_replays, device.num_uploads
    result = collect(driver, {0: [0] * 5})

    assert after == (before[0], before[1] + 1, before[2] + 1), "one upload, one replay, no wait"
    assert device.num_waits == before[0] + 1
    assert ids_of(result) == [answer[1:5]], "three drafts, and the token in place of the wrong one"
    assert ids_of(verify(driver, runner, {0: answer[5:7]})) == [answer[5:8]]


def alone_as(make, kinds: list[dict]) -> list[int]:
    """Tokens of the first prompt, sampled in this way."""
    driver, _, _ = make()
    return driver.generate(0, A, 9, **kinds[0])


@pytest.mark.parametrize("kinds", [FREE[:1], FREE[1:2]], ids=["greedy", "drawn"])
def test_no_value_is_asked_for(make, kinds):
    with kernels.prefer("torch"):
        driver, runner, _ = make(Elsewhere(), on="meta")
        driver.submit([(0, 40, True)], (driver.new(0, A, **kinds[0]),))
        submit(driver, runner, {0: [1, 2, 3]})
        assert [type(pending).__name__ for _, pending in driver.worker.lane.in_flight] == [
            "QueuedStep",
            "QueuedVerification",
        ]


def test_a_step_larger_than_all_graphs_goes_without(make, free):
    device = FakeDevice()
    driver, runner, _ = make(device, verifying=(4, 6))
    enter(driver, FREE)
    drafts = {seq: free[seq][1:3] for seq in (0, 1)}

    assert ids_of(verify(driver, runner, drafts)) == [free[0][1:4], free[1][1:4]]
    assert device.num_replays == 1
    drafts = {0: free[0][4:6], 1: free[1][4:7]}
    assert ids_of(verify(driver, runner, drafts)) == [free[0][4:7], free[1][4:8]]
    assert device.num_replays == 1, "seven tokens"


def test_the_last_token_of_the_context(make, folder):
    tokens = prompt(CONTEXT - 5, 8)
    driver = reference(folder)
    with contextlib.closing(driver.worker):
        want = driver.generate(0, tokens, 6)
    device = FakeDevice()
    driver, runner, _ = make(device)
    assert ids_of(driver.step([(0, len(tokens), True)], (driver.new(0, tokens),))) == [want[:1]]

    assert ids_of(verify(driver, runner, {0: want[1:5]})) == [want[1:]]
    assert device.num_replays == 1
    assert driver.computed[0] == CONTEXT
    assert int(runner.runner.table.tokens[0, CONTEXT]) == want[5]


def test_weights_that_moved_are_captured_again(make, free):
    device = FakeDevice()
    with kernels.prefer("torch"):
        driver, runner, _ = make(device)
        graphs = runner.graphs
        assert graphs is not None
        assert device.num_captures == len(SIZES) + len(VERIFYING)
        enter(driver, FREE)
        drafts = {0: free[0][1:3], 1: free[1][1:2]}
        for weight in runner.runner.model.weights():
            weight.load(weight.read().clone())
        with pytest.raises(ExecutionError):  # what was captured reads the weights where they were
            verify(driver, runner, drafts)
        driver.computed.update({0: len(A), 1: len(B)})

        runner.capture_later()
        assert ids_of(verify(driver, runner, drafts)) == [free[0][1:4], free[1][1:3]]

    assert device.num_captures == 2 * (len(SIZES) + len(VERIFYING))


def test_padding_touches_nobody(make):
    driver, runner, pool = make(verifying=(8,))
    enter(driver, FREE, [0, 1])
    table = runner.runner.table
    before = [tensor.clone() for tensor in (*pool.k, *pool.v)]
    tokens, slots = table.tokens.clone(), table.slots.clone()
    verify(driver, runner, {0: [1, 2]})

    for old, new in zip(before, (*pool.k, *pool.v), strict=True):
        changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
        assert {40, 41, 42} <= set(changed) <= {40, 41, 42, NUM_SEQS * CONTEXT}
    assert (slots != table.slots)[:NUM_SEQS].nonzero().tolist() == [[0, 40], [0, 41], [0, 42]]
    assert {tuple(place) for place in (tokens != table.tokens)[:NUM_SEQS].nonzero().tolist()} <= {
        (0, 41),
        (0, 42),
        (0, 43),
    }


def test_bad_logits_end_a_row_where_they_come(make, free):
    """After a draft that was right the step that begins there has the error; after one that was wrong nothing has."""
    driver, runner, _ = make()
    enter(driver, FREE, [0, 1, 2])
    embed = runner.runner.model.embed
    bad = free[0][2]
    assert bad not in (*free[1][:4], *free[2][:4], free[0][1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            runner.runner.model,
            "embed",
            lambda ids: embed(ids) + torch.where(ids == bad, torch.nan, 0.0)[:, None],
        )
        assert runner.graphs is not None
        runner.graphs.capture()
        result = verify(driver, runner, {0: free[0][1:4], 1: [bad], 2: free[2][1:3]})
        assert ids_of(result) == [free[0][1:3], free[1][1:2], free[2][1:4]]
        assert not result.errors
        result = verify(driver, runner, {0: [5], 2: free[2][4:5]})
    assert ids_of(result) == [[], free[2][4:6]]
    assert result.errors == {0: BAD_LOGITS}


def test_hidden_states_are_computed_without_a_graph(make, free):
    device = FakeDevice()
    driver, runner, _ = make(device)
    kinds = [{"sampling": GREEDY}, {"sampling": DRAWN, "return_hidden_states": True}]
    enter(driver, kinds, [0, 1])

    result = verify(driver, runner, {0: free[0][1:3], 1: []})

    assert ids_of(result) == [free[0][1:4], free[1][1:2]]
    assert len(result.hidden_states[1]) == 32 * 4
    assert device.num_replays == 0


def test_the_triton_backend_verifies_in_a_graph(make, free):
    if find_spec("triton") is None:
        pytest.skip("the package triton is not installed")
    if not triton.is_interpreted():
        pytest.skip("Triton was told to compile: tests/execution/test_execution_cuda.py runs graphs on a GPU")
    from headrace.attention.triton import TritonAttention

    device = FakeDevice()
    with kernels.prefer("triton"):
        driver, runner, _ = make(device, attention=TritonAttention(deterministic=False), sizes=(1,), verifying=(8,))
        enter(driver, FREE, [0, 1])
        result = verify(driver, runner, {0: free[0][1:4], 1: [free[1][1], (free[1][2] + 1) % 131]})

    assert ids_of(result) == [free[0][1:5], free[1][1:3]]
    assert device.num_replays == 1


def test_how_many_drafts_were_right():
    ids = torch.tensor([5, 6, 7, 8, -1, 3, 3, 9])
    drafts = torch.tensor([5, 6, 1, 4, 2, 3, 3, 9])
    after = torch.tensor([3, 2, 1, 0, 0, 2, 1, 0])

    assert num_right(ids, drafts, after).tolist() == [2, 1, 0, 0, 0, 2, 1, 0]


def test_sizes_and_their_memory():
    assert verifying_sizes(256, 16) == (4, 8, 16, 32, 64)
    assert verifying_sizes(1, 16) == (4, 8, 16, 17)
    assert verifying_sizes(2, 3) == (4, 8)
    assert verifying_sizes(256, 1) == (4, 8, 16, 32, 64)
    small = graph_bytes(8, 128256, 4096, 8192)
    assert graph_bytes(8, 128256, 4096, 8192, verifying_sizes=(4, 64)) - small > 56 * 128256 * 24
    large = graph_bytes(64, 128256, 4096, 8192)
    assert 0 < graph_bytes(64, 128256, 4096, 8192, verifying_sizes=(4, 64)) - large < 1 << 30


def test_the_device_of_the_tests_does_what_a_graph_would():
    """It does not read the host again, does not wait, and does not use other memory."""
    values, out, host = torch.arange(4), torch.zeros(4, dtype=torch.int64), [1]
    work = CapturedWork(lambda: torch.add(values, host[0], out=out))
    values += 1
    work.run()
    assert out.tolist() == [2, 3, 4, 5]
    host[0] = 2
    with pytest.raises(AssertionError, match="captured as"):
        work.run()
    host[0], values = 1, values.clone()
    with pytest.raises(AssertionError, match="captured as"):
        work.run()
    for wait in (lambda: values.max().item(), lambda: values[values > 1], lambda: values.nonzero()):
        with pytest.raises(AssertionError, match="needs a value"):
            CapturedWork(wait)


def test_the_device_of_the_tests_keeps_nothing_that_a_graph_makes_on_the_way():
    values, out, seen = torch.ones(4), torch.zeros(4), []

    def run() -> None:
        seen[:] = [values + 1]
        torch.add(seen[0], 1, out=out)

    work = CapturedWork(run)
    work.run()
    assert out.tolist() == [3, 3, 3, 3]
    assert seen[0].isnan().all()
