"""Formats that write calls as JSON objects."""

import json

import pytest
from parser_harness import Output, make_format

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TWO_CALLS = (
    "Let me look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa\\"}ris", "days": [1, {"a": "<"}]}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>'
)


@pytest.mark.parametrize("special", [(), TAGS])
def test_hermes(special):
    parsed = Output(make_format("hermes", None, special), TWO_CALLS).check()

    assert parsed.content == "Let me look."
    assert parsed.calls == (
        ("get_weather", '{"city": "Pa\\"}ris", "days": [1, {"a": "<"}]}'),
        ("now", "{}"),
    )
    assert all(id.startswith("call_") and len(id) == 29 for id in parsed.ids)
    assert len(set(parsed.ids)) == 2


@pytest.mark.parametrize("special", [(), TAGS])
@pytest.mark.parametrize(
    "text, content, calls",
    [
        ("no call\n", "no call\n", ()),
        ("\n\n", "\n\n", ()),
        ("", "", ()),
        ('<tool_call>{"name": "f"}</tool_call>', "", (("f", "{}"),)),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", (("f", "{}"),)),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", (("f", '{"a": 1}'),)),
        (
            '<tool_call>{"id": 3, "name": "f", "x": {"name": "g"}, "parameters": {"a": 1}}</tool_call>',
            "",
            (("f", '{"a": 1}'),),
        ),
        # Cut off: what is there stays.
        ('a <tool_call>{"name": "f", "arguments": {"a": "b', "a", (("f", '{"a": "b'),)),
        ('a <tool_call>{"name": "f", ', "a", (("f", ""),)),
        # A closing tag is missing, or what stands between them.
        (
            '<tool_call>{"name": "f", "arguments": {"a": 1}}<tool_call>{"name": "g"}',
            "",
            (("f", '{"a": 1}'), ("g", "{}")),
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> b', "b", (("f", '{"a": 1'),)),
        (
            '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n\nThat is it. ',
            "That is it. ",
            (("f", '{"a": 1}'),),
        ),
    ],
)
def test_hermes_at_its_edges(special, text, content, calls):
    parsed = Output(make_format("hermes", None, special), text).check()

    assert (parsed.content, parsed.calls) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>x</tool_call> y",
        'a <tool_call> {"name": 1}</tool_call>',
        "the tag <tool_call> begins",
        "<tool_ca",
        "<tool_call>",
    ],
)
def test_what_is_no_call_is_content_as_it_was_written(text):
    assert Output(make_format("hermes"), text).check().content == text


def test_reasoning_between_tags_and_its_tokens():
    format = make_format("hermes", "qwen3", TAGS)
    text = "<think>\nsome thoughts\n</think>\n\n" + TWO_CALLS
    output = Output(format, text)
    parsed = output.check()

    assert parsed.reasoning == "some thoughts"
    assert parsed.content == "Let me look."
    assert len(parsed.calls) == 2
    inside = text.index("</think>") - len("<think>")
    assert parsed.num_reasoning_tokens == -(-inside // 4)


def test_the_prompt_says_whether_reasoning_is_open():
    format = make_format("hermes", "qwen3", TAGS)
    think, end = format.special["<think>"], format.special["</think>"]

    def parsed(**prompt):
        return Output(format, "hm</think>yes", **prompt).check()

    for prompt in ({"prompt_text": "<|im_start|>assistant\n<think>\n"}, {"prompt_ids": [5, think, end, 6, think, 7]}):
        assert (parsed(**prompt).reasoning, parsed(**prompt).content) == ("hm", "yes")
    for prompt in ({"prompt_text": "<think>\n\n</think>\n\n"}, {"prompt_ids": [think, end, 6]}, {}):
        assert (parsed(**prompt).reasoning, parsed(**prompt).content) == ("", "hmyes")


def test_a_call_ends_reasoning_that_was_not_closed():
    parsed = Output(
        make_format("hermes", "qwen3", TAGS), '<think>so I call\n<tool_call>{"name": "f"}</tool_call>'
    ).check()

    assert (parsed.reasoning, parsed.content, parsed.calls) == ("so I call", "", (("f", "{}"),))


@pytest.mark.parametrize("special", [(), TAGS])
def test_what_is_not_read_stays_as_it_is(special):
    text = "<think>\nhm\n</think>\n\n" + TWO_CALLS
    format = make_format("hermes", "qwen3", special)

    assert Output(format, text, reads_tools=False, reads_reasoning=False).check().content == text
    parsed = Output(format, text, reads_tools=False).check()
    assert (parsed.reasoning, parsed.content) == ("hm", TWO_CALLS)
    parsed = Output(format, text, reads_reasoning=False).check()
    assert (parsed.content, len(parsed.calls)) == ("<think>\nhm\n</think>\n\nLet me look.", 2)


def test_text_that_only_looks_like_a_special_token_is_text():
    format = make_format("hermes", "qwen3", TAGS)
    output = Output(format, "")
    output.pieces = [(text, 1) for text in ("<think>", "x", "</think>", '<tool_call>{"name": "f"}', "</tool_call>")]

    assert output.check().content == '<think>x</think><tool_call>{"name": "f"}</tool_call>'


def test_special_tokens_inside_strings_are_their_text():
    text = json.dumps({"name": "f", "arguments": {"a": "<think> </tool_call>"}})
    parsed = Output(make_format("hermes", "qwen3", TAGS), f"<tool_call>{text}</tool_call>").check()

    assert parsed.decoded == [("f", {"a": "<think> </tool_call>"})]
