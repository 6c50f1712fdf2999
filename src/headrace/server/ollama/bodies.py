"""Reads bodies of Ollama's API: what the API does not know is ignored, as Ollama does it, and noted in the reply.

Runs in the event loop that serves HTTP.
"""

import functools
from collections.abc import Hashable, Mapping
from typing import TypeVar, cast

import msgspec
from msgspec import inspect

from headrace.messages.bodies import alternatives, asks_for_nothing
from headrace.server.http import Exchange

T = TypeVar("T")

MAX_NAME = 100
"""Most characters of a name that is noted."""


async def read_body(exchange: Exchange, decoder: "msgspec.json.Decoder[T]") -> tuple[T, list[str]]:
    """The body, and the names of its fields and options that nobody knows and that ask for something. Raises the errors of `read_json`."""
    unknown: list[str] = []

    def without_unknown(body: object) -> object:
        return _known(body, cast(Hashable, decoder.type), "", unknown)

    return await exchange.read_json(decoder, any_content_type=True, prepare=without_unknown), unknown


def _known(body: object, kind: Hashable, path: str, unknown: list[str]) -> object:
    """`body` without unknown fields, whose names are added to `unknown`, where `kind`, a Struct, and the structs in its fields have none."""
    if not isinstance(body, dict):
        return body
    fields, kept = _fields(kind), {}
    for name, value in body.items():
        if name in fields:
            inner = fields[name]
            kept[name] = value if inner is None else _known(value, inner, f"{path}{name}.", unknown)
        elif not asks_for_nothing(name, value):
            unknown.append(path + name[:MAX_NAME])
    return kept


@functools.cache
def _fields(kind: Hashable) -> Mapping[str, Hashable | None]:
    """The fields of a Struct, and the Struct that one holds if it has no other fields than its own."""
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType), f"{kind} is no struct"
    found: dict[str, Hashable | None] = {}
    for field in described.fields:
        structs = [one for one in alternatives(field.type) if isinstance(one, inspect.StructType)]
        found[field.encode_name] = next((one.cls for one in structs if one.forbid_unknown_fields), None)
    return found
