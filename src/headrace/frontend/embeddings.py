"""Prompts given as embeddings: to the float32 bytes that the scheduler gets.

Owns the three forms in which embeddings come: rows of numbers (`pack_embeds`), bytes, and rows of numbers within a JSON body
(`embeds_to_base64`), which may hold millions of numbers and are read row by row. Pure functions; for large inputs in a thread.
"""

import base64
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import cast

import msgspec

from headrace.errors import RequestError
from headrace.messages.packing import pack_float32

_NAME = "input_embeds"
_BLANK = b" \t\r\n"
_CHECKED_BYTES = 64 << 10
_SKIPPED = _BLANK + b",["


class _EmbedsOfBody(msgspec.Struct):
    """A body of /generate, of which only this is looked at."""

    input_embeds: msgspec.Raw = msgspec.Raw()


_BODY = msgspec.json.Decoder(_EmbedsOfBody)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ROW = msgspec.json.Decoder(list[float])


def pack_embeds(
    value: bytes | Sequence[bytes | Sequence[float | Sequence[float]]], hidden_size: int
) -> tuple[list[bytes], bool]:
    """float32[num_tokens, hidden_size] of each prompt, and whether `value` was a list of prompts. Raises RequestError."""
    if isinstance(value, bytes):
        return [_checked(value, hidden_size)], False
    first = value[0] if value else None
    if isinstance(first, bytes) or (isinstance(first, list) and first and isinstance(first[0], list)):
        return [
            _checked(prompt, hidden_size) if isinstance(prompt, bytes) else _pack_rows(prompt, hidden_size)
            for prompt in value
        ], True
    return [_pack_rows(value, hidden_size)], False


def embeds_to_base64(body: bytes, hidden_size: int) -> bytes:
    """A JSON body of /generate whose `input_embeds`, when they are rows of numbers, are base64 instead.

    Memory and time without a break are those of one row. A body without such rows comes back as it is; what is no JSON as well,
    for the decoder to say so. Raises RequestError.
    """
    try:
        embeds = bytes(_BODY.decode(body).input_embeds)
        if not embeds.lstrip(_BLANK).startswith(b"["):
            return body
        fields = _FIELDS.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body
    prompts, is_batch = _read_prompts(embeds, hidden_size)
    if not prompts:
        return body
    encoded = [base64.b64encode(prompt).decode() for prompt in prompts]
    fields[_NAME] = msgspec.Raw(msgspec.json.encode(encoded if is_batch else encoded[0]))
    return msgspec.json.encode(fields)


def _read_prompts(embeds: bytes, hidden_size: int) -> tuple[list[bytes], bool]:
    """The prompts of a JSON value, which is well formed, and whether they are a list of prompts; none when they are no numbers."""
    prompts: list[bytearray] = []
    depth = 0
    for row, num_opened in _rows_of(embeds):
        # The first row is behind every bracket that is open: two for rows of one prompt, three for prompts.
        depth = depth or num_opened
        if depth not in (2, 3):
            return [], False
        try:
            values = _ROW.decode(row)
        except msgspec.MsgspecError:
            raise RequestError(f"{_NAME}: a row must be a list of numbers", _NAME) from None
        if num_opened > 1 or not prompts:
            prompts.append(bytearray())
        prompts[-1] += _pack_row(values, hidden_size)
    return [bytes(prompt) for prompt in prompts], depth == 3


def _rows_of(embeds: bytes) -> Iterator[tuple[bytes, int]]:
    """Each innermost list, and how many lists begin with it (itself included)."""
    at = 0
    while (end := embeds.find(b"]", at)) >= 0:
        start = embeds.rfind(b"[", at, end)
        if start >= 0:
            before = embeds[at:start]
            if before.strip(_SKIPPED):
                raise RequestError(f"{_NAME}: a row must be a list of numbers", _NAME)
            yield embeds[start : end + 1], before.count(b"[") + 1
        at = end + 1


def _pack_rows(rows: object, hidden_size: int) -> bytes:
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
        raise RequestError(f"{_NAME}: a prompt or a row is empty", _NAME)
    return b"".join(_pack_row(cast("list[float]", row), hidden_size) for row in rows)


def _pack_row(row: list[float], hidden_size: int) -> bytes:
    if len(row) != hidden_size:
        raise RequestError(f"{_NAME}: a row has {len(row)} values, the model needs {hidden_size}", _NAME)
    if not all(type(value) in (int, float) for value in row):
        raise RequestError(f"{_NAME}: values must be finite float32 numbers", _NAME)
    try:
        return _checked(pack_float32(row), hidden_size)
    except OverflowError:
        raise RequestError(f"{_NAME}: values must be finite float32 numbers", _NAME) from None


def _checked(data: bytes, hidden_size: int) -> bytes:
    if not data or len(data) % (4 * hidden_size):
        raise RequestError(
            f"{_NAME}: {len(data)} bytes are no rows of {hidden_size} float32 values ({4 * hidden_size} bytes each)",
            _NAME,
        )
    for at in range(0, len(data), _CHECKED_BYTES):
        values = array("f")
        values.frombytes(data[at : at + _CHECKED_BYTES])
        # Float32 numbers cannot overflow the sum, which is a double: it is finite when all of them are.
        if not math.isfinite(sum(values)):
            raise RequestError(f"{_NAME}: values must be finite float32 numbers", _NAME)
    return data
