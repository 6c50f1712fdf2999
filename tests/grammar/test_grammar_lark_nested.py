"""A lark definition within a JSON string, or up to a mark: the same texts, and what is refused."""

import json
import random

import llguidance
import pytest
from lark_definitions import CHARACTERS, DEFINITIONS, PATCH

from headrace.grammar.lark_nested import in_json_string, up_to_mark
from headrace.grammar.lark_reader import LarkError, read_definition

BYTES = llguidance.LLTokenizer("byte")
NUM_TEXTS = 120


def matcher(text: str) -> llguidance.LLMatcher:
    made = llguidance.LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": text}]}), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def nested(made: tuple[str, list[str]]) -> llguidance.LLMatcher:
    expression, definitions = made
    return matcher("\n".join([f"start: {expression}", *definitions]))


def takes(template: llguidance.LLMatcher, text: str) -> bool:
    copy = template.deep_copy()
    data = list(text.encode())
    return copy.try_consume_tokens(data) == len(data) and copy.is_accepting()


def texts(template: llguidance.LLMatcher, pieces: tuple[str, ...], rng: random.Random) -> list[str]:
    """Random texts, half of them beginnings that the definition allows."""
    found = ["".join(rng.choices([*CHARACTERS, *pieces * 4], k=rng.randint(0, 8))) for _ in range(NUM_TEXTS // 2)]
    for _ in range(NUM_TEXTS // 2):
        copy, text = template.deep_copy(), ""
        for _ in range(rng.randint(1, 40)):
            tried = [*rng.sample(CHARACTERS, 8), "\n", '"', "\\", *pieces]
            fitting = [one for one in tried if copy.validate_tokens(list(one.encode())) == len(one.encode())]
            if not fitting or (copy.is_accepting() and rng.random() < 0.2):
                break
            piece = rng.choice(fitting)
            copy.consume_tokens(list(piece.encode()))
            text += piece
        found.append(text)
    return found


def is_writable(text: str) -> bool:
    """Whether a JSON string can have it without \\u."""
    return not any(char < " " and char not in "\b\f\n\r\t" for char in text)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_json_string_has_what_the_definition_accepts(name: str):
    definition, pieces = DEFINITIONS[name]
    plain = matcher(definition)
    within = nested(in_json_string(read_definition(definition), "d_"))
    asked = texts(plain, pieces, random.Random(name))
    accepted = [text for text in asked if takes(plain, text)]
    assert len(accepted) > 5, "the texts are worth something"
    for text in asked:
        expected = takes(plain, text) and is_writable(text)
        assert takes(within, json.dumps(text, ensure_ascii=False)[1:-1]) == expected, text


@pytest.mark.parametrize("name", DEFINITIONS)
def test_up_to_a_mark_the_text_is_as_it_is(name: str):
    definition, pieces = DEFINITIONS[name]
    plain = matcher(definition)
    for mark in ("</value>", ""):
        within = nested(up_to_mark(read_definition(definition), "d_", mark, mark))
        for text in texts(plain, pieces, random.Random(name)):
            assert takes(within, text + mark) == takes(plain, text), text


def test_a_text_that_could_go_on_ends_with_the_mark():
    within = nested(up_to_mark(read_definition("start: /(?s:.*)/"), "d_", "\n</value>\n", "</value>"))
    for text in ("", "a", "a\n", "\n</valu", "a\n<b>\n"):
        assert takes(within, f"{text}\n</value>\n"), text
        assert not takes(within, text)
    assert not takes(within, "a</value>b\n</value>\n")


def test_ignored_text_stands_between_two_terminals():
    definition = read_definition('start: "a" "\\n" "b"\n%ignore /[ \\t]+/')
    for made, written in ((in_json_string(definition, "d_"), json.dumps), (up_to_mark(definition, "d_", "", ""), str)):
        within = nested(made)
        for text, expected in (("a\nb", True), ("a \t\n\tb", True), (" a\nb", False), ("a\nb ", False)):
            shown = written(text)
            assert takes(within, shown[1:-1] if written is json.dumps else shown) == expected, text


def test_two_definitions_stand_side_by_side():
    one = in_json_string(read_definition('start: T "\\n"\nT: /a+/'), "one_")
    other = in_json_string(read_definition('start: T "\\n"\nT: /b+/'), "other_")
    both = nested((f'{one[0]} "," {other[0]}', [*one[1], *other[1]]))
    assert takes(both, "aa\\n,b\\n")
    assert not takes(both, "b\\n,a\\n")


def test_a_definition_without_escapes_stays_small():
    _, definitions = in_json_string(read_definition('start: "(" start ")" | /[a-z]+/'), "d_")
    assert len(definitions) == 4, "one rule and three terminals"
    _, definitions = in_json_string(read_definition(PATCH), "d_")
    assert len(definitions) < 70


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ("", "no rule `start`"),
        ("start: A", "line 1: the terminal `A` is not defined"),
        ('start: "a"\n\nother: missing', "line 3: the rule `missing` is not defined"),
        ("start: A\nA: B\nB: A", "leads back to itself"),
        ('start: "a"\nstart: "b"', "line 2: `start` is defined twice"),
        ("start: 'a'", "double quotes"),
        ('start: ("a"', "expected `)`"),
        ('start: "a" )', "`)` is not expected here"),
        ("start: <think>", "special tokens"),
        ('start: %json {"type": "object"}', "`%json` is not supported"),
        ('start: %regex {"substring_words": "a b"}', "`%regex` is not supported"),
        ('start: %lark { start: "a" }', "`%lark` is not supported"),
        ("start: @other", "`@other` is not supported"),
        ('start[stop="a"]: /.*/', "the attribute `stop` is not supported"),
        ("start[lazy]: /.*/", "the attribute `lazy` is not supported"),
        ('start[suffix="a"]: /.*/', "the attribute `suffix` is not supported"),
        ("start[max_tokens=5]: /.*/", "the attribute `max_tokens` is not supported"),
        ('start.2: "a"', "priorities"),
        ('start::x: "a"', "parameters"),
        ('start: a{"b"}\na: "a"', "expected"),
        ('start: a::5\na: "a"', "parameters"),
        ('start: "a" & "b"', "only in terminals"),
        ('start: A\nA: b\nb: "b"', "cannot have the rule `b` in it"),
        ("%import other.A\nstart: A", "expected `common`"),
        ("%import common.NOTHING\nstart: NOTHING", "`common.NOTHING` does not exist"),
        ('%declare A\nstart: "a"', "`%declare` is not supported"),
        ('%llguidance {"ignore_once": true}\nstart: "a"', "ignore_once"),
        ('%llguidance 5\nstart: "a"', "must be followed by an object"),
        ('start: "b".."a"', "a range needs"),
        ('start: "a"~3..2', "at least 3 and at most 2"),
        ("start: /a(?=b)/", "line 1: the regular expression /a(?=b)/: look-around"),
        ("start: /a^b/", "the anchor `^`"),
        (r"start: /\ba/", "the anchor `\\b`"),
        ("start: /^a|b/", "the anchor `^` beside `|`"),
        (r"start: /\p{Greek}/", "only general categories"),
        (r"start: /a\q/", r"`\q` is not supported"),
        ("start: /[a/", "not closed"),
        ("start: /(a/", "not closed"),
        ("start: /a)/", "not open"),
        ("start: /*a/", "repeats nothing"),
        ("start: /a{x}/", "`{` must begin"),
        ("start: /a****************/", "operators"),
        ("start: /[b-a]/", "the range"),
        ("start: /(?R)a/", "the flag `R`"),
        ("start: /a/l", "the flag `l`"),
        (f'start: {"(" * 40}"a"{")" * 40}', "nested"),
        (f"start: /{'(' * 99}a{')' * 99}/", "nested"),
        (f"start: {'~' * 99}A\nA: /a/", "nested"),
        ("start: T0\n" + "\n".join(f"T{n}: T{n + 1} T{n + 1}" for n in range(26)) + "\nT26: /ab/", "too large"),
        # Short definitions of much text: of one terminal, and of many together.
        (f'start: C\nA: "{"a" * 4_000}"\nB: {"A " * 8}\nC: {"B " * 100}', "too large"),
        ("start: C0\n" + "\n".join(f"C{n}: A" for n in range(20)) + f'\nA: "{"a" * 4_000}"', "too large"),
        ("start: " + "a" * 70_000, "at most 32768"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(definition: str, reason: str):
    with pytest.raises(LarkError) as refused:
        read_definition(definition)
    assert reason in str(refused.value)


def test_what_matches_nothing_or_too_much_is_refused():
    with pytest.raises(LarkError, match="matches no text"):
        in_json_string(read_definition('start: "a" start'), "d_")
    with pytest.raises(LarkError, match="matches no text"):
        in_json_string(read_definition(r"start: /\x00/"), "d_")
    with pytest.raises(LarkError, match="too large"):
        in_json_string(read_definition(f"start: /{'a?' * 2_000}/"), "d_")
    with pytest.raises(LarkError, match="too large"):
        in_json_string(read_definition(f"start: /{'[^a]?' * 5_000}/"), "d_")
