"""Grammars of calls in a model's own format, as structural tags: for calls that are required, bound by a schema, limited to one, or forbidden.

Names a format's terminals by their text; where a tokenizer has a special token for one, the grammar means that token. Other added tokens are
text to a grammar, and a model may then write them in other tokens: an output that is bound by one is read with `by_text` (`OutputFormat.parser`).
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, Literal

from headrace.errors import RequestError
from headrace.parsers.parameters import properties, referenced, schema_types, to_json
from headrace.parsers.registry import NO_TABLE, OutputFormat
from headrace.parsers.table import Writing

Node = dict[str, Any]
"""A format of a structural tag, before it is written as JSON."""

Tool = Mapping[str, object]

NO_INPUTS: Mapping[str, str] = {}

_MAX_GEMMA_DEPTH = 6
"""Deeper values of Gemma's notation are written as JSON."""

_MAX_FREE_DEPTH = 3
"""Deeper values of functions without a bound schema are not allowed in Gemma's notation."""

_MAX_LENGTH = 1 << 16

MAX_CHARS = 1 << 20
"""Largest grammar of calls, in characters of its JSON. Notations whose parts must be written once for each combination would exceed any memory."""

_MAX_PAIRS = MAX_CHARS // 32
"""Most pieces in a list of pairs, which cannot be shorter."""

_BOUNDS = {"pattern", "minLength", "maxLength", "format"}


@dataclass(frozen=True, slots=True)
class Named:
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
    is_harmony = format.table.has_headers  # where the end of a call is the end of the output: there is only one
    if content is not None:
        content = sequence(const("<|channel|>final<|message|>"), content) if is_harmony else content
    if content is not None and (choice == "none" or not tools):
        body = content
    elif choice == "none":
        if format.table is NO_TABLE:
            return None
        openings = list(format.table.opens) or [
            text for text in ("<|call|>", "<|constrain|>") if text in format.special
        ]
        ids = frozenset(format.special[text] for text in openings if text in format.special)
        if ids or not openings:
            return CallGrammar(forbidden_ids=ids) if ids else None
        body = any_text(openings)
    elif choice == "auto":
        is_free = content is None and (parallel or is_harmony)
        if is_free and not any(tool.get("name") in strict_names for tool in tools):
            return None
        writing = _writing(format)
        calls = _each_call(writing, tools, strict_names, inputs)
        parallel = parallel and not is_harmony
        body = (
            _optional_calls(format, writing, calls, parallel)
            if content is None
            else one_of(_calls(writing, calls, parallel), content)
        )
    else:
        body = _required_calls(format, tools, choice, parallel and not is_harmony, inputs)
    if in_reasoning and format.reasoning is not None:
        body = sequence(tag("", any_text(), format.reasoning.closes[0]), regex("[\n]{0,2}"), body)
    elif opens_reasoning:
        body = sequence(_reasoning(format), body)
    return CallGrammar(json.dumps({"type": "structural_tag", "format": body}, ensure_ascii=False))


def binds_texts(format: OutputFormat) -> bool:
    """Whether lark definitions bind the texts of calls: a format that writes them within quotes gives any text there."""
    return bool(format.table.writings) and _writing(format).has_plain_text


def _writing(format: OutputFormat) -> Writing:
    for writing in format.table.writings:
        if not writing.needs or writing.needs in format.special:
            return writing
    raise RequestError(
        "required calls and strict schemas are not supported for the tool call format of this model", "tool_choice"
    )


def _reasoning(format: OutputFormat) -> Node:
    """Reasoning that the model may begin by itself, up to its end."""
    if format.table.has_headers:
        after = "<|end|><|start|>assistant"
        return sequence(
            maybe(tag("<|channel|>analysis<|message|>", any_text(), after)),
            maybe(tag("<|channel|>commentary<|message|>", any_text(), after)),
        )
    if format.reasoning is None:
        return const("")
    block = tag(format.reasoning.opens[0], any_text(), format.reasoning.closes[0])
    return maybe(sequence(block, regex("[\n]{0,2}")))


# --- calls


def _required_calls(
    format: OutputFormat,
    tools: Sequence[Tool],
    choice: Literal["required"] | Named,
    parallel: bool,
    inputs: Mapping[str, str],
) -> Node:
    writing = _writing(format)
    if isinstance(choice, Named):
        parallel = False
        tools = [tool for tool in tools if tool.get("name") == choice.name]
        if not tools:
            raise RequestError(f"tool_choice names the function {choice.name!r}, which is not in tools", "tool_choice")
    if not tools:
        raise RequestError("tool_choice requires a call, and there are no tools", "tool_choice")
    calls = _each_call(writing, tools, {tool.get("name") for tool in tools}, inputs)
    body = _calls(writing, calls, parallel)
    return body if writing.bare or format.table.has_headers else sequence(regex("[\n]{0,2}"), body)


def _optional_calls(format: OutputFormat, writing: Writing, calls: Sequence[Node], parallel: bool) -> Node:
    """Any text, in which calls may stand where the format has them."""
    if format.table.has_headers:
        return one_of(_calls(writing, calls, False), sequence(const("<|channel|>final<|message|>"), any_text()))
    if writing.bare:
        return one_of(_calls(writing, calls, parallel), regex(f"(?s:[ \t\r\n]*[^ \t\r\n\\{writing.bare}].*)?"))
    tags = [_calls(writing, calls, parallel)] if writing.section[0] else list(calls)
    begins = [str(item["begin"]) for item in tags]
    triggers = [text for text in format.table.opens if any(begin.startswith(text) for begin in begins)]
    others = [text for text in format.table.opens if text not in triggers]
    return {
        "type": "triggered_tags",
        "triggers": triggers[:1] or [commonprefix(begins)],  # noqa: RUF071, of texts: character by character
        "tags": tags,
        "stop_after_first": not parallel,
        "excludes": others,
    }


def _calls(writing: Writing, calls: Sequence[Node], parallel: bool) -> Node:
    separated: Node = {
        "type": "tags_with_separator",
        "tags": list(calls),
        "separator": writing.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    begin, end = writing.section
    return tag(begin, separated, end) if begin else separated


def _each_call(
    writing: Writing, tools: Sequence[Tool], strict_names: Collection[object], inputs: Mapping[str, str]
) -> list[Node]:
    """One call of each function, as tags. Raises RequestError if they are too large."""
    calls = []
    for tool in tools:
        name = str(tool.get("name"))
        begin = writing.begin.replace("{name}", to_json(name)[1:-1] if writing.escapes else name)
        begin, number, rest = begin.partition("{number}")
        content = _arguments(writing, tool.get("parameters"), tool.get("name") in strict_names, inputs.get(name, ""))
        if number:
            content = sequence(regex("[0-9]{1,6}"), const(rest), content)
        calls.append(tag(begin, content, writing.end))
    if _num_chars(calls) > MAX_CHARS:
        raise _too_large()
    return calls


def _arguments(writing: Writing, parameters: object, is_strict: bool, definition: str) -> Node:
    """The arguments of a call. definition: what the one parameter matches, "" if that is its schema's matter."""
    if not isinstance(parameters, Mapping) or not parameters:
        # A function without parameters has none, as OpenAI says.
        schema: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
    else:
        schema = parameters if "type" in parameters else {"type": "object", **parameters}
    text = lark(definition) if definition else None
    match writing.arguments:
        case "json":
            return json_schema(schema if is_strict else {"type": "object"})
        case "gemma":
            if not is_strict:
                return _free_gemma_object(writing.delimiter)
            return _GemmaWriter(schema, writing.delimiter, text).members(schema)
        case _ if not is_strict:
            return _free_arguments(writing)
        case "python":
            items = [
                (sequence(const(f"{key}="), _python_value(value, schema)), is_required)
                for key, value, is_required in _parameters(schema)
            ]
            return _pairs(items, ", ")
        case "tags":
            begin, end = writing.parameter
            tags = []
            for key, value, is_required in _parameters(schema):
                is_string = "true" if set(schema_types(value, schema)) <= {"string"} else "false"
                named = begin.replace("{key}", key).replace("{is_string}", is_string)
                item = tag(named, text or _text_value(value, schema), end)
                tags.append(item if is_required else maybe(item))
            return sequence(*tags)


def _parameters(schema: Mapping[str, object]) -> list[tuple[str, object, bool]]:
    """(name, schema, whether it must be there) of each."""
    required = schema.get("required")
    return [(key, value, isinstance(required, list) and key in required) for key, value in properties(schema).items()]


def _free_arguments(writing: Writing) -> Node:
    """Any arguments of a format that is not JSON."""
    if writing.arguments == "python":
        return _repeated(sequence(regex("[A-Za-z_][A-Za-z0-9_]*="), _python_value({}, {})), ", ")
    begin, end = writing.parameter
    begins = [begin.replace("{is_string}", text) for text in ("true", "false")][: 2 if "{is_string}" in begin else 1]
    items = []
    for begin in begins:
        before, _, after = begin.partition("{key}")
        items.append(sequence(const(before), regex('[^<>"\r\n]+'), tag(after, any_text(), end)))
    return _repeated(one_of(*items), "")


# --- values


def _python_value(schema: object, root: Mapping[str, object]) -> Node:
    """A value in Python's notation: JSON, strings between single quotes, and Python's names of constants."""
    values = _fixed_values(schema)
    if values:
        return one_of(
            *(
                const(text)
                for value in values
                for text in ((to_json(value), repr(value)) if isinstance(value, str) else (repr(value),))
            )
        )
    types = schema_types(schema, root)
    options = [json_schema(schema, root)]
    if not types or (set(types) == {"string"} and not set(schema if isinstance(schema, Mapping) else ()) & _BOUNDS):
        options.append(regex(r"'([^'\\\r\n]|\\[\\'\"nrt])*'"))
    if not types or "boolean" in types:
        options.append(regex("True|False"))
    if not types or "null" in types:
        options.append(const("None"))
    return one_of(*options)


def _fixed_values(schema: object) -> list[object]:
    if not isinstance(schema, Mapping):
        return []
    values = schema.get("enum")
    return values if isinstance(values, list) else [schema["const"]] if "const" in schema else []


def _text_value(schema: object, root: Mapping[str, object]) -> Node:
    """A parameter's value as text between tags."""
    if values := _fixed_values(schema):
        return one_of(*(const(value if isinstance(value, str) else to_json(value)) for value in values))
    types = schema_types(schema, root)
    if types and "string" not in types:
        return json_schema(schema, root)
    return _text(schema) if set(types) == {"string"} else any_text()


def _text(schema: object) -> Node:
    """A string without quotes. Its length and pattern are kept to, where they are given; formats such as dates are not."""
    if not isinstance(schema, Mapping):
        return any_text()
    pattern = schema.get("pattern")
    least, most = schema.get("minLength"), schema.get("maxLength")
    if isinstance(pattern, str):
        begin = "" if pattern.startswith("^") else "(?s:.*)"
        end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        return regex(f"{begin}({pattern.removeprefix('^')[: None if end else -1]}){end}")
    if isinstance(least, int) or isinstance(most, int):
        least = least if isinstance(least, int) else 0
        return regex(f"(?s:.{{{least},{most if isinstance(most, int) and most <= _MAX_LENGTH else ''}}})")
    return any_text()


class _GemmaWriter:
    """Arguments in Gemma's notation. root: where references lead to. text: what the one string matches, if not what its schema says.

    The node of each value is made once, however many references lead to it.
    """

    def __init__(self, root: Mapping[str, object], delimiter: str, text: Node | None) -> None:
        self._root = root
        self._delimiter = delimiter
        self._text = text
        self._known: dict[tuple[int, int], Node] = {}

    def members(self, schema: Mapping[str, object], depth: int = 0) -> Node:
        items = [
            (sequence(const(f"{key}:"), self._value(value, depth + 1)), is_required)
            for key, value, is_required in _parameters(schema)
        ]
        return tag("{", _pairs(items, ",") if items else const(""), "}")

    def _value(self, schema: object, depth: int) -> Node:
        if isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
            schema = referenced(reference, self._root)
        if not isinstance(schema, Mapping) or depth > _MAX_GEMMA_DEPTH:
            return json_schema(schema, self._root)
        key = (id(schema), depth)
        if key not in self._known:
            self._known[key] = self._new_value(schema, depth)
        return self._known[key]

    def _new_value(self, schema: Mapping[str, object], depth: int) -> Node:
        delimiter = self._delimiter
        values = _fixed_values(schema)
        if values and all(value is None or isinstance(value, str | int | float) for value in values):
            texts = [f"{delimiter}{value}{delimiter}" if isinstance(value, str) else to_json(value) for value in values]
            return one_of(*map(const, texts))
        match schema.get("type"):
            case "string":
                return tag(delimiter, self._text or _text(schema), delimiter)
            case "object" if isinstance(schema.get("properties"), Mapping):
                return self.members(schema, depth)
            case "array" if isinstance(schema.get("items"), Mapping):
                items = _repeated(self._value(schema["items"], depth + 1), ",")
                return tag("[", items | {"at_least_one": bool(schema.get("minItems"))}, "]")
            case _:
                return json_schema(schema, self._root)


def _free_gemma_object(delimiter: str, depth: int = 0) -> Node:
    value = _free_gemma_value(delimiter, depth)
    return tag("{", _repeated(sequence(regex("[A-Za-z_][A-Za-z0-9_]*"), const(":"), value), ","), "}")


def _free_gemma_value(delimiter: str, depth: int) -> Node:
    options = [tag(delimiter, any_text(), delimiter), json_schema({"type": ["number", "boolean", "null"]})]
    if depth < _MAX_FREE_DEPTH:
        options += [
            _free_gemma_object(delimiter, depth + 1),
            tag("[", _repeated(_free_gemma_value(delimiter, depth + 1), ","), "]"),
        ]
    return one_of(*options)


# --- formats of structural tags


def const(text: str) -> Node:
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> Node:
    return {"type": "regex", "pattern": pattern}


def lark(definition: str) -> Node:
    return {"type": "lark", "definition": definition}


def any_text(excludes: Sequence[str] = ()) -> Node:
    return {"type": "any_text", "excludes": list(excludes)}


def sequence(*elements: Node) -> Node:
    """One after the other; empty texts are left out."""
    kept = [element for element in elements if element != const("")]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept} if kept else const("")


def one_of(*elements: Node) -> Node:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def maybe(element: Node) -> Node:
    return one_of(element, const(""))


def tag(begin: str, content: Node, end: str) -> Node:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_schema(schema: object, root: Mapping[str, object] | None = None) -> Node:
    """JSON of a schema. root: where its references lead to, with the options for the whole."""
    if isinstance(schema, Mapping) and root is not None:
        definitions = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
        schema = {**definitions, **schema}
    return {"type": "json_schema", "json_schema": schema}


def _repeated(item: Node, separator: str) -> Node:
    return {"type": "tags_with_separator", "tags": [tag("", item, "")], "separator": separator}


def _pairs(items: Sequence[tuple[Node, bool]], separator: str) -> Node:
    """Items in their order, with a text between those that are there. Each with whether it must be there. Raises RequestError for too many."""
    num_firsts = next((i + 1 for i, (_, is_required) in enumerate(items) if is_required), len(items))
    if num_firsts * (2 * len(items) - num_firsts) > 2 * _MAX_PAIRS:
        raise _too_large()
    firsts: list[Node] = []
    for i, (item, is_required) in enumerate(items):
        rest = [
            sequence(const(separator), other) if needed else maybe(sequence(const(separator), other))
            for other, needed in items[i + 1 :]
        ]
        firsts.append(sequence(item, *rest))
        if is_required:
            break
    else:
        firsts.append(const(""))
    return one_of(*firsts)


def _too_large() -> RequestError:
    return RequestError(
        f"tools: in the tool call format of this model the parameters need a grammar of more than {MAX_CHARS} characters; "
        "offer fewer or simpler tools, or leave calls to the model (tool_choice auto without strict)",
        "tools",
    )


def _num_chars(value: object) -> int:
    """At least how many characters the JSON of a value has, found without writing it: parts that are shared are read once, at any depth."""
    known: dict[int, int] = {}  # of lists and objects, by their Python ids
    todo = [value]
    while todo:
        inner = _parts_of(todo[-1])
        if unknown := [one for one in inner if _parts_of(one) and id(one) not in known]:
            todo += unknown
            continue
        known[id(todo.pop())] = 2 + sum(
            len(one) + 2 if isinstance(one, str) else known.get(id(one), 1) for one in inner
        )
    return known[id(value)]


def _parts_of(value: object) -> Sequence[object]:
    match value:
        case dict():
            return [*value.keys(), *value.values()]
        case list() | tuple():
            return value
        case _:
            return ()
