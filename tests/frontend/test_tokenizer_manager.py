"""The life of a call: sent, answered, streamed, aborted, failed. The engine is a fake; the detokenizer is real."""

import asyncio
import gc
import random
import subprocess
import sys
from itertools import pairwise

import msgspec
import pytest
from frontend_fakes import EOS, READY, STATE, FakeEngine, request, turns

from headrace.errors import CapacityError, ExecutionError, LateError, NotFoundError, RequestError
from headrace.frontend.request_state import ReqState
from headrace.messages.control import Heartbeat, SchedulerStats, SourceGone
from headrace.messages.outputs import BatchTokenIDOut, FinishReason
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


async def test_nothing_of_a_call_waits_for_a_collection_of_cycles(make_frontend):
    frontend = make_frontend()
    gc.collect()
    gc.disable()
    try:
        await frontend.call(["hello", "you"], rid=["x", "y"], sampling_params={"n": 2})
        left = [each for each in gc.get_objects() if isinstance(each, ReqState)]
    finally:
        gc.enable()

    assert left == []


async def test_token_ids_become_text_here_if_there_is_no_detokenizer_process(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    frontend.manager.detokenize_with(engine.detokenizer)
    engine.send = lambda *rows: engine.outbox.send(BatchTokenIDOut(rows, engine.source))

    [answer] = await frontend.call("hello é", sampling_params={"stop": ["x"]})

    assert answer["text"] == "hello é"
    assert engine.detokenizer.num_samples == 0


async def test_what_a_dead_scheduler_still_says_is_not_decoded_here(make_frontend):
    frontend = make_frontend()
    engine = frontend.engine
    frontend.manager.detokenize_with(engine.detokenizer)
    task = frontend.start("ab", rid="r")
    await engine.until(lambda: engine.requests)
    engine.outbox.send(BatchTokenIDOut((engine.row("r", "a"),), 0))
    engine.outbox.send(SourceGone(0))
    engine.outbox.send(BatchTokenIDOut((engine.row("r", "x"),), 0))
    engine.num_tokens["r"] = -1  # the next scheduler begins with the options again
    engine.outbox.send(BatchTokenIDOut((engine.row("r", "b", STOP),), 1))

    [answer] = await task

    assert answer["output_ids"] == list(b"ab")


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


async def test_one_prompt_with_several_samples_counts_its_prompt_once(make_frontend):
    frontend = make_frontend()

    [answers] = await frontend.call("abc", sampling_params={"n": 4})

    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [3] * 4
    assert b'headrace:prompt_tokens_total{model_name="fake"} 3.0' in render(frontend.manager.metrics)


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
    assert "receiving engine messages failed" in caplog.text


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


# -- logprobs and hidden states


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


# -- control


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


def test_the_front_end_does_not_import_torch_or_transformers():
    code = (
        "import sys, headrace.frontend.tokenizer_manager, headrace.text.detokenizer_manager, headrace.api.engine\n"
        "import headrace.api.runtime, headrace.processes.recovery, headrace.metrics.export\n"
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
