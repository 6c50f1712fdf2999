"""Decodes JSON bodies, in a thread unless they are small, and limits what they may hold.

Decoding holds the GIL: a few megabytes of empty lists would block every other request for seconds. So the values of a body are
counted first, piece by piece, in the same thread that then decodes it (small bodies are decoded in the event loop).
Owns these limits and the limit on bytes of bodies in memory. Does not know what a body means.
"""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from headrace.errors import CapacityError, TooLargeError
from headrace.garbage import give_back_free_memory

T = TypeVar("T")

INLINE_BODY_BYTES = 16 << 10
"""Bodies up to this size are decoded in the event loop: that is faster than waking the thread."""

MAX_VALUES = 1 << 19
MAX_LISTS = 1 << 14
MAX_FIELDS = 1 << 15
"""Each limit means well under 0.1 s of decoding: a value takes about 0.1 us, a list or an object with its fields 1 to 2 us."""

BODIES_AT_ONCE = 8
"""How many bodies of the largest size may be in memory at once."""

TRIM_BYTES = 32 << 20
"""After this many bytes of bodies, once none is in memory, return free memory to the system (malloc would keep it)."""

_PIECE_BYTES = 64 << 10
_DIGITS = bytes(ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256))
_LONG_NUMBER = b"0" * 19
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u([dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""An escape in a JSON string; its group is half a character."""


@dataclass(slots=True)
class BodyCounts:
    """Counts of a JSON text, outside its strings: values (really separators), lists and objects, fields of objects."""

    values: int = 0
    lists: int = 0
    fields: int = 0

    def add(self, text: bytes) -> None:
        """Count a piece that contains no strings."""
        self.values += text.count(b",")
        self.lists += text.count(b"[") + text.count(b"{")
        self.fields += text.count(b":")

    @property
    def is_small(self) -> bool:
        """Whether all counts are within the limits."""
        return self.values < MAX_VALUES and self.lists <= MAX_LISTS and self.fields <= MAX_FIELDS

    def check(self) -> None:
        """Raises TooLargeError for the first limit that is exceeded."""
        for count, limit, what in (
            (self.values + 1, MAX_VALUES, "values"),
            (self.lists, MAX_LISTS, "lists and objects"),
            (self.fields, MAX_FIELDS, "fields of objects"),
        ):
            if count > limit:
                raise TooLargeError(
                    f"the body holds {count} {what}, at most {limit}: send it in several requests",
                    code="body_too_large",
                )


def count_body(body: bytes) -> BodyCounts:
    """Counts of `body`: exact for valid JSON, arbitrary for anything else. In pieces, so that other threads get a turn."""
    counts = BodyCounts()
    for at in range(0, len(body), _PIECE_BYTES):
        counts.add(body[at : at + _PIECE_BYTES])
    # Most bodies are within the limits even when the contents of strings are counted too.
    return counts if counts.is_small else _count_outside_strings(body)


def _count_outside_strings(body: bytes) -> BodyCounts:
    counts = BodyCounts()
    at, in_string = 0, False
    while at < len(body):
        end = min(at + _PIECE_BYTES, len(body))
        # Extend the piece past an escaped character, so that no escape sequence is split.
        while end < len(body) and body[end - 1] == ord("\\"):
            end += 1
        piece = body[at:end]
        at = end
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        counts.add(b"".join(parts[in_string::2]))
        in_string ^= len(parts) % 2 == 0
    return counts


def has_long_number(body: bytes) -> bool:
    """Whether there are 19 digits in a row anywhere: such an integer may not fit in 64 bits."""
    overlap = len(_LONG_NUMBER) - 1
    return any(
        _LONG_NUMBER in body[at : at + _PIECE_BYTES + overlap].translate(_DIGITS)
        for at in range(0, len(body), _PIECE_BYTES)
    )


def half_character(body: bytes) -> str:
    """The first escape in a JSON text that is half a character (a surrogate without the other one) and its place; empty if there is none."""
    lone = next((found for found in _ESCAPE.finditer(body) if found[1]), None)
    return "" if lone is None else f"\\u{lone[1].decode()} at byte {lone.start()}"


class Bodies:
    """Bodies of requests in memory, and the thread that decodes the larger ones. Used in the event loop."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.num_bytes = 0
        self._num_arrived = 0
        self._closed = False
        self._max_bytes = BODIES_AT_ONCE * max_body_bytes
        # One thread: two that decode would block the event loop for twice as long.
        self._thread = ThreadPoolExecutor(1, "headrace-body")

    def take(self, num_bytes: int) -> None:
        """Count `num_bytes` more in memory. Raises CapacityError when they exceed the limit."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise CapacityError("too many large requests are arriving at once: try again later", retry_after_s=1.0)
        self.num_bytes += num_bytes
        self._num_arrived += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Count `num_bytes` fewer in memory."""
        self.num_bytes -= num_bytes
        if self.num_bytes == 0 and self._num_arrived >= TRIM_BYTES and not self._closed:
            self._num_arrived = 0
            self._thread.submit(give_back_free_memory)

    async def join(self, parts: list[bytes]) -> bytes:
        """The parts joined into one, in the thread, since tens of megabytes take milliseconds. Empties `parts`."""
        if len(parts) == 1:
            return parts[0]
        if sum(map(len, parts)) <= _PIECE_BYTES:
            return b"".join(parts)

        def work() -> bytes:
            body = b"".join(parts)
            parts.clear()
            return body

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def decode(self, body: bytes, decode: Callable[[bytes], T], shorten: Callable[[bytes], bytes] | None) -> T:
        """`decode(body)`, in the thread unless the body is small.

        shorten: rewrites a body into an equivalent one with fewer values. Raises TooLargeError, and whatever `decode` raises.
        """
        if len(body) <= INLINE_BODY_BYTES:
            return decode(body)

        def work() -> T:
            short = shorten(body) if shorten is not None else body
            count_body(short).check()
            return decode(short)

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
