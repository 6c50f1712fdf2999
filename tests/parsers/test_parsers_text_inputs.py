"""Calls whose one argument is a text of a lark definition: it matches where the format writes texts as they are, and is any text elsewhere."""

import json
import random
import re

import pytest
from parser_harness import Output, make_format
from renderers import MARKS
from test_parsers_call_grammar import ONE_CALL, RENDERERS, Grammar, mistral_list

from headrace.parsers.call_grammar import Named, binds_texts, call_grammar

DEFINITION = r"""
start: "begin" LF (line | quoted)+ "end"
line: "+" /[^\n]*/ LF
quoted: "\"" /[a-z\\]+/ "\"" LF
%import common.LF
"""
TEXT = 'begin\n+x = "é" </a>\n"a\\b"\n+\n+\ty\nend'
MATCHING = re.compile(r'begin\n(?:\+[^\n]*\n|"[a-z\\]+"\n)+end')
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
PLAIN = [name for name in RENDERERS if binds_texts(make_format(name, None, MARKS.get(name, ())))]
QUOTED = [name for name in RENDERERS if name not in PLAIN]
INPUTS = {"patch": DEFINITION, "note": 'start: LINE\nLINE: /[a-z]+/ "\\n"'}


def made(name, choice, with_special=True, **options):
    special = MARKS.get(name, ()) if with_special else ()
    found = call_grammar(make_format(name, None, special), TOOLS, choice, inputs=INPUTS, **options)
    return Grammar(found, special)


def written(name, text, with_special=True, tool="patch"):
    write = RENDERERS[name] if name != "mistral" or with_special else mistral_list
    return write([(tool, {"input": text})])


@pytest.mark.parametrize("with_special", [True, False])
@pytest.mark.parametrize("name", PLAIN)
def test_a_required_text_matches_its_definition(name, with_special):
    grammar = made(name, "required", with_special)
    assert grammar.takes(written(name, TEXT, with_special))
    assert grammar.takes(written(name, "abc\n", with_special, "note"))
    assert not grammar.takes(written(name, "abc\n", with_special))
    assert not grammar.takes(written(name, TEXT, with_special, "note"))
    for other in OTHERS:
        assert not grammar.takes(written(name, other, with_special)), other


@pytest.mark.parametrize("name", PLAIN)
def test_the_model_may_choose_and_is_bound_then(name):
    grammar = made(name, "auto", strict_names=set(INPUTS))
    before = "<|channel|>final<|message|>" if name == "gpt-oss" else ""
    assert grammar.takes(f"{before}Just text, no call.")
    assert grammar.takes(written(name, TEXT))
    assert not grammar.takes(written(name, OTHERS[1]))


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_written_is_read(name):
    special = MARKS.get(name, ())
    grammar = made(name, Named("patch"))
    num_read = 0
    for seed in range(6):
        text = grammar.random_text(random.Random(seed), max_tokens=1500)
        if text is None:
            continue
        calls = Output(make_format(name, None, special), text).whole().calls
        assert [call[0] for call in calls] == ["patch"]
        argument = json.loads(calls[0][1])["input"]
        assert MATCHING.fullmatch(argument), argument
        num_read += 1
    assert num_read or name in ONE_CALL


@pytest.mark.parametrize("with_special", [True, False])
@pytest.mark.parametrize("name", QUOTED)
def test_within_quotes_it_is_any_text(name, with_special):
    grammar = made(name, "required", with_special)
    for text in (TEXT, *OTHERS):
        assert grammar.takes(written(name, text, with_special)), text


@pytest.mark.parametrize("with_special", [True, False])
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    ("definition", "matching", "others"),
    [
        ("start: /(?s:.*)/", ["", "a", TEXT, "a\n<b", "</a>\n"], []),
        (
            'start: head? body\nhead: "// x"i LF -> first\n# A comment.\nbody: /[^!]/ | WORD* /(?s:.+)/\nWORD: /[a-z]+ /\n%import common (LF, INT)',
            ["// X\nab c", "ab cd\n", "!!"],
            [""],
        ),
        (
            'start: "a" item+\n?item: "b" | LINE\nLINE: /.*/ NL\n%import common.LF -> NL',
            ["ab", "a\n", "ab</b>\n"],
            ["b", ""],
        ),
    ],
)
def test_a_call_ends_where_the_last_terminal_could_go_on(definition, matching, others, name, with_special):
    special = MARKS.get(name, ()) if with_special else ()
    found = call_grammar(
        make_format(name, None, special), TOOLS, Named("patch"), parallel=False, inputs={"patch": definition}
    )
    grammar = Grammar(found, special)
    for text in matching:
        call = written(name, text, with_special)
        assert grammar.takes(call), text
        assert not grammar.takes(call + call), text
    for text in others:
        assert not grammar.takes(written(name, text, with_special)), text
