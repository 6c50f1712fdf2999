"""What a key may use, what the queue tells those who come too late, and clients that do not read."""

import asyncio

import msgspec
import pytest
from frontend_fakes import READY, answers_of, request, turns

from headrace.errors import CapacityError
from headrace.frontend.tenants import Bucket, Caller, QueuePace, Tenant, TenantLimits
from headrace.frontend.tokenizer_manager import ANONYMOUS
from headrace.messages.outputs import WAITED_TOO_LONG, FinishReason
from headrace.metrics.export import render

STOP = FinishReason("stop", matched=256)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def call(frontend, tenant, rid, **fields):
    """A call in a task, by a tenant."""

    async def run():
        caller = Caller(tenant) if tenant else ANONYMOUS
        return [
            answer async for answer in answers_of(frontend.manager, request("pp", rid=rid, **fields), caller=caller)
        ]

    return asyncio.create_task(run())


def test_a_bucket_holds_a_minute_and_tells_when_it_is_filled():
    bucket = Bucket(60.0, 0.0)
    assert bucket.wait_s(1.0, 0.0) == 0.0
    bucket.take(90.0)
    assert bucket.wait_s(1.0, 0.0) == pytest.approx(31.0)
    assert bucket.wait_s(1.0, 30.0) == pytest.approx(1.0)
    assert bucket.wait_s(1.0, 31.0) == 0.0
    assert bucket.wait_s(1000.0, 1000.0) == 0.0  # never more than it can hold


def test_the_pace_of_the_queue_is_the_one_of_late():
    pace = QueuePace()
    assert pace.wait_s(10, 0.0) == 1.0
    for i in range(10):
        pace.note(i * 0.5)
    assert pace.wait_s(10, 5.0) == pytest.approx(5.0)
    assert pace.wait_s(20, 5.0) == pytest.approx(10.0)
    assert pace.wait_s(10**9, 5.0) == 120.0
    assert pace.wait_s(10, 1000.0) == 1.0


async def test_a_key_at_its_limit_of_requests_is_told_429_and_others_are_not(make_frontend):
    frontend = make_frontend()
    small, other = Tenant(TenantLimits(name="small", max_concurrent=1)), Tenant(TenantLimits(name="other", weight=2.5))
    first, beside = call(frontend, small, "a"), call(frontend, other, "b")
    await frontend.engine.until(lambda: len(frontend.engine.requests) == 2)

    with pytest.raises(CapacityError, match=r"requests at once \(1\)") as caught:
        await call(frontend, small, "c")
    assert (caught.value.status_code, caught.value.retry_after_s >= 1.0) == (429, True)
    assert (caught.value.code, caught.value.error_type) == ("rate_limit_exceeded", "requests")
    assert (
        'rejected_requests_total{model_name="fake",reason="key_limit"} 1.0' in render(frontend.manager.metrics).decode()
    )
    sent = frontend.engine.requests
    rids = [small.scope + "a", other.scope + "b"]
    assert [(sent[rid].tenant, sent[rid].weight) for rid in rids] == [("small", 1.0), ("other", 2.5)]

    for rid in rids:
        frontend.engine.emit(rid, "x", STOP)
    await asyncio.gather(first, beside)
    again = call(frontend, small, "c")
    await frontend.engine.until(lambda: small.scope + "c" in sent)
    frontend.engine.emit(small.scope + "c", "x", STOP)
    await again
    assert (small.num_live, small.num_queued, other.num_live) == (0, 0, 0)


async def test_waiting_samples_of_a_key_are_bounded_until_their_first_token(make_frontend):
    frontend = make_frontend()
    tenant = Tenant(TenantLimits(name="t", max_queued=2))
    first = call(frontend, tenant, "a", sampling_params={"n": 2})
    await frontend.engine.until(lambda: len(frontend.engine.requests) == 2)
    with pytest.raises(CapacityError, match=r"waiting samples \(2\)"):
        await call(frontend, tenant, "b")

    frontend.engine.emit(tenant.scope + "a/0", "x")
    await turns()
    second = call(frontend, tenant, "b")
    await frontend.engine.until(lambda: tenant.scope + "b" in frontend.engine.requests)
    for rid in ("a/0", "a/1", "b"):
        frontend.engine.emit(tenant.scope + rid, "y", STOP)
    await asyncio.gather(first, second)


async def test_rates_count_requests_and_computed_tokens(make_frontend):
    clock = Clock()
    frontend = make_frontend(clock=clock)
    requests = Tenant(TenantLimits(name="r", requests_per_minute=1), clock.now)
    tokens = Tenant(TenantLimits(name="t", tokens_per_minute=6), clock.now)
    for tenant, rid in ((requests, "a"), (tokens, "b")):
        task = call(frontend, tenant, rid)
        rid = tenant.scope + rid
        await frontend.engine.until(lambda rid=rid: rid in frontend.engine.requests)
        frontend.engine.emit(rid, "xxxxxx", STOP)
        await task

    with pytest.raises(CapacityError, match=r"requests per minute \(1\)") as caught:
        await call(frontend, requests, "c")
    assert caught.value.retry_after_s == pytest.approx(60.0)
    # 2 of the prompt and 6 made, of 6: 3 must come back at 6 a minute.
    with pytest.raises(CapacityError, match=r"tokens per minute \(6\)") as caught:
        await call(frontend, tokens, "c")
    assert caught.value.retry_after_s == pytest.approx(30.0)
    clock.now += 31
    task = call(frontend, tokens, "d")
    await frontend.engine.until(lambda: tokens.scope + "d" in frontend.engine.requests)
    frontend.engine.emit(tokens.scope + "d", "x", STOP)
    await task


async def test_retry_after_of_a_full_queue_is_the_time_that_half_of_it_takes(make_frontend):
    clock = Clock()
    ready = msgspec.structs.replace(READY, max_running_requests=4)
    frontend = make_frontend(ready=ready, max_queued_requests=4, clock=clock)
    engine = frontend.engine
    tasks = [call(frontend, None, f"r{i}") for i in range(8)]
    await engine.until(lambda: len(engine.requests) == 8)
    for i in range(4):  # one begins every ten seconds
        engine.emit(f"r{i}", "x", STOP)
        await turns()
        clock.now += 10.0
    tasks += [call(frontend, None, f"s{i}") for i in range(4)]
    await engine.until(lambda: len(engine.requests) == 12)

    with pytest.raises(CapacityError, match="queue is full") as caught:
        await call(frontend, None, "late")
    # Eight wait, four of them take 4 x 10 s.
    assert caught.value.retry_after_s == pytest.approx(40.0)
    for rid in list(engine.num_tokens):
        engine.emit(rid, "y", STOP)
    await asyncio.gather(*tasks)


async def test_what_waited_too_long_is_an_overload_with_a_time_to_come_back(make_frontend):
    frontend = make_frontend(queue_timeout_s=5.0)
    task = call(frontend, None, "r")
    await frontend.engine.until(lambda: frontend.engine.requests)
    sent = frontend.engine.requests["r"]
    assert sent.queue_deadline_s == pytest.approx(sent.created_s + 5.0)
    assert sent.deadline_s == 0.0
    frontend.engine.emit("r", finish=FinishReason("abort", message=WAITED_TOO_LONG, status_code=503))

    with pytest.raises(CapacityError, match="waited") as caught:
        await task
    assert (caught.value.status_code, caught.value.retry_after_s >= 1.0) == (503, True)
    assert 'reason="queue_timeout"} 1.0' in render(frontend.manager.metrics).decode()


async def test_the_servers_own_requests_have_no_time_limits(make_frontend):
    frontend = make_frontend(queue_timeout_s=1e-3, request_timeout_s=1e-3)
    probe = asyncio.create_task(frontend.manager.health(generate=True))
    echo = asyncio.create_task(frontend.engine.echo())
    assert await probe
    sent = next(iter(frontend.engine.requests.values()))
    echo.cancel()
    await asyncio.gather(echo, return_exceptions=True)

    assert (sent.deadline_s, sent.queue_deadline_s) == (0.0, 0.0)


@pytest.mark.parametrize("reads", [False, True])
async def test_a_stream_that_nobody_reads_is_aborted_at_its_limit_and_no_other(make_frontend, reads):
    frontend = make_frontend(max_stream_buffer_bytes=1000)
    engine = frontend.engine
    outputs = frontend.manager.generate_request(request("p", rid="r", stream=True))
    first = asyncio.create_task(anext(outputs))
    await engine.until(lambda: engine.requests)
    engine.emit("r", "x" * 10)
    got = (await first).text
    for _ in range(6):
        if "r" in engine.num_tokens:
            engine.emit("r", "y" * 50)
        await turns()
        engine.pump()
        if reads:
            got += (await anext(outputs)).text
    assert [abort.rids for abort in engine.aborts] == ([] if reads else [("r",)])
    if reads:
        engine.emit("r", "z", STOP)
    rest = [update async for update in outputs]

    # What was made before is there for a client that reads after all.
    got += "".join(update.text for update in rest)
    assert got.startswith("x" * 10 + "y" * 200)
    assert rest[-1].finish.type == ("stop" if reads else "abort")
