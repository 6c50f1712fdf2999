"""Structural tags: free text with constrained parts, in both shapes."""

import pytest
from grammar_harness import TOKENIZER, matcher, refusal, special, takes

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
THINK = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
CALLS = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [{"type": "tag", "begin": "<f=x>", "content": JSON, "end": ["</f>", "</g>"]}],
}


def tag(content):
    return matcher("structural_tag", {"type": "structural_tag", "format": content})


def refused(content):
    return refusal("structural_tag", {"type": "structural_tag", "format": content})


def check(made, accepted, rejected):
    assert [text for text in accepted if not takes(made, text)] == []
    assert [text for text in rejected if takes(made, text)] == []


@pytest.mark.parametrize("with_type", [False, True])
def test_structures_and_triggers(with_type):
    asked = {
        "structures": [
            {"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"},
            {"begin": "<f=y>", "schema": {"type": "integer"}, "end": "</f>"},
            {"begin": "[call]", "schema": {"type": "null"}, "end": ""},
        ],
        "triggers": ["<f=", "[call"],
    }
    made = matcher("structural_tag", {"type": "structural_tag", **asked} if with_type else asked)

    check(
        made,
        [
            "",
            "hello",
            'hi <f=x>{"a": 1}</f> bye',
            '<f=x>{"a":1}</f><f=y>3</f>',
            "<f",
            "[call]null or so",
            "a <f=y>3</f> b <f=y>4</f>",
        ],
        ["<f=", "<f=z>", '<f=x>{"a": "s"}</f>', '<f=x>{"a": 1}', "[call]1", "text [call"],
    )


def test_each_structure_needs_its_trigger():
    message = refusal("structural_tag", {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["<g"]})

    assert "'<f>'" in message


def test_a_tag_ends_with_the_first_of_its_ends():
    check(tag(THINK), ["<t>a b</t>", "<t></t>", "<t>a<</t>"], ["<t>a", "<t>a</t>b", "<t>a</t></t>", "a</t>"])


def test_a_sequence():
    made = tag({"type": "sequence", "elements": [THINK, {"type": "const_string", "value": "\n"}, JSON]})

    check(made, ['<t>a</t>\n{"a": 1}'], ['{"a": 1}', "<t>a</t>", '<t>a</t>{"a": 1}'])


def test_one_of_several_formats():
    made = tag(
        {
            "type": "or",
            "elements": [THINK, {"type": "const_string", "value": "no"}, {"type": "regex", "pattern": "[0-9]+/x"}],
        }
    )

    check(made, ["<t>a</t>", "no", "12/x"], ["yes", "", "12"])


@pytest.mark.parametrize(
    "options, accepted, rejected",
    [
        ({}, ["", "hi", 'hi <f=x>{"a": 1}</g> and <f=x>{"a": 2}</f>'], ["hi <f=", '<f=x>{"a": []}</f>']),
        ({"at_least_one": True}, ['<f=x>{"a": 1}</f>', '<f=x>{"a": 1}</f> bye'], ["", "hi", 'hi <f=x>{"a": 1}</f>']),
        ({"stop_after_first": True}, ["hi", 'hi <f=x>{"a": 1}</f>'], ['hi <f=x>{"a": 1}</f> bye']),
        (
            {"at_least_one": True, "stop_after_first": True},
            ['<f=x>{"a": 1}</f>'],
            ["", 'hi <f=x>{"a": 1}</f>', '<f=x>{"a": 1}</f> '],
        ),
        ({"excludes": ["bad"]}, ["ba", 'hi <f=x>{"a": 1}</f> d'], ["a bad b", 'bad <f=x>{"a": 1}</f>']),
    ],
)
def test_triggered_tags(options, accepted, rejected):
    check(tag({**CALLS, **options}), accepted, rejected)


def test_triggered_tags_within_a_tag_end_with_it():
    made = tag({"type": "tag", "begin": "[", "content": CALLS, "end": "]"})

    check(
        made,
        ["[]", "[hi]", '[hi <f=x>{"a": 1}</f>]', '[hi <f=x>{"a": 1}</f> more]'],
        ["[hi", "[hi]x", '[<f=x>{"a": 1}]'],
    )


@pytest.mark.parametrize(
    "options, accepted, rejected",
    [
        ({}, ["", "<t>a</t>", "<t>a</t>,<t></t>,<t>b</t>"], ["<t>a</t>,", "x", ",<t>a</t>"]),
        ({"at_least_one": True}, ["<t>a</t>", "<t>a</t>,<t></t>"], [""]),
        ({"stop_after_first": True}, ["", "<t>a</t>"], ["<t>a</t>,<t></t>"]),
    ],
)
def test_tags_with_separator(options, accepted, rejected):
    check(tag({"type": "tags_with_separator", "tags": [THINK], "separator": ",", **options}), accepted, rejected)


def test_text_that_excludes_strings():
    check(tag({"type": "any_text", "excludes": ["</t>", "x"]}), ["", "abc", "</t"], ["a</t>", "ax"])


def test_marks_that_are_special_tokens_are_tokens():
    mark = "<|im_start|>"
    content = {
        "type": "triggered_tags",
        "triggers": [mark],
        "tags": [{"type": "tag", "begin": f"{mark}go ", "content": JSON, "end": mark}],
    }
    made = matcher("structural_tag", {"format": content}, {mark: special(mark)})
    text = f'hi {mark}go {{"a": 1}}{mark} bye'

    assert takes(made, TOKENIZER.encode(text, add_special_tokens=False, allow_special=True))
    assert not takes(made, TOKENIZER.encode(f"{mark}stay", add_special_tokens=False, allow_special=True))


def test_schemas_are_taken_as_in_json_schema():
    content = {"type": "json_schema", "json_schema": {"type": "string", "format": "colour", "not": {"const": "red"}}}

    check(tag(content), ['"blue"'], ['"red"', "1"])


@pytest.mark.parametrize(
    "content, said",
    [
        ({"type": "foo"}, "format.type: invalid value"),
        ({"type": "tag", "begin": "a"}, "content"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "style"),
        ({"type": "any_text", "exclude": ["x"]}, "exclude"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, THINK]}, "last element"),
        ({"type": "sequence", "elements": []}, "`sequence`"),
        ({**CALLS, "triggers": ["x"]}, "'<f=x>'"),
        ({**CALLS, "triggers": ["<f=", "<f"]}, "exactly one trigger"),
        ({**CALLS, "triggers": [""]}, "empty"),
        ({**CALLS, "tags": [{"begin": "<f=x>", "content": {"type": "any_text"}, "end": ""}]}, "`end`"),
        ({"type": "json_schema", "json_schema": {"contains": {}}}, "`contains`"),
        ({"type": "json_schema", "json_schema": {"x-guidance": {"lenient": True}}}, "`lenient`"),
        ({"type": "regex", "pattern": "(?=a)"}, "look-around"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(content, said):
    assert said in refused(content)


@pytest.mark.parametrize(
    "value", [{}, {"a": 1}, [], {"structures": [], "triggers": []}, {"type": "other", "format": THINK}]
)
def test_what_is_no_structural_tag_is_refused(value):
    assert "structural tag" in refusal("structural_tag", value)


def test_text_ends_at_a_special_token_that_has_text_before_it():
    mark = "<|im_start|>"
    made = matcher(
        "structural_tag",
        {"format": {"type": "tag", "begin": "[", "content": {"type": "any_text"}, "end": f"</{mark}x>"}},
        {mark: special(mark)},
    )

    def accepts(text):
        return takes(made, TOKENIZER.encode(text, add_special_tokens=False, allow_special=True))

    assert accepts(f"[a </b> </c</{mark}x>")
    assert accepts(f"[</{mark}x>")
    assert not accepts(f"[a {mark}x>")
    assert not accepts(f"[a </{mark}")


def test_a_lark_definition_is_a_format():
    definition = 'start: /[^<\\n]+/ "\\n" | "<" start ">"'
    plain = {"type": "lark", "definition": definition}
    check(
        tag({"type": "or", "elements": [{"type": "tag", "begin": "<a>", "content": plain, "end": ["</a>", "</b>"]}]}),
        ["<a>x\n</a>", '<a><"\n></b>'],
        ["<a>x</a>", "<a>x\n", "<a>x\\n</a>", "<a><x\n</a>"],
    )
    assert "json_string" in refused({"type": "lark", "definition": definition, "json_string": True})
    assert "max_tokens" in refused({"type": "lark", "definition": "start[max_tokens=5]: /.*/"})
