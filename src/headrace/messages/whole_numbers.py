"""Numbers without a fraction are integers: `8192.0`, as clients in JavaScript and Lua write them, where a body takes an integer.

Owns the walk over a body that turns them into integers. Pure functions; any process.
"""

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from msgspec import inspect

from headrace.messages.allowed_values import alternatives


def with_whole_numbers(body: object, kind: type[Any]) -> object:
    """`body` (of JSON types) with integers for floats without a fraction, where `kind`, a Struct, takes integers and no other numbers.

    What a client may write freely (tools, schemas, arguments of a template) stays as it is. `body` itself is not changed.
    """
    return _whole(body, _place_of(cast(Hashable, kind)))


@dataclass(slots=True)
class _Place:
    """Where a value is. takes_whole: integers, but no other numbers. fields: of an object with known fields. items, values: of a list and of an
    object with any fields; None = nothing there changes."""

    takes_whole: bool = False
    fields: "Mapping[str, _Place]" = field(default_factory=dict)
    items: "_Place | None" = None
    values: "_Place | None" = None


def _whole(value: object, place: _Place) -> object:
    if isinstance(value, float):
        return int(value) if place.takes_whole and value.is_integer() else value
    if isinstance(value, (list, tuple)) and place.items is not None:
        # Prompts are lists of up to a million ids: their types are looked at by C alone.
        if not {float, list, tuple, dict}.intersection(map(type, value)):
            return value
        return [_whole(item, place.items) for item in value]
    if isinstance(value, dict) and (place.fields or place.values):
        places = ((name, item, place.fields.get(name, place.values)) for name, item in value.items())
        return {name: item if at is None else _whole(item, at) for name, item, at in places}
    return value


@functools.cache
def _place_of(kind: Hashable) -> _Place:
    """The body of a Struct."""
    return _place(inspect.type_info(kind))


def _place(kind: inspect.Type) -> _Place:
    place, takes_float = _Place(), False
    for one in alternatives(kind):
        match one:
            case inspect.IntType():
                place.takes_whole = True
            case inspect.LiteralType(values=values):
                place.takes_whole |= any(type(value) is int for value in values)
            case inspect.FloatType() | inspect.AnyType():
                takes_float = True
            case inspect.ListType(item_type=inner):
                place.items = _place(inner)
            case inspect.DictType(value_type=inner):
                place.values = _place(inner)
            case inspect.StructType(fields=inner):
                place.fields = {one.encode_name: _place(one.type) for one in inner}
    place.takes_whole &= not takes_float
    return place
