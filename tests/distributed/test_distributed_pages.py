"""Pages of KV of which several ranks have parts: all parts go out and come back, in every rank or in none."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from model_harness import CPU, MAX_POSITIONS, save_tiny, tiny_config
from thread_group import on_ranks

from headrace.attention.base import KvPool
from headrace.checkpoint.source import open_checkpoint
from headrace.distributed.base import ALL_LAYERS, WHOLE, Shard, Stage
from headrace.errors import ExecutionError
from headrace.execution.load_weights import load_model
from headrace.execution.page_transfer import LeaderPages, PoolPages
from headrace.execution.profiler import StepProfiler
from headrace.execution.rank_jobs import FollowerJobs, LeaderJobs, Turn
from headrace.layers.weight import Placement, Weight
from headrace.messages.ranks import RankPages, RankStep, RankStop, pack, unpack
from headrace.messages.weights import Prepared
from headrace.models.registry import model_class_for

PAGE, PAGES, LAYERS = 4, 8, 2
NOTHING_ELSE: Any = None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tiny_config("llama"), tmp_path)
    return tmp_path


def weights_of(folder: Path, shard: Shard = WHOLE, stage: Stage = ALL_LAYERS) -> list[Weight]:
    checkpoint = open_checkpoint(folder)
    placement = Placement(CPU, torch.float32, MAX_POSITIONS, shard=shard, stage=stage)
    return list(load_model(checkpoint, model_class_for(checkpoint.config, "auto"), placement).weights())


def random_pool(rank: int) -> KvPool:
    """Its first rank has twice as many heads as the others."""
    source = torch.Generator().manual_seed(rank)  # ranks are threads here
    heads = 2 if rank == 0 else 1
    return KvPool(
        *([torch.randn(PAGE * PAGES, heads, 8, generator=source) for _ in range(LAYERS)] for _ in "kv"),
        PAGE * PAGES,
        PAGE,
    )


def rows(pool: KvPool, pages: list[int]) -> torch.Tensor:
    return torch.cat([one.view(PAGES, -1)[pages] for one in (*pool.k, *pool.v)], dim=1)


def serve(folder: Path, shard: Shard, act: Callable[[LeaderPages], object], kind: type[PoolPages] = PoolPages) -> Any:
    """`act` on the pages of all ranks, for the leader; followers do what it says. Returns what it gave, and the rank's pool."""
    pool = random_pool(shard.rank)
    weights = weights_of(folder, shard)
    pages = kind(pool, lambda: weights, dict, number=shard.rank)
    if shard.leads:
        found = act(LeaderPages(pages, LeaderJobs(shard.group, Turn()), shard.size, shares=True))
        shard.group.send(pack(RankStop()))
        return found, pool
    jobs = FollowerJobs(shard.group, NOTHING_ELSE, NOTHING_ELSE, StepProfiler(None), do_pages=pages.do)
    while not isinstance(message := unpack(shard.group.receive()), RankStop):
        assert not isinstance(message, RankStep), message
        jobs.handle(message)
    return None, pool


def test_pages_come_back_in_every_rank(folder: Path):
    def act(pages: LeaderPages) -> None:
        pages.fingerprint()
        data = pages.read([1, 3])
        assert len(data) == 2 * pages.page_bytes == 2 * 2 * LAYERS * PAGE * 4 * 8 * 4
        pages.write([6, 5], data)

    for rank, (_, pool) in enumerate(on_ranks(3, lambda shard: serve(folder, shard, act))):
        assert torch.equal(rows(pool, [6, 5]), rows(random_pool(rank), [1, 3]))
        assert torch.equal(rows(pool, [0, 1, 2, 3, 4, 7]), rows(random_pool(rank), [0, 1, 2, 3, 4, 7]))


class CannotRead(PoolPages):
    def do(self, work: RankPages) -> Prepared:
        if work.kind == "write":
            raise ExecutionError("no memory")
        return super().do(work)


def test_when_one_rank_cannot_none_has_the_pages(folder: Path):
    def act(pages: LeaderPages) -> None:
        pages.fingerprint()
        data = pages.read([1, 3])
        with pytest.raises(ExecutionError, match="rank 1: no memory"):
            pages.write([6, 5], data)

    kinds = [PoolPages, CannotRead, PoolPages]
    for rank, (_, pool) in enumerate(on_ranks(3, lambda shard: serve(folder, shard, act, kinds[shard.rank]))):
        assert torch.equal(rows(pool, list(range(PAGES))), rows(random_pool(rank), list(range(PAGES))))


def test_the_fingerprint_is_of_the_weights_of_every_rank_and_of_their_number(folder: Path):
    def change(weight: Weight) -> None:
        keeper = weight.keepers[0]
        kept = dict(keeper.kept())
        name = next(name for name, value in kept.items() if isinstance(value, torch.Tensor))
        kept[name] = kept[name].clone()
        kept[name].view(torch.uint8).view(-1)[-1] ^= 1
        keeper.restore(kept)

    class Changed(PoolPages):
        def do(self, work: RankPages) -> Prepared:
            change(next(iter(self._weights())))
            return super().do(work)

    def fingerprint(size: int, kind: type[PoolPages] = PoolPages) -> str:
        run = on_ranks(
            size, lambda shard: serve(folder, shard, LeaderPages.fingerprint, kind if shard.rank else PoolPages)
        )
        return run[0][0]

    assert fingerprint(2) == fingerprint(2)
    alone = PoolPages(random_pool(0), lambda: weights_of(folder), dict).fingerprint()
    assert len({alone, fingerprint(2), fingerprint(3), fingerprint(2, Changed)}) == 4


def test_stages_have_together_the_weights_of_one_process(folder: Path):
    """So they find each other's KV: no sum is in another order."""
    digests: dict[str, str] = {}
    for index in range(2):
        weights = weights_of(folder, stage=Stage(index, 2))
        digests |= PoolPages(random_pool(0), lambda weights=weights: weights, dict).digests()
    assert digests == PoolPages(random_pool(0), lambda: weights_of(folder), dict).digests()
