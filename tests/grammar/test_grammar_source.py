"""From a request's grammar to the library's text: each kind takes what it should, and refuses the rest with a reason."""

import json

import llguidance
import pytest
from grammar_harness import LIBRARY, LIMITS, TOKENIZER, matcher, refusal, special, takes

from headrace.errors import RequestError
from headrace.grammar.source import explain, library_text
from headrace.grammar.vocabulary import parser_limits
from headrace.messages.grammar import GrammarSpec


def test_the_whole_output_must_match_a_regex():
    made = matcher("regex", r"[a-z]{2,3}(-\d+)?")

    assert takes(made, "ab")
    assert takes(made, "abc-42")
    assert not takes(made, "abcd")
    assert not takes(made, "ab-")


@pytest.mark.parametrize("pattern, text", [("^a/b$", "a/b"), ("a|b$", "b"), ("x?\n", "x\n"), ("é+", "éé")])
def test_anchors_slashes_and_unicode_in_a_regex(pattern, text):
    assert takes(matcher("regex", pattern), text)


@pytest.mark.parametrize(
    "pattern, said",
    [
        ("(?=a)b", "look-around"),
        (r"(a)\1", "backreferences"),
        (r"\bx", "word boundaries"),
        ("a$b", "`$` is supported only at the end"),
        ("(", "unclosed group"),
    ],
)
def test_a_regex_that_cannot_be_a_mask_is_refused_with_the_reason(pattern, said):
    message = refusal("regex", pattern)

    assert said in message
    assert pattern in message or json.dumps(pattern)[1:-1] in message


@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf", "lark", "choice", "structural_tag"])
@pytest.mark.parametrize("text", ["", " \n", "a\ud800"])
def test_an_empty_grammar_and_a_lone_surrogate_are_refused(kind, text):
    assert "field" in refusal(kind, text)


def test_a_choice_is_one_of_its_strings():
    made = matcher("choice", ["a", "ab", 'é\x7f\n"😀', "a"])

    assert takes(made, "a")
    assert takes(made, "ab")
    assert takes(made, 'é\x7f\n"😀')
    assert not takes(made, "b")
    assert not takes(made, "aab")


@pytest.mark.parametrize("value", [[], [""], ["a", ""], {}, "a", [1], None])
def test_a_choice_needs_strings(value):
    assert "string" in refusal("choice", json.dumps(value))


def test_gbnf():
    made = matcher("ebnf", 'root ::= greeting " " [a-z]+\n# who\ngreeting ::= "hello"\n  | "hi"')

    assert takes(made, "hello world")
    assert takes(made, "hi x")
    assert not takes(made, "hey x")


@pytest.mark.parametrize(
    "text, accepted, rejected",
    [
        ('root ::= [a-z]* "x" [a-z]', ["xy", "axxz"], ["x", "ab"]),
        (r'root ::= "\u00e9\x41\"\\\n" [^\x00-\x1F\]"]? .', ['éA"\\\na\n', 'éA"\\\n!'], ['éA"\\\n', 'éA"\\\n]!']),
        ('root ::= "a"{2} "b"{1,} "c"{0,2} ("d" | "")', ["aab", "aabbccd"], ["ab", "aabccc"]),
        ('root ::= a-b aB a_b\na-b ::= "x"\naB ::= "y"\na_b ::= "z"', ["xyz"], ["xxx"]),
        ('root ::= "[" ws root? ws "]"\nws ::= ([ \\t] ws)?', ["[]", "[ [ ]\t]"], ["[", "[ [ ]"]),
        (
            'root ::= list\nlist ::= item | item "," list\nitem ::= [a-z]+ ("=" [a-z]+)?',
            ["a", "a=b,c,d=e"],
            ["a,", "=b"],
        ),
        ('root ::= e\ne ::= t (("+" | "-") t)*\nt ::= [0-9]+ | "(" e ")"', ["1", "1+(2-33)"], ["1+", "(1"]),
        ('root ::= "a" root | "b"', ["b", "aab"], ["a", "ba"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= (\n  "a" # one\n  | "b"\n)', ["a", "b"], ["ab"]),
    ],
)
def test_gbnf_is_matched_character_by_character(text, accepted, rejected):
    made = matcher("ebnf", text)

    assert [text for text in accepted if not takes(made, text)] == []
    assert [text for text in rejected if takes(made, text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "root ::= foo",
        'x ::= "a"',
        'root := "a"',
        'root ::= "',
        "root ::= [a-",
        "root ::= []",
        "root ::= [b-a]",
        'root ::= "\\',
        'root ::= "\\q"',
        r'root ::= "\ud800"',
        'root ::= ("a"',
        'root ::= "a")',
        'root ::= "a"{2,1}',
        'root ::= "a"{x}',
        "root",
        f"root ::= {'(' * 50_000}",
    ],
)
def test_what_is_no_gbnf_is_refused(text):
    assert "GBNF" in refusal("ebnf", text)


def test_gbnf_with_many_rules():
    rules = "\n".join(f"r{i} ::= r{i + 1}" for i in range(3_000))

    assert takes(matcher("ebnf", f'root ::= r0\n{rules}\nr3000 ::= "a"'), "a")


def test_lark():
    made = matcher("lark", 'start: "n=" NUMBER\nNUMBER: /[0-9]+/')

    assert takes(made, "n=12")
    assert not takes(made, "n=")


@pytest.mark.parametrize(
    "text", ["start: foo", 'start "a"', 'foo: "a"', 'start: "a', "start: @other", "start: <|none|>"]
)
def test_lark_that_is_not_valid_is_refused(text):
    assert "the grammar is not" in refusal("lark", text)


def test_a_grammar_that_allows_nothing_is_refused():
    assert "allows no output" in refusal("lark", "start: s\ns: s")


@pytest.mark.parametrize("attribute", ["max_tokens=3", "temperature=0.5", 'stop="x"', 'lazy, stop_capture = "x"'])
def test_attributes_that_need_more_than_a_mask_are_refused(attribute):
    message = refusal("lark", f'start: "stop=" rule // stop=\nrule[{attribute}]: /[a-z]*/')

    assert attribute.removeprefix("lazy, ").partition("=")[0].strip() in message
    assert "line 2" in message


def test_what_only_looks_like_an_attribute_is_allowed():
    assert takes(matcher("lark", 'start: "max_tokens=3" /stop=x/ # temperature=1'), "max_tokens=3stop=x")


def test_schemas_in_lark_are_taken_as_schemas_are():
    made = matcher("lark", 'start: "x: " %json {"type": "array", "items": {"type": "string", "format": "colour"}}')

    assert takes(made, 'x: ["red"]')
    assert takes(made, 'x: [\n  "red"\n]')
    assert not takes(made, 'x: [  "red"]')


@pytest.mark.parametrize("between", [" ", "\n", "  // why\n "])
def test_lenient_schemas_in_lark_are_refused(between):
    with pytest.raises(RequestError):
        matcher("lark", f'start: %json{between}{{"x-guidance": {{"lenient": true}}, "not": {{}}}}')


def test_a_special_token_in_lark_is_the_token_and_not_its_text():
    made = matcher("lark", 'start: "a" <|im_start|>')

    assert takes(made, [*TOKENIZER.encode("a", add_special_tokens=False), special("<|im_start|>")])
    assert not takes(made, "a<|im_start|>")


def test_the_library_never_reads_a_request_as_its_own_json():
    refusal("lark", '{"grammars": [{"json_schema": {"x-guidance": {"lenient": true}, "not": {}}}]}')


def test_a_refusal_is_short_and_has_nothing_of_the_library_in_it():
    spec = GrammarSpec("regex", "a", "structured_outputs.regex")
    refused = explain(
        spec, "lexer error: too many expressions constructed\n<state>\nTokens: secret\n</state>" + "x" * 9000
    )

    assert refused.param == "structured_outputs.regex"
    assert "too complex" in refused.message
    assert "secret" not in refused.message
    assert len(explain(spec, "y" * 9000).message) <= 500


def test_limits_grow_with_the_vocabulary():
    small, large = parser_limits(49_152), parser_limits(262_144)

    assert small.step_max_items < large.step_max_items
    assert small.step_lexer_fuel == large.step_lexer_fuel
    assert not small.verbose_errors


@pytest.mark.parametrize("depth", [200, 3_000, 200_000])
@pytest.mark.parametrize("kind", ["json_schema", "choice", "structural_tag"])
def test_deeply_nested_json_is_refused(kind, depth):
    assert "levels deep" in refusal(kind, "[" * depth + "]" * depth)
    assert "levels deep" in refusal(kind, '{"items":' * depth + "{}" + "}" * depth)


def test_brackets_in_strings_are_no_nesting():
    assert takes(matcher("choice", ["[" * 300, '\\"[{']), "[" * 300)


def test_the_text_is_what_a_matcher_takes():
    text = library_text(GrammarSpec("json_schema", '{"type": "object"}', "field"))

    assert takes(llguidance.LLMatcher(LIBRARY, text, limits=LIMITS), "{}")
