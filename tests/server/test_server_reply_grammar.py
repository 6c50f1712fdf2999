"""What a reply must match: calls, the request's own grammar, and where reasoning stands beside them."""

import json
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.parsers.registry import OutputFormat, choose
from headrace.sampling.params import SamplingParams
from headrace.server.chat.calls import BoundReply, bound_reply
from headrace.server.chat.conversation import Conversation, Tool, ToolChoice, function_tool

MARKS = {"<think>": 1, "</think>": 2, "<tool_call>": 3, "</tool_call>": 4}
SCHEMA: dict[str, object] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ANSWER: dict[str, object] = {"type": "object", "properties": {"b": {"type": "boolean"}}}


def formatted(tools: str = "hermes", reasoning: str = "think", special: dict[str, int] = MARKS) -> OutputFormat:
    found = choose(template="", special=special, tool_parser=tools, reasoning_parser=reasoning)
    assert found is not None
    return found


def tool(strict: bool = False) -> Tool:
    return function_tool("tools[0]", "f", None, SCHEMA, strict)


def bound(
    sampling: SamplingParams,
    output_format: OutputFormat,
    tools: tuple[Tool, ...] = (),
    choice: ToolChoice = ToolChoice(),
    parallel: bool = True,
    prompt: str = "",
) -> BoundReply:
    conversation = Conversation(messages=[], tools=tools, choice=choice, parallel=parallel)
    return bound_reply(sampling, conversation, output_format, output_format.parser(prompt_text=prompt), prompt)


def tag_of(reply: BoundReply) -> dict[str, Any]:
    assert reply.by_grammar
    found: dict[str, Any] = json.loads(str(reply.sampling.structural_tag))["format"]
    assert reply.sampling.json_schema is None
    return found


PLAIN = SamplingParams()
JSON = SamplingParams(json_schema=ANSWER)


def test_tools_that_the_model_may_call_bind_nothing():
    assert bound(PLAIN, formatted(), (tool(),)) == BoundReply(PLAIN)


def test_strict_single_required_and_named_calls_are_bound():
    for fields in (
        {"tools": (tool(strict=True),)},
        {"tools": (tool(),), "parallel": False},
        {"tools": (tool(),), "choice": ToolChoice("required")},
        {"tools": (tool(),), "choice": ToolChoice("required", "f")},
    ):
        assert "<tool_call>" in json.dumps(tag_of(bound(PLAIN, formatted(), **fields)))  # type: ignore[arg-type]


def test_one_of_in_a_tool_that_is_not_strict_is_any_of_where_it_must_be():
    schema = {"type": "object", "properties": {"a": {"oneOf": [{"pattern": "^x"}, {"pattern": "y$"}]}}}
    for strict in (True, False):
        tools = (function_tool("tools[0]", "f", None, schema, strict), tool())
        tag = tag_of(bound(PLAIN, formatted(), tools, ToolChoice("required")))
        assert ("coerce_one_of" in json.dumps(tag)) is not strict
        assert tools[0].function["parameters"] == schema, "as the model sees it"


def test_none_forbids_the_token_that_begins_a_call():
    reply = bound(SamplingParams(logit_bias={"9": 1.0}), formatted(), (tool(),), ToolChoice("none"))
    assert reply == BoundReply(SamplingParams(logit_bias={"9": 1.0, "3": -100.0}))


def test_none_excludes_the_text_that_begins_a_call():
    reply = bound(PLAIN, formatted(special={}), (tool(),), ToolChoice("none"))
    assert "<tool_call>" in json.dumps(tag_of(reply))


def test_a_grammar_waits_for_the_end_of_reasoning_that_the_prompt_has_opened():
    reply = bound(JSON, formatted(), prompt="<|assistant|><think>\n")
    assert reply == BoundReply(SamplingParams(json_schema=ANSWER, grammar_after="</think>"))
    reply = bound(PLAIN, formatted(), (tool(),), ToolChoice("required"), prompt="<think>")
    assert reply.sampling.grammar_after == "</think>"
    assert "<think>" not in json.dumps(tag_of(reply))


def test_reasoning_that_ends_with_text_is_part_of_the_grammar():
    output_format = formatted(special={})
    for sampling, tools, choice in ((JSON, (), ToolChoice()), (PLAIN, (tool(),), ToolChoice("required"))):
        reply = bound(sampling, output_format, tools, choice, prompt="<think>")
        assert "</think>" in json.dumps(tag_of(reply))
        assert reply.sampling.grammar_after is None
    with pytest.raises(RequestError, match="reasoning"):
        bound(SamplingParams(ebnf='root ::= "a"'), output_format, prompt="<think>")


def test_a_grammar_leaves_room_for_reasoning_that_the_model_may_open():
    assert "<think>" in json.dumps(tag_of(bound(JSON, formatted())))
    assert bound(JSON, formatted(), prompt="<think>\n\n</think>\n\n") == BoundReply(JSON), "it is switched off"
    assert bound(JSON, formatted(reasoning="none")) == BoundReply(JSON)


def test_an_answer_and_calls_are_alternatives():
    shown = json.dumps(tag_of(bound(JSON, formatted(reasoning="none"), (tool(),))))
    assert json.dumps(ANSWER) in shown
    assert "<tool_call>" in shown
    for other in (
        SamplingParams(regex="a+"),
        SamplingParams(choice=["a", "b"]),
        SamplingParams(structural_tag={"format": {"type": "any_text"}}),
    ):
        assert "<tool_call>" in json.dumps(tag_of(bound(other, formatted(), (tool(),))))
    assert bound(JSON, formatted(reasoning="none"), (tool(),), ToolChoice("none")) == BoundReply(JSON)


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(ebnf='root ::= "a"'), "ebnf"),
        (SamplingParams(lark='start: "a"'), "lark"),
        (SamplingParams(structural_tag={"structures": [{}], "triggers": ["a"]}), "structural_tag"),
    ],
)
def test_grammars_that_cannot_be_alternatives_are_refused(sampling: SamplingParams, param: str):
    with pytest.raises(RequestError) as caught:
        bound(sampling, formatted(), (tool(),))
    assert caught.value.param == param


def test_a_grammar_that_the_client_has_placed_stays_there():
    sampling = SamplingParams(json_schema=ANSWER, grammar_after="</think>")
    assert bound(sampling, formatted(), (tool(),)) == BoundReply(sampling)
    with pytest.raises(RequestError, match="grammar_after"):
        bound(sampling, formatted(), (tool(),), ToolChoice("required"))
