"""The request types of the official clients, taken apart into fields and words; and docs/fields.md, the table that gives each a class.

A field is a path: `text.format[json_schema].schema`; in brackets is the variant of a union, by its type or role.
"""

import functools
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import typing_extensions
from pydantic import BaseModel

PAGE = Path(__file__).parents[2] / "docs" / "fields.md"
CLASSES = ("served", "neutral", "noted", "refused")
ANY = "any"
_WRAPPERS = (
    typing.Annotated,
    typing.Required,
    typing.NotRequired,
    typing_extensions.Required,
    typing_extensions.NotRequired,
)
_UNIONS = (Union, types.UnionType)


@dataclass(frozen=True)
class Row:
    """A line of the table. values: words of the field; empty = whatever it holds, ("any",) = every word that there is."""

    fields: tuple[str, ...]
    values: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class Section:
    """The table of an API."""

    rows: tuple[Row, ...]

    def row(self, path: str, word: str | None = None) -> Row | None:
        """The row that gives a field, or one of its words, its class: the closest one; None = none does."""
        found = [(rank, index) for index, row in enumerate(self.rows) if (rank := _rank(row, path, word))]
        return self.rows[max(found, key=lambda each: each[0])[1]] if found else None

    def covers(self, path: str) -> bool:
        """Whether everything beneath a field has one class, so that no row is about a part of it."""
        parts = any(
            _is_beneath(name.removesuffix(".*"), path) or (name == path and row.values not in ((), (ANY,)))
            for row in self.rows
            for name in row.fields
        )
        return not parts and self.row(path + ".anything", "any word") is not None


def _rank(row: Row, path: str, word: str | None) -> int:
    """How closely a row means a field, or its word; 0 = not at all."""
    best = 0
    for name in row.fields:
        whole = name.removesuffix(".*")
        is_whole = name != whole or (row.kind != "served" and not row.values)
        if path == whole:
            said = word is None or word in row.values
            best = max(
                best, 3000 if said and word is not None else 2000 if said or is_whole or row.values == (ANY,) else 0
            )
        elif is_whole and _is_beneath(path, whole):
            best = max(best, len(whole))
    return best


def _is_beneath(path: str, parent: str) -> bool:
    return path.startswith(parent) and path[len(parent) :].startswith((".", "["))


def sections() -> dict[str, Section]:
    """docs/fields.md by its headings. Checks that every row has a class."""
    found: dict[str, list[Row]] = {}
    rows: list[Row] = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            rows = found.setdefault(line.removeprefix("## "), [])
        if line.startswith("| `"):
            fields, values, kind = (cell.strip() for cell in line.strip("|").split("|"))
            word = kind.partition(":")[0].partition(",")[0]
            assert word in CLASSES, line
            words = (ANY,) if values == ANY else tuple(re.findall(r"`([^`]+)`", values))
            rows.append(Row(tuple(re.findall(r"`([^`]+)`", fields)), words, word))
    return {name: Section(tuple(rows)) for name, rows in found.items()}


@dataclass(frozen=True)
class Found:
    """A field of a type, or one of its words. body: a small one in which the field asks for something, or is the word."""

    path: str
    word: str | None
    body: Any


Wrap = Callable[[Any], Any]


def walk(
    kind: Any, path: str, wrap: Wrap, stop: Callable[[str], bool], above: frozenset[Any] = frozenset()
) -> Iterator[Found]:
    """Every field of a type, and every word that one may be. wrap: makes a body of a value of `kind`. stop: beneath this field all is known."""
    origin = get_origin(kind)
    if origin in _WRAPPERS:
        yield from walk(get_args(kind)[0], path, wrap, stop, above)
    elif origin is Literal:
        yield from (Found(path, str(word), wrap(word)) for word in get_args(kind) if word != "")
    elif (fields := _fields(kind)) is not None:
        if kind not in above:
            for name, inner in fields.items():
                if not _is_label(name, inner):
                    yield from _field(kind, name, inner, path, wrap, stop, above | {kind})
    elif origin in _UNIONS:
        own = [each for each in get_args(kind) if each is not type(None)]
        own = [inner for each in own for inner in _flat(each)]
        several = sum(_fields(each) is not None for each in own) > 1
        for each in own:
            if several and _fields(each) is not None:
                inside = f"{path}[{_label(each)}]"
                yield Found(inside, None, wrap(example(each)))
                if not stop(inside):
                    yield from walk(each, inside, wrap, stop, above)
            else:
                yield from walk(each, path, wrap, stop, above)
    elif origin is dict:
        return
    elif origin is not None:
        yield from walk(get_args(kind)[0], path, lambda value: wrap([value]), stop, above)


def _field(
    kind: Any, name: str, inner: Any, path: str, wrap: Wrap, stop: Callable[[str], bool], above: frozenset[Any]
) -> Iterator[Found]:
    inside = f"{path}.{name}" if path else name

    def wrapped(value: Any) -> Any:
        return wrap(_least(kind) | {name: value})

    yield Found(inside, None, wrapped(example(inner)))
    if not stop(inside):
        yield from walk(inner, inside, wrapped, stop, above)


def _is_label(name: str, kind: Any) -> bool:
    """Whether a field only says which variant its object is."""
    while get_origin(kind) in _WRAPPERS:
        kind = get_args(kind)[0]
    return name in ("type", "role") and get_origin(kind) is Literal and len(get_args(kind)) == 1


def _flat(kind: Any) -> list[Any]:
    """The types of a union within a union."""
    while get_origin(kind) in _WRAPPERS:
        kind = get_args(kind)[0]
    if get_origin(kind) in _UNIONS:
        return [inner for each in get_args(kind) if each is not type(None) for inner in _flat(each)]
    return [kind]


@functools.cache
def _fields(kind: Any) -> dict[str, Any] | None:
    """Of a TypedDict or a pydantic model; None for anything else."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if isinstance(kind, type) and hasattr(kind, "__total__"):
        return typing.get_type_hints(kind, include_extras=True)
    return None


def _label(kind: Any) -> str:
    """What a variant is called: the word of its type or role, else its class."""
    for name in ("type", "role"):
        own = (_fields(kind) or {}).get(name)
        while get_origin(own) in (*_WRAPPERS, *_UNIONS):
            own = next(each for each in get_args(own) if each is not type(None))
        if get_origin(own) is Literal:
            return str(get_args(own)[0])
    return str(kind.__name__)


def _is_required(kind: Any, name: str, inner: Any) -> bool:
    # The clients' modules have their annotations as text, in which typing does not see Required.
    marks = (typing.Required, typing_extensions.Required)
    return (
        get_origin(inner) in marks
        or name in ("type", "role", "content")
        or (kind.__total__ and name in kind.__required_keys__)
    )


def _least(kind: Any) -> dict[str, Any]:
    """Only what an object must have."""
    if issubclass(kind, BaseModel):
        return {}
    fields = _fields(kind) or {}
    return {name: example(inner) for name, inner in fields.items() if _is_required(kind, name, inner)}


def example(kind: Any) -> Any:
    """A small value of a type that asks for something."""
    origin = get_origin(kind)
    if origin in (*_WRAPPERS, *_UNIONS):
        return example(next(each for each in get_args(kind) if each is not type(None)))
    if origin is Literal:
        return get_args(kind)[0]
    if (fields := _fields(kind)) is not None:
        return _least(kind) or {name: example(fields[name]) for name in list(fields)[:1]}
    if origin is dict or kind is object:
        return {"a": "b"}
    if origin is not None:
        return [example(get_args(kind)[0])]
    return {str: "x", int: 1, float: 0.5, bool: True}.get(kind, {"a": "b"})
