"""The prompts that a call gives, as text, token ids or embeddings, and what each of them contains once it is tokenized.

Owns the fields of a call that hold prompts: their shape, their checks, and the `PromptContent` made of them. Large calls are checked in a thread.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from headrace.errors import RequestError
from headrace.media_kinds import NO_REFS, MediaRefs, refs_of
from headrace.messages.packing import pack_float32, pack_int32
from headrace.messages.requests import CallInput, GenerateReqInput, PromptContent
from headrace.sampling.params import check_vocabulary
from headrace.text.batch_tokenizer import AsyncDynamicBatchTokenizer

_EMBEDS = "input_embeds"
_NUMBERS = {int, float}
_CHECKED_BYTES = 64 << 10

LARGE_ITEMS = 8192
"""Calls with more token ids or prompts than this are split in a thread."""


@dataclass(frozen=True, slots=True)
class PromptInput:
    """One prompt as a call gives it. Exactly one of `text`, `ids` and `embeds` is not None.

    embeds: float32[num_tokens, hidden_size], num_tokens > 0. second: the second text of a pair, whose first is `text`. media: an item
    for each of its media tokens.
    """

    text: str | None = None
    ids: list[int] | None = None
    embeds: bytes | None = None
    second: str | None = None
    media: MediaRefs = NO_REFS

    @property
    def field(self) -> str:
        if self.text is not None:
            return "text"
        return "input_ids" if self.ids is not None else "input_embeds"

    @property
    def only_tokens(self) -> bool:
        return self.embeds is None and not self.media

    def most_bytes(self, context_length: int) -> int:
        """Approximate upper bound of the bytes of its content."""
        # A text has at most one token per byte; a prompt longer than the context is refused after tokenizing.
        num_characters = len(self.text or "") + len(self.second or "")
        num_tokens = len(self.ids) if self.ids is not None else min(4 * num_characters, context_length)
        return 4 * num_tokens + len(self.embeds or b"")


def is_large(obj: CallInput) -> bool:
    """Whether splitting the call takes longer than waking a thread; judged by lengths alone."""
    if isinstance(obj.text, list):
        return len(obj.text) > LARGE_ITEMS
    if obj.input_ids is not None:
        return len(obj.input_ids) + sum(len(ids) for ids in obj.input_ids if isinstance(ids, list)) > LARGE_ITEMS
    return isinstance(obj, GenerateReqInput) and obj.input_embeds is not None


def given_inputs(obj: GenerateReqInput, vocab_size: int, hidden_size: int) -> tuple[list[PromptInput], bool]:
    """The prompts of a call, and whether they were given as a list. Raises RequestError naming the field."""
    inputs, is_batch = _without_media(obj, vocab_size, hidden_size)
    if not (data := obj.media_data()):
        return inputs, is_batch
    media = refs_of(data, len(inputs), is_batch)
    if obj.input_embeds is not None and (kind := next((kind for kind in data for own in media if own.of(kind)), None)):
        raise RequestError(f"{kind.field}: prompts of input_embeds take no {kind.noun}", kind.field)
    return [replace(given, media=own) for given, own in zip(inputs, media, strict=True)], is_batch


def _without_media(obj: GenerateReqInput, vocab_size: int, hidden_size: int) -> tuple[list[PromptInput], bool]:
    only_input(obj, "text", "input_ids", "input_embeds")
    if obj.text is not None:
        return [PromptInput(text=text) for text in _texts(obj.text)], isinstance(obj.text, list)
    if obj.input_ids is not None:
        lists, is_batch = id_lists(obj.input_ids, vocab_size)
        return [PromptInput(ids=ids) for ids in lists], is_batch
    assert obj.input_embeds is not None, "one of the three is given"
    embeds, is_batch = pack_embeds(obj.input_embeds, hidden_size)
    return [PromptInput(embeds=rows) for rows in embeds], is_batch


async def tokenize_inputs(
    inputs: Sequence[PromptInput], tokenizer: AsyncDynamicBatchTokenizer, hidden_size: int
) -> list[PromptContent]:
    """What each prompt contains. Texts are tokenized together, in threads. Raises RequestError for one that is far too long."""
    texts = [given.text for given in inputs if given.text is not None]
    encoded = iter(await tokenizer.encode(texts) if texts else ())
    contents = []
    for given in inputs:
        if given.embeds is not None:
            num_tokens = len(given.embeds) // (4 * hidden_size)
            contents.append(PromptContent(bytes(4 * num_tokens), given.embeds))
        else:
            contents.append(PromptContent(pack_int32(given.ids if given.ids is not None else next(encoded))))
    return contents


def check_num_prompts(obj: GenerateReqInput, limit: int) -> None:
    """Check the number of prompts by the length of the list, before looking at any of them. Raises RequestError."""
    for name, value in (("text", obj.text), ("input_ids", obj.input_ids), ("input_embeds", obj.input_embeds)):
        if not isinstance(value, list) or not value or type(value[0]) is int:
            continue
        # A list of rows of floats is one prompt.
        is_row = (
            name == "input_embeds" and isinstance(value[0], list) and value[0] and not isinstance(value[0][0], list)
        )
        if not is_row and len(value) > limit:
            raise RequestError(f"at most {limit} prompts in one request, got {len(value)}", name)


def only_input(obj: CallInput, *names: str) -> tuple[str, object]:
    """The one field of these that is given, and its value. Raises RequestError if it is not one, or an empty list."""
    given = [name for name in names if getattr(obj, name) is not None]
    if len(given) != 1:
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
        message = f"give exactly one of {listed}, got {' and '.join(given) or 'none of them'}"
        raise RequestError(message, given[1] if given else "text")
    name, value = given[0], getattr(obj, given[0])
    if isinstance(value, list) and not value:
        raise RequestError(f"{name} is empty", name)
    return name, value


def _texts(given: str | list[str]) -> list[str]:
    texts = list(given) if isinstance(given, list) else [given]
    for text in texts:
        if not isinstance(text, str):
            raise RequestError("text must be a string or a list of strings", "text")
        if not text:
            raise RequestError("text: a prompt is empty", "text")
        check_text("text", text)
    return texts


def id_lists(given: list[int | list[int]], vocab_size: int) -> tuple[list[list[int]], bool]:
    """The token ids of each prompt, and whether they were given as a list of prompts. Raises RequestError."""
    is_batch = isinstance(given[0], list)
    if any(isinstance(item, list) != is_batch for item in given):
        raise RequestError("input_ids mixes token ids and lists of token ids", "input_ids")
    lists = cast("list[list[int]]", given if is_batch else [given])
    if not all(lists):
        raise RequestError("input_ids: a prompt is empty", "input_ids")
    for ids in lists:
        check_token_ids("input_ids", ids, vocab_size)
    return lists, is_batch


def check_text(param: str, text: str, max_length: int | None = None) -> None:
    """Raises RequestError when `text` is not valid Unicode (lone surrogates) or is longer than `max_length` characters."""
    if max_length is not None and len(text) > max_length:
        raise RequestError(f"{param} is longer than {max_length} characters", param)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{param} is not valid Unicode: it contains a lone surrogate", param) from None


def check_token_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError unless every item is an int (no bool, no float) of the vocabulary."""
    if set(map(type, ids)) - {int}:
        wrong = next(token_id for token_id in ids if type(token_id) is not int)
        raise RequestError(f"{param}: token ids must be integers, got {wrong!r:.40}", param)
    check_vocabulary(param, ids, vocab_size)


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
        raise RequestError(f"{_EMBEDS}: a prompt or a row is empty", _EMBEDS)
    if any(set(map(type, row)) - _NUMBERS for row in rows):
        raise _not_finite()
    return b"".join(pack_row(cast("list[float]", row), hidden_size) for row in rows)


def pack_row(row: list[float], hidden_size: int) -> bytes:
    """float32[hidden_size] of one token. Raises RequestError."""
    if len(row) != hidden_size:
        raise RequestError(f"{_EMBEDS}: a row has {len(row)} values, the model needs {hidden_size}", _EMBEDS)
    try:
        return _checked(pack_float32(row), hidden_size)
    except OverflowError:
        raise _not_finite() from None


def _checked(data: bytes, hidden_size: int) -> bytes:
    if not data or len(data) % (4 * hidden_size):
        raise RequestError(
            f"{_EMBEDS}: {len(data)} bytes are not whole rows of {hidden_size} float32 values ({4 * hidden_size} bytes each)",
            _EMBEDS,
        )
    for at in range(0, len(data), _CHECKED_BYTES):
        values = array("f")
        values.frombytes(data[at : at + _CHECKED_BYTES])
        # The sum is a double, which float32 values cannot overflow: it is finite if all values are.
        if not math.isfinite(sum(values)):
            raise _not_finite()
    return data


def _not_finite() -> RequestError:
    return RequestError(f"{_EMBEDS}: values must be finite float32 numbers", _EMBEDS)
