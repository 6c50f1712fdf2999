"""Steps whose rows go through the layers in two halves (--enable-two-batch-overlap): the tokens and the bits of whole steps, on two ranks."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_harness import LIMIT_S, new_group

sys.path.insert(0, str(Path(__file__).parent.parent / "execution"))
sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from lora_harness import tiny_adapter
from model_harness import save_tiny, tiny_config
from runner_harness import CONTEXT, DRAWN, GREEDY, VOCAB_SIZE, WEARY, Driver, prompt, save_llama

from headrace.config.server_args import ServerArgs
from headrace.distributed.base import Shard
from headrace.distributed.one_host import SharedMemoryGroup
from headrace.distributed.rank import Rank
from headrace.distributed.two_halves import TwoHalves
from headrace.errors import ExecutionError
from headrace.execution.build import build_follower, build_worker
from headrace.kernels import cpu

if cpu.why_not():
    pytest.skip(cpu.why_not(), allow_module_level=True)

NUM_LAYERS = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("llama", "mixture")}
    save_llama(made["llama"], intermediate_size=256)
    mixture = tiny_config("mixtral")
    mixture.vocab_size, mixture.num_hidden_layers, mixture.max_position_embeddings = VOCAB_SIZE, NUM_LAYERS, CONTEXT
    save_tiny(mixture, made["mixture"])
    return made


@contextmanager
def two_ranks(folder: Path, halves_from: int, **options: Any) -> Iterator[tuple[Driver, SharedMemoryGroup]]:
    args = ServerArgs(
        model_path=str(folder),
        tp_size=2,
        enable_two_batch_overlap=halves_from > 0,
        disable_overlap_schedule=True,
        max_running_requests=4,
        max_total_tokens=4 * CONTEXT,
        num_threads=1,
        disable_weight_cache=True,
        **{"dtype": "float32", **options},
    )
    with new_group(2) as (group, fd), ThreadPoolExecutor(1) as other:
        theirs = SharedMemoryGroup.join(fd, 1, 2, LIMIT_S)

        def run() -> None:
            runner, resources = build_follower(args, Rank(Shard(1, 2, theirs, halves_from), group=theirs))
            with resources:
                runner.follow()

        running = other.submit(run)
        worker, info = build_worker(args, rank=Rank(Shard(0, 2, group, halves_from), group=group))
        yield Driver(worker, info), group
        worker.close()
        running.result(LIMIT_S)


def answers(driver: Driver, group: SharedMemoryGroup) -> tuple[list[Any], list[int]]:
    """What each step gives, and how many sums it has begun: prompts in chunks, alone and beside rows that decode, which draw tokens in several ways;
    four rows, three and one; chunks of which nothing is read; and hidden states of a whole prompt."""
    new = [
        driver.new(0, prompt(40, 1), GREEDY),
        driver.new(1, prompt(7, 2), DRAWN),
        driver.new(2, prompt(23, 3), WEARY),
        driver.new(3, prompt(5, 4), DRAWN, return_hidden_states=True),
    ]
    steps: list[tuple[list[tuple[int, int, bool]], tuple[Any, ...]]] = [
        ([(0, 17, False)], (new[0],)),
        ([(0, 23, True), (1, 7, True)], (new[1],)),
        ([(0, 1, True), (1, 1, True), (2, 10, False)], (new[2],)),
        ([(0, 1, True), (1, 1, True), (2, 13, True), (3, 5, True)], (new[3],)),
        *[([(row, 1, True) for row in range(4)], ())] * 6,
        *[([(row, 1, True) for row in range(3)], ())] * 6,
        *[([(1, 1, True)], ())] * 3,
    ]
    found, begun = [], []
    for rows, entering in steps:
        before = group.num_begun
        result = driver.step(rows, new=entering)
        assert not result.errors
        found.append((result.ids.tolist(), result.id_starts.tolist(), result.hidden_states))
        begun.append(group.num_begun - before)
    return found, begun


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {}),
        ("llama", {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"}),
        # Where layers run one by one.
        ("mixture", {"ep_size": 2}),
        ("mixture", {"page_size": 1}),
        ("llama", {"attention_backend": "torch_native", "page_size": 1}),
    ],
    ids=str,
)
def test_halves_give_the_bits_of_whole_steps(folders: dict[str, Path], model: str, options: dict[str, Any]):
    folder = folders[model]
    with two_ranks(folder, 0, **options) as (driver, group):
        want, none_begun = answers(driver, group)
        fused = "fused decoder: yes" in str(driver.info.decisions)
    assert fused == (model == "llama" and "page_size" not in options)
    with two_ranks(folder, 2, **options) as (driver, group):
        got, begun = answers(driver, group)
        assert "two-batch overlap: in steps of 2 tokens or more" in str(driver.info.decisions)

    assert got == want
    each = 2 * 2 * NUM_LAYERS
    # Nothing is read of the first step, nor of one half of the next two: in the native call these stop before the two sums of the last layer.
    first = [each - 4, each - 2, each - 2] if fused else [each] * 3
    assert set(none_begun) == {0}
    assert begun == [*first, *[each] * 13, 0, 0, 0]


def test_steps_with_adapters_run_whole(tmp_path: Path):
    adapter = tiny_adapter(save_llama(tmp_path / "model", intermediate_size=256)).save(tmp_path / "adapter")

    def answers_of(halves_from: int) -> tuple[list[list[int]], list[bool]]:
        found, were_cut = [], []
        with two_ranks(tmp_path / "model", halves_from, lora_paths=f"a={adapter}") as (driver, group):
            new = (driver.new(0, prompt(9, 1), lora_id=1), driver.new(1, prompt(8, 2)))
            for rows in ([(0, 9, True), (1, 8, True)], [(0, 1, True), (1, 1, True)], [(1, 1, True), (2, 9, True)]):
                before = group.num_begun
                found.append(driver.step(rows, new=new).ids.tolist())
                were_cut.append(group.num_begun > before)
                new = (driver.new(2, prompt(9, 1)),) if len(found) == 2 else ()
        return found, were_cut

    want, whole = answers_of(0)
    got, cut = answers_of(2)

    assert got == want
    assert whole == [False] * 3
    assert cut == [False, False, True]


def test_a_half_that_fails_ends_the_other():
    """Neither waits for the sums of the other rank, which does not come."""
    with new_group(2) as (group, fd):
        SharedMemoryGroup.join(fd, 1, 2, LIMIT_S)
        halves = TwoHalves(group)
        ends: list[str] = []

        def fail() -> None:
            raise ValueError("of this half")

        def sum_once() -> None:
            try:
                halves.all_reduce(torch.zeros(3))
            except ExecutionError as error:
                ends.append(error.message)
                raise

        for acts in ((fail, sum_once), (sum_once, fail)):
            with pytest.raises(ValueError, match="of this half"):
                halves.run(*acts)
    assert ends == ["the other half of the step failed"] * 2
