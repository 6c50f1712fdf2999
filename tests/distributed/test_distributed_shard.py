"""How the ranks share what there is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.distributed.base import WHOLE, Shard
from headrace.errors import ModelError


@given(st.integers(1, 8), st.integers(1, 300), st.sampled_from([1, 2, 32]))
def test_parts_are_whole_units_side_by_side_and_as_even_as_units_allow(size, n, unit):
    num_units = -(-n // unit)
    shards = [Shard(rank, size) for rank in range(size)]
    if num_units < size:
        with pytest.raises(ModelError, match=f"{n} .* {size} ranks"):
            shards[0].split(n, unit)
        return

    parts = [shard.part(n, unit) for shard in shards]
    assert tuple(parts) == shards[0].split(n, unit)
    assert [i for part in parts for i in range(n)[part]] == list(range(n))
    assert all(part.start % unit == 0 for part in parts)
    units = [-(-(part.stop - part.start) // unit) for part in parts]
    assert units == sorted(units, reverse=True)
    assert units[0] - units[-1] <= 1


def test_the_whole_is_one_part():
    assert Shard(0, 1, None) == WHOLE
    assert WHOLE.split(7, 2) == (slice(0, 7),)
    assert WHOLE.part(7) == slice(0, 7)
