"""Steps that go wrong on the leader: the follower, here a thread, stays where the leader is."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rank_harness import LIMIT_S, new_group

sys.path.insert(0, str(Path(__file__).parent.parent / "execution"))

from runner_harness import CONTEXT, Driver, make_driver, prompt, save_llama

from headrace.config.server_args import ServerArgs
from headrace.distributed.base import Shard
from headrace.distributed.rank import Rank
from headrace.distributed.shared_memory import SharedMemoryGroup
from headrace.errors import ExecutionError
from headrace.execution.build import build_follower, build_worker
from headrace.execution.ranks import follow
from headrace.kernels import cpu

if cpu.why_not():
    pytest.skip(cpu.why_not(), allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("steps")
    save_llama(made, intermediate_size=256)
    return made


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
    )
    broken: list[str] = []
    with new_group(2) as (group, fd), ThreadPoolExecutor(1) as other:
        theirs = SharedMemoryGroup.join(fd, 1, 2, LIMIT_S)

        def run() -> None:
            runner, resources = build_follower(args, Rank(Shard(1, 2, theirs), group=theirs))
            with resources:
                follow(runner, theirs)

        running = other.submit(run)
        worker, info = build_worker(args, rank=Rank(Shard(0, 2, group), group=group), on_broken=broken.append)
        yield Driver(worker, info), broken
        worker.close()
        running.result(LIMIT_S)


def test_sequences_that_cannot_be_entered_end_with_their_steps_and_nothing_else(
    ranks: tuple[Driver, list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
):
    driver, broken = ranks
    sampler: Any = driver.worker.runner.sampler  # type: ignore[attr-defined]
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
