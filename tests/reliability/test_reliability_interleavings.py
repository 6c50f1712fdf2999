"""Deaths, returns, updates, pauses, adapters and requests in random order over real processes: success means that every replica has it.

HEADRACE_INTERLEAVINGS=200 plays so many seeds (3 by default), HEADRACE_INTERLEAVINGS_FROM=n begins with the n-th.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

for folder in ("scheduler", "frontend"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))

from replica_fleet import Fleet, History, play  # noqa: E402

NUM_SEEDS = int(os.environ.get("HEADRACE_INTERLEAVINGS", "3"))
FIRST_SEED = int(os.environ.get("HEADRACE_INTERLEAVINGS_FROM", "0"))
PER_FLEET = 10


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    await fleet.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS, PER_FLEET))
async def test_orders_deaths_and_returns_in_random_order(fleet: Fleet, first: int, capfd: pytest.CaptureFixture[str]):
    for seed in range(first, min(first + PER_FLEET, FIRST_SEED + NUM_SEEDS)):
        try:
            await fleet.check(await play(fleet, seed))
        except BaseException:
            print(f"seed {seed}")
            raise
        assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
async def test_thirty_two_streams_lose_nothing_and_mix_nothing(fleet: Fleet):
    history = History()
    for i in range(32):
        fleet.ask(history, [0, *(int(bit) for bit in f"{i:05b}")], 120, stream=True)
    await asyncio.sleep(0.1)
    fleet.order(history, "update", lambda: fleet.update(history))
    fleet.order(history, "load", lambda: fleet.load("a"))
    await asyncio.sleep(0.05)
    assert fleet.kill("scheduler", 1)
    fleet.order(history, "update", lambda: fleet.update(history))
    await fleet.settle(history)
    await fleet.check(history)
    assert fleet.weights == 2
    assert fleet.manager.link.num_replayed > 0
    for one in history.asked:
        (answer,) = one.task.result()
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
