"""The new output of a sample since the last update: the front end's output, from which every API makes its replies.

Independent of the format of replies, which `native_answer` and the handlers in `server/` own. Sent to HTTP workers as msgpack.
"""

import math
from collections.abc import Callable, Mapping
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
from headrace.messages.packing import unpack_float32, unpack_int32

LogprobItem = tuple[float | None, int, str | None]
"""(logprob or None, token id, text or None)."""

LogprobRow = list[LogprobItem] | None
"""Logprobs of several ids at the position of one token. None for the first token of a prompt, which has no logprob."""


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
    """Logprobs of consecutive tokens, in lists of the same length. top, picked: of the most likely and of the requested ids; None = not requested."""

    tokens: list[LogprobItem]
    top: list[LogprobRow] | None = None
    picked: list[LogprobRow] | None = None

    def following(self, before: Self) -> Self:
        return type(self)(
            before.tokens + self.tokens, _joined(before.top, self.top), _joined(before.picked, self.picked)
        )


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
    a row of hidden_size values per token; None if not requested. speculation: with the last update, None without speculative decoding.
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
    hidden_states: list[list[float]] | None = None
    speculation: SpeculationCounts | None = None
    pooled: bytes | None = None
    progress: PromptProgress | None = None
    versions: tuple[TokenVersions, ...] = ()
    mean_logprob: float | None = None

    @property
    def is_progress(self) -> bool:
        """Whether it says how far the prompt is, and nothing else."""
        return self.progress is not None and not self.ids and self.finish is None

    def raise_failure(self) -> None:
        """Raise the error of an abort by the engine, see `failure_of`; nothing for any other update."""
        if self.finish is not None and (failure := failure_of(self.finish)) is not None:
            raise failure


def _joined(before: list[LogprobRow] | None, after: list[LogprobRow] | None) -> list[LogprobRow] | None:
    return None if before is None or after is None else before + after


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
    """A sample's logprobs in the form of replies, from the engine's arrays: growing lists with an entry per token. top, picked: empty
    rows if they were not requested."""

    tokens: list[LogprobItem] = field(default_factory=list)
    top: list[LogprobRow] = field(default_factory=list)
    picked: list[LogprobRow] = field(default_factory=list)

    def since(self, start: int, has_top: bool, has_picked: bool) -> TokenLogprobs:
        top = self.top[start:] if has_top else None
        return TokenLogprobs(self.tokens[start:], top, self.picked[start:] if has_picked else None)

    def mean(self) -> float:
        """Of the logprobs that there are; NaN if there are none."""
        values = [value for value, *_ in self.tokens if value is not None]
        return math.fsum(values) / len(values) if values else math.nan

    def add_unknown(self, token_id: int, text: TokenText) -> None:
        """Add a token without a logprob: the first of the prompt."""
        self.tokens.append((None, token_id, text(token_id)))
        self.top.append(None)
        self.picked.append(None)

    def extend(self, block: LogprobBlock, picked_ids: tuple[int, ...], text: TokenText) -> None:
        """Append a block. Raises ValueError when its arrays do not fit together."""
        ids = unpack_int32(block.token_ids)
        if not ids:
            return
        values = unpack_float32(block.values)
        self.tokens += [(finite(v), i, text(i)) for v, i in zip(values, ids, strict=True)]
        top_ids, top_values = unpack_int32(block.top_ids), unpack_float32(block.top_values)
        width = len(top_ids) // len(ids)
        items = [(finite(v), i, text(i)) for v, i in zip(top_values, top_ids, strict=True)]
        self.top += [items[row * width : (row + 1) * width] for row in range(len(ids))]
        picked = unpack_float32(block.picked)
        if len(picked) != len(picked_ids) * len(ids):
            raise ValueError(f"{len(picked)} picked logprobs for {len(ids)} tokens of {len(picked_ids)} ids")
        width = len(picked_ids)
        for row in range(len(ids)):
            row_values = picked[row * width : (row + 1) * width]
            self.picked.append([(finite(v), i, text(i)) for v, i in zip(row_values, picked_ids, strict=True)])


def finite(value: float) -> float | None:
    """`value`, or None for NaN and infinity, which JSON does not have and which mean that there is no logprob."""
    return value if math.isfinite(value) else None
