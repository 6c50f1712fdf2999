"""Stop patterns: what they may cost, and that searching only the end of the text finds what searching all of it finds."""

import pytest
import re2
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace.text.stop import (
    MAX_STOP_PATTERNS,
    MIN_WINDOW_CHARS,
    SEARCH_COST,
    PatternSearch,
    compile_stop_patterns,
    longest_match,
)

ATOMS = [
    "a",
    "b",
    ".",
    r"\d",
    "[ab]",
    "[^a]",
    "[]b]",
    "[[:digit:]x]",
    r"\x61",
    r"\pL",
    r"\B",
    r"\b",
    "^",
    "$",
    r"\x{62}",
]
REPEATS = ["", "", "?", "{2}", "{1,3}", "{0,2}?", "*", "+", "{2,}"]
PATTERNS = st.recursive(
    st.tuples(st.sampled_from(ATOMS), st.sampled_from(REPEATS)).map("".join),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map("|".join),
        st.tuples(st.sampled_from(["(", "(?:", "(?i:", "(?P<g>"]), inner, st.just(")"), st.sampled_from(REPEATS)).map(
            "".join
        ),
    ),
    max_leaves=6,
)


def accepted(pattern):
    try:
        compile_stop_patterns((pattern,))
    except RequestError:
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(pattern=PATTERNS, text=st.text("ab1é ", max_size=30))
def test_no_match_is_longer_than_the_longest(pattern, text):
    options = re2.Options()
    options.longest_match, options.log_errors = True, False
    try:
        found = list(re2.compile(pattern, options).finditer(text))
    except re2.error:
        return
    width = longest_match(pattern)
    assert width is None or all(match.end() - match.start() <= width for match in found)


@pytest.mark.parametrize(
    "pattern, width",
    [("abc|d", 3), ("(?:ab){2,5}c", 11), ("a*", None), ("a{3,}", None), ("(?i)ab$", 2), (r"[]\]a]{4}", 4), ("a{,3}", 5),
     (r"\Qa*\E", None), (r"\p{Greek}\pL", 2), ("a??", 1), ("(" * 200 + "a" + ")" * 200, None)],
)  # fmt: skip
def test_the_longest_match_is_read_from_the_pattern(pattern, width):
    assert longest_match(pattern) == width


@settings(max_examples=300, deadline=None)
@given(pattern=PATTERNS.filter(accepted), pieces=st.lists(st.text("ab1é ", max_size=5), max_size=12))
def test_a_pattern_stops_at_the_first_piece_after_which_the_whole_text_has_a_match(pattern, pieces):
    whole = re2.compile(pattern)
    search, text = PatternSearch(compile_stop_patterns((pattern,))), ""
    for piece in pieces:
        text += piece
        found = search.push(piece)
        assert (found is not None) == (whole.search(text) is not None)
        if found is not None:
            return


@pytest.mark.parametrize(
    "patterns",
    [
        [r"(?:[^x]{1,30}){1,30}!"],
        [r"(a|b)*a(a|b){900}c"],
        [r".{0,1000}!!"],
        ["((a{30}){30}){30}"],
        [rf"(a|b)*a(a|b){{{i}}}c" for i in range(12, 12 + MAX_STOP_PATTERNS)],
        ["a"] * (MAX_STOP_PATTERNS + 1),
    ],
)
def test_what_costs_too_much_at_every_token_is_refused(patterns):
    with pytest.raises(RequestError) as refused:
        compile_stop_patterns(tuple(patterns))
    assert refused.value.param == "stop_regex"


@pytest.mark.parametrize(
    "patterns",
    [
        [r"(a|b)*a(a|b){12}c"],
        [r"\n\n(Human|User|Question):"] * MAX_STOP_PATTERNS,
        [r"(?s)<answer>.*</answer>", r"\p{Han}{2}", r"[.!?]\s+$", r"(?i)final answer:\s*\w+"],
    ],
)
def test_one_token_searches_a_bounded_part_of_the_text(patterns):
    compiled = compile_stop_patterns(tuple(patterns))

    assert sum(each.compiled.programsize * each.reach for each in compiled.patterns) <= SEARCH_COST
    assert all(
        each.reach >= min(MIN_WINDOW_CHARS, longest_match(each.source) or MIN_WINDOW_CHARS)
        for each in compiled.patterns
    )
    search = PatternSearch(compiled)
    for _ in range(3000):
        search.push("abé ")
    assert len(search._window) <= compiled.reach + 5


def test_samples_share_the_compiled_patterns():
    assert compile_stop_patterns(("a+b", "c")) is compile_stop_patterns(("a+b", "c"))
