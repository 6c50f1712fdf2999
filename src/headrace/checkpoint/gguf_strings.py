"""Strings of a GGUF file's metadata, which lie one after the other, each behind its length."""

import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import overload

import numpy as np


class Strings(Sequence[str]):
    """The strings of a metadata array, each decoded when it is asked for. They are a copy, 8 bytes and its text for each: the file may change."""

    def __init__(self, data: bytes, starts: "array[int]") -> None:
        """starts: where each begins in the file, and the last one ends; data begins with the first."""
        self._data, self._starts = data, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        first, begin, end = self._starts[0], self._starts[at], self._starts[at + 1]
        return text_of(self._data[begin + 8 - first : end - first])

    def __iter__(self) -> Iterator[str]:
        data, first = self._data, self._starts[0]
        # All at once, if it is text without zeros: each length becomes one zero.
        places = np.array(self._starts[:-1], np.int64)[:, None] - first
        joined, kept = np.frombuffer(data, np.uint8).copy(), np.ones(len(data), np.bool_)
        joined[places], kept[places + np.arange(1, 8)] = 0, False
        with suppress(UnicodeDecodeError):
            texts = joined[kept].tobytes().decode().split("\0")[1:]
            if len(texts) == len(self):
                return iter(texts)
        return (text_of(data[begin + 8 - first : end - first]) for begin, end in pairwise(self._starts))

    def find(self, text: str) -> int | None:
        """The place of the first that is `text`."""
        wanted = text.encode()
        wanted, first = struct.pack("<Q", len(wanted)) + wanted, self._starts[0]
        at = self._data.find(wanted)
        while at >= 0 and self._starts[index := bisect_left(self._starts, first + at)] != first + at:
            at = self._data.find(wanted, at + 1)
        return index if at >= 0 else None


def text_of(data: bytes) -> str:
    """Vocabularies sometimes contain invalid bytes: such a piece can never match text, but it must keep its id."""
    return data.decode(errors="replace")
