"""What a reply must match: the model's own way to write calls, joined with the grammar that the request asks for, around its reasoning.

Pure functions, run in the thread that renders prompts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.grammar.schema_walk import with_one_of_as_any_of
from headrace.messages.grammar import GrammarKind
from headrace.messages.neutral import is_empty
from headrace.parsers.call_grammar import CallGrammar, Named, call_grammar
from headrace.parsers.engine import OutputParser
from headrace.parsers.registry import OutputFormat
from headrace.sampling.grammar_fields import GRAMMAR_KINDS, json_value
from headrace.sampling.params import SamplingParams
from headrace.server.chat.conversation import Conversation

_FORBIDDEN = -100.0
"""The bias of tokens that must not come, the least that is allowed."""

_FREE_KINDS: tuple[GrammarKind, ...] = ("ebnf", "lark")
"""Grammars that cannot be part of another one."""


@dataclass(frozen=True, slots=True)
class BoundReply:
    """sampling: with what the output must match. by_grammar: a grammar that was made here binds it, so marks may come as text, too."""

    sampling: SamplingParams
    by_grammar: bool = False


def bound_reply(
    sampling: SamplingParams, conversation: Conversation, output_format: OutputFormat, start: OutputParser, prompt: str
) -> BoundReply:
    """The sampling parameters with what `tool_choice`, `strict` and reasoning ask of the output.

    start: a parser at the beginning of the output. prompt: the end of its text. Raises RequestError for what cannot be combined.
    """
    kind = next((kind for kind in GRAMMAR_KINDS if not is_empty(getattr(sampling, kind))), None)
    if sampling.grammar_after:
        if conversation.choice.mode == "required":
            raise RequestError("grammar_after cannot be combined with a required tool call", "grammar_after")
        return BoundReply(sampling)
    reasoning = output_format.reasoning
    ends_reasoning = next((text for text in reasoning.closes if text in output_format.special), "") if reasoning else ""
    # Where the prompt has opened the reasoning, the grammar begins behind its end, or has it in itself; else the model may open it.
    after = ends_reasoning if start.is_reasoning else ""
    opens_reasoning = not start.is_reasoning and not _has_closed(output_format, prompt)
    in_reasoning = start.is_reasoning and not after
    bound = _calls_and_content(sampling, kind, conversation, output_format, opens_reasoning, in_reasoning)
    if bound is None:
        return BoundReply(msgspec.structs.replace(sampling, grammar_after=after) if kind and after else sampling)
    if bound.forbidden_ids:
        bias = {str(token_id): _FORBIDDEN for token_id in bound.forbidden_ids}
        sampling = msgspec.structs.replace(sampling, logit_bias={**(sampling.logit_bias or {}), **bias})
    if not bound.structural_tag:
        return BoundReply(sampling)
    without: dict[str, Any] = dict.fromkeys(GRAMMAR_KINDS)
    tag = bound.structural_tag
    return BoundReply(
        msgspec.structs.replace(sampling, **without | {"structural_tag": tag, "grammar_after": after or None}), True
    )


def _calls_and_content(
    sampling: SamplingParams,
    kind: GrammarKind | None,
    conversation: Conversation,
    output_format: OutputFormat,
    opens_reasoning: bool,
    in_reasoning: bool,
) -> CallGrammar | None:
    """What binds the output; None = nothing, or the request's own grammar as it is."""
    choice, tools = conversation.choice, conversation.tools
    may_call = bool(tools) and choice.mode != "none"
    content = None
    if kind is not None and choice.mode != "required":
        beside_reasoning = in_reasoning or (opens_reasoning and output_format.has_reasoning)
        if not may_call and not beside_reasoning:
            return None
        if kind in _FREE_KINDS:
            if may_call:
                raise RequestError(
                    f"{kind} cannot be combined with tools that may be called: use tool_choice none, or another kind of grammar",
                    kind,
                )
            if in_reasoning:
                raise RequestError(
                    f"{kind} cannot be combined with this model's reasoning: switch that off, or use another kind of grammar",
                    kind,
                )
            return None
        content = _content(sampling, kind)
    if not tools and content is None:
        return None
    return call_grammar(
        output_format,
        [tool.function if tool.strict else _loose(tool.function) for tool in tools],
        Named(choice.name) if choice.name is not None else choice.mode,
        parallel=conversation.parallel,
        strict_names={tool.name for tool in tools if tool.strict},
        opens_reasoning=opens_reasoning,
        in_reasoning=in_reasoning,
        content=content,
        inputs={tool.name: tool.lark for tool in tools if tool.lark},
    )


def _loose(function: Mapping[str, object]) -> Mapping[str, object]:
    """A function that is not strict, as grammars read it."""
    parameters = function.get("parameters")
    return {**function, "parameters": with_one_of_as_any_of(parameters)} if isinstance(parameters, dict) else function


def _content(sampling: SamplingParams, kind: GrammarKind) -> dict[str, Any]:
    """The request's grammar as a format of a structural tag. Raises RequestError."""
    match kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": json_value(kind, sampling.json_schema)}
        case "regex":
            return {"type": "regex", "pattern": sampling.regex}
        case "choice":
            texts = [{"type": "const_string", "value": text} for text in sampling.choice or ()]
            return texts[0] if len(texts) == 1 else {"type": "or", "elements": texts}
        case _:
            tag = json_value(kind, sampling.structural_tag)
            found = tag.get("format") if isinstance(tag, dict) else None
            if not isinstance(found, dict):
                raise RequestError(
                    "structural_tag: only one with a `format` can be combined with tools or reasoning", "structural_tag"
                )
            return found


def _has_closed(output_format: OutputFormat, prompt: str) -> bool:
    """Whether the prompt ends with reasoning that is complete, as templates write it to switch reasoning off."""
    reasoning = output_format.reasoning
    return reasoning is not None and prompt.rstrip().endswith(tuple(reasoning.closes))
