"""The format that a checkpoint describes itself: `response_template` in its tokenizer's config, as a table for the machine.

The template names fields of the message, each with what opens and closes it. `content` is content, `thinking`, `reasoning` and
`reasoning_content` are reasoning, `tool_calls` are calls. Differences to transformers' own reader: nothing is lost (a text that has no field,
or comes in two places, is content; what cannot be read as a call is content as it was written), and JSON arguments are passed on as they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import regex

from headrace.parsers.base import CallSink, Reader
from headrace.parsers.json_text import JsonCall
from headrace.parsers.program import marks
from headrace.parsers.region_values import calls_of, parsed, transformed
from headrace.parsers.table import Captures, Go, Kind, ReasoningTable, State, Table, ToolSchemas

_REASONING = ("thinking", "reasoning", "reasoning_content")
_CALLS = "tool_calls"
_PARSERS = ("text", "int", "float", "bool", "json", "xml-inline", "kv-lines")
Field = Mapping[str, Any]


class UnsupportedTemplateError(ValueError):
    """A template that cannot be followed; its text says why."""


def tables_of(template: Mapping[str, object], special: Mapping[str, int]) -> tuple[Table, ReasoningTable | None]:
    """The tables of a template: reasoning between literal tags has one of its own. special: texts of added tokens and their ids.

    Raises UnsupportedTemplateError.
    """
    if template.get("version", 1) != 1:
        raise UnsupportedTemplateError(f"its version is {template.get('version')!r}")
    fields = template.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise UnsupportedTemplateError("it has no fields")
    anchor = _anchor(template, "start_anchor", "start_anchor_pattern")
    literals: list[str] = []
    states: dict[str, State] = {}
    opens: dict[str, Go] = {}
    patterns: list[tuple[str, Go]] = []
    implicit = State(Kind.CONTENT)
    reasoning: ReasoningTable | None = None
    for name, field in fields.items():
        _check(name, field)
        begin, end = _terminals(field, "open"), _terminals(field, "close")
        kind = Kind.REASONING if name in _REASONING else Kind.CONTENT
        on = {text: Go("content") for text in end[0]}
        after = [(pattern, Go("content")) for pattern in end[1]]
        literals += [*begin[0], *end[0]]
        if not begin[0] and not begin[1]:
            if name == _CALLS:
                raise UnsupportedTemplateError(f"{name} has no begin mark")
            implicit = State(kind, on, patterns=after)
            continue
        if kind is Kind.REASONING and reasoning is None and begin[0] and end[0] and not begin[1] and not end[1]:
            reasoning = ReasoningTable("response_template", tuple(begin[0]), tuple(end[0]))
            continue
        opens.update((text, Go(f"field {name}")) for text in begin[0])
        patterns += [(pattern, Go(f"field {name}")) for pattern in begin[1]]
        if name != _CALLS:
            states[f"field {name}"] = State(kind, on, patterns=after)
        elif _is_plain_json(field) and not end[1]:
            states[f"field {name}"] = State(Kind.READER, reader=_json_reader, then="closing")
            states["closing"] = State(Kind.SPACE, on)
        else:
            states[f"field {name}"] = State(Kind.REGION, on, read_calls=_region_reader(field), patterns=after)
    states["content"] = State(implicit.kind, implicit.on, patterns=(*patterns, *implicit.patterns))
    texts = [*literals, *(pattern.replace("\\", "") for state in states.values() for pattern, _ in state.patterns)]
    # Where a token is only a part of some terminal, all of them are read as text.
    is_text = any(text not in special and marks([text], special) for text in texts)
    has_reasoning = reasoning is None and any(name in _REASONING for name in fields)
    table = Table(
        "response_template",
        states,
        anchor=anchor,
        is_text=is_text,
        has_tools=_CALLS in fields,
        has_reasoning=has_reasoning,
        opens=opens,
    )
    return table, reasoning


def _check(name: object, field: object) -> None:
    if not isinstance(field, Mapping):
        raise UnsupportedTemplateError(f"field {name!r} is not an object")
    if field.get("content", "text") not in _PARSERS:
        raise UnsupportedTemplateError(f"field {name!r} has the content {field['content']!r}")
    if name not in (_CALLS, "content", *_REASONING):
        raise UnsupportedTemplateError(f"the field {name!r} is not supported")
    if name != _CALLS and field.get("content", "text") != "text":
        raise UnsupportedTemplateError(f"field {name!r} is not text")


def _terminals(field: Field, name: str) -> tuple[list[str], list[str]]:
    """The literal texts and the regular expressions that open or close a field."""
    literal, pattern = field.get(name), field.get(f"{name}_pattern")
    texts = [literal] if isinstance(literal, str) else list(literal or ())
    if not all(isinstance(text, str) and text for text in texts):
        raise UnsupportedTemplateError(f"`{name}` must be a string or a list of strings")
    if pattern is None:
        return texts, []
    try:
        regex.compile(pattern, regex.DOTALL)
    except (regex.error, TypeError):
        raise UnsupportedTemplateError(f"`{name}_pattern` is not a regular expression") from None
    return texts, [pattern]


def _anchor(template: Mapping[str, object], name: str, pattern_name: str) -> str:
    texts, patterns = _terminals(template, name)
    if not texts and not patterns:
        raise UnsupportedTemplateError(f"it has neither {name} nor {pattern_name}")
    return patterns[0] if patterns else "|".join(map(regex.escape, sorted(texts, key=len, reverse=True)))


def _is_plain_json(field: Field) -> bool:
    """Whether a call is a JSON object of name and arguments, which can be passed on while it comes."""
    if field.get("content") != "json" or field.get("content_args") or field.get("transform_each"):
        return False
    transform = field.get("transform")
    function = transform.get("function", transform) if isinstance(transform, Mapping) else transform
    whole: Sequence[object] = (
        None,
        "{content}",
        {"name": "{content.name}", "arguments": "{content.arguments}"},
    )
    return function in whole


def _json_reader(sink: CallSink, schemas: ToolSchemas) -> Reader:
    return JsonCall(sink, ("arguments",))


def _region_reader(field: Field) -> Any:
    content, options = field.get("content", "text"), field.get("content_args") or {}
    transform, each = field.get("transform"), field.get("transform_each", False)

    def read(text: str, captures: Captures, schemas: ToolSchemas) -> list[tuple[str, str]]:
        value = parsed(text, content, options)
        if each:
            value = [transformed(transform, {**captures, **item}) for item in value]
        elif transform is not None:
            value = transformed(transform, {**captures, "content": value})
        return calls_of(value, schemas)

    return read
