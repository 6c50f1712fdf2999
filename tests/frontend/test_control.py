"""Control operations and health: what the schedulers answer, and what it means when they do not."""

import asyncio
from dataclasses import replace

import pytest
from frontend_fakes import STATE, turns

from headrace.errors import ExecutionError, NotFoundError
from headrace.messages.control import FaultReq, Heartbeat
from headrace.messages.operations import CHECK_HEALTH, FLUSH_CACHE, OPERATIONS


async def test_control_operations_bring_the_scheduler_s_answer(make_frontend):
    frontend = make_frontend()
    manager = frontend.manager
    echo = asyncio.create_task(frontend.engine.echo())

    assert (await manager.control.flush_cache()).success
    assert await manager.control.internal_state() == STATE
    assert await manager.health()
    assert await manager.health(generate=True)
    frontend.engine.busy = True
    assert await manager.health(generate=True)
    assert len(frontend.engine.requests) == 1  # a token was made only while it was not busy

    echo.cancel()
    await asyncio.gather(echo, return_exceptions=True)


async def test_a_scheduler_that_is_silent_is_an_error_and_not_healthy(make_frontend, monkeypatch):
    for row in (FLUSH_CACHE, CHECK_HEALTH):
        monkeypatch.setitem(OPERATIONS, row.name, replace(row, timeout_s=0.01))
    monkeypatch.setattr("headrace.frontend.engine_parts.HEALTH_TIMEOUT_S", 0.01)
    frontend = make_frontend()

    with pytest.raises(ExecutionError, match="no answer"):
        await frontend.manager.control.flush_cache()
    assert not await frontend.manager.health(generate=True)
    assert await frontend.manager.health()


async def test_a_process_that_was_heard_and_is_silent_is_not_healthy(make_frontend):
    now = [0.0]
    frontend = make_frontend(clock=lambda: now[0])
    assert await frontend.manager.health()
    frontend.engine.outbox.send(Heartbeat("scheduler"))
    await turns()

    now[0] += 4.0
    assert await frontend.manager.health()
    now[0] += 4.0
    assert not await frontend.manager.health()
    frontend.engine.outbox.send(Heartbeat("scheduler"))
    await turns()
    assert await frontend.manager.health()
    assert frontend.manager.heartbeats.age_s("scheduler") == 0.0
    assert frontend.manager.heartbeats.age_s("nobody") is None


async def test_faults_are_refused_unless_enabled_and_go_to_the_process_that_does_them(make_frontend):
    fault, late = FaultReq("forward", "raise", "r"), FaultReq("detokenize", "raise", "r")
    with pytest.raises(NotFoundError):
        await make_frontend().manager.control.inject_fault(fault)

    frontend = make_frontend(enable_fault_injection=True)
    await frontend.manager.control.inject_fault(fault)
    await frontend.manager.control.inject_fault(late)

    assert frontend.engine.inbox.recv_nowait() == fault
    assert frontend.channels.receiver("to_detokenizer").recv_nowait() == late


async def test_who_asks_while_the_schedulers_are_asked_shares_the_next_answer(make_frontend):
    frontend = make_frontend()
    control = frontend.manager.control
    asked, answer = [], frontend.engine.handle
    frontend.engine.handle = lambda message: (asked.append(message), answer(message))

    first = asyncio.create_task(control.internal_state())
    message = await frontend.engine.next_message()
    others = [asyncio.create_task(control.internal_state()) for _ in range(50)]
    await asyncio.sleep(0)
    others[0].cancel()
    frontend.engine.handle(message)
    await frontend.engine.until(lambda: len(asked) == 2)

    assert await asyncio.gather(first, *others[1:]) == [STATE] * 50
    assert len(asked) == 2
    later = asyncio.create_task(control.internal_state())
    await frontend.engine.until(lambda: len(asked) == 3)
    assert await later == STATE
