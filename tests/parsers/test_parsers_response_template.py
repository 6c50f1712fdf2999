"""Formats that checkpoints describe: the same message as transformers reads, however the text is cut."""

import json

import pytest
from parser_harness import Output
from transformers.utils.chat_parsing import parse_response

from headrace.errors import RequestError
from headrace.parsers.call_grammar import call_grammar
from headrace.parsers.registry import choose

TOOLS = [
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "ratio": {"type": "number"},
                "deep": {"type": ["boolean", "null"]},
                "tags": {"type": "array"},
            },
        },
    }
]
CALL = {"type": "function", "function": "{content}"}
NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
QWEN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "content": {"close": "<|im_end|>", "repeats": True, "join": ""},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": CALL,
        },
    },
}
CODER = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"repeats": True, "join": ""},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>]+)>\n(?P<value>.*?)\n</parameter>"},
            "transform": NAMED_CALL,
        },
    },
}
HARMONY = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"]},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+) <\|constrain\|>json<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": NAMED_CALL,
        },
    },
}
GEMMA = {
    "start_anchor_pattern": r"<\|turn>model\n",
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "content": {"close_pattern": r"<turn\|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": NAMED_CALL,
        },
    },
}
LIST = {
    "start_anchor": "[/INST]",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            "transform_each": True,
        },
    },
}
LINES = {
    "start_anchor": "A:",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"@(?P<name>\w+)\n",
            "close": "@end",
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"kv_sep": "=", "value_parser": {"name": "text"}},
            "transform": NAMED_CALL,
        },
    },
}
ARGUMENTS = '{"city": "Pa\\"r<is", "days": 7, "deep": null, "tags": ["a", {"b": 1}]}'
QWEN_CALLS = f"""<think>
hm
</think>

Sure.
<tool_call>
{{"name": "weather", "arguments": {ARGUMENTS}}}
</tool_call>
<tool_call>
{{"name": "now", "arguments": {{}}}}
</tool_call><|im_end|>"""
CODER_CALLS = """Sure.
<tool_call>
<function=weather>
<parameter=city>
12
</parameter>
<parameter=days>
7
</parameter>
<parameter=ratio>
2.50
</parameter>
<parameter=deep>
True
</parameter>
<parameter=tags>
[1, "a"]
</parameter>
<parameter=other>
7
</parameter>
</function>
</tool_call>
<tool_call><function=now></function></tool_call>"""
HARMONY_CALL = (
    "<|channel|>analysis<|message|>hm<|end|>"
    f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
)
GEMMA_CALL = (
    "<|channel>thought\nhm<channel|>Sure."
    '<|tool_call>call:weather{city:<|"|>Pa"ris, {x}<|"|>,days:7,tags:[<|"|>a<|"|>,true]}<tool_call|><turn|>'
)
LIST_CALLS = (
    '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", "days": "7"}}, {"name": "now", "arguments": {}}]'
)
START = "<|im_start|>assistant\n"
CASES = {
    "qwen": (QWEN, START, QWEN_CALLS),
    "qwen, in its thoughts": (QWEN, f"<|im_start|>user\n<think>{START}<think>\n", "hm</think>Just text <b> here"),
    "qwen, only text": (QWEN, START, "a < b <thin </think > c"),
    "coder": (CODER, START, CODER_CALLS),
    "harmony": (HARMONY, "<|start|>assistant", HARMONY_CALL),
    "harmony, an answer": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>Yes.<|return|>",
    ),
    "gemma": (GEMMA, "<|turn>model\n", GEMMA_CALL),
    "list": (LIST, "[/INST]", LIST_CALLS),
    "lines": (LINES, "A:", "Sure @weather\ncity = Oslo\ndays = 7\n@end"),
}
SPECIAL = {
    "qwen": ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"),
    "harmony": ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|end|>", "<|return|>"),
    "gemma": ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>"),
}


@pytest.mark.parametrize("with_special", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_transformers(name, with_special):
    template, prompt, text = CASES[name]
    special = {text: 1000 + i for i, text in enumerate(SPECIAL.get(name.split(",")[0], ()) if with_special else ())}
    format = choose(template="", special=special, response_template=template)
    output = Output(format, text, tools=TOOLS, prompt_text=prompt)
    parsed = output.check(num_random=4)

    expected = parse_response(text, template, prefix=prompt, tools=TOOLS)
    calls = expected.get("tool_calls", [])
    functions = [call["function"] for call in calls]
    assert parsed.content.strip() == expected.get("content", "")
    assert parsed.reasoning == expected.get("reasoning_content", expected.get("thinking", ""))
    assert parsed.decoded == [(function["name"], function["arguments"]) for function in functions]


def test_what_is_no_call_is_content_and_what_is_not_read_too():
    format = choose(template="", special={}, response_template=CODER)
    text = "Sure.\n<tool_call>\n<function=now></function></tool_call>"

    assert Output(format, text, reads_tools=False).check().content == text
    format = choose(template="", special={}, response_template=LIST)
    assert Output(format, "a [TOOL_CALLS] none").check().content == "a [TOOL_CALLS] none"


def test_a_template_that_cannot_be_followed_leaves_the_choice_to_the_chat_template():
    for template in (
        {"version": 2, **QWEN},
        {"fields": QWEN["fields"]},
        {**QWEN, "fields": {}},
        {**QWEN, "fields": {"poem": {}}},
        {**QWEN, "fields": {"content": {"content": "json"}}},
        {**QWEN, "fields": {"content": {"close_pattern": "("}}},
    ):
        assert choose(template="", special={}, response_template=template) is None
    assert choose(template="<tool_call> 'arguments'", special={}, response_template={}).name == "hermes"
    assert choose(template="", special={}, response_template=QWEN).name == "response_template"
    assert choose(template="", special={}, response_template=QWEN, tool_parser="glm45").name == "glm45"


def test_arguments_of_plain_json_stream():
    parser = choose(template="", special={}, response_template=QWEN).parser()
    events = [event for character in CASES["qwen"][2] for event in parser.push([(character, 1)])]
    texts = [event.text for event in events if getattr(event, "index", 1) == 0 and hasattr(event, "text")]

    assert "".join(texts) == ARGUMENTS
    assert len(texts) == len(ARGUMENTS)
    assert json.loads(ARGUMENTS)


def test_calls_can_be_required_where_the_chat_template_shows_how_they_are_written():
    format = choose(template="<tool_call> <think>", special={}, response_template=QWEN)
    made = json.loads(call_grammar(format, TOOLS, "required").structural_tag)

    assert '<tool_call>\\n{\\"name\\": \\"weather\\"' in json.dumps(made)
    assert "<think>" in json.dumps(made)
    bare = choose(template="", special={}, response_template=QWEN)
    with pytest.raises(RequestError, match="format"):
        call_grammar(bare, TOOLS, "required")
    assert "<tool_call>" in call_grammar(bare, TOOLS, "none").structural_tag


def test_strict_calls_after_a_beginning_that_is_a_pattern():
    format = choose(template="<function= <parameter=", special={}, response_template=CODER)
    made = json.loads(call_grammar(format, [*TOOLS, {"name": "now"}], "auto", strict_names={"weather"}).structural_tag)

    assert made["format"]["triggers"] == ["<tool_call>\n<function="]


def test_reasoning_between_tags_that_is_not_read_stays():
    format = choose(template="", special={}, response_template=QWEN)

    assert Output(format, "<think>hm</think> a", reads_reasoning=False).check().content == "<think>hm</think> a"
