"""Decodes JSON bodies, in a thread unless they are small, and limits what they may hold.

Decoding holds the GIL: a few megabytes of empty lists would block every other request for seconds. So the values of a body are
counted first, piece by piece, in the same thread that then decodes it (small bodies are decoded in the event loop), and embeddings, which may be
millions of numbers, are read row by row. Owns these limits and the limit on bytes of bodies in memory. Does not know what a body means.
"""

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

import msgspec

from headrace.errors import CapacityError, RequestError, TooLargeError
from headrace.frontend.inputs import pack_row
from headrace.garbage import collect_all, give_back_free_memory
from headrace.messages.bodies import as_meant, field_error
from headrace.messages.requests import GenerateReqInput
from headrace.sampling.grammar_fields import GRAMMAR_KINDS
from headrace.turns import Places, Shares, Turns, asking

T = TypeVar("T")

INLINE_BODY_BYTES = 16 << 10
"""Bodies up to this size are decoded in the event loop: that is faster than waking the thread."""

MAX_VALUES = 1 << 19
MAX_LISTS = 1 << 14
MAX_FIELDS = 1 << 15
"""Each limit means well under 0.1 s of decoding: a value takes about 0.1 us, a list or an object with its fields 1 to 2 us."""

BODIES_AT_ONCE = 10
"""How many bodies of the largest size may be in memory at once; eight of one tenant that is alone."""

SMALL_BODY_BYTES = 64 << 10
"""So much of each body is never refused, nor counted for the share: clients with many small bodies take no room from others."""

MANY_ITEMS = 1 << 12
MANY_AT_ONCE = 6
"""A body of more lists, objects and fields takes several times its bytes once it is decoded, and the more of them are decoded at a time, the more
memory stays with Python, in parts of a megabyte that are not quite empty. So few are, four of one tenant alone and five of two; the others wait as
bytes."""

PLACE_WAIT_S = 60.0
"""One that waits longer gets a 503."""

TRIM_BYTES = 8 << 20
TRIM_EVERY_S = 2.0
"""So long after this many bytes of large bodies and long replies, return free memory to the system (malloc would keep it)."""

COLLECT_BYTES = 64 << 20
"""After so many, also collect what refers to itself: the error of a request that has gone may hold its body."""

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
    def num_items(self) -> int:
        """Python makes an object of each."""
        return self.lists + self.fields

    @property
    def excess(self) -> str:
        """What exceeds its limit; empty if nothing does."""
        limits = (
            (self.values + 1, MAX_VALUES, "values"),
            (self.lists, MAX_LISTS, "lists and objects"),
            (self.fields, MAX_FIELDS, "fields of objects"),
        )
        return next((f"{count} {what}, at most {limit}" for count, limit, what in limits if count > limit), "")

    def check(self) -> None:
        """Raises TooLargeError for the first limit that is exceeded."""
        if excess := self.excess:
            raise TooLargeError(f"the body holds {excess}: send it in several requests", code="body_too_large")


def count_body(body: bytes) -> BodyCounts:
    """Counts of `body`: exact for valid JSON, arbitrary for anything else. In pieces, so that other threads get a turn."""
    counts = BodyCounts()
    for at in range(0, len(body), _PIECE_BYTES):
        counts.add(body[at : at + _PIECE_BYTES])
    # Most bodies are within the limits even when the contents of strings are counted too.
    return counts if not counts.excess else _count_outside_strings(body)


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


Prepare = Callable[[object], object]
"""What an API makes of a body that does not decode as it is, before it is decoded again: given and returned as JSON types."""


def decode_json(body: bytes, decoder: "msgspec.json.Decoder[T]", prepare: Prepare | None = None) -> T:
    """`body` as the decoder's type; strict: no coercion but of `8.0` to 8, no NaN, integers of fields within 64 bits, no unknown fields that ask for
    something.

    Raises RequestError naming the field at fault.
    """
    try:
        try:
            value = decoder.decode(body)
        except msgspec.ValidationError:
            # Only a body that does not decode as it is pays for looking at each of its fields.
            value = _decode_what_asks(body, decoder, prepare)
        if has_long_number(body):
            _refuse_wide_integers(value, decoder.type)
    except msgspec.ValidationError as exc:
        raise field_error(str(exc), decoder.type) from None
    except msgspec.DecodeError as exc:
        raise RequestError(f"the body is not valid JSON: {_fault(body, str(exc))}", code="invalid_json") from None
    except UnicodeDecodeError as exc:
        raise RequestError(f"the body is not valid UTF-8: {exc.reason}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None
    return value


def _fault(body: bytes, text: str) -> str:
    """What is wrong with a body that is no JSON. text: what the decoder says, which takes half a character for the end."""
    if half := half_character(body):
        return f"{half} is half a character (a lone surrogate); the other half must follow it"
    return "it ends too early (the input data was truncated)" if text == "Input data was truncated" else text


def _decode_what_asks(body: bytes, decoder: "msgspec.json.Decoder[T]", prepare: Prepare | None) -> T:
    """Like `decode_json`, with integers for whole numbers and without the fields that ask for nothing."""
    try:
        given = msgspec.json.decode(body)
    except msgspec.ValidationError:
        return decoder.decode(body)  # a number that no type can hold; the error says where it is
    given = as_meant(given if prepare is None else prepare(given), decoder.type)
    _refuse_wide_integers(given, decoder.type)
    return decoder.decode(msgspec.json.encode(given))


def _refuse_wide_integers(body: object, kind: object) -> None:
    """Raises RequestError for a field with an integer beyond 64 bits: no field needs one, and they cannot be sent to the other processes.

    body: decoded as `kind`, or as JSON.
    What may hold any JSON (tools, schemas, arguments) stays in this process, or is sent as text, but for that of a call of the engine.
    """
    is_sent = kind is GenerateReqInput
    pending: list[tuple[object, str]] = [(body, "")]
    while pending:
        item, field = pending.pop()
        match item:
            case int() if not -(2**63) <= item < 2**63:
                raise RequestError(f"{field}: the integer does not fit in 64 bits", field, "invalid_json")
            case list():
                pending += [(inner, field) for inner in item]
            case dict() if is_sent:
                pending += [
                    (inner, f"{field}.{name}".strip(".")) for name, inner in item.items() if name not in GRAMMAR_KINDS
                ]
            case msgspec.Struct():
                names = zip(item.__struct_fields__, item.__struct_encode_fields__, strict=True)
                pending += [
                    (getattr(item, name), f"{field}.{written}".strip("."))
                    for name, written in names
                    if name not in GRAMMAR_KINDS
                ]


class Bodies:
    """Bodies of requests in memory, and the thread that decodes the larger ones. num_bytes: of all bodies. Used in the event loop."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.num_bytes = 0
        self._num_freed = self._num_uncollected = 0
        self._trimming: asyncio.TimerHandle | None = None
        self._shares = Shares(BODIES_AT_ONCE * max_body_bytes, SMALL_BODY_BYTES)
        self.places = Places(MANY_AT_ONCE)
        # One thread: two that decode would block the event loop for twice as long.
        self._thread = Turns(1, "headrace-body", seconds_per_byte=1e-8)

    def take(self, tenant: str, num_bytes: int, of_body: int = 0) -> None:
        """Count `num_bytes` more in memory, of a body of which `of_body` is there. Raises CapacityError when that is above the tenant's share."""
        if not self._shares.take(tenant, num_bytes, of_body, asking().weight):
            raise CapacityError("too many large requests are arriving at once: try again later", retry_after_s=1.0)
        self.num_bytes += num_bytes

    def give_back(self, tenant: str, num_bytes: int) -> None:
        """A body of which `num_bytes` were there is gone, and what was made of it is somebody else's."""
        self._shares.give_back(tenant, num_bytes)
        self.num_bytes -= num_bytes

    def note_end(self, num_bytes: int) -> None:
        """A request has been answered of which so many bytes were a large body or a long reply: perhaps much memory is free now."""
        self._num_freed += num_bytes
        self._num_uncollected += num_bytes
        if self._num_freed >= TRIM_BYTES and self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(TRIM_EVERY_S, self._trim)

    def _trim(self) -> None:
        self._trimming, self._num_freed = None, 0
        if self._num_uncollected < COLLECT_BYTES:
            self._thread.submit(give_back_free_memory)
        else:
            self._num_uncollected = 0
            self._thread.submit(collect_all)

    async def join(self, parts: list[bytes]) -> bytes:
        """The parts joined into one, in the thread, since tens of megabytes take milliseconds. Empties `parts`."""
        if len(parts) == 1:
            return parts[0]
        num_bytes = sum(map(len, parts))
        if num_bytes <= _PIECE_BYTES:
            return b"".join(parts)

        def work() -> bytes:
            body = b"".join(parts)
            parts.clear()
            return body

        return await self._thread.run(work, num_bytes)

    async def decode(
        self,
        body: bytes,
        decode: Callable[[bytes], T],
        shorten: Callable[[bytes], bytes] | None,
        wait: Callable[[], Awaitable[None]],
    ) -> T:
        """`decode(body)`, in the thread unless the body is small.

        shorten: rewrites a body into an equivalent one with fewer values. wait: for one of the `places`, if the body has `MANY_ITEMS`. Raises
        TooLargeError, and whatever `decode` raises.
        """
        if len(body) <= INLINE_BODY_BYTES:
            return decode(body)

        def work() -> tuple[bytes, T | None]:
            """The body if it is yet to be decoded, or what it is."""
            short = shorten(body) if shorten is not None else body
            counts = count_body(short)
            counts.check()
            has_many = counts.num_items > MANY_ITEMS and _count_outside_strings(short).num_items > MANY_ITEMS
            return (short, None) if has_many else (b"", decode(short))

        left, decoded = await self._thread.run(work, len(body))
        if not left:
            return cast(T, decoded)
        await wait()
        return await self._thread.run(lambda: decode(left), len(left))

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        if self._trimming is not None:
            self._trimming.cancel()
        self._thread.close()


_NAME = "input_embeds"
_BLANK = b" \t\r\n"
_SKIPPED = _BLANK + b",["


class _EmbedsOfBody(msgspec.Struct):
    """The only field of a /generate body that is read here."""

    input_embeds: msgspec.Raw = msgspec.Raw()


_BODY = msgspec.json.Decoder(_EmbedsOfBody)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ROW = msgspec.json.Decoder(list[float])


def embeds_to_base64(body: bytes, hidden_size: int) -> bytes:
    """Rewrite a JSON body of /generate: `input_embeds` given as rows of numbers become base64.

    Holds the GIL for one row at a time. A body without such rows is returned unchanged; so is invalid JSON, which the decoder
    reports. Raises RequestError, TooLargeError.
    """
    try:
        embeds = bytes(_BODY.decode(body).input_embeds)
        if not embeds.lstrip(_BLANK).startswith(b"["):
            return body
        counts, own = count_body(body), count_body(embeds)
        BodyCounts(counts.values - own.values, counts.lists - own.lists, counts.fields - own.fields).check()
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
    """The prompts of a well-formed JSON value, and whether it is a list of prompts; none if they are not numbers."""
    prompts: list[bytearray] = []
    depth_of_rows = 0
    for row, depth, num_opened in _rows_of(embeds):
        # Two brackets are open within a row of a single prompt, three within one of several prompts.
        depth_of_rows = depth_of_rows or depth
        if depth_of_rows not in (2, 3):
            return [], False
        if depth != depth_of_rows:
            raise _no_rows()
        if num_opened > 1:
            prompts.append(bytearray())
        prompts[-1] += _read_row(row, hidden_size)
    return [bytes(prompt) for prompt in prompts], depth_of_rows == 3


def _read_row(row: bytes, hidden_size: int) -> bytes:
    num_values = row.count(b",") + (row.strip(b"[]" + _BLANK) != b"")
    if num_values != hidden_size:
        raise RequestError(f"{_NAME}: a row has {num_values} values, the model needs {hidden_size}", _NAME)
    try:
        return pack_row(_ROW.decode(row), hidden_size)
    except msgspec.MsgspecError:
        raise _no_rows() from None


def _rows_of(embeds: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Each innermost list, how many lists are open within it, and how many of them begin with it (itself included)."""
    at = depth = 0
    while (end := embeds.find(b"]", at)) >= 0:
        start = embeds.rfind(b"[", at, end)
        before = embeds[at : start if start >= 0 else end]
        if before.strip(_SKIPPED):
            raise _no_rows()
        if start >= 0:
            num_opened = before.count(b"[") + 1
            depth += num_opened
            yield embeds[start : end + 1], depth, num_opened
        depth -= 1
        at = end + 1


def _no_rows() -> RequestError:
    return RequestError(f"{_NAME} must be rows of numbers, or a list of prompts that are such rows", _NAME)
