"""Guesses by n-grams: what followed the last tokens before, looked up in an index that grows with the sequence."""

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.messages.requests import PromptContent, SampleTask
from headrace.messages.step import NewSequence
from headrace.sampling.params import ResolvedSamplingParams
from headrace.speculative.base import Drafts
from headrace.speculative.ngram import LONGEST, MOST_INDEXED, SHARED_AT_A_TIME, SHORTEST, NgramDrafter, SharedOutputs

SEQ = 3


def sequence(tokens: list[int], seq: int = SEQ, namespace: str = "", **task: object) -> NewSequence:
    ids = np.array(tokens, np.int32)
    return NewSequence(
        seq=seq,
        rid="a",
        token_ids=ids,
        num_prompt_tokens=len(ids),
        prefix_slots=np.empty(0, np.int32),
        task=SampleTask(ResolvedSamplingParams(max_new_tokens=8, seed=0), **task),
        end_token_ids=(),
        content=PromptContent(ids.tobytes()),
        namespace=namespace,
    )


def searched(tokens: list[int], most: int) -> list[int]:
    """The same by looking through all tokens from behind."""
    for n in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
        for begin in range(len(tokens) - n - 1, -1, -1):
            if tokens[begin : begin + n] == tokens[-n:]:
                return tokens[begin + n : begin + n + most]
    return []


@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    steps=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=12),
    most=st.integers(1, 6),
)
def test_guesses_are_what_a_search_of_all_tokens_finds(prompt, steps, most):
    drafter = NgramDrafter(most)
    drafter.add(sequence(prompt))
    tokens = list(prompt)
    for ids in steps:
        drafter.extend(SEQ, ids)
        tokens += ids
        assert drafter.guess(SEQ).tokens == searched(tokens, most)


def test_a_predicted_text_is_guessed_from_its_first_token_on():
    drafter = NgramDrafter(3)
    drafter.add(sequence([1, 2, 3], predicted_ids=np.array([7, 8, 9, 10, 11], np.int32).tobytes()))
    drafter.extend(SEQ, [7])
    assert drafter.guess(SEQ).tokens == [8, 9, 10]
    drafter.extend(SEQ, [8, 9, 4])
    assert drafter.guess(SEQ).tokens == []
    drafter.extend(SEQ, [8, 9])
    assert drafter.guess(SEQ).tokens[:1] == [4]  # what came last after 8 and 9


def test_a_text_that_repeats_itself_is_guessed_as_far_as_allowed():
    drafter = Drafts([NgramDrafter(8)])
    drafter.add(sequence([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 5, 6]))
    for token_id in (7, 8, 9, 10, 11, 12, 13, 14, 5, 6, 7, 8):
        drafter.extend(SEQ, [token_id])

    assert drafter.propose([SEQ]) == [[9, 10, 11, 12, 13, 14, 5, 6]]


def test_guesses_that_are_wrong_end_and_begin_again_when_they_would_be_right():
    drafter = Drafts([NgramDrafter(4)])
    drafter.add(sequence([1, 2, 9] * 3))
    noise = iter(range(100, 200))
    for _ in range(20):  # what follows 1, 2 is new each time
        for token_id in (1, 2, next(noise)):
            drafter.extend(SEQ, [token_id])
    drafter.extend(SEQ, [1])
    drafter.extend(SEQ, [2])
    assert drafter.propose([SEQ]) == [[]]
    for _ in range(12):
        for token_id in (31, 32, 33, 34, 35):
            drafter.extend(SEQ, [token_id])
    assert drafter.propose([SEQ]) == [[31, 32, 33, 34]]


def test_sequences_without_tokens_to_look_up_are_left_alone():
    drafter = Drafts([NgramDrafter(8)])
    drafter.add(sequence([1, 2, 3] * 5, return_hidden_states=True))
    drafter.extend(SEQ, [1, 2, 3])
    assert drafter.propose([SEQ]) == [[]]


def test_what_others_of_the_namespace_have_said_is_guessed():
    drafter = NgramDrafter(3, SharedOutputs(1000))
    said = list(range(100, 100 + SHARED_AT_A_TIME))
    for seq, namespace in ((0, "a"), (1, "a"), (2, "b")):
        drafter.add(sequence([1, 2, 3, 4], seq, namespace))
    drafter.extend(0, said)

    for seq in (1, 2):
        drafter.extend(seq, said[:4])

    assert drafter.guess(1).tokens == said[4:7]
    assert drafter.guess(2).tokens == []


def test_the_rest_is_told_when_a_sequence_leaves():
    drafter = NgramDrafter(3, SharedOutputs(1000))
    drafter.add(sequence([1, 2, 3, 4], 0))
    drafter.extend(0, [7, 8, 9])
    drafter.leave(0)
    drafter.add(sequence([0, 1, 2, 3, 4], 0))
    drafter.extend(0, [7])

    assert drafter.guess(0).tokens == [8, 9]


def test_only_the_last_outputs_are_kept():
    outputs = SharedOutputs(10)
    outputs.add("old", array("i", range(8)))
    outputs.add("new", array("i", range(20, 28)))
    assert outputs.continuation("old", array("i", [0, 1, 2, 3]), 2) == []
    assert outputs.continuation("new", array("i", [20, 21, 22, 23]), 2) == [24, 25]
    outputs.add("new", array("i", range(30, 38)))
    assert outputs.continuation("new", array("i", [20, 21, 22, 23]), 2) == []
    assert outputs.continuation("new", array("i", [33, 34, 35, 36]), 2) == [37]


def test_a_store_for_hardly_any_token_is_empty():
    outputs = SharedOutputs(1)
    outputs.add("", array("i", range(40)))
    assert outputs.continuation("", array("i", [0, 1, 2, 3]), 2) == []


def test_a_long_sequence_is_indexed_from_its_last_tokens_on():
    drafter = NgramDrafter(3)
    early, late = [7, 8, 9, 10, 11], [17, 18, 19, 20, 21]
    filling = [1_000_000 + index for index in range(2 * MOST_INDEXED)]
    drafter.add(sequence([*early, *filling, *late, 1, 2]))
    drafter.extend(SEQ, early[:4])
    assert drafter.guess(SEQ).tokens == []
    drafter.extend(SEQ, late[:4])
    assert drafter.guess(SEQ).tokens[:1] == late[4:]

    drafter.extend(SEQ, filling)
    drafter.extend(SEQ, late[:4])
    assert drafter.guess(SEQ).tokens == []


def test_nothing_is_known_of_a_sequence_that_has_left():
    drafter = NgramDrafter(3, SharedOutputs(1000))
    drafter.add(sequence([1, 2, 3, 4]))
    drafter.extend(SEQ, [5, 1, 2])
    assert drafter.guess(SEQ).tokens
    drafter.leave(SEQ)
    drafter.leave(SEQ + 1)
    assert drafter.guess(SEQ).tokens == []
    drafter.extend(SEQ, [3])


def test_many_rows_share_what_a_step_may_compute():
    drafts = Drafts([NgramDrafter(16)])
    for seq in range(40):
        drafts.add(sequence([1, 2, 3, 1, 2, 3] * 8, seq))
        drafts.extend(seq, [1])
    assert [len(tokens) for tokens in drafts.propose(range(40))] == [0] * 40
    assert max(len(tokens) for tokens in drafts.propose(range(16))) <= 3
