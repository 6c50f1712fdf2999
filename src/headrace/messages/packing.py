"""Integers and floats as the little-endian bytes that messages carry. No numpy: the front end imports this."""

import sys
from array import array
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T", int, float)


def pack_int32(values: Iterable[int]) -> bytes:
    """int32[n] as bytes. Raises OverflowError for a value that does not fit."""
    return _little(array("i", values)).tobytes()


def pack_float32(values: Iterable[float]) -> bytes:
    """float32[n] as bytes. A value beyond the range becomes infinite."""
    return _little(array("f", values)).tobytes()


def unpack_int32(data: bytes) -> list[int]:
    """Bytes of an int32[n]. Raises ValueError when the length is not a multiple of 4."""
    values = array("i", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def unpack_float32(data: bytes) -> list[float]:
    """Bytes of a float32[n]. Raises ValueError when the length is not a multiple of 4."""
    values = array("f")
    values.frombytes(data)
    return _little(values).tolist()


def _little(values: "array[T]") -> "array[T]":
    if sys.byteorder == "big":
        values.byteswap()
    return values
