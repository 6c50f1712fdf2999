"""Outputs of marks, words and pieces of calls in any order: the same message however they are cut, nothing lost and nothing twice."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_harness import Output, cut, make_format
from renderers import MARKS, RENDERERS

from headrace.parsers.program import terminals

CALL = ("weather", {"city": "Pa\"r<is\n' [x]", "days": [7, {"a": None}]})
PIECES = (
    " ",
    "\n",
    "<",
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    ",",
    ":",
    "=",
    "(",
    ")",
    "\\",
    "call:",
    "functions.",
    "a=",
    '{"name": "f"',
    '"arguments": {',
)
REASONING = {"mistral": "mistral", "gemma4": "gemma4", "gpt-oss": None}
# What is written before a call or in place of a key may be the format's own: types, numbers, channels, keys that mean nothing.
LOSSLESS = ("pythonic", "lfm2", "deepseek_v32", "qwen3_coder", "glm45", "glm47", "minimax_m2")


def formats(name):
    reasoning = REASONING.get(name, "qwen3")
    for special in ((), (*MARKS.get(name, ()), "<think>", "</think>", "[THINK]", "[/THINK]")):
        yield make_format(name, reasoning, special)


def outputs(name):
    format = next(formats(name))
    atoms = st.one_of(
        st.sampled_from(terminals(format.table, format.reasoning)),
        st.sampled_from(PIECES),
        st.just("word"),
        st.just(RENDERERS[name]([CALL])),
        st.just(RENDERERS[name]([CALL])[:-9]),
    )
    return st.lists(atoms, max_size=14).map(numbered)


def numbered(atoms):
    """A text in which every word is another one."""
    return "".join(f"w{i}w" if atom == "word" else atom for i, atom in enumerate(atoms))


def told(parsed):
    return "\n".join([parsed.content, parsed.reasoning, *(part for call in parsed.calls for part in call)])


@pytest.mark.parametrize("name", RENDERERS)
def test_any_text_is_read_the_same_however_it_is_cut(name):
    made = list(formats(name))

    @settings(max_examples=25, derandomize=True, deadline=None, database=None)
    @given(outputs(name), st.integers(0, 1000))
    def check(text, seed):
        rng = random.Random(seed)
        for format in made:
            output = Output(format, text)
            whole = output.whole()
            assert output.parse([[piece] for piece in output.characters()]) == whole
            assert output.parse([[piece] for piece in cut(output.pieces, rng)]) == whole
            words = re.findall(r"w\d+w", told(whole))
            assert len(set(words)) == len(words)
            if name in LOSSLESS:
                assert set(words) == set(re.findall(r"w\d+w", text))

    check()


@pytest.mark.parametrize("name", RENDERERS)
def test_arguments_of_every_kind_come_back(name):
    """Strings with anything in them, apart from the marks that end them."""
    text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(
        lambda text: "\\" not in text or name != "gemma4"
    )
    values = st.recursive(
        st.one_of(
            text,
            st.integers(-(10**12), 10**12),
            st.booleans(),
            st.none(),
            st.floats(allow_nan=False, allow_infinity=False),
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
        ),
        max_leaves=5,
    )
    format = next(formats(name))

    @settings(max_examples=25, derandomize=True, deadline=None, database=None)
    @given(st.dictionaries(st.sampled_from(["alpha", "beta", "gamma"]), values, max_size=3))
    def check(arguments):
        schema = {key: {} if isinstance(value, str) else {"type": json_type(value)} for key, value in arguments.items()}
        tools = [{"name": "f", "parameters": {"type": "object", "properties": schema}}]
        if name == "qwen3_coder":  # a line break at an end of a value is the format's own
            arguments = {
                key: value.strip("\n") if isinstance(value, str) else value for key, value in arguments.items()
            }
        output = Output(format, RENDERERS[name]([("f", arguments)]), tools=tools)
        whole = output.whole()
        assert whole.decoded == [("f", arguments)]
        assert output.parse([[piece] for piece in output.characters()]) == whole

    check()


def json_type(value):
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case list():
            return "array"
        case _:
            return "object"


@pytest.mark.parametrize(
    "text", ["<" * 5_000, "<tool_call>" * 500, "<function=a b" * 400, "\n" * 5_000, "<tool_call>\n" * 300]
)
def test_long_runs_of_what_could_begin_a_call_are_text(text):
    parser = make_format("qwen3_coder", "qwen3").parser()
    events = [event for character in text for event in parser.push([(character, 1)])] + parser.finish()

    assert "".join(event.text for event in events) == text
