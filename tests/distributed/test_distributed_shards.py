"""Which part of a model a rank has."""

from itertools import pairwise

import pytest

from headrace.distributed.base import Shard, head_share, length
from headrace.errors import ModelError


@pytest.mark.parametrize(
    ("n", "unit", "size", "sizes"),
    [
        (3, 1, 2, [2, 1]),
        (1536, 128, 2, [768, 768]),
        (200, 64, 3, [128, 64, 8]),
        (100, 64, 2, [64, 36]),
        (7, 1, 7, [1] * 7),
    ],
)
def test_parts_are_whole_units_and_cover_everything(n, unit, size, sizes):
    parts = Shard(size=size).split(n, unit)

    assert [length(part) for part in parts] == sizes
    assert parts[0].start == 0
    assert parts[-1].stop == n
    assert all(before.stop == after.start for before, after in pairwise(parts))


def test_too_few_units_are_refused():
    with pytest.raises(ModelError, match="64 cannot be split over 2 ranks in units of 64"):
        Shard(size=2).split(64, 64)


@pytest.mark.parametrize(
    ("num_query", "num_kv", "size", "shares"),
    [
        (9, 3, 2, [(slice(0, 6), slice(0, 2)), (slice(6, 9), slice(2, 3))]),
        (8, 1, 2, [(slice(0, 4), slice(0, 1)), (slice(4, 8), slice(0, 1))]),
        (8, 2, 3, [(slice(0, 2), slice(0, 1)), (slice(2, 4), slice(0, 1)), (slice(4, 8), slice(1, 2))]),
        (4, 4, 1, [(slice(0, 4), slice(0, 4))]),
        (5, 1, 2, [(slice(0, 3), slice(0, 1)), (slice(3, 5), slice(0, 1))]),
    ],
)
def test_query_heads_stay_with_their_kv_head(num_query, num_kv, size, shares):
    found = [head_share(Shard(rank, size), num_query, num_kv) for rank in range(size)]

    assert [(share.query, share.kv) for share in found] == shares


def test_more_ranks_than_query_heads_are_refused():
    with pytest.raises(ModelError, match="2 cannot be split over 3 ranks"):
        head_share(Shard(0, 5), 4, 2)
