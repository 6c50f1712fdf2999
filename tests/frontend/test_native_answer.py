"""The native answer: what is new, or all there is, of each sample."""

import pytest

from headrace.frontend.native_answer import NativeStream, native_answer, whole_answer
from headrace.frontend.sample_update import LogprobLists, SampleLogprobs, SampleTimes, SampleUpdate, SampleUsage
from headrace.messages.outputs import FinishReason, LogprobBlock
from headrace.messages.packing import pack_float32, pack_int32

LENGTH = FinishReason("length", length=4)


def logprobs(ids, prompt_ids=()):
    """With one alternative and no ids asked for."""
    made = []
    for tokens, value, top in ((prompt_ids, -2.0, -1.0), (ids, -0.5, -0.25)):
        lists = LogprobLists()
        packed = pack_int32(tokens)
        lists.extend(
            LogprobBlock(packed, pack_float32([value] * len(tokens)), packed, pack_float32([top] * len(tokens))), ()
        )
        made.append(lists.since(0, True, (), None))
    return SampleLogprobs(*made)


def update(text, ids, finish=None, *, total=0, index=0, is_listed=False, logprobs=None):
    usage, times = SampleUsage(3, total or len(ids), 1), SampleTimes(0.5, 1.0)
    return SampleUpdate("r", index, is_listed, text, ids, finish, usage, times, "default", 0, logprobs)


def test_an_incremental_stream_says_what_is_new():
    stream = NativeStream(incremental=True)
    updates = [update("ab", [1, 2]), update("c", [3], LENGTH)]

    assert [stream.answer(each)["text"] for each in updates] == ["ab", "c"]


def test_a_stream_that_is_not_incremental_says_all_there_is_of_each_sample():
    stream = NativeStream(incremental=False)
    updates = [
        update("ab", [1, 2], index=0, is_listed=True),
        update("x", [7], index=1, is_listed=True),
        update("c", [3], LENGTH, index=0, is_listed=True),
        update("y", [8], LENGTH, index=1, is_listed=True),
    ]
    answers = [stream.answer(each) for each in updates]

    assert [(a["index"], a["text"], a["output_ids"]) for a in answers] == [
        (0, "ab", [1, 2]),
        (1, "x", [7]),
        (0, "abc", [1, 2, 3]),
        (1, "xy", [7, 8]),
    ]


def test_answers_that_were_given_do_not_grow():
    stream = NativeStream(incremental=False)
    first = stream.answer(update("a", [1], logprobs=logprobs([1], [9])))
    stream.answer(update("b", [2], LENGTH, logprobs=logprobs([2])))

    assert first["output_ids"] == [1]
    assert first["meta_info"]["output_token_logprobs"] == [(-0.5, 1, None)]


@pytest.mark.parametrize("incremental", [False, True])
def test_the_answer_of_a_whole_call_is_what_its_stream_adds_up_to(incremental):
    stream = NativeStream(incremental)
    parts = [
        update("ab", [1, 2], logprobs=logprobs([1, 2], [9, 8])),
        update("", [], total=2, logprobs=logprobs([])),
        update("c", [3], LENGTH, total=3, logprobs=logprobs([3])),
    ]
    answers = [stream.answer(part) for part in parts]
    last = answers[-1]
    if incremental:
        names = [name for name in last["meta_info"] if name.endswith("logprobs")]
        lists = {name: [entry for a in answers for entry in a["meta_info"][name]] for name in names}
        text, ids = "".join(a["text"] for a in answers), [i for a in answers for i in a["output_ids"]]
        last = {"text": text, "output_ids": ids, "meta_info": last["meta_info"] | lists}

    assert last == whole_answer([update("abc", [1, 2, 3], LENGTH, total=3, logprobs=logprobs([1, 2, 3], [9, 8]))])


def test_lists_that_were_not_asked_for_are_left_out():
    meta = native_answer(update("a", [1], logprobs=logprobs([1])))["meta_info"]

    assert meta["input_token_logprobs"] == []
    assert meta["input_top_logprobs"] == []
    assert "output_token_ids_logprobs" not in meta
    assert "output_token_logprobs" not in native_answer(update("a", [1]))["meta_info"]


def test_a_list_of_one_is_a_list():
    assert whole_answer([update("a", [1], LENGTH, is_listed=True)])[0]["index"] == 0
    assert "index" not in whole_answer([update("a", [1], LENGTH)])
