"""Results on their way out: scheduler -> detokenizer -> tokenizer manager."""

from collections.abc import Sequence
from typing import Literal

import msgspec

WAITED_TOO_LONG = "the request waited longer than the server lets it wait"
"""Message of the aborts by --queue-timeout-s, which tells them from others with status 503."""


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Why a sample ended (`meta_info.finish_reason`).

    stop: `matched` is the stop string, the regex's match, or the token id. length: `length` = tokens made.
    abort: `message` for the client and the `status_code` an error before the first token is answered with.
    """

    type: Literal["stop", "length", "abort"]
    matched: str | int | None = None
    length: int = 0
    message: str = ""
    status_code: int = 0


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
        """Blocks of consecutive tokens as one; None when there are none."""
        if len(blocks) < 2:
            return blocks[0] if blocks else None
        return cls(*(b"".join(getattr(block, name) for block in blocks) for name in cls.__struct_fields__))

    def first(self, num_tokens: int) -> "LogprobBlock":
        """Those of the first `num_tokens` tokens, 0 <= num_tokens <= n."""
        total = len(self.token_ids) // 4
        if num_tokens == total:
            return self
        parts = (getattr(self, name) for name in self.__struct_fields__)
        return LogprobBlock(*(part[: len(part) // total * num_tokens] for part in parts))


class DecodeOptions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the detokenizer treats a sample. Sent with its first output.

    context_ids: the last tokens of the prompt, int32 bytes: a leading space or a character's first bytes may hang on them.
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


class SampleEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something that happened to a sample in the scheduler. at_s: time.monotonic().

    admitted: num_tokens of its prompt were cached. chunk: so many tokens of its prompt (or of what a retraction lost) were planned.
    retracted: it had so many output tokens.
    """

    kind: Literal["admitted", "chunk", "retracted"]
    at_s: float
    num_tokens: int


class SampleStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Counts and times of one sample, in tokens and seconds. Sent with the first and the last output.

    queue_time_s: from arrival at the scheduler to the first step it took part in. events: with the last output only.
    weight_version: of the weights at that output.
    """

    prompt_tokens: int
    cached_tokens: int
    num_retractions: int = 0
    queue_time_s: float = 0.0
    events: tuple[SampleEvent, ...] = ()
    weight_version: str = "default"


class TokenIDOut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one sample. Exactly one of a rid's outputs has `finish`; it is the last.

    ids: int32[n] little-endian, n >= 0. num_output_tokens: all tokens so far, these included.
    A matched stop token or EOS is part of `ids` and of the count; the detokenizer trims it from the text.
    prompt_logprobs: with the first output. hidden_states: float32[m, hidden_size], one row per token of `ids` (the first
    output also carries the prompt's rows before them).
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


class BatchTokenIDOut(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Everything one step has to say, in one message. source: which life of which scheduler said it."""

    rows: tuple[TokenIDOut, ...]
    source: int = 0


class StrOut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `TokenIDOut` and the new text of its sample (held back and trimmed as stops ask). `tokens.options` has been obeyed: None."""

    text: str
    tokens: TokenIDOut


class BatchStrOut(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Everything one step has to say, as text. source: of the `BatchTokenIDOut`."""

    rows: tuple[StrOut, ...]
    source: int = 0
