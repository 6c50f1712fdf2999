"""Vectors as JSON, and long replies in pieces, so that others are served while one is written.

Runs in the event loop that serves HTTP.
"""

import base64
import math
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import TypeVar

from headrace.messages.packing import unpack_float32
from headrace.server.http import Exchange, encode_json, send_response

T = TypeVar("T")

PIECE_BYTES = 1 << 18
"""How much JSON is made and written at a time, about a millisecond's work."""

_JSON = b"application/json"


def vector_json(pooled: bytes, as_base64: bool = False) -> str | list[float]:
    """float32[n] bytes as JSON holds them: a list of numbers, or base64 of the little-endian bytes."""
    return base64.b64encode(pooled).decode() if as_base64 else unpack_float32(pooled)


def normalized(pooled: bytes) -> bytes:
    """The vector with length 1; one of length 0 stays as it is."""
    values = unpack_float32(pooled)
    length = math.sqrt(math.fsum(value * value for value in values))
    if length == 0.0:
        return pooled
    unit = array("f", [value / length for value in values])
    if sys.byteorder == "big":
        unit.byteswap()
    return unit.tobytes()


async def reply_in_pieces(
    exchange: Exchange, pieces: Iterator[bytes], headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """One JSON reply. pieces: not empty; each is made when the one before it is written. One that is a single piece has its length in the header."""
    first, second = next(pieces), next(pieces, None)
    if second is None:
        await send_response(exchange.send, 200, first, _JSON, [*headers])
        return
    await exchange.send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", _JSON), *headers]})
    await exchange.write(first)
    while second is not None:
        await exchange.write(second)
        second = next(pieces, None)
    await exchange.send({"type": "http.response.body", "body": b""})


def object_pieces(
    head: dict[str, object], name: str, items: Iterator[object], tail: dict[str, object]
) -> Iterator[bytes]:
    """An object of JSON as pieces: the fields of `head`, then the list `items` as the field `name`, then those of `tail`."""
    begin = encode_json(head)[:-1] + (b"," if head else b"")
    rest = encode_json(tail)[1:]
    end = b"]" + (b"," if tail else b"") + rest
    return list_pieces(items, begin + encode_json(name) + b":[", end)


def list_pieces(items: Iterator[object], begin: bytes = b"[", end: bytes = b"]") -> Iterator[bytes]:
    """A list of JSON as pieces, between `begin` and `end`."""
    parts, size, separator = [begin], 0, b""
    for item in items:
        part = encode_json(item)
        parts += [separator, part]
        size += len(part)
        separator = b","
        if size >= PIECE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join([*parts, end])


def sigmoid(logit: float) -> float:
    """1 / (1 + e^-x), without an overflow for a large |x|."""
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    power = math.exp(logit)
    return power / (1.0 + power)


def softmax(logits: Sequence[float]) -> list[float]:
    """Probabilities that add up to 1."""
    top = max(logits)
    powers = [math.exp(logit - top) for logit in logits]
    total = math.fsum(powers)
    return [power / total for power in powers]
