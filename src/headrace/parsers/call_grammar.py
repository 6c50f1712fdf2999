"""Grammars of calls in a model's own format, as structural tags: for calls that are required, bound by a schema, limited to one, or forbidden.

Names a format's terminals by their text; where a tokenizer has a special token for one, the grammar means that token. Other added tokens are
text to a grammar, and a model may then write them in other tokens: an output that is bound by one is read with `by_text` (`OutputFormat.parser`).
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.errors import RequestError
from headrace.parsers.parameters import schema_types, to_json
from headrace.parsers.registry import OutputFormat
from headrace.parsers.table import Writing
from headrace.parsers.value_grammar import (
    MAX_CHARS,
    Node,
    any_text,
    const,
    free_gemma_object,
    gemma_object,
    json_schema,
    lark,
    num_chars,
    one_of,
    pairs,
    python_value,
    regex,
    repeated,
    sequence,
    tag,
    text_value,
    too_large,
)

Tool = Mapping[str, object]

NO_INPUTS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Named:
    """The function that must be called."""

    name: str


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """What an output must match. structural_tag: its JSON, or "" for nothing. forbidden_ids: tokens that may not come."""

    structural_tag: str = ""
    forbidden_ids: frozenset[int] = frozenset()


def call_grammar(
    format: OutputFormat,
    tools: Sequence[Tool],
    choice: Literal["required", "auto", "none"] | Named,
    parallel: bool = True,
    strict_names: Collection[str] = (),
    opens_reasoning: bool = True,
    content: Node | None = None,
    in_reasoning: bool = False,
    inputs: Mapping[str, str] = NO_INPUTS,
) -> CallGrammar | None:
    """The grammar for a choice of tools, or None if anything may be written.

    tools: functions with `name` and `parameters`. Required or named calls match the functions' schemas; others only where the function is
    in `strict_names`. parallel: whether there may be more than one call. opens_reasoning: the output may begin with reasoning; False where
    the grammar begins after it, or reasoning is switched off. content: what an output without calls must match, a format of a structural
    tag. in_reasoning: the output begins within reasoning, which the prompt has opened, and the grammar has its end. inputs: by the names of
    functions with one parameter, a text, the lark definition that it matches where the call is bound and `binds_texts`.
    Raises RequestError if the format has no calls, the named function is not there, or the functions' schemas make too large a grammar.
    """
    if content is not None and (choice == "none" or not tools):
        return _bound(format, _answer(format, content), opens_reasoning, in_reasoning)
    if choice == "none":
        return _without_calls(format, opens_reasoning, in_reasoning)
    is_harmony = _is_harmony(format)  # where the end of a call is the end of the output: there is only one
    is_free = content is None and (parallel or is_harmony)
    if choice == "auto" and is_free and not any(tool.get("name") in strict_names for tool in tools):
        return None
    writing = _writing(format)
    parallel = parallel and not is_harmony
    if isinstance(choice, Named):
        tools = [tool for tool in tools if tool.get("name") == choice.name]
        if not tools:
            raise RequestError(f"tool_choice names the function {choice.name!r}, which is not in tools", "tool_choice")
    if choice == "auto":
        calls = _each_call(writing, tools, strict_names, inputs)
        if content is None:
            body = _optional_calls(format, writing, calls, parallel)
        else:
            body = one_of(_calls(writing, calls, parallel), _answer(format, content))
    else:
        if not tools:
            raise RequestError("tool_choice requires a call, and there are no tools", "tool_choice")
        calls = _each_call(writing, tools, {tool.get("name") for tool in tools}, inputs)
        body = _calls(writing, calls, parallel and not isinstance(choice, Named))
        if not writing.bare and not is_harmony:
            body = sequence(regex("[\n]{0,2}"), body)
    return _bound(format, body, opens_reasoning, in_reasoning)


def binds_texts(format: OutputFormat) -> bool:
    """Whether lark definitions bind the texts of calls: a format that writes them within quotes gives any text there."""
    return format.table is not None and bool(format.table.writings) and _writing(format).has_plain_text


def _bound(format: OutputFormat, body: Node, opens_reasoning: bool, in_reasoning: bool) -> CallGrammar:
    if in_reasoning and format.reasoning is not None:
        body = sequence(tag("", any_text(), format.reasoning.closes[0]), regex("[\n]{0,2}"), body)
    elif opens_reasoning:
        body = sequence(_reasoning(format), body)
    return CallGrammar(json.dumps({"type": "structural_tag", "format": body}, ensure_ascii=False))


def _answer(format: OutputFormat, content: Node) -> Node:
    """What matches `content`, where the format has its answers."""
    return sequence(const("<|channel|>final<|message|>"), content) if _is_harmony(format) else content


def _writing(format: OutputFormat) -> Writing:
    for writing in format.table.writings if format.table is not None else ():
        if not writing.needs or writing.needs in format.special:
            return writing
    raise RequestError(
        "required calls and strict schemas are not supported for the tool call format of this model", "tool_choice"
    )


def _is_harmony(format: OutputFormat) -> bool:
    return format.table is not None and format.table.has_headers


def _without_calls(format: OutputFormat, opens_reasoning: bool, in_reasoning: bool) -> CallGrammar | None:
    if format.table is None:
        return None
    table = format.table
    openings = list(table.opens) or [text for text in ("<|call|>", "<|constrain|>") if text in format.special]
    ids = frozenset(format.special[text] for text in openings if text in format.special)
    if ids or not openings:
        return CallGrammar(forbidden_ids=ids) if ids else None
    return _bound(format, any_text(openings), opens_reasoning, in_reasoning)


def _reasoning(format: OutputFormat) -> Node:
    """Reasoning that the model may begin by itself, up to its end."""
    if _is_harmony(format):
        after = "<|end|><|start|>assistant"
        return sequence(
            one_of(tag("<|channel|>analysis<|message|>", any_text(), after), const("")),
            one_of(tag("<|channel|>commentary<|message|>", any_text(), after), const("")),
        )
    if format.reasoning is None:
        return const("")
    block = tag(format.reasoning.opens[0], any_text(), format.reasoning.closes[0])
    return one_of(sequence(block, regex("[\n]{0,2}")), const(""))


def _each_call(
    writing: Writing, tools: Sequence[Tool], strict_names: Collection[object], inputs: Mapping[str, str]
) -> list[Node]:
    """One call of each function, as tags. Raises RequestError if they are too large."""
    calls = [
        _call(writing, tool, tool.get("name") in strict_names, inputs.get(str(tool.get("name")), "")) for tool in tools
    ]
    if num_chars(calls) > MAX_CHARS:
        raise too_large()
    return calls


def _call(writing: Writing, tool: Tool, is_strict: bool, definition: str) -> Node:
    """One call of one function, as a tag. definition: what its one parameter matches, "" if that is its schema's matter."""
    name = str(tool.get("name"))
    begin = writing.begin.replace("{name}", to_json(name)[1:-1] if writing.escapes else name)
    schema = _arguments_schema(tool.get("parameters"))
    if is_strict and definition and writing.has_plain_text:
        content = _text_argument(writing, schema, definition)
    else:
        content = _arguments(writing, schema, is_strict)
    begin, number, rest = begin.partition("{number}")
    if number:
        content = sequence(regex("[0-9]{1,6}"), const(rest), content)
    return tag(begin, content, writing.end)


def _arguments_schema(parameters: object) -> Mapping[str, object]:
    """The schema of a function's arguments, which are an object. A function without parameters has none, as OpenAI says."""
    if not isinstance(parameters, Mapping) or not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return parameters if "type" in parameters else {"type": "object", **parameters}


def _arguments(writing: Writing, schema: Mapping[str, object], is_strict: bool) -> Node:
    if writing.arguments == "json":
        return json_schema(schema if is_strict else {"type": "object"})
    if writing.arguments == "gemma":
        return gemma_object(schema, schema, writing.delimiter) if is_strict else free_gemma_object(writing.delimiter)
    if not is_strict:
        return _free_arguments(writing)
    properties = schema.get("properties")
    required = schema.get("required")
    items: list[tuple[Node, bool]] = []
    for key, value in properties.items() if isinstance(properties, Mapping) else ():
        is_required = isinstance(required, list) and key in required
        if writing.arguments == "python":
            items.append((sequence(const(f"{key}="), python_value(value, schema)), is_required))
            continue
        is_string = set(schema_types(value, schema)) <= {"string"}
        begin, end = writing.parameter
        begin = begin.replace("{key}", key).replace("{is_string}", "true" if is_string else "false")
        items.append((tag(begin, text_value(value, schema), end), is_required))
    return pairs(items, ", " if writing.arguments == "python" else "")


def _text_argument(writing: Writing, schema: Mapping[str, object], definition: str) -> Node:
    """Arguments that are one text."""
    properties = schema["properties"]
    assert isinstance(properties, Mapping), properties
    (key,) = properties
    if writing.arguments == "gemma":
        return tag("{", sequence(const(f"{key}:"), tag(writing.delimiter, lark(definition), writing.delimiter)), "}")
    begin, end = writing.parameter
    return tag(begin.replace("{key}", key).replace("{is_string}", "true"), lark(definition), end)


def _free_arguments(writing: Writing) -> Node:
    """Any arguments of a format that is not JSON."""
    if writing.arguments == "python":
        return repeated(sequence(regex("[A-Za-z_][A-Za-z0-9_]*="), python_value({}, {})), ", ")
    begin, end = writing.parameter
    begins = [begin.replace("{is_string}", text) for text in ("true", "false")][: 2 if "{is_string}" in begin else 1]
    items = []
    for begin in begins:
        before, _, after = begin.partition("{key}")
        items.append(sequence(const(before), regex('[^<>"\r\n]+'), tag(after, any_text(), end)))
    return repeated(one_of(*items), "")


def _calls(writing: Writing, calls: Sequence[Node], parallel: bool) -> Node:
    """At least one call."""
    separated: Node = {
        "type": "tags_with_separator",
        "tags": list(calls),
        "separator": writing.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    begin, end = writing.section
    return tag(begin, separated, end) if begin else separated


def _optional_calls(format: OutputFormat, writing: Writing, calls: Sequence[Node], parallel: bool) -> Node:
    """Any text, in which calls may stand where the format has them."""
    if _is_harmony(format):
        return one_of(_calls(writing, calls, False), sequence(const("<|channel|>final<|message|>"), any_text()))
    if writing.bare:
        return one_of(_calls(writing, calls, parallel), regex(f"(?s:[ \t\r\n]*[^ \t\r\n\\{writing.bare}].*)?"))
    assert format.table is not None
    tags = [_calls(writing, calls, parallel)] if writing.section[0] else list(calls)
    begins = [str(item["begin"]) for item in tags]
    triggers = [text for text in format.table.opens if any(begin.startswith(text) for begin in begins)]
    others = [text for text in format.table.opens if text not in triggers]
    return {
        "type": "triggered_tags",
        "triggers": triggers[:1] or [_common_beginning(begins)],
        "tags": tags,
        "stop_after_first": not parallel,
        "excludes": others,
    }


def _common_beginning(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    size = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:size]
