"""Outputs of the engine as they reach the samples: logprobs, hidden states, and outputs that make no sense or belong to nobody."""

import asyncio

import pytest
from frontend_fakes import EOS, turns

from headrace.errors import ExecutionError
from headrace.messages.control import Heartbeat
from headrace.messages.outputs import BatchStrOut, FinishReason, LogprobBlock, SampleStats, StrOut, TokenIDOut
from headrace.messages.packing import pack_float32, pack_int32
from headrace.metrics.export import render

STOP = FinishReason("stop", matched=EOS)
NAN = float("nan")


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

    assert (await frontend.manager.counters())["num_unknown_outputs"] == 1


async def test_frames_that_other_processes_dropped_are_counted(make_frontend):
    frontend = make_frontend()
    await frontend.manager.health()
    frontend.engine.outbox.send(Heartbeat("detokenizer", dropped_frames=3))
    await turns()

    assert (await frontend.manager.counters())["detokenizer_dropped_frames"] == 3


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


@pytest.mark.parametrize(
    ("asked", "start", "mean"),
    [
        ({}, 1, -1.5),
        ({"return_logprob": True}, 1, -1.5),
        ({"logprob_start_len": 1}, 2, -2.0),
        ({"normalized_logprob_start_len": 1, "stream": True}, 2, -2.0),
        ({"logprob_start_len": 2}, 3, None),
    ],
)
async def test_the_mean_of_a_prompts_logprobs_is_there_at_the_end_without_the_lists(make_frontend, asked, start, mean):
    frontend = make_frontend()
    engine = frontend.engine
    task = frontend.start("abc", rid="r", return_normalized_logprob=True, **asked)
    await engine.until(lambda: engine.requests)
    assert engine.requests["r"].task.logprobs.prompt_start == start
    block = LogprobBlock(pack_int32([98, 99][start - 1 :]), pack_float32([-1, -2][start - 1 :]))
    engine.emit("r", "x", prompt_logprobs=block, logprobs=LogprobBlock(pack_int32([120]), pack_float32([-0.5])))
    engine.emit("r", "x", FinishReason("length", length=2))

    answers = await task

    assert answers[-1]["meta_info"]["normalized_prompt_logprob"] == mean
    assert ("input_token_logprobs" in answers[-1]["meta_info"]) == ("return_logprob" in asked)


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
