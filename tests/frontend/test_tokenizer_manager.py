"""The life of a call: sent, answered, streamed, aborted, failed. The engine is a fake; the detokenizer is real."""

import asyncio
import contextlib
import random
import re
import subprocess
import sys
from itertools import pairwise

import msgspec
import pytest
from frontend_fakes import CONTEXT_LENGTH, EOS, READY, STATE, FakeEngine, request, turns

from headrace.errors import CapacityError, ContextLengthError, ExecutionError, LateError, NotFoundError, RequestError
from headrace.messages.control import FaultReq, Heartbeat, SchedulerStats
from headrace.messages.outputs import BatchStrOut, FinishReason, LogprobBlock, SampleStats, StrOut, TokenIDOut
from headrace.messages.packing import pack_float32, pack_int32
from headrace.metrics.export import render

STOP = FinishReason("stop", matched=EOS)
NAN = float("nan")


async def test_one_prompt_gives_one_dict(make_frontend):
    frontend = make_frontend()

    [answer] = await frontend.call("hello", rid="r1")

    assert answer["text"] == "hello"
    assert answer["output_ids"] == list(b"hello")
    assert "index" not in answer
    meta = answer["meta_info"]
    assert meta["id"] == "r1"
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 5, 0)
    assert meta["weight_version"] == "default"
    assert meta["queue_time"] == 0.25
    assert 0 <= meta["ttft"] <= meta["e2e_latency"]


async def test_a_list_gives_a_list_in_order_whatever_ends_first(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start(["a", "b", "c"], rid=["x", "y", "z"])
    await engine.until(lambda: len(engine.requests) == 3)
    for rid in ("z", "x", "y"):
        engine.emit(rid, rid, STOP)

    [answers] = await task

    assert [a["text"] for a in answers] == ["", "", ""]  # the last id is the stop token
    assert [a["meta_info"]["id"] for a in answers] == ["x", "y", "z"]
    assert [a["index"] for a in answers] == [0, 1, 2]


async def test_a_list_of_one_gives_a_list(make_frontend):
    [answers] = await make_frontend().call(["solo"])

    assert [a["text"] for a in answers] == ["solo"]


async def test_a_stream_is_cumulative_and_its_last_chunk_has_everything(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start("p", stream=True, rid="r")
    await engine.until(lambda: engine.requests)
    for text in ("a", "b"):
        engine.emit("r", text)
        await turns()
    engine.emit("r", "c", FinishReason("length", length=3))

    chunks = await task

    assert [c["text"] for c in chunks] == ["a", "ab", "abc"]
    assert [c["output_ids"] for c in chunks] == [[97], [97, 98], [97, 98, 99]]
    assert [c["meta_info"]["finish_reason"] for c in chunks] == [None, None, {"type": "length", "length": 3}]


async def test_incremental_streams_give_deltas_to_the_end(make_frontend):
    frontend = make_frontend(incremental_streaming_output=True)
    engine = frontend.engine
    task = frontend.start("p", stream=True, rid="r")
    await engine.until(lambda: engine.requests)
    for text in ("a", "bc"):
        engine.emit("r", text)
        await turns()
    engine.emit("r", "d", FinishReason("length", length=4))

    chunks = await task

    assert [c["text"] for c in chunks] == ["a", "bc", "d"]
    assert [c["output_ids"] for c in chunks] == [[97], [98, 99], [100]]


async def test_a_reader_that_is_slow_gets_one_chunk_for_all_it_missed(make_frontend):
    frontend = make_frontend(incremental_streaming_output=True)
    engine = frontend.engine
    outputs = frontend.manager.generate_request(request("p", stream=True, rid="r"))
    first = asyncio.create_task(anext(outputs))
    await engine.until(lambda: engine.requests)
    engine.emit("r", "0")
    assert (await first).text == "0"
    for _ in range(1000):
        engine.emit("r", "x")
    await turns()
    engine.emit("r", "y", FinishReason("length", length=1002))

    rest = [update.text async for update in outputs]

    assert "".join(rest) == "x" * 1000 + "y"
    assert len(rest) <= 2


async def test_batch_streams_yield_whichever_is_first_with_its_index(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start(["a", "b"], stream=True, rid=["x", "y"])
    await engine.until(lambda: len(engine.requests) == 2)
    for rid, text, finish in (("y", "1", None), ("x", "2", STOP), ("y", "3", FinishReason("length", length=2))):
        engine.emit(rid, text, finish)
        await turns()

    chunks = await task

    assert [(c["index"], c["text"]) for c in chunks] == [(1, "1"), (0, ""), (1, "13")]
    assert [c["meta_info"]["finish_reason"] is not None for c in chunks] == [False, True, True]


async def test_samples_are_prompt_major_share_a_group_and_have_seeds_of_their_own(make_frontend):
    frontend = make_frontend()

    [answers] = await frontend.call(["ab", "cd"], rid=["p", "q"], sampling_params={"n": 3, "seed": 7})

    assert [a["index"] for a in answers] == [0, 1, 2, 3, 4, 5]
    assert [a["text"] for a in answers] == ["ab"] * 3 + ["cd"] * 3
    assert [a["meta_info"]["id"] for a in answers] == ["p"] * 3 + ["q"] * 3
    sent = [frontend.engine.requests[rid] for rid in frontend.engine.order]
    assert [r.task.params.seed for r in sent] == [7, 8, 9] * 2
    assert [r.group for r in sent] == ["p"] * 3 + ["q"] * 3
    assert len({r.rid for r in sent}) == 6


async def test_one_prompt_with_several_samples_counts_its_prompt_once(make_frontend):
    frontend = make_frontend()

    [answers] = await frontend.call("abc", sampling_params={"n": 4})

    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [3] * 4
    assert b'headrace:prompt_tokens_total{model_name="fake"} 3.0' in render(frontend.manager.metrics)


async def test_requests_without_a_seed_differ_and_repeat_when_the_server_is_started_again(make_frontend):
    def seeds(engine):
        return [engine.requests[rid].task.params.seed for rid in engine.order]

    first, again = make_frontend(random_seed=5), make_frontend(random_seed=5)
    for frontend in (first, again):
        await frontend.call("a")
        await frontend.call("a")

    assert len(set(seeds(first.engine))) == 2
    assert seeds(first.engine) == seeds(again.engine)


async def test_a_rid_in_use_is_refused_and_may_be_used_again_afterwards(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start("a", rid="r")
    await engine.until(lambda: engine.requests)

    with pytest.raises(RequestError, match=r"Duplicate request ID 'r': .* in use"):
        await frontend.start("b", rid="r")
    with pytest.raises(RequestError, match="in use"):
        await frontend.start(["b", "c"], rid=["new", "r"])
    with pytest.raises(RequestError, match="in use"):
        await frontend.start(["b", "c"], rid="r")
    engine.emit("r", "x", STOP)
    await task

    [answer] = await frontend.call("c", rid="r")
    assert answer["text"] == "c"


async def test_a_rid_is_taken_before_its_prompt_is_tokenized(make_frontend):
    frontend = make_frontend()
    frontend.tokenizer.released.clear()
    first = frontend.start("x" * 5000, rid="r")  # tokenized in a thread
    await turns()

    with pytest.raises(RequestError, match="in use"):
        await frontend.start("b", rid="r")
    frontend.tokenizer.released.set()
    with pytest.raises(RequestError, match="maximum context length"):
        await first


async def test_the_same_rid_twice_in_a_batch_is_refused(make_frontend):
    with pytest.raises(RequestError, match="twice"):
        await make_frontend().start(["a", "b"], rid=["r", "r"])


async def test_the_name_of_a_batch_is_free_when_its_last_sample_has_ended(make_frontend):
    frontend = make_frontend()
    await frontend.call(["a", "b"], rid="batch", sampling_params={"n": 2})

    [answers] = await frontend.call(["c"], rid="batch")

    assert answers[0]["text"] == "c"


async def test_clean_up_of_an_old_call_leaves_the_new_owner_of_its_rid_alone(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    old = frontend.manager.generate_request(request("a", rid="r", stream=True))
    first = asyncio.create_task(anext(old))
    await engine.until(lambda: engine.requests)
    engine.emit("r", "x", FinishReason("length", length=1))
    await first
    task = frontend.start("b", rid="r")
    await engine.until(lambda: "r" in engine.num_tokens)

    await old.aclose()  # its waiter leaves only now

    engine.pump()
    assert not engine.aborts
    engine.emit("r", "new", FinishReason("length", length=3))
    assert (await task)[0]["text"] == "new"


# -- aborts


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


# -- failures


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "status,kind",
    [(400, RequestError), (404, NotFoundError), (503, CapacityError), (429, CapacityError), (500, ExecutionError)],
)
async def test_a_failure_before_the_first_token_is_raised(make_frontend, stream, status, kind):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start("p", rid="r", stream=stream)
    await engine.until(lambda: engine.requests)
    engine.emit("r", finish=FinishReason("abort", message="no", status_code=status))

    with pytest.raises(kind, match="no") as caught:
        await task
    assert caught.value.status_code == status


async def test_a_failure_after_the_first_token_is_the_finish_reason_of_a_stream(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start("p", rid="r", stream=True)
    await engine.until(lambda: engine.requests)
    engine.emit("r", "a")
    await turns()
    engine.emit("r", finish=FinishReason("abort", message="no", status_code=500))

    chunks = await task

    assert chunks[-1]["text"] == "a"
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "abort", "message": "no", "status_code": 500}


@pytest.mark.parametrize("stream", [False, True])
async def test_one_bad_item_does_not_fail_the_others(make_frontend, stream):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start(["a", "b"], rid=["x", "y"], stream=stream)
    await engine.until(lambda: len(engine.requests) == 2)
    engine.emit("x", finish=FinishReason("abort", message="no", status_code=500))
    engine.emit("y", "fine", FinishReason("length", length=4))

    answers = await task
    answers = answers if stream else answers[0]

    assert answers[0]["meta_info"]["finish_reason"]["status_code"] == 500
    assert answers[1]["text"] == "fine"


async def test_a_list_with_nothing_but_failures_is_an_error(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start("a", rid="r", sampling_params={"n": 2})
    await engine.until(lambda: len(engine.requests) == 2)
    for rid in ("r/0", "r/1"):
        engine.emit(rid, finish=FinishReason("abort", message="never fits", status_code=400))

    with pytest.raises(RequestError, match="never fits"):
        await task


async def test_the_end_of_a_child_reaches_every_waiter(make_frontend):
    frontend = make_frontend()
    engine, manager = frontend.engine, frontend.manager
    tasks = [frontend.start("p"), frontend.start("p", stream=True), frontend.start(["a", "b"], rid="batch")]
    engine.answers = False
    tasks += [asyncio.create_task(manager.control.flush_cache()), asyncio.create_task(manager.control.internal_state())]
    given_up = frontend.start("p", rid="given up")
    await engine.until(lambda: len(engine.requests) == 5)
    engine.emit(engine.order[1], "partial")
    await turns()
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)

    await asyncio.to_thread(manager.fail_all, "the scheduler process has ended")
    manager.fail_all("again")

    for task in tasks:
        with pytest.raises(ExecutionError, match="the scheduler process has ended"):
            await task
    with pytest.raises(ExecutionError, match="scheduler"):
        await frontend.start("p")
    assert not await manager.health()
    assert not await manager.health(generate=True)
    assert frontend.is_clean


async def test_a_loop_that_breaks_answers_every_waiter(make_frontend, caplog):
    frontend = make_frontend()
    broken = []
    frontend.manager.on_broken = lambda: broken.append(frontend.manager.engine_loop.failure)
    task = frontend.start("p")
    await frontend.engine.until(lambda: frontend.engine.requests)
    frontend.engine.outbox.send(Heartbeat(["not", "hashable"]))

    with pytest.raises(ExecutionError, match="internal error"):
        await task
    assert not await frontend.manager.health()
    assert broken == ["internal error"]
    assert "the loop that takes outputs failed" in caplog.text


async def test_a_row_that_cannot_be_taken_ends_its_sample_alone(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    bad, good = frontend.start("p", rid="bad"), frontend.start("p", rid="good")
    await engine.until(lambda: len(engine.requests) == 2)
    rows = StrOut("x", TokenIDOut("bad", b"123", 1)), StrOut("y", TokenIDOut("good", pack_int32([121]), 1, STOP))
    engine.outbox.send(BatchStrOut(rows))

    with pytest.raises(ExecutionError, match="internal error"):
        await bad
    assert (await good)[0]["text"] == "y"
    engine.pump()
    assert [a.rids for a in engine.aborts] == [("bad",)]


async def test_outputs_of_unknown_rids_are_counted_and_dropped(make_frontend):
    frontend = make_frontend()
    frontend.manager.start()
    frontend.engine.outbox.send(BatchStrOut((StrOut("x", TokenIDOut("nobody", b"", 0)),)))
    await turns()

    assert frontend.manager.counters()["num_unknown_outputs"] == 1


async def test_frames_that_other_processes_dropped_are_counted(make_frontend):
    frontend = make_frontend()
    await frontend.manager.health()
    frontend.engine.outbox.send(Heartbeat("detokenizer", dropped_frames=3))
    await turns()

    assert frontend.manager.counters()["detokenizer_dropped_frames"] == 3


# -- limits and checks


async def test_a_full_queue_answers_with_retry_after_until_there_is_room(make_frontend):
    # One that fills the running slot, one that waits.
    frontend = make_frontend(ready=msgspec.structs.replace(READY, max_running_requests=1), max_queued_requests=1)
    engine = frontend.engine
    tasks = [frontend.start("p", rid=rid) for rid in ("a", "b")]
    await engine.until(lambda: len(engine.requests) == 2)

    with pytest.raises(CapacityError, match="queue is full") as caught:
        await frontend.start("p", rid="c")
    assert (caught.value.status_code, caught.value.retry_after_s > 0) == (503, True)

    engine.emit("a", "x", STOP)
    await turns()
    third = frontend.start("p", rid="c")
    await engine.until(lambda: "c" in engine.requests)
    for rid in ("b", "c"):
        engine.emit(rid, "y", STOP)
    await asyncio.gather(*tasks, third)


async def test_more_samples_than_the_queue_can_ever_hold_are_a_bad_request(make_frontend):
    frontend = make_frontend(ready=msgspec.structs.replace(READY, max_running_requests=2), max_queued_requests=3)
    with pytest.raises(RequestError, match="asks for 6 samples"):
        await frontend.start(["a", "b", "c"], sampling_params={"n": 2})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "length,accepted", [(CONTEXT_LENGTH - 1, True), (CONTEXT_LENGTH, False), (CONTEXT_LENGTH + 1, False)]
)
async def test_a_prompt_must_leave_room_in_the_context(make_frontend, stream, length, accepted):
    frontend = make_frontend()
    if accepted:
        answers = await frontend.call("x" * length, stream=stream)
        assert answers[-1]["meta_info"]["completion_tokens"] == 1
        return
    with pytest.raises(ContextLengthError, match=rf"maximum context length is {CONTEXT_LENGTH} tokens\..*\b{length}\b"):
        await frontend.start("x" * length, stream=stream)


async def test_a_prompt_that_fills_the_context_may_ask_for_no_tokens(make_frontend):
    frontend = make_frontend()
    [answer] = await frontend.call("x" * CONTEXT_LENGTH, sampling_params={"max_new_tokens": 0})

    assert answer["output_ids"] == []


async def test_a_long_prompt_within_a_batch_refuses_the_batch_before_anything_is_sent(make_frontend):
    frontend = make_frontend()

    with pytest.raises(RequestError, match=r"prompt 1: This model's maximum .* resulted in 70 tokens"):
        await frontend.start(["fine", "x" * 70, "fine"], stream=True)

    frontend.engine.pump()
    assert not frontend.engine.requests


async def test_prompt_and_output_must_fit_the_context_together(make_frontend):
    frontend = make_frontend()
    words = (
        "This model's maximum context length is 64 tokens. However, you requested 65 tokens (4 in the messages, 61 in the completion). "
        "Please reduce the length of the messages or completion."
    )
    with pytest.raises(ContextLengthError, match=re.escape(words)) as caught:
        await frontend.start("four", sampling_params={"max_new_tokens": 61})
    assert (caught.value.param, caught.value.code) == ("max_new_tokens", "context_length_exceeded")

    [answer] = await frontend.call("four", sampling_params={"max_new_tokens": 60})
    assert answer["text"] == "four"


async def test_outputs_default_to_128_tokens_or_what_the_caller_says_or_the_room(make_frontend):
    frontend = make_frontend(ready=msgspec.structs.replace(READY, context_length=1000))
    await frontend.call("p", rid="a")
    echo = asyncio.create_task(frontend.engine.echo())
    async for _ in frontend.manager.generate_request(request("p", rid="b"), default_max_new_tokens=10**9):
        pass
    echo.cancel()
    await asyncio.gather(echo, return_exceptions=True)

    asked = [frontend.engine.requests[rid].task.params.max_new_tokens for rid in ("a", "b")]
    assert asked == [128, 999]


# -- logprobs and hidden states


async def test_logprobs_are_lists_of_value_id_and_text(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start(
        "abc",
        rid="r",
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[5],
        return_text_in_logprobs=True,
    )
    await engine.until(lambda: engine.requests)
    assert engine.requests["r"].task.logprobs.prompt_start == 1
    prompt = LogprobBlock(
        pack_int32([98, 99]),
        pack_float32([-1, -2]),
        pack_int32([98, 97, 99, 97]),
        pack_float32([-1, -3, -2, -4]),
        pack_float32([-9, -8]),
    )
    one = LogprobBlock(
        pack_int32([120]), pack_float32([-0.5]), pack_int32([120, 97]), pack_float32([-0.5, NAN]), pack_float32([-7])
    )
    engine.emit("r", "x", prompt_logprobs=prompt, logprobs=one)
    engine.emit("r", "x", FinishReason("length", length=2), logprobs=one)

    [answer] = await task

    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == [(None, 97, "a"), (-1.0, 98, "b"), (-2.0, 99, "c")]
    assert meta["input_top_logprobs"] == [None, [(-1.0, 98, "b"), (-3.0, 97, "a")], [(-2.0, 99, "c"), (-4.0, 97, "a")]]
    assert meta["input_token_ids_logprobs"] == [None, [(-9.0, 5, "\x05")], [(-8.0, 5, "\x05")]]
    assert meta["output_token_logprobs"] == [(-0.5, 120, "x")] * 2
    assert meta["output_top_logprobs"] == [[(-0.5, 120, "x"), (None, 97, "a")]] * 2
    assert meta["output_token_ids_logprobs"] == [[(-7.0, 5, "\x05")]] * 2


async def test_logprobs_of_outputs_only_have_no_texts_and_no_input_entries_unless_asked(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start("abc", rid="r", return_logprob=True)
    await engine.until(lambda: engine.requests)
    assert engine.requests["r"].task.logprobs.prompt_start == 4
    engine.emit(
        "r", "x", FinishReason("length", length=1), logprobs=LogprobBlock(pack_int32([120]), pack_float32([-0.5]))
    )

    meta = (await task)[0]["meta_info"]

    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"] == [(-0.5, 120, None)]
    assert "output_top_logprobs" not in meta


PROMPT_BLOCK = LogprobBlock(pack_int32([98, 99]), pack_float32([-1, -2]))
ONE_BLOCK = LogprobBlock(pack_int32([120]), pack_float32([-0.5]))
PROMPT_LISTS = [(None, 97, None), (-1.0, 98, None), (-2.0, 99, None)]


@pytest.mark.parametrize("stream", [False, True])
async def test_samples_of_a_prompt_share_the_logprobs_that_the_first_one_asks_for(make_frontend, stream):
    frontend = make_frontend()
    engine = frontend.engine
    fields = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"n": 2}}
    task = frontend.start("abc", rid="r", stream=stream, **fields)
    await engine.until(lambda: len(engine.requests) == 2)
    assert [engine.requests[rid].task.logprobs.prompt_start for rid in ("r/0", "r/1")] == [1, 4]
    # The prompt was cached, so the second sample is done first.
    engine.emit("r/1", "x", FinishReason("length", length=1), logprobs=ONE_BLOCK)
    await turns()
    assert not task.answers
    engine.emit("r/0", "x", FinishReason("length", length=1), prompt_logprobs=PROMPT_BLOCK, logprobs=ONE_BLOCK)

    answers = await task

    answers = answers if stream else answers[0]
    assert sorted(answer["index"] for answer in answers) == [0, 1]
    for answer in answers:
        assert answer["meta_info"]["input_token_logprobs"] == PROMPT_LISTS
        assert answer["meta_info"]["output_token_logprobs"] == [(-0.5, 120, None)]


@pytest.mark.parametrize(
    "options,more", [({"disable_radix_cache": True}, {}), ({}, {"return_hidden_states": True})], ids=["cache", "states"]
)
async def test_each_sample_asks_for_itself_where_prompts_are_not_shared(make_frontend, options, more):
    frontend = make_frontend(**options)
    engine = frontend.engine
    fields = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"n": 2}}
    task = frontend.start("abc", rid="r", **fields, **more)
    await engine.until(lambda: len(engine.requests) == 2)
    assert [engine.requests[rid].task.logprobs.prompt_start for rid in ("r/0", "r/1")] == [1, 1]
    for rid in ("r/0", "r/1"):
        engine.emit(rid, finish=FinishReason("length"), prompt_logprobs=PROMPT_BLOCK)
    for answer in (await task)[0]:
        assert answer["meta_info"]["input_token_logprobs"] == PROMPT_LISTS


# -- a deadline

LATE = FinishReason("abort", message="too late", status_code=408)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_late_before_its_first_token_is_an_error(make_frontend, stream):
    frontend = make_frontend()
    task = frontend.start("p", rid="r", stream=stream)
    await frontend.engine.until(lambda: frontend.engine.requests)
    frontend.engine.emit("r", finish=LATE)

    with pytest.raises(LateError, match="too late") as caught:
        await task
    assert caught.value.status_code == 408


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_late_after_it_began_ends_with_what_there_is(make_frontend, stream):
    frontend = make_frontend()
    task = frontend.start("p", rid="r", stream=stream)
    await frontend.engine.until(lambda: frontend.engine.requests)
    frontend.engine.emit("r", "ab")
    frontend.engine.emit("r", "c", LATE)

    last = (await task)[-1]

    assert last["text"] == "abc"
    # Status 0: no error frame follows.
    assert last["meta_info"]["finish_reason"] == {"type": "abort", "message": "too late", "status_code": 0}


async def test_hidden_states_come_as_rows(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start("ab", rid="r", return_hidden_states=True)
    await engine.until(lambda: engine.requests)
    engine.emit("r", "x", hidden_states=pack_float32([1, 2, 3, 4]))
    engine.emit("r", "y", FinishReason("length", length=2), hidden_states=pack_float32([5, 6]))

    assert (await task)[0]["meta_info"]["hidden_states"] == [[1, 2], [3, 4], [5, 6]]


async def test_cached_tokens_never_exceed_the_prompt(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start("ab", rid="r")
    await engine.until(lambda: engine.requests)
    engine.emit("r", "x", STOP, stats=SampleStats(2, 5, num_retractions=2))

    meta = (await task)[0]["meta_info"]
    assert (meta["cached_tokens"], meta["num_retractions"]) == (2, 2)


# -- control


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
    monkeypatch.setattr("headrace.frontend.control.CONTROL_TIMEOUT_S", 0.01)
    monkeypatch.setattr("headrace.frontend.health.HEALTH_TIMEOUT_S", 0.01)
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


async def test_draining_refuses_newcomers_and_lets_the_others_finish(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start("p", rid="r")
    await engine.until(lambda: engine.requests)
    drained = asyncio.create_task(frontend.manager.drain(20.0))
    await turns()

    with pytest.raises(CapacityError, match="stopping"):
        await frontend.start("q")
    assert not drained.done()
    engine.emit("r", "x", FinishReason("length", length=1))

    assert (await task)[0]["text"] == "x"
    assert await drained


async def test_a_drain_that_takes_too_long_aborts_the_rest(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start("p", rid="r")
    await engine.until(lambda: engine.requests)
    drained = asyncio.create_task(frontend.manager.drain(0.0))
    await engine.until(lambda: engine.aborts)

    assert (await task)[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert not await drained


# -- metrics, logging, imports


async def test_metrics_follow_the_requests_and_the_scheduler(make_frontend):
    frontend = make_frontend(served_model_name="tiny")
    await frontend.call("abcd")
    frontend.engine.outbox.send(SchedulerStats(STATE))
    frontend.engine.outbox.send(SchedulerStats(STATE))
    await turns()

    text = render(frontend.manager.metrics).decode()

    for line in (
        "prompt_tokens_total{L} 4.0",
        "generation_tokens_total{L} 4.0",
        'requests_total{finish_reason="length",L} 1.0',
        "time_to_first_token_seconds_count{L} 1.0",
        "inter_token_latency_seconds_count{L} 3.0",
        "e2e_request_latency_seconds_count{L} 1.0",
        "queue_time_seconds_sum{L} 0.25",
        "retracted_requests_total{L} 3.0",
        "prefix_query_tokens_total{L} 20.0",
        'gen_throughput{dp_rank="0",L} 12.5',
        'kv_available_tokens{dp_rank="0",L} 4000.0',
        'kv_evictable_tokens{dp_rank="0",L} 90.0',
        'cache_hit_rate{dp_rank="0",L} 0.25',
    ):
        assert "headrace:" + line.replace("L", 'model_name="tiny"', 1) in text, line


async def test_a_prompt_counts_when_it_has_been_computed(make_frontend):
    frontend = make_frontend(served_model_name="tiny")
    engine = frontend.engine
    queued = frontend.start("abcd", rid="queued")
    running = frontend.start("ab", rid="running")
    scored = frontend.start("a", rid="scored", sampling_params={"max_new_tokens": 0})
    await engine.until(lambda: len(engine.requests) == 3)
    engine.emit("running", "x")
    engine.emit("scored", finish=FinishReason("length"))
    frontend.manager.abort_request("queued")
    frontend.manager.abort_request("running")
    engine.pump()
    await asyncio.gather(queued, running, scored)

    assert 'headrace:prompt_tokens_total{model_name="tiny"} 3.0' in render(frontend.manager.metrics).decode()


def test_the_front_end_does_not_import_torch_or_transformers():
    code = (
        "import sys, headrace.frontend.tokenizer_manager, headrace.text.detokenizer_manager, headrace.api.engine\n"
        "import headrace.api.runtime, headrace.processes.supervisor, headrace.metrics.export\n"
        "bad = {'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""


async def test_random_ends_aborts_and_cancellations_leave_nothing_behind(make_frontend):
    rng = random.Random(7)
    frontend = make_frontend()
    engine: FakeEngine = frontend.engine
    tasks = []
    for step in range(400):
        match rng.randrange(6):
            case 0 | 1:
                n = rng.choice([1, 1, 3])
                prompts = rng.choice(["p", ["p", "q"]])
                tasks.append(
                    frontend.start(prompts, rid=f"r{step}", stream=rng.random() < 0.5, sampling_params={"n": n})
                )
            case 2 if tasks:
                rng.choice(tasks).cancel()
            case 3 if engine.num_tokens:
                frontend.manager.abort_request(rng.choice(list(engine.num_tokens)))
            case 4 if engine.num_tokens:
                finish = rng.choice([STOP, FinishReason("abort", message="x", status_code=500)])
                engine.emit(rng.choice(list(engine.num_tokens)), finish=finish)
            case 5 if engine.num_tokens:
                engine.emit(rng.choice(list(engine.num_tokens)), "abc")
        await turns(rng.randrange(4))
        if rng.random() < 0.5:
            engine.pump()
    await turns()
    frontend.manager.abort_request(abort_all=True)
    engine.pump()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task.cancelled() or task.exception() is not None:
            continue
        answers = task.answers if task.answers and isinstance(task.answers[0], dict) else task.answers[0]
        ended = [a.get("index", 0) for a in answers if a["meta_info"]["finish_reason"]]
        assert len(ended) == len(set(ended))
    engine.pump()
    await turns()
    assert frontend.is_clean


async def test_indices_are_monotone_within_a_stream(make_frontend):
    chunks = await make_frontend().call(["abc", "defg"], stream=True, sampling_params={"n": 2})

    for index in range(4):
        texts = [c["text"] for c in chunks if c["index"] == index]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
        ends = [c for c in chunks if c["index"] == index and c["meta_info"]["finish_reason"]]
        assert len(ends) == 1


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
