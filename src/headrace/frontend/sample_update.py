"""The new output of a sample since the last update: the front end's output, from which every API makes its replies.

Independent of the format of replies, which `native_answer` and the handlers in `server/` own. Sent to HTTP workers as msgpack.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

import msgspec

from headrace.errors import (
    CapacityError,
    ExecutionError,
    HeadraceError,
    LateError,
    NotFoundError,
    RequestError,
    TooLargeError,
)
from headrace.media_kinds import MediaKind
from headrace.messages.outputs import FinishReason, LogprobBlock, SpeculationCounts, TokenVersions
from headrace.messages.packing import pack_float32, pack_int32, unpack_float32, unpack_int32

LogprobItem = tuple[float | None, int, str | None]
"""(logprob or None, token id, text or None)."""

LogprobRow = list[LogprobItem] | None
"""Logprobs of several ids at the position of one token. None for the first token of a prompt, which has no logprob."""

PART_BYTES = 1 << 15
"""Of a long list of logprobs: some 4,000 of them, which take a few milliseconds to write."""

TokenText = Callable[[int], str | None]
"""Text of a token for logprob lists, or None if it is not requested."""


class SampleUsage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Token counts of a sample so far. cached_tokens: of the prompt, found in the prefix cache. media_tokens: of
    the prompt, those of each kind of media."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    media_tokens: Mapping[MediaKind, int] = {}


class SampleTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Times of a sample in seconds; None = not yet.

    queue_s: until its first step. ttft_s, e2e_s: from the arrival of the call until its first token and its end.
    decode_throughput: tokens per second after the first, known at the end; None if there is no second token.
    """

    queue_s: float
    ttft_s: float | None = None
    e2e_s: float | None = None
    decode_throughput: float | None = None

    @property
    def prompt_s(self) -> float:
        """From the first step to the first token, or to an end without one."""
        return max(0.0, self._first_s - self.queue_s)

    @property
    def output_s(self) -> float:
        """From the first token to the end."""
        return max(0.0, (self.e2e_s or 0.0) - self._first_s)

    @property
    def _first_s(self) -> float:
        return self.ttft_s if self.ttft_s is not None else self.e2e_s or 0.0


class PromptProgress(msgspec.Struct, frozen=True, gc=False):
    """How far a prompt is, as llama.cpp's server says it, in tokens. processed: computed or found in the cache; `cache` of them were found there.
    time_ms: since the first step that it was to take part in."""

    total: int
    cache: int
    processed: int
    time_ms: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Logprobs of consecutive tokens, packed. As lists: `tokens`, and `top` and `picked` of the most likely and of the requested ids (None = not
    requested); a long one in `parts`, since a list takes ten times as much memory.

    ids, values: int32[n], float32[n]; NaN = no logprob. top_ids, top_values: [m, k]. picked_values: float32[m, len(picked_ids)]. m is n, less the
    first token of a prompt, which has none (num_unknown = 1). texts: of ids, if they are requested.
    """

    ids: bytes = b""
    values: bytes = b""
    top_ids: bytes | None = None
    top_values: bytes = b""
    picked_ids: tuple[int, ...] | None = None
    picked_values: bytes = b""
    num_unknown: int = 0
    texts: Mapping[int, str] = {}

    def __len__(self) -> int:
        return len(self.ids) // 4

    @property
    def num_bytes(self) -> int:
        return (
            len(self.ids) + len(self.values) + len(self.top_ids or b"") + len(self.top_values) + len(self.picked_values)
        )

    @property
    def tokens(self) -> list[LogprobItem]:
        return self._items(unpack_int32(self.ids), self.values)

    @property
    def top(self) -> list[LogprobRow] | None:
        return None if self.top_ids is None else self._rows(unpack_int32(self.top_ids), self.top_values)

    @property
    def picked(self) -> list[LogprobRow] | None:
        ids = self.picked_ids
        return None if ids is None else self._rows([*ids] * (len(self) - self.num_unknown), self.picked_values)

    def parts(self, most_bytes: int = PART_BYTES) -> "Iterator[TokenLogprobs]":
        """The same in parts of one token or at most so many bytes."""
        step = max(1, most_bytes * len(self) // max(1, self.num_bytes))
        for start in range(0, len(self), step):
            yield self._part(start, start + step)

    def following(self, before: Self) -> Self:
        """After those that came before, of the same request."""
        if not before:
            return self
        return msgspec.structs.replace(
            before,
            ids=before.ids + self.ids,
            values=before.values + self.values,
            top_ids=None if before.top_ids is None else before.top_ids + (self.top_ids or b""),
            top_values=before.top_values + self.top_values,
            picked_values=before.picked_values + self.picked_values,
            texts={**before.texts, **self.texts},
        )

    def _part(self, start: int, stop: int) -> "TokenLogprobs":
        num_rows = len(self) - self.num_unknown
        first, last = max(0, start - self.num_unknown), stop - self.num_unknown
        return TokenLogprobs(
            self.ids[4 * start : 4 * stop],
            self.values[4 * start : 4 * stop],
            None if self.top_ids is None else rows_of(self.top_ids, num_rows, first, last),
            rows_of(self.top_values, num_rows, first, last),
            self.picked_ids,
            rows_of(self.picked_values, num_rows, first, last),
            self.num_unknown if start == 0 else 0,
            self.texts,
        )

    def _items(self, ids: list[int], values: bytes) -> list[LogprobItem]:
        text = self.texts.get
        return [(finite(v), i, text(i)) for v, i in zip(unpack_float32(values), ids, strict=True)]

    def _rows(self, ids: list[int], values: bytes) -> list[LogprobRow]:
        items, num_rows = self._items(ids, values), len(self) - self.num_unknown
        width = len(items) // num_rows if num_rows else 0
        return [None] * self.num_unknown + [items[row * width : (row + 1) * width] for row in range(num_rows)]


def rows_of(data: bytes | bytearray, num_rows: int, start: int, stop: int) -> bytes:
    """Rows `start` .. `stop` - 1 of the rows that `data` has."""
    width = len(data) // num_rows if num_rows else 0
    return bytes(memoryview(data)[start * width : stop * width])


class SampleLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    prompt: TokenLogprobs
    output: TokenLogprobs

    def following(self, before: Self) -> Self:
        return type(self)(self.prompt.following(before.prompt), self.output.following(before.output))


class SampleUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New output of one sample: text, ids and logprobs since its last update. All other fields have their current values.

    All updates of a sample joined are its whole output. finish: with the last update, None before.

    rid: of the prompt, as the client knows it. index: of the sample in the reply of its call. is_listed: that reply is a list,
    because the prompts were a list or there are several samples. logprobs: None if not requested. hidden_states: with the last update,
    float32[n, hidden_size]; None if not requested. speculation: with the last update, None without speculative decoding.
    pooled: of an `EmbeddingReqInput`, float32[n] little-endian: the embedding, or the numbers (logits) of the classification. None: there is none,
    as for every other call, or for an input that failed. progress: of its prompt, if that was asked for; at the latest with the first output.
    versions: of all its tokens so far, where they change; empty with --kv-on-update flush. mean_logprob: of the prompt, see `LogprobLists.mean`, with
    the last update; None if not requested.
    """

    rid: str
    index: int
    is_listed: bool
    text: str
    ids: list[int]
    finish: FinishReason | None
    usage: SampleUsage
    times: SampleTimes
    weight_version: str
    num_retractions: int
    logprobs: SampleLogprobs | None = None
    hidden_states: bytes | None = None
    speculation: SpeculationCounts | None = None
    pooled: bytes | None = None
    progress: PromptProgress | None = None
    versions: tuple[TokenVersions, ...] = ()
    mean_logprob: float | None = None
    hidden_size: int = 0

    @property
    def num_bytes(self) -> int:
        """Of what may be long, as it is packed here."""
        logprobs = self.logprobs
        more = 0 if logprobs is None else logprobs.prompt.num_bytes + logprobs.output.num_bytes
        return more + len(self.hidden_states or b"") + len(self.pooled or b"")

    @property
    def is_progress(self) -> bool:
        """Whether it says how far the prompt is, and nothing else."""
        return self.progress is not None and not self.ids and self.finish is None

    def raise_failure(self) -> None:
        """Raise the error of an abort by the engine, see `failure_of`; nothing for any other update."""
        if self.finish is not None and (failure := failure_of(self.finish)) is not None:
            raise failure


def failure_of(finish: FinishReason, retry_after_s: float = 1.0) -> HeadraceError | None:
    """The error of an abort by the engine; None for other finish reasons, and for requested aborts."""
    if finish.type != "abort" or finish.status_code < 400:
        return None
    match finish.status_code:
        case 404:
            return NotFoundError(finish.message)
        case 408:
            return LateError(finish.message)
        case 413:
            return TooLargeError(finish.message)
        case 429 | 503:
            return CapacityError(finish.message, retry_after_s, status_code=finish.status_code)
        case code if code < 500:
            return RequestError(finish.message, finish.param or None)
        case _:
            return ExecutionError(finish.message)


@dataclass(slots=True)
class LogprobLists:
    """A sample's logprobs as they grow, packed as in `TokenLogprobs`."""

    ids: bytearray = field(default_factory=bytearray)
    values: bytearray = field(default_factory=bytearray)
    top_ids: bytearray = field(default_factory=bytearray)
    top_values: bytearray = field(default_factory=bytearray)
    picked: bytearray = field(default_factory=bytearray)
    num_unknown: int = 0

    def __len__(self) -> int:
        return len(self.ids) // 4

    @property
    def num_bytes(self) -> int:
        return len(self.ids) + len(self.values) + len(self.top_ids) + len(self.top_values) + len(self.picked)

    def since(self, start: int, has_top: bool, picked_ids: tuple[int, ...], text: TokenText | None) -> TokenLogprobs:
        """Those from token `start` on. text: None = not requested."""
        num_rows, first = len(self) - self.num_unknown, max(0, start - self.num_unknown)
        ids, top_ids = bytes(self.ids[4 * start :]), rows_of(self.top_ids, num_rows, first, num_rows)
        texts: dict[int, str] = {}
        if text is not None:
            shown = {*unpack_int32(ids), *unpack_int32(top_ids), *(picked_ids if ids else ())}
            texts = {token_id: found for token_id in shown if (found := text(token_id)) is not None}
        return TokenLogprobs(
            ids,
            bytes(self.values[4 * start :]),
            top_ids if has_top else None,
            rows_of(self.top_values, num_rows, first, num_rows),
            picked_ids or None,
            rows_of(self.picked, num_rows, first, num_rows),
            self.num_unknown if start == 0 else 0,
            texts,
        )

    def mean(self) -> float:
        """Of the logprobs that there are; NaN if there are none."""
        values = [value for value in unpack_float32(bytes(self.values)) if math.isfinite(value)]
        return math.fsum(values) / len(values) if values else math.nan

    def add_unknown(self, token_id: int) -> None:
        """Begin with a token without a logprob: the first of the prompt."""
        self.ids += pack_int32([token_id])
        self.values += pack_float32([math.nan])
        self.num_unknown = 1

    def extend(self, block: LogprobBlock, picked_ids: tuple[int, ...]) -> None:
        """Append a block. Raises ValueError when its arrays do not fit together."""
        if not block.token_ids:
            return
        count, num_rows = len(block.token_ids) // 4, len(self) - self.num_unknown
        width = len(self.top_ids) // num_rows if num_rows else len(block.top_ids) // count if count else 0
        lengths = [len(data) for data in (block.token_ids, block.values, block.top_ids, block.top_values, block.picked)]
        if lengths != [4 * count, 4 * count, width * count, width * count, 4 * len(picked_ids) * count] or width % 4:
            raise ValueError(
                f"arrays of {lengths} bytes for {count} tokens, {width} of top ids each, {len(picked_ids)} picked"
            )
        self.ids += block.token_ids
        self.values += block.values
        self.top_ids += block.top_ids
        self.top_values += block.top_values
        self.picked += block.picked


def finite(value: float) -> float | None:
    """`value`, or None for NaN and infinity, which JSON does not have and which mean that there is no logprob."""
    return value if math.isfinite(value) else None
