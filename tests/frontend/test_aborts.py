"""Aborts: by rid, by the name of a call or prompt, of everything, and by clients that leave."""

import asyncio
import contextlib

import msgspec
import pytest
from frontend_fakes import EOS, READY, request, turns

from headrace.errors import RequestError
from headrace.messages.outputs import FinishReason

STOP = FinishReason("stop", matched=EOS)


async def test_an_abort_ends_the_call_with_its_partial_text(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start("p", rid="req-1")
    other = frontend.start("p", rid="req-10")
    await engine.until(lambda: len(engine.requests) == 2)
    engine.emit("req-1", "part")
    await turns()

    frontend.manager.abort_request("req-1")
    engine.pump()

    [answer] = await task
    assert answer["text"] == "part"
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert not other.done()
    engine.emit("req-10", "x", STOP)
    await other


async def test_the_rid_of_a_prompt_aborts_all_its_samples_and_the_one_of_a_batch_everything(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start(["a", "b"], rid="batch", sampling_params={"n": 2})
    await engine.until(lambda: len(engine.requests) == 4)

    frontend.manager.abort_request("batch/0")
    engine.pump()
    assert set(engine.num_tokens) == {"batch/1/0", "batch/1/1"}
    frontend.manager.abort_request("batch")
    engine.pump()

    [answers] = await task
    assert {a["meta_info"]["finish_reason"]["type"] for a in answers} == {"abort"}


async def test_an_unknown_rid_is_harmless_and_nothing_is_sent(make_frontend):
    frontend = make_frontend()
    frontend.manager.abort_request("nobody")
    frontend.manager.abort_request("")
    frontend.engine.pump()

    assert not frontend.engine.aborts


async def test_abort_all_ends_every_call(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    tasks = [frontend.start("p") for _ in range(5)]
    await engine.until(lambda: len(engine.requests) == 5)

    frontend.manager.abort_request(abort_all=True)
    frontend.manager.abort_request(abort_all=True)
    engine.pump()

    for task in tasks:
        assert (await task)[0]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_an_abort_before_sending_ends_the_call_without_the_engine(make_frontend):
    frontend = make_frontend(ready=msgspec.structs.replace(READY, context_length=10_000, max_total_tokens=10_000))
    frontend.tokenizer.released.clear()
    task = frontend.start("x" * 5000, rid="r")  # tokenized in a thread
    await turns()

    frontend.manager.abort_request("r")
    frontend.tokenizer.released.set()

    [answer] = await task
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    frontend.engine.pump()
    assert not frontend.engine.requests


async def test_an_abort_that_meets_the_end_changes_nothing(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start("p", rid="r")
    await engine.until(lambda: engine.requests)
    engine.emit("r", "done", FinishReason("length", length=4))
    frontend.manager.abort_request("r")
    engine.pump()

    [answer] = await task
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("emitted", ["", "some"])
async def test_a_cancelled_call_aborts_all_its_samples(make_frontend, stream, emitted):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start("p", rid="r", stream=stream, sampling_params={"n": 3})
    await engine.until(lambda: len(engine.requests) == 3)
    if emitted:
        engine.emit("r/1", emitted)
        engine.emit("r/2", emitted, STOP)
        await turns()

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    engine.pump()

    assert [set(a.rids) for a in engine.aborts] == [{"r/0", "r/1"} if emitted else {"r/0", "r/1", "r/2"}]
    assert not engine.num_tokens


async def test_a_rid_whose_call_was_given_up_is_taken_until_its_last_output(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    engine.aborts_end = False
    task = frontend.start("p", rid="r")
    await engine.until(lambda: engine.requests)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    with pytest.raises(RequestError, match="in use"):
        await frontend.start("q", rid="r")
    engine.emit("r", finish=FinishReason("abort"))
    await turns()

    assert (await frontend.call("q", rid="r"))[0]["text"] == "q"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_is_gone_aborts_its_call(make_frontend, monkeypatch, stream):
    monkeypatch.setattr("headrace.frontend.tokenizer_manager.DISCONNECT_POLL_S", 0.0)
    frontend = make_frontend()
    engine = frontend.engine
    polls = []

    async def is_disconnected():
        polls.append(1)
        return len(polls) == 3

    outputs = frontend.manager.generate_request(request("p", rid="r", stream=stream), is_disconnected)
    with pytest.raises(RequestError, match="closed the connection"):
        await anext(outputs)

    engine.pump()
    assert [a.rids for a in engine.aborts] == [("r",)]


async def test_closing_a_generator_early_aborts_at_once(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    async with contextlib.aclosing(frontend.manager.generate_request(request("p", rid="r", stream=True))) as outputs:
        first = asyncio.create_task(anext(outputs))
        await engine.until(lambda: engine.requests)
        engine.emit("r", "x")
        await first
    engine.pump()

    assert [a.rids for a in engine.aborts] == [("r",)]
