"""Emptying the cache as soon as nothing runs."""

import math

import pytest

from headrace.errors import RequestError
from headrace.frontend.control import flush_when_idle
from headrace.messages.control import Outcome


class Busy:
    """Refuses so many times."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.num_calls = 0

    async def __call__(self) -> Outcome:
        self.num_calls += 1
        self.left -= 1
        return Outcome(self.left < 0, "said so")


async def test_a_flush_is_tried_until_it_succeeds():
    busy = Busy(3)
    assert (await flush_when_idle(busy, 600.0)).success
    assert busy.num_calls == 4


async def test_without_a_time_there_is_one_attempt():
    busy = Busy(1)
    assert not (await flush_when_idle(busy, 0.0)).success
    assert busy.num_calls == 1


@pytest.mark.parametrize("timeout_s", [-1.0, 601.0, math.nan, math.inf])
async def test_a_wait_has_a_bound(timeout_s: float):
    with pytest.raises(RequestError, match="timeout must be between"):
        await flush_when_idle(Busy(0), timeout_s)
