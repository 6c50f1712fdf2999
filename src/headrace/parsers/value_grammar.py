"""Pieces of structural tags for the arguments of calls: JSON, text between tags, and Gemma's notation."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import RequestError
from headrace.parsers.parameters import referenced, schema_types, to_json

Node = dict[str, Any]
"""A format of a structural tag, before it is written as JSON."""

_MAX_DEPTH = 6
"""Deeper values of Gemma's notation are written as JSON."""
_MAX_FREE_DEPTH = 3
"""Deeper values of functions without a bound schema are not allowed in Gemma's notation."""
_MAX_LENGTH = 1 << 16
MAX_CHARS = 1 << 20
"""Largest grammar of calls, in characters of its JSON. Notations whose parts must be written once for each combination would exceed any memory."""
_MAX_PAIRS = MAX_CHARS // 32
"""Most pieces in a list of pairs, which cannot be shorter."""
_BOUNDS = {"pattern", "minLength", "maxLength", "format"}


def const(text: str) -> Node:
    """Exactly this text."""
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> Node:
    """Text that a regular expression matches."""
    return {"type": "regex", "pattern": pattern}


def lark(definition: str) -> Node:
    """Text of a lark definition."""
    return {"type": "lark", "definition": definition}


def any_text(excludes: Sequence[str] = ()) -> Node:
    """Any text without these."""
    return {"type": "any_text", "excludes": list(excludes)}


def sequence(*elements: Node) -> Node:
    """One after the other; empty texts are left out."""
    kept = [element for element in elements if element != const("")]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept} if kept else const("")


def one_of(*elements: Node) -> Node:
    """One of these."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def tag(begin: str, content: Node, end: str) -> Node:
    """A format between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_schema(schema: object, root: Mapping[str, object] | None = None) -> Node:
    """JSON of a schema. root: where its references lead to, with the options for the whole."""
    if isinstance(schema, Mapping) and root is not None:
        definitions = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
        schema = {**definitions, **schema}
    return {"type": "json_schema", "json_schema": schema}


def too_large() -> RequestError:
    """The error for a grammar that exceeds MAX_CHARS."""
    return RequestError(
        f"tools: in the tool call format of this model the parameters need a grammar of more than {MAX_CHARS} characters; "
        "offer fewer or simpler tools, or leave calls to the model (tool_choice auto without strict)",
        "tools",
    )


def num_chars(value: object) -> int:
    """At least how many characters the JSON of a value has, found without writing it: parts that are shared are read once, at any depth."""
    known: dict[int, int] = {}  # of lists and objects, by their Python ids
    todo = [value]
    while todo:
        inner = _inner(todo[-1])
        if unknown := [one for one in inner if _inner(one) and id(one) not in known]:
            todo += unknown
            continue
        known[id(todo.pop())] = 2 + sum(
            len(one) + 2 if isinstance(one, str) else known.get(id(one), 1) for one in inner
        )
    return known[id(value)]


def _inner(value: object) -> Sequence[object]:
    match value:
        case dict():
            return [*value.keys(), *value.values()]
        case list() | tuple():
            return value
        case _:
            return ()


def pairs(items: Sequence[tuple[Node, bool]], separator: str) -> Node:
    """Items in their order, with a text between those that are there. Each with whether it must be there. Raises RequestError for too many."""
    if not separator:
        return sequence(*(item if is_required else one_of(item, const("")) for item, is_required in items))
    num_firsts = next((i + 1 for i, (_, is_required) in enumerate(items) if is_required), len(items))
    if num_firsts * (2 * len(items) - num_firsts) > 2 * _MAX_PAIRS:
        raise too_large()
    firsts: list[Node] = []
    for i, (item, is_required) in enumerate(items):
        rest = [
            sequence(const(separator), other) if needed else one_of(sequence(const(separator), other), const(""))
            for other, needed in items[i + 1 :]
        ]
        firsts.append(sequence(item, *rest))
        if is_required:
            break
    else:
        firsts.append(const(""))
    return one_of(*firsts)


def repeated(item: Node, separator: str) -> Node:
    """Any number of an item, or none."""
    return {"type": "tags_with_separator", "tags": [tag("", item, "")], "separator": separator}


def python_value(schema: object, root: Mapping[str, object]) -> Node:
    """A value in Python's notation: JSON, strings between single quotes, and Python's names of constants."""
    values = fixed_values(schema)
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


def fixed_values(schema: object) -> list[object]:
    """The values that a schema lists, empty if it does not."""
    if not isinstance(schema, Mapping):
        return []
    values = schema.get("enum")
    return values if isinstance(values, list) else [schema["const"]] if "const" in schema else []


def text_value(schema: object, root: Mapping[str, object]) -> Node:
    """A parameter's value as text between tags."""
    if values := fixed_values(schema):
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


def gemma_object(schema: Mapping[str, object], root: Mapping[str, object], delimiter: str) -> Node:
    """An object in Gemma's notation. Raises RequestError for a schema whose grammar would be too large."""
    return _gemma_object(schema, root, delimiter, 0, {})


def _gemma_object(
    schema: Mapping[str, object],
    root: Mapping[str, object],
    delimiter: str,
    depth: int,
    known: dict[tuple[int, int], Node],
) -> Node:
    """known: the nodes of values, by the Python ids of their schemas and their depths: each is made once, however many references lead to it."""
    properties, required = schema.get("properties"), schema.get("required")
    items = [
        (
            sequence(const(f"{key}:"), _gemma_value(value, root, delimiter, depth + 1, known)),
            isinstance(required, list) and key in required,
        )
        for key, value in (properties.items() if isinstance(properties, Mapping) else ())
    ]
    return tag("{", pairs(items, ",") if items else const(""), "}")


def _gemma_value(
    schema: object, root: Mapping[str, object], delimiter: str, depth: int, known: dict[tuple[int, int], Node]
) -> Node:
    if isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
        schema = referenced(reference, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return json_schema(schema, root)
    key = (id(schema), depth)
    if key not in known:
        known[key] = _new_gemma_value(schema, root, delimiter, depth, known)
    return known[key]


def _new_gemma_value(
    schema: Mapping[str, object],
    root: Mapping[str, object],
    delimiter: str,
    depth: int,
    known: dict[tuple[int, int], Node],
) -> Node:
    values = fixed_values(schema)
    if values and all(value is None or isinstance(value, str | int | float) for value in values):
        return one_of(
            *(const(f"{delimiter}{value}{delimiter}" if isinstance(value, str) else to_json(value)) for value in values)
        )
    match schema.get("type"):
        case "string":
            return tag(delimiter, _text(schema), delimiter)
        case "object" if isinstance(schema.get("properties"), Mapping):
            return _gemma_object(schema, root, delimiter, depth, known)
        case "array" if isinstance(schema.get("items"), Mapping):
            separated = {
                "type": "tags_with_separator",
                "tags": [tag("", _gemma_value(schema["items"], root, delimiter, depth + 1, known), "")],
                "separator": ",",
                "at_least_one": bool(schema.get("minItems")),
            }
            return tag("[", separated, "]")
        case _:
            return json_schema(schema, root)


def free_gemma_object(delimiter: str, depth: int = 0) -> Node:
    """Any object in Gemma's notation."""
    return tag(
        "{",
        repeated(sequence(regex("[A-Za-z_][A-Za-z0-9_]*"), const(":"), _free_gemma_value(delimiter, depth)), ","),
        "}",
    )


def _free_gemma_value(delimiter: str, depth: int) -> Node:
    options = [tag(delimiter, any_text(), delimiter), json_schema({"type": ["number", "boolean", "null"]})]
    if depth < _MAX_FREE_DEPTH:
        options += [
            free_gemma_object(delimiter, depth + 1),
            tag("[", repeated(_free_gemma_value(delimiter, depth + 1), ","), "]"),
        ]
    return one_of(*options)
