"""Steps of a leader and a follower, here a thread: what they tell each other about logits, and steps that go wrong on the leader, where the
follower stays where the leader is."""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_harness import LIMIT_S, new_group
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "execution"))

from runner_harness import CONTEXT, VOCAB_SIZE, Driver, ids_by_row, make_driver, prompt, save_llama

from headrace.config.server_args import ServerArgs
from headrace.distributed.base import Shard
from headrace.distributed.one_host import SharedMemoryGroup
from headrace.distributed.rank import Rank
from headrace.errors import ExecutionError
from headrace.execution.build import build_follower, build_worker
from headrace.execution.ranks import FollowerRunner
from headrace.kernels import cpu
from headrace.messages.control import FaultReq
from headrace.messages.requests import LogprobSpec, PromptContent
from headrace.sampling.params import ResolvedSamplingParams
from headrace.sampling.sampler import BAD_LOGITS

if cpu.why_not():
    pytest.skip(cpu.why_not(), allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("steps")
    save_llama(made, intermediate_size=256)
    return made


class Other:
    """The follower as the leader sees it. reasons: for which the ranks were given up."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons

    def check(self) -> None:
        pass

    def wait_loaded(self) -> None:
        pass

    def wait_ready(self) -> None:
        pass

    def give_up(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.fixture
def ranks(folder: Path) -> Iterator[tuple[Driver, list[str]]]:
    """The leader's driver, and the reasons for which the ranks could not go on."""
    args = ServerArgs(
        model_path=str(folder),
        tp_size=2,
        dtype="float32",
        disable_overlap_schedule=True,
        max_running_requests=4,
        max_total_tokens=4 * CONTEXT,
        num_threads=1,
        disable_weight_cache=True,
        enable_fault_injection=True,
    )
    broken: list[str] = []
    with new_group(2) as (group, fd), ThreadPoolExecutor(1) as other:
        theirs = SharedMemoryGroup.join(fd, 1, 2, LIMIT_S)

        def run() -> None:
            runner, resources = build_follower(args, Rank(Shard(1, 2, theirs), group=theirs))
            with resources:
                runner.follow()

        running = other.submit(run)
        worker, info = build_worker(args, rank=Rank(Shard(0, 2, group), group=group), others=Other(broken))
        yield Driver(worker, info), broken
        worker.close()
        running.result(LIMIT_S)


@pytest.mark.parametrize("factor, dtype", [(1.0, torch.int8), (300.0, torch.bfloat16)])
def test_the_leader_measures_with_the_others_and_all_have_the_kv_precision_that_it_chooses(
    tmp_path: Path, factor: float, dtype: torch.dtype
):
    save_llama(tmp_path, hidden_size=64, intermediate_size=256)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in tensors:
        if "k_proj" in name:
            tensors[name][5::16] *= factor
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    args = ServerArgs(
        model_path=str(tmp_path),
        tp_size=2,
        quantization="int8",
        max_running_requests=2,
        max_total_tokens=CONTEXT,
        num_threads=1,
        disable_weight_cache=True,
    )
    waited: list[str] = []
    with new_group(2) as (group, fd), ThreadPoolExecutor(1) as other:
        theirs = SharedMemoryGroup.join(fd, 1, 2, LIMIT_S)

        def run() -> FollowerRunner:
            rank = Rank(Shard(1, 2, theirs), group=theirs)
            runner, resources = build_follower(args, rank, lambda: waited.append("follower"))
            with resources:
                runner.follow()
            return runner

        running = other.submit(run)
        others = Other([])
        others.wait_loaded = lambda: waited.append("leader")  # type: ignore[method-assign]
        rank = Rank(Shard(0, 2, group), group=group)
        worker, info = build_worker(args, rank=rank, others=others, tokenize=lambda text: prompt(200, 0))
        worker.close()
        follower = running.result(LIMIT_S).runner.attention.paged_kv()

    assert info.kv_cache_dtype == str(dtype).removeprefix("torch.")
    assert follower is not None
    assert {keys.dtype for keys in follower.pool.k} == {dtype}
    assert sorted(waited) == ["follower", "leader"]


def test_sequences_that_cannot_be_entered_end_with_their_steps_and_nothing_else(
    ranks: tuple[Driver, list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
):
    driver, broken = ranks
    sampler: Any = driver.worker.runner.runner.sampler  # type: ignore[attr-defined]
    add = sampler.add

    def failing(seq: int, new: Any) -> None:
        if new.rid == "bad":
            raise MemoryError
        add(seq, new)

    want = make_driver(folder, disable_weight_cache=True).generate(2, prompt(9, 2), 6)
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "add", failing)
        driver.step([(0, 5, True)], (driver.new(0, prompt(5, 0)),))
        bad = driver.new(1, prompt(7, 1), rid="bad", return_hidden_states=True)
        # The second was planned before it was known that the first fails.
        driver.submit([(0, 1, True), (1, 3, False)], (bad,))
        driver.submit([(0, 1, True), (1, 4, True)])
        for _ in range(2):
            with pytest.raises(ExecutionError):
                driver.worker.collect()

    assert driver.generate(2, prompt(9, 2), 6) == want
    assert driver.generate(1, prompt(9, 2), 6) == want
    assert not broken


@pytest.fixture
def gathered(ranks: tuple[Driver, list[str]], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and columns of what the leader gathers."""
    group: Any = ranks[0].worker.runner._group  # type: ignore[attr-defined]
    gather, shapes = group.gather, []

    def noted(x: torch.Tensor, columns: Sequence[int], out: torch.Tensor | None) -> None:
        gather(x, columns, out)
        shapes.append((len(x), sum(columns)))

    monkeypatch.setattr(group, "gather", noted)
    return shapes


SEEDED = ResolvedSamplingParams(max_new_tokens=50, seed=4, temperature=0.9)
EDITED = ResolvedSamplingParams(max_new_tokens=50, seed=0, temperature=0.0, logit_bias=((7, 3.0),))


@pytest.mark.parametrize(
    ("beside", "columns"),
    [
        ({}, 4),
        ({"sampling": SEEDED}, VOCAB_SIZE),
        ({"sampling": EDITED}, VOCAB_SIZE),
        ({"logprobs": LogprobSpec(prompt_start=50, top_num=1, token_ids=())}, VOCAB_SIZE),
        ({"return_hidden_states": True}, 4),
    ],
    ids=["greedy", "seeded", "edited", "with logprobs", "with hidden states"],
)
def test_all_logits_are_gathered_only_when_a_row_beside_needs_them(
    ranks: tuple[Driver, list[str]], gathered: list[tuple[int, int]], folder: Path, beside: dict[str, Any], columns: int
):
    driver, _ = ranks
    alone = make_driver(folder, disable_weight_cache=True)
    want = [alone.generate(0, prompt(9, 2), 4), alone.generate(1, prompt(5, 3), 4, **beside)]

    entering = (driver.new(0, prompt(9, 2)), driver.new(1, prompt(5, 3), **beside))
    steps = [driver.step([(0, 9, True), (1, 5, True)], entering)]
    steps += [driver.step([(0, 1, True), (1, 1, True)]) for _ in range(3)]

    assert [[ids_by_row(step)[row] for step in steps] for row in (0, 1)] == want
    assert gathered == [(2, columns)] * 4


def test_a_row_without_usable_logits_fails_alone(ranks: tuple[Driver, list[str]], gathered: list[tuple[int, int]]):
    """Whether the model finds them, in a prompt of embeddings with NaN, or a fault is injected, for which all logits are gathered."""
    driver, broken = ranks
    nan = PromptContent(b"", np.full((5, 32), np.nan, np.float32).tobytes())
    failed = driver.step(
        [(0, 9, True), (1, 5, True)], (driver.new(0, prompt(9, 2)), driver.new(1, prompt(5, 3), content=nan))
    )
    injected = driver.step([(0, 1, True)], faults=(FaultReq(rid="r0", stage="sampling", at_token=1, kind="nan"),))

    assert failed.errors == {1: BAD_LOGITS}
    assert ids_by_row(failed)[1] == -1
    assert injected.errors == {0: BAD_LOGITS}
    assert gathered == [(2, 4), (1, VOCAB_SIZE)]
    assert not broken
