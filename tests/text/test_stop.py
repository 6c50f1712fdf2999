"""Stops are found where they first complete, and only text that may begin one is held back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace.text.incremental import IncrementalDecoder
from headrace.text.stop import HoldBack, StopMatch, StopMatcher, compile_stop_patterns
from smollm2_tokenizer import smollm2_tokenizer

TOKENIZER = smollm2_tokenizer()


class Letters:
    """Token i is the text pieces[i]."""

    fixed_bytes = True
    strips_first_space = False
    special_ids: frozenset[int] = frozenset()

    def __init__(self, pieces):
        self.pieces = pieces

    def token_bytes(self, token_id):
        return self.pieces[token_id].encode()

    def decode(self, ids, skip_special_tokens=True, spaces_between_special_tokens=True):
        return "".join(self.pieces[index] for index in ids)


def first_match(pieces, stop, stop_regex=()):
    """(number of tokens used, match) of pushing the pieces one by one."""
    matcher = StopMatcher(stop, list(stop_regex), IncrementalDecoder(Letters(pieces)))
    for index in range(len(pieces)):
        if match := matcher.push(index):
            return index + 1, match
    return len(pieces), None


def expected(text, stop):
    """By definition: the smallest end, and of those the longest stop."""
    ends = [(text.find(one) + len(one), -len(one), one) for one in stop if one in text]
    if not ends:
        return None
    end, _, one = min(ends)
    return StopMatch(one, end - len(one), end, cut=end - len(one))


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("abé", max_size=4), max_size=12),
    stop=st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_the_match_is_the_one_that_completes_first_however_the_text_is_split(pieces, stop):
    text = "".join(pieces)

    _, match = first_match(pieces, stop)

    assert match == expected(text, stop)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_held_text_is_the_longest_suffix_that_begins_a_stop(pieces, stop):
    hold = HoldBack(stop)
    text = released = ""

    for piece in pieces:
        text += piece
        released += hold.push(piece)
        assert released + hold.held == text
        suffixes = [text[at:] for at in range(len(text) + 1)]
        assert hold.held == next(suffix for suffix in suffixes if any(one.startswith(suffix) for one in stop))


def test_the_token_that_completes_the_stop_is_reported():
    used, match = first_match(["x", "ST", "O", "Py", "z"], ["STOP"])

    assert used == 4
    assert match == StopMatch("STOP", 1, 5, cut=1)


def test_a_stop_that_only_begins_is_released():
    hold = HoldBack(["</end>"])

    assert [hold.push(part) for part in ("a</", "en", "d", "?b")] == ["a", "", "", "</end?b"]


def test_a_stop_inside_the_prompt_does_not_count():
    prompt = TOKENIZER.encode("say stop now")
    matcher = StopMatcher(["stop"], [], IncrementalDecoder(TOKENIZER, context_ids=prompt))

    assert all(matcher.push(index) is None for index in TOKENIZER.encode(" go"))
    assert any(matcher.push(index) for index in TOKENIZER.encode(" stop"))


def test_a_stop_of_several_bytes_waits_for_the_last():
    ids = TOKENIZER.encode("a世")
    matcher = StopMatcher(["世"], [], IncrementalDecoder(TOKENIZER))

    matches = [matcher.push(index) for index in ids]

    assert matches[-1] == StopMatch("世", 1, 2, cut=1)
    assert not any(matches[:-1])


def test_a_pattern_stops_and_is_not_trimmed():
    used, match = first_match(["on ", "4", "2", " of"], [], [r"\d\d"])

    assert used == 3
    assert match == StopMatch(r"\d\d", 3, 5, cut=5)


def test_offsets_of_a_pattern_stay_right_beyond_its_window():
    used, match = first_match(["é" * 3000, "é" * 3000, "x9"], [], [r"x\d"])

    assert used == 3
    assert match == StopMatch(r"x\d", 6000, 6002, cut=6002)


@pytest.mark.parametrize("pattern", ["^b", r"\Ab"])
def test_the_start_of_a_pattern_is_the_start_of_the_output_also_when_the_window_has_moved(pattern):
    assert first_match(["b", "a"], [], [pattern])[1] == StopMatch(pattern, 0, 1, cut=1)
    # Every window begins with a b once; none of them is the first character.
    assert first_match(["a", *["b" * 1024] * 6], [], [pattern])[1] is None


def test_the_start_of_a_line_is_found_where_the_window_begins():
    used, match = first_match(["a\n", "b" * 4095, "!"], [], [r"(?m)^b+!"])

    assert used == 3
    assert match == StopMatch(r"(?m)^b+!", 2, 4098, cut=4098)


def test_a_string_wins_over_a_pattern_with_the_same_token():
    _, match = first_match(["a1b"], ["b"], [r"\d"])

    assert match == StopMatch("b", 2, 3, cut=2)


@pytest.mark.parametrize("pattern", ["(", "(?=a)", r"(a)\1", "a*", "x{100000}", "a" * 2000, "\ud800"])
def test_a_pattern_that_cannot_be_honoured_is_refused(pattern):
    with pytest.raises(RequestError) as refused:
        compile_stop_patterns((pattern,))
    assert refused.value.param == "stop_regex"


def test_an_explosive_pattern_is_matched_in_linear_time():
    compile_stop_patterns((r"(a|aa){1,50}b",))
    _, match = first_match(["a" * 4000, "c"], [], [r"(a|aa){1,50}b"])

    assert match is None


def test_a_sample_holds_no_more_than_its_stops_are_long_and_builds_nothing_from_them():
    stops = tuple("a" * 255 + chr(ord("b") + i) for i in range(20))
    matcher, hold = StopMatcher(stops, [], IncrementalDecoder(Letters(["a" * 7]))), HoldBack(stops)

    for _ in range(200):
        assert matcher.push(0) is None
        hold.push("a" * 7)

    assert len(matcher._tail) == 255
    assert len(hold.held) == 255
    # The strings themselves are the request's.
    assert all(mine is given for mine, given in zip(matcher._stop, stops, strict=True))
