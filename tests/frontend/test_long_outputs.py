"""Outputs that take much memory, logprobs above all: refused before they are computed, held by shares, and shown in pieces."""

import asyncio
import json
from contextlib import aclosing

import pytest
from frontend_fakes import request, turns

from headrace.errors import RequestError
from headrace.frontend.native_answer import answer_pieces, whole_answer
from headrace.frontend.tenants import Caller
from headrace.messages.outputs import FinishReason, LogprobBlock
from headrace.messages.packing import pack_float32, pack_int32

MANY = {"return_logprob": True, "token_ids_logprob": list(range(100))}
EACH = 400
"""Bytes of each token, without its own logprob."""
RIDS = [*(f"@a{number}" for number in range(1, 8)), "@b1"]
STOP = FinishReason("stop", matched=256)


def sampled(**sampling):
    return {"sampling_params": sampling, **MANY}


def start(frontend, turn="@a", text="p", rid="r", **fields):
    async def run():
        caller = Caller(address=turn) if turn else Caller()
        updates = frontend.manager.generate_request(request(text, rid=rid, **fields), caller=caller)
        async with aclosing(updates):
            return [update async for update in updates]

    return asyncio.create_task(run())


async def asked(frontend, **fields):
    """The most tokens of each sample of a call that is admitted."""
    task = start(frontend, **fields)
    try:
        await frontend.engine.until(lambda: frontend.engine.requests or task.done())
        if task.done():
            await task
        return [sent.task.params.max_new_tokens for sent in frontend.engine.requests.values()]
    finally:
        task.cancel()
        await turns()


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        (sampled(max_new_tokens=20), 20),
        (sampled(max_new_tokens=4, n=5), 4),
        # A program has its own engine to itself.
        (sampled(max_new_tokens=60, n=5) | {"turn": ""}, 60),
        # Tokens and their own logprobs are not counted: batches of rollouts have millions of both.
        ({"sampling_params": {"max_new_tokens": 60, "n": 50}, "return_logprob": True}, 60),
        ({"sampling_params": {"max_new_tokens": 60, "n": 50}}, 60),
    ],
)
async def test_what_can_be_held_is_computed(make_frontend, fields, most):
    frontend = make_frontend(max_reply_bytes=20 * EACH)
    assert set(await asked(frontend, **fields)) == {most}


@pytest.mark.parametrize(
    "fields",
    [
        sampled(max_new_tokens=21),
        # Without a limit of its own it is not cut without a word.
        sampled(),
        sampled(max_new_tokens=5, n=5),
        {"sampling_params": {"max_new_tokens": 21}, "return_logprob": True, "top_logprobs_num": 50},
        {"sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0, "text": "p" * 40}
        | {"top_logprobs_num": 50},
        {"sampling_params": {"max_new_tokens": 50, "n": 25}, "return_hidden_states": True},
    ],
)
async def test_what_could_not_be_held_is_refused_before_it_is_computed(make_frontend, fields):
    frontend = make_frontend(max_reply_bytes=20 * EACH)
    with pytest.raises(RequestError, match=r"the limit is 8000 \(--max-reply-bytes\)") as refused:
        await start(frontend, **fields)
    assert refused.value.param == "max_new_tokens"
    assert not frontend.engine.requests
    assert frontend.is_clean


def block(num_tokens, picked=100):
    ids = pack_int32([120] * num_tokens)
    values = pack_float32([-0.5] * num_tokens)
    return LogprobBlock(ids, values, b"", b"", pack_float32([-0.25] * num_tokens * picked))


async def test_a_tenant_above_its_share_is_cut_off_and_no_other(make_frontend):
    """Together eight replies of the largest size are held: one tenant holds six, and then another finds room."""
    frontend = make_frontend(max_reply_bytes=40 * (EACH + 8))
    engine = frontend.engine

    each = sampled(max_new_tokens=40)
    tasks = {rid: start(frontend, rid[:2], rid=rid, **each) for rid in RIDS}
    await engine.until(lambda: len(engine.requests) == len(RIDS))
    for rid in RIDS:
        engine.emit(rid, "x", ids=[120] * 40, logprobs=block(40))
        await turns()
    engine.pump()
    assert [abort.rids for abort in engine.aborts] == [("@a7",)]

    for rid in [rid for rid in tasks if rid in engine.num_tokens]:
        engine.emit(rid, "", STOP)
    done = await asyncio.gather(*tasks.values())
    assert [len(updates[0].logprobs.output) for updates in done] == [40] * len(RIDS)
    # What has been answered is held no longer.
    again = start(frontend, rid="@a8", **each)
    await engine.until(lambda: "@a8" in engine.requests)
    engine.emit("@a8", "x", STOP, logprobs=block(40))
    await again
    assert len(engine.aborts) == 1


async def test_a_long_answer_in_pieces_is_the_same(make_frontend):
    frontend = make_frontend()
    prompt = LogprobBlock(
        pack_int32([98, 99]),
        pack_float32([-1, -2]),
        pack_int32([98, 97] * 2),
        pack_float32([-1] * 4),
        pack_float32([-9] * 2),
    )
    one = LogprobBlock(
        pack_int32([120] * 3),
        pack_float32([-0.5] * 3),
        pack_int32([5, 6] * 3),
        pack_float32([-3] * 6),
        pack_float32([-7] * 3),
    )
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [5]}
    asked = request("abc", rid="r", return_text_in_logprobs=True, return_hidden_states=True, **fields)

    async def collect():
        return [update async for update in frontend.manager.generate_request(asked)]

    task = asyncio.create_task(collect())
    await frontend.engine.until(lambda: frontend.engine.requests)
    frontend.engine.emit(
        "r", "x", ids=[120] * 3, prompt_logprobs=prompt, logprobs=one, hidden_states=pack_float32([1.0, 2.0] * 6)
    )
    frontend.engine.emit("r", "y", STOP, ids=[121] * 3, logprobs=one)
    updates = await task

    whole = whole_answer(updates, {"more": 1})
    assert json.loads(b"".join(answer_pieces(updates, {"more": 1}))) == json.loads(json.dumps(whole))
    [update] = updates
    for side in (update.logprobs.prompt, update.logprobs.output):
        parts = [*side.parts(most_bytes=1)]
        assert [len(part) for part in parts] == [1] * len(side)
        for kind in ("tokens", "top", "picked"):
            assert [row for part in parts for row in getattr(part, kind)] == getattr(side, kind)


async def test_blocks_that_do_not_fit_those_before_are_refused(make_frontend):
    frontend = make_frontend()
    task = frontend.start("abc", rid="r", return_logprob=True, top_logprobs_num=2)
    await frontend.engine.until(lambda: frontend.engine.requests)
    ids, value = pack_int32([120]), pack_float32([-0.5])
    frontend.engine.emit("r", "x", logprobs=LogprobBlock(ids, value, ids * 2, value * 2))
    frontend.engine.emit("r", "x", logprobs=LogprobBlock(ids, value, ids, value))
    with pytest.raises(Exception, match="internal error"):
        await task
