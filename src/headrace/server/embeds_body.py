"""Reads the embeddings in a JSON body row by row, because they may be millions of numbers.

Decoding all of them at once would block every other request. Pure functions, for the thread that decodes bodies.
"""

import base64
from collections.abc import Iterator

import msgspec

from headrace.errors import RequestError
from headrace.frontend.inputs import pack_row
from headrace.server.body import BodyCounts, count_body

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
        _check_rest(body, embeds)
        fields = _FIELDS.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body
    prompts, is_batch = _read_prompts(embeds, hidden_size)
    if not prompts:
        return body
    encoded = [base64.b64encode(prompt).decode() for prompt in prompts]
    fields[_NAME] = msgspec.Raw(msgspec.json.encode(encoded if is_batch else encoded[0]))
    return msgspec.json.encode(fields)


def _check_rest(body: bytes, embeds: bytes) -> None:
    counts, own = count_body(body), count_body(embeds)
    BodyCounts(counts.values - own.values, counts.lists - own.lists, counts.fields - own.fields).check()


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
