"""What --max-queued-requests counts: samples that wait, and not those that run."""

import asyncio

import msgspec
import pytest
from frontend_fakes import EOS, READY, turns

from headrace.errors import CapacityError
from headrace.frontend.sample_table import SampleQueue
from headrace.messages.outputs import FinishReason

STOP = FinishReason("stop", matched=EOS)
ONE_SLOT = msgspec.structs.replace(READY, max_running_requests=1)


async def test_with_every_slot_taken_only_so_many_wait(make_frontend):
    frontend = make_frontend(ready=ONE_SLOT, max_queued_requests=1)
    engine = frontend.engine
    runs = frontend.start("p", rid="runs", stream=True)
    await engine.until(lambda: engine.requests)
    engine.emit("runs", "x")
    await turns()
    waits = frontend.start("p", rid="waits")
    await engine.until(lambda: "waits" in engine.requests)

    with pytest.raises(
        CapacityError, match="running samples: 1, waiting: 1 of at most 1, in this request: 1"
    ) as caught:
        await frontend.start("p", rid="third")
    assert caught.value.status_code == 503

    engine.emit("runs", "y", STOP)
    await turns()
    third = frontend.start("p", rid="third")
    await engine.until(lambda: "third" in engine.requests)
    for rid in ("waits", "third"):
        engine.emit(rid, "y", STOP)
    await asyncio.gather(runs, waits, third)
    assert frontend.is_clean


async def test_slots_of_all_replicas_count(make_frontend):
    frontend = make_frontend(ready=ONE_SLOT, max_queued_requests=1, dp_size=2)
    tasks = [frontend.start("p", rid=f"r{i}") for i in range(3)]
    await frontend.engine.until(lambda: len(frontend.engine.requests) == 3)
    with pytest.raises(CapacityError, match="queue is full"):
        await frontend.start("p", rid="r3")
    for i in range(3):
        frontend.engine.emit(f"r{i}", "x", STOP)
    await asyncio.gather(*tasks)


async def test_samples_that_end_without_a_token_leave_room(make_frontend):
    frontend = make_frontend(ready=ONE_SLOT, max_queued_requests=1)
    for stream in (False, True, False, True):
        task = frontend.start(["a", "b"], stream=stream)
        await frontend.engine.until(lambda: len(frontend.engine.num_tokens) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await frontend.engine.until(lambda: not frontend.engine.num_tokens)
        await turns()
    assert (frontend.manager.table.queue.num_queued, frontend.manager.table.queue.num_running) == (0, 0)


def test_more_running_than_slots_are_no_room_for_waiting():
    """A slot count may shrink at run time, and samples that were taken back to the queue count as running."""
    queue = SampleQueue(num_slots=1, max_waiting=1, num_running=3)
    queue.check(1, 0.0)
    queue.enter(1)
    assert queue.num_waiting == 1
    with pytest.raises(CapacityError):
        queue.check(1, 0.0)


def test_nobody_fills_the_queue():
    queue = SampleQueue(num_slots=10, max_waiting=90)
    held: dict[str, int] = {}

    def take(key: str) -> int:
        """One sample after the other, until the key is refused."""
        while True:
            try:
                queue.check(1, 0.0, held.get(key, 0))
            except CapacityError:
                return held[key]
            queue.enter(1)
            held[key] = held.get(key, 0) + 1

    assert [take(key) for key in "abc"] == [80, 16, 3], "there is room for one more key, whoever came before"
    with pytest.raises(CapacityError, match="places left for others") as own:
        queue.check(1, 0.0, held["a"])
    assert own.value.status_code == 429
    assert take("d") == 1
    with pytest.raises(CapacityError, match="queue is full") as full:
        queue.check(1, 0.0, 0)
    assert full.value.status_code == 503
