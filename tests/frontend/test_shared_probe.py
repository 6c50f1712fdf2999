"""One probe of the engine for everybody who asks."""

import asyncio

from frontend_fakes import READY, turns

from headrace.frontend.engine_parts import SharedProbe
from headrace.messages.outputs import FinishReason


class Probe:
    """Counts its runs and finds what it is told once `open` is set."""

    def __init__(self):
        self.num_runs = 0
        self.open = asyncio.Event()
        self.finds = True

    async def __call__(self):
        self.num_runs += 1
        await self.open.wait()
        return self.finds


async def test_everybody_who_asks_meanwhile_shares_a_run_and_a_caller_that_leaves_disturbs_none():
    probe, now = Probe(), [0.0]
    shared = SharedProbe(probe, lambda: now[0])
    tasks = [asyncio.create_task(shared.result()) for _ in range(50)]
    await turns()
    tasks[0].cancel()
    await turns()
    probe.open.set()

    assert all(await asyncio.gather(*tasks[1:]))
    assert probe.num_runs == 1


async def test_a_finding_is_the_answer_for_a_second():
    probe, now = Probe(), [100.0]
    shared = SharedProbe(probe, lambda: now[0])
    probe.open.set()
    assert await shared.result()
    probe.finds = False
    now[0] += 0.99
    assert await shared.result()
    now[0] += 0.01

    assert not await shared.result()
    assert not await shared.result()
    assert probe.num_runs == 2


async def test_any_number_of_probes_takes_one_place_in_the_queue(make_frontend):
    frontend = make_frontend(clock=lambda: 0.0)
    manager = frontend.manager
    asked = [asyncio.create_task(manager.health(generate=True)) for _ in range(10 * READY.max_running_requests)]
    await frontend.engine.until(lambda: frontend.engine.requests)
    assert (len(frontend.engine.requests), manager.table.queue.num_queued) == (1, 1)
    (rid,) = frontend.engine.requests
    frontend.engine.emit(rid, ids=[0])
    frontend.engine.emit(rid, finish=FinishReason("length", length=1))

    assert all(await asyncio.gather(*asked))
    assert await manager.health(generate=True)
    assert len(frontend.engine.requests) == 1
