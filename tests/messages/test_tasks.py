"""What scheduling asks of a task is all that it needs to know of it."""

import msgspec
import pytest

from headrace.errors import RequestError
from headrace.messages.requests import LogprobSpec, PromptContent, SampleTask, TokenizedGenerateReqInput
from headrace.sampling.params import ResolvedSamplingParams
from headrace.scheduler.request import Req

EOS = frozenset({1, 2})


def task(logprobs: LogprobSpec | None = None, **params: object) -> SampleTask:
    return SampleTask(ResolvedSamplingParams(**{"max_new_tokens": 4, "seed": 0, **params}), logprobs=logprobs)


@pytest.mark.parametrize(("ignore_eos", "want"), [(False, {1, 2, 7}), (True, {7})])
def test_its_own_stop_tokens_end_a_sample_and_the_models_unless_it_ignores_them(ignore_eos, want):
    sampled = task(stop_token_ids=(7,), ignore_eos=ignore_eos)

    assert sampled.end_token_ids(EOS) == want
    assert sampled.ignores_eos == ignore_eos


def test_only_a_stop_string_or_pattern_needs_the_text():
    assert task(stop_token_ids=(7,)).stop_text is None
    assert task(stop=("x",)).stop_text.stop == ("x",)
    assert task(stop_regex=("x+",)).stop_text.stop_regex == ("x+",)


@pytest.mark.parametrize("start", [1, 5, 100])
def test_delivered_prompt_logprobs_are_not_asked_for_again(start):
    logprobs = LogprobSpec(start, 2, (3,))
    left = task(logprobs).with_prompt_logprobs_from(9)

    assert left == task(LogprobSpec(9, 2, (3,)))
    assert task().with_prompt_logprobs_from(9) == task()


@pytest.mark.parametrize("logprobs", [None, LogprobSpec(3)])
def test_a_request_knows_which_prompt_logprobs_are_left(logprobs):
    asked = TokenizedGenerateReqInput("r", PromptContent(bytes(4 * 6)), task(logprobs))
    req = Req.from_input(asked, 0.0, 0, EOS, 1)
    hidden = Req.from_input(
        msgspec.structs.replace(asked, task=msgspec.structs.replace(asked.task, return_hidden_states=True)),
        0.0,
        0,
        EOS,
        1,
    )

    assert req.prompt_logprob_start == (6 if logprobs is None else 3)
    assert req.match_limit == (5 if logprobs is None else 2)
    assert hidden.match_limit == 0


def test_a_sample_that_may_take_no_token_is_refused():
    task(allowed_token_ids=(1, 2)).check(EOS)
    task(allowed_token_ids=(1, 2), min_new_tokens=1, ignore_eos=True).check(EOS)
    with pytest.raises(RequestError, match="forbid every one"):
        task(allowed_token_ids=(1, 2), min_new_tokens=1).check(EOS)
    with pytest.raises(RequestError, match="forbid every one"):
        task(allowed_token_ids=(3,), bad_words=((3,),)).check(EOS)
