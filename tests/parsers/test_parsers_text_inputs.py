"""Calls whose one argument is a text of a lark definition: in every format the text that is read matches it."""

import json
import random

import pytest
from parser_harness import Output, make_format
from renderers import MARKS
from test_parsers_call_grammar import ONE_CALL, RENDERERS, Grammar, mistral_list

from headrace.parsers.call_grammar import Named, call_grammar

DEFINITION = r"""
start: "begin" LF (line | quoted)+ "end"
line: "+" /[^\n]*/ LF
quoted: "\"" /[a-z\\]+/ "\"" LF
%import common.LF
"""
TEXT = 'begin\n+x = "é" </a>\n"a\\b"\n+\n+\ty\nend'
OTHERS = ["", "begin\n", TEXT + "\n", TEXT.replace("+", "-"), TEXT.replace('"a', "a")]
SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
TOOLS = [
    {"name": "patch", "parameters": SCHEMA},
    {"name": "note", "parameters": SCHEMA},
]
INPUTS = {"patch": DEFINITION, "note": 'start: LINE\nLINE: /[a-z]+/ "\\n"'}


def made(name, choice, with_special=True, **options):
    special = MARKS.get(name, ()) if with_special else ()
    found = call_grammar(make_format(name, None, special), TOOLS, choice, inputs=INPUTS, **options)
    return Grammar(found, special)


def written(name, text, with_special=True, tool="patch"):
    write = RENDERERS[name] if name != "mistral" or with_special else mistral_list
    return write([(tool, {"input": text})])


@pytest.mark.parametrize("with_special", [True, False])
@pytest.mark.parametrize("name", RENDERERS)
def test_a_required_text_matches_its_definition(name, with_special):
    grammar = made(name, "required", with_special)
    assert grammar.takes(written(name, TEXT, with_special))
    assert grammar.takes(written(name, "abc\n", with_special, "note"))
    assert not grammar.takes(written(name, "abc\n", with_special))
    assert not grammar.takes(written(name, TEXT, with_special, "note"))
    for other in OTHERS:
        assert not grammar.takes(written(name, other, with_special)), other


@pytest.mark.parametrize("name", RENDERERS)
def test_the_model_may_choose_and_is_bound_then(name):
    grammar = made(name, "auto", strict_names=set(INPUTS))
    before = "<|channel|>final<|message|>" if name == "gpt-oss" else ""
    assert grammar.takes(f"{before}Just text, no call.")
    assert grammar.takes(written(name, TEXT))
    assert not grammar.takes(written(name, OTHERS[1]))


@pytest.mark.parametrize("name", RENDERERS)
def test_what_is_written_is_read(name):
    special = MARKS.get(name, ())
    grammar = made(name, Named("patch"))
    alone = Grammar(call_grammar(make_format("hermes"), TOOLS, Named("patch"), inputs=INPUTS), ())
    num_read = 0
    for seed in range(6):
        text = grammar.random_text(random.Random(seed), max_tokens=1500)
        if text is None:
            continue
        calls = Output(make_format(name, None, special), text).whole().calls
        assert [call[0] for call in calls] == ["patch"]
        argument = json.loads(calls[0][1])["input"]
        assert alone.takes(written("hermes", argument)), argument
        num_read += 1
    assert num_read or name in ONE_CALL
