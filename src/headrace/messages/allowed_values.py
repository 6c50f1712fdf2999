"""The fields of a body and the values that one accepts, for error messages. Pure functions; any process."""

import re
from collections.abc import Iterator

from msgspec import inspect

_STEP = re.compile(r"[^.\[\]]+|\[[^\]]*\]")


def allowed_values(kind: object, path: str) -> tuple[object, ...]:
    """The `Literal` values accepted at `path` (e.g. `tags[0]`) in a body of type `kind`; empty if there are none."""
    return tuple(value for each in _at(kind, path) if isinstance(each, inspect.LiteralType) for value in each.values)


def field_names(kind: object, path: str) -> list[str]:
    """The fields at `path` in a body of type `kind`, then those of the objects that these hold (`sampling_params.temperature`)."""
    structs = [each for each in _at(kind, path) if isinstance(each, inspect.StructType)]
    own = [field for struct in structs for field in struct.fields]
    inner = [
        f"{field.encode_name}.{held.encode_name}"
        for field in own
        for each in alternatives(field.type)
        if isinstance(each, inspect.StructType)
        for held in each.fields
    ]
    return [field.encode_name for field in own] + inner


def _at(kind: object, path: str) -> list[inspect.Type]:
    found = list(alternatives(inspect.type_info(kind)))
    for step in _STEP.findall(path):
        found = [alternative for each in found for inner in _inside(each, step) for alternative in alternatives(inner)]
    return found


def _inside(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.ListType) and step.startswith("["):
        yield kind.item_type
    elif isinstance(kind, inspect.DictType) and step.startswith("["):
        yield kind.value_type
    elif isinstance(kind, inspect.StructType):
        yield from (field.type for field in kind.fields if field.encode_name == step)


def alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The types of a union, or the one type; without their bounds."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from alternatives(each)
    else:
        yield kind
