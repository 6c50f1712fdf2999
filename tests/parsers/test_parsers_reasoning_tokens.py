"""The tokens that begin and end each format's reasoning."""

import pytest
from parser_harness import make_format

from headrace.parsers.registry import choose, reasoning_tokens

TEMPLATE = {
    "start_anchor": "<|bot|>",
    "fields": {
        "thinking": {"open": "<t>", "close": "</t>", "content": "text"},
        "content": {"close": "<|end|>", "content": "text"},
    },
}


def found(format):
    """Special tokens are 1000 and above, other characters their code points."""

    def encode(text):
        ids = []
        while text:
            mark = next((mark for mark in format.special if text.startswith(mark)), text[0])
            ids.append(format.special[mark] if mark in format.special else ord(mark))
            text = text[len(mark) :]
        return ids

    return reasoning_tokens(format, encode)


@pytest.mark.parametrize(
    ("tool_parser", "reasoning_parser", "special", "end", "ends", "begins"),
    [
        ("none", "think", ("<think>", "</think>"), 1001, (1001,), ((1000,),)),
        ("none", "think", ("</think>",), 1000, (1000,), (tuple(map(ord, "<think>")),)),
        ("hermes", "think", ("<think>", "</think>", "<tool_call>"), 1001, (1001, 1002), ((1000,),)),
        ("none", "mistral", ("[THINK]", "[/THINK]"), 1001, (1001,), ((1000,),)),
        (
            "none",
            "gemma4",
            ("<|channel>", "<channel|>"),
            1001,
            (1001,),
            ((1000, *map(ord, "thought\n")), (1000, *map(ord, "thought"))),
        ),
        (
            "gpt-oss",
            "none",
            ("<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|start|>"),
            1002,
            (1000, 1002, 1003, 1004, 1005),
            ((1000, *map(ord, "analysis"), 1001),),
        ),
    ],
)
def test_the_tokens_of_a_format(tool_parser, reasoning_parser, special, end, ends, begins):
    assert found(make_format(tool_parser, reasoning_parser, special)) == (end, ends, begins)


def test_formats_that_no_token_ends():
    for format in (
        make_format("none", "think"),
        make_format("none", "think", ("<think>",)),
        make_format("hermes", "none", ("</think>",)),
        make_format("gpt-oss", "none", ("<|channel|>", "<|message|>")),
    ):
        assert found(format) is None


def test_a_format_that_the_checkpoint_describes():
    format = choose(template="", special={"<t>": 1000, "</t>": 1001, "<|end|>": 1002}, response_template=TEMPLATE)
    assert format is not None
    assert found(format) == (1001, (1001,), ((1000,),))
    format = choose(template="", special={}, response_template=TEMPLATE)
    assert format is not None
    assert found(format) is None
