"""What the scheduler gets of the prompts of a call: seeds, groups, lengths that fit the context, logprobs that are asked for once."""

import asyncio
import re

import msgspec
import pytest
from frontend_fakes import CONTEXT_LENGTH, READY, request, turns

from headrace.errors import ContextLengthError, RequestError
from headrace.messages.outputs import FinishReason, LogprobBlock
from headrace.messages.packing import pack_float32, pack_int32


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


async def test_requests_without_a_seed_differ_and_repeat_when_the_server_is_started_again(make_frontend):
    def seeds(engine):
        return [engine.requests[rid].task.params.seed for rid in engine.order]

    first, again = make_frontend(random_seed=5), make_frontend(random_seed=5)
    for frontend in (first, again):
        await frontend.call("a")
        await frontend.call("a")

    assert len(set(seeds(first.engine))) == 2
    assert seeds(first.engine) == seeds(again.engine)


async def test_more_samples_than_the_queue_can_ever_hold_are_a_bad_request(make_frontend):
    frontend = make_frontend(ready=msgspec.structs.replace(READY, max_running_requests=2), max_queued_requests=3)
    with pytest.raises(RequestError, match="has 6 samples"):
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


@pytest.mark.parametrize("length", [CONTEXT_LENGTH, CONTEXT_LENGTH + 5, 50 * CONTEXT_LENGTH + 70_000])
async def test_with_auto_truncate_a_prompt_and_its_limit_are_cut_to_the_context(make_frontend, length):
    frontend = make_frontend(allow_auto_truncate=True)
    for prompt in ("x" * length, {"input_ids": [5] * length}):
        given = {"text": prompt} if isinstance(prompt, str) else prompt
        [answer] = await frontend.call(**given, sampling_params={"max_new_tokens": 9999})
        assert answer["meta_info"]["prompt_tokens"] == CONTEXT_LENGTH - 1
        assert answer["meta_info"]["completion_tokens"] == 1


async def test_with_auto_truncate_what_fits_stays_as_it_is(make_frontend):
    frontend = make_frontend(allow_auto_truncate=True)
    await frontend.call("x" * 10, sampling_params={"max_new_tokens": CONTEXT_LENGTH - 10})
    await frontend.call("x" * 10, sampling_params={"max_new_tokens": CONTEXT_LENGTH - 9})
    limits = [frontend.engine.requests[rid].task.params.max_new_tokens for rid in frontend.engine.order]
    assert limits == [CONTEXT_LENGTH - 10] * 2
    with pytest.raises(RequestError, match="max_new_tokens"):
        await frontend.start("x" * 10, sampling_params={"max_new_tokens": -1})


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
