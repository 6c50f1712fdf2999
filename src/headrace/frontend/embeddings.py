"""Converts prompts given as embeddings (rows of numbers, or bytes) to float32 bytes for the scheduler.

Pure functions; run in a thread for large inputs.
"""

import math
from array import array
from collections.abc import Sequence
from typing import cast

from headrace.errors import RequestError
from headrace.messages.packing import pack_float32

_NAME = "input_embeds"
_NUMBERS = {int, float}
_CHECKED_BYTES = 64 << 10


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


def _pack_rows(rows: object, hidden_size: int) -> bytes:
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
        raise RequestError(f"{_NAME}: a prompt or a row is empty", _NAME)
    if any(set(map(type, row)) - _NUMBERS for row in rows):
        raise _not_finite()
    return b"".join(pack_row(cast("list[float]", row), hidden_size) for row in rows)


def pack_row(row: list[float], hidden_size: int) -> bytes:
    """float32[hidden_size] of one token. Raises RequestError."""
    if len(row) != hidden_size:
        raise RequestError(f"{_NAME}: a row has {len(row)} values, the model needs {hidden_size}", _NAME)
    try:
        return _checked(pack_float32(row), hidden_size)
    except OverflowError:
        raise _not_finite() from None


def _checked(data: bytes, hidden_size: int) -> bytes:
    if not data or len(data) % (4 * hidden_size):
        raise RequestError(
            f"{_NAME}: {len(data)} bytes are not whole rows of {hidden_size} float32 values ({4 * hidden_size} bytes each)",
            _NAME,
        )
    for at in range(0, len(data), _CHECKED_BYTES):
        values = array("f")
        values.frombytes(data[at : at + _CHECKED_BYTES])
        # The sum is a double, which float32 values cannot overflow: it is finite if all values are.
        if not math.isfinite(sum(values)):
            raise _not_finite()
    return data


def _not_finite() -> RequestError:
    return RequestError(f"{_NAME}: values must be finite float32 numbers", _NAME)
