"""Outputs: scheduler -> detokenizer -> tokenizer manager."""

from collections.abc import Sequence
from typing import Literal

import msgspec

WAITED_TOO_LONG = "the request waited longer than the server lets it wait"
"""Message of aborts by --queue-timeout-s; it distinguishes them from other aborts with status 503."""


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Why a sample ended (`meta_info.finish_reason`).

    stop: `matched` is the stop string, the regex's match, or the token id. length: `length` = output tokens.
    abort: `message` is for the client; `status_code` is that of the reply if there is no output yet; `param` names the field at fault.
    """

    type: Literal["stop", "length", "abort"]
    matched: str | int | None = None
    length: int = 0
    message: str = ""
    status_code: int = 0
    param: str = ""


class LogprobBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Logprobs of n consecutive tokens, little-endian arrays.

    token_ids int32[n]; values float32[n] (NaN = none: the first prompt token); top_ids int32[n, k]; top_values float32[n, k];
    picked float32[n, c] in the order of `LogprobSpec.token_ids`.
    """

    token_ids: bytes = b""
    values: bytes = b""
    top_ids: bytes = b""
    top_values: bytes = b""
    picked: bytes = b""

    @classmethod
    def joined(cls, blocks: Sequence["LogprobBlock"]) -> "LogprobBlock | None":
        """Blocks of consecutive tokens joined into one; None if there are none."""
        if len(blocks) < 2:
            return blocks[0] if blocks else None
        return cls(*(b"".join(getattr(block, name) for block in blocks) for name in cls.__struct_fields__))

    def after(self, before: "LogprobBlock | None") -> "LogprobBlock":
        """This block behind the one of the tokens before its own, if there is one."""
        if before is None:
            return self
        return LogprobBlock(*(getattr(before, name) + getattr(self, name) for name in self.__struct_fields__))

    def first(self, num_tokens: int) -> "LogprobBlock":
        """The block of the first `num_tokens` tokens, 0 <= num_tokens <= n."""
        total = len(self.token_ids) // 4
        if num_tokens == total:
            return self
        parts = (getattr(self, name) for name in self.__struct_fields__)
        return LogprobBlock(*(part[: len(part) // total * num_tokens] for part in parts))


class DecodeOptions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the detokenizer treats a sample. Sent with its first output.

    context_ids: int32 bytes, the last tokens of the prompt, on which a leading space or an incomplete character may depend.
    output_ids, attempt: of `TokenizedGenerateReqInput`; the text of output_ids has been delivered.
    """

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    context_ids: bytes = b""
    output_ids: bytes = b""
    attempt: int = 0


SampleEventKind = Literal["grammar_compiled", "transferred", "admitted", "chunk", "retracted"]


class SampleEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something that happened to a sample in the scheduler. at_s: time.monotonic().

    num_tokens means, for transferred: tokens of the prompt, whose KV has come from a prefill server; admitted:
    prompt tokens found in the cache; chunk: tokens planned in one step, of the prompt or of what a
    retraction lost; retracted: output tokens so far; grammar_compiled: 0.
    """

    kind: SampleEventKind
    at_s: float
    num_tokens: int


class SpeculationCounts(msgspec.Struct, frozen=True, gc=False):
    """What draft tokens have brought: rows of steps that had some, drafted tokens, and accepted ones (`num_right`)."""

    num_steps: int = 0
    num_drafted: int = 0
    num_right: int = 0

    @property
    def accept_length(self) -> float:
        """Mean number of tokens that such a row gave; 0 before the first."""
        return 1.0 + self.num_right / self.num_steps if self.num_steps else 0.0

    def after_step(self, num_drafted: int, num_right: int) -> "SpeculationCounts":
        return SpeculationCounts(self.num_steps + 1, self.num_drafted + num_drafted, self.num_right + num_right)

    def added_to(self, other: "SpeculationCounts | None") -> "SpeculationCounts":
        if other is None:
            return self
        return SpeculationCounts(
            self.num_steps + other.num_steps,
            self.num_drafted + other.num_drafted,
            self.num_right + other.num_right,
        )


MissReason = Literal["other_text", "not_cached", "evicted", "flushed", "weights", "other_namespace"]


class CacheMiss(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why not all of a prompt was found in the prefix cache.

    position: of the first token that was not. reason: other_text = what is cached goes on with `cached_id` there, not with `token_id`;
    not_cached = it ends there; evicted, flushed, weights = it was there and is gone: for want of room, by /flush_cache, by an update of the
    weights; other_namespace = it is there for another cache_salt, extra_key or adapter of the same key. cached_id: -1 = none.
    """

    position: int
    reason: MissReason
    token_id: int
    cached_id: int = -1


class TokenVersions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which weights gave the output tokens from place `start` on, and the oldest that gave KV from which these were computed.

    kv_age: how many updates lie between the two; the names may be the same.
    """

    start: int
    weight_version: str
    kv_version: str
    kv_age: int = 0


class SampleStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Counts and times of one sample, in tokens and seconds. Sent with the first and the last output.

    queue_time_s: from arrival at the scheduler to the first step it took part in. events: with the last output only.
    weight_version: of the weights at that output. speculation: None without speculative decoding.
    cache_miss: with the last output only; None if all was found.
    """

    prompt_tokens: int
    cached_tokens: int
    num_retractions: int = 0
    queue_time_s: float = 0.0
    events: tuple[SampleEvent, ...] = ()
    weight_version: str = "default"
    speculation: SpeculationCounts | None = None
    cache_miss: CacheMiss | None = None


class TokenIDOut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one sample. Exactly one of a rid's outputs has `finish`; it is the last.

    ids: int32[n] little-endian, n >= 0. num_output_tokens: output tokens so far, including these.
    A matched stop token or EOS is part of `ids` and of the count; the detokenizer trims it from the text.
    prompt_logprobs: with the first output. hidden_states: float32[m, hidden_size], one row per token of `ids` (the first
    output also carries the prompt's rows before them). pooled: float32[n], the result of a `PoolTask`, with the only output.
    versions: where they change in `ids`, with --kv-on-update recompute or keep.
    """

    rid: str
    ids: bytes
    num_output_tokens: int
    finish: FinishReason | None = None
    options: DecodeOptions | None = None
    stats: SampleStats | None = None
    logprobs: LogprobBlock | None = None
    prompt_logprobs: LogprobBlock | None = None
    hidden_states: bytes = b""
    pooled: bytes = b""
    versions: tuple[TokenVersions, ...] = ()


class BatchTokenIDOut(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """All outputs of one step, in one message. source: which scheduler, and which incarnation of it, sent this."""

    rows: tuple[TokenIDOut, ...]
    source: int = 0


class PromptPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How many tokens of a sample's prompt have been computed, or were found in the cache (`cached_tokens`)."""

    rid: str
    processed_tokens: int
    cached_tokens: int


class SamplesMoved(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Samples, by rid, that have begun to run, and retracted ones that wait again. A new sample waits until it is told here. prompts: of those that
    several steps compute, as long as they do.

    source: of the `BatchTokenIDOut`. Not by way of the detokenizer, so an output of an earlier step may arrive later.
    """

    running: tuple[str, ...]
    waiting: tuple[str, ...] = ()
    source: int = 0
    prompts: tuple[PromptPart, ...] = ()


class StrOut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `TokenIDOut` and the new text of its sample (held back and trimmed as stops ask). `tokens.options` has been obeyed: None."""

    text: str
    tokens: TokenIDOut


class BatchStrOut(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """All outputs of one step, with text. source: of the `BatchTokenIDOut`."""

    rows: tuple[StrOut, ...]
    source: int = 0
