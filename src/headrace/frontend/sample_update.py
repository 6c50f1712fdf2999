"""What a sample has to say since it was last asked: the front end's output, from which every API makes its replies.

Nothing in it is a reply's shape: `native_answer` and the handlers in `server/` have those. Crosses to HTTP workers as msgpack.
"""

from typing import Self

import msgspec

from headrace.messages.outputs import FinishReason

LogprobItem = tuple[float | None, int, str | None]
"""(logprob or None, token id, text or None)."""

LogprobRow = list[LogprobItem] | None
"""Of one token: logprobs of several ids at its place. None for the first token of a prompt, which has no logprob."""


class SampleUsage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of a sample so far. cached: those of the prompt that were found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class SampleTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How long a sample took. Seconds; None = not yet.

    queue_s: until the first step it took part in. ttft_s, e2e_s: until its first token and its end, from when the call came.
    decode_throughput: tokens per second after the first, known at the end; None also when there is no second one.
    """

    queue_s: float
    ttft_s: float | None = None
    e2e_s: float | None = None
    decode_throughput: float | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Logprobs of consecutive tokens: three lists of one length. top, picked: of the most likely ids and of those asked for; None = of none."""

    tokens: list[LogprobItem]
    top: list[LogprobRow] | None = None
    picked: list[LogprobRow] | None = None

    def following(self, before: Self) -> Self:
        """Those of `before` and these."""
        return type(self)(
            before.tokens + self.tokens, _joined(before.top, self.top), _joined(before.picked, self.picked)
        )


class SampleLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Logprobs of tokens of the prompt and of the output."""

    prompt: TokenLogprobs
    output: TokenLogprobs

    def following(self, before: Self) -> Self:
        """Those of `before` and these."""
        return type(self)(self.prompt.following(before.prompt), self.output.following(before.output))


class SampleUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is new of one sample: text, ids and logprobs since its last update. Everything else is as it stands now.

    All updates of a sample joined are its answer. finish: with the last update, None before.

    rid: the prompt's, as its client knows it. index: the sample's place in the answer of its call; is_listed: that answer is a list,
    because its prompt was one or has several samples. logprobs: None when they were not asked for. hidden_states: with the last update,
    a row of hidden_size values for each token; None when they were not asked for.
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


def _joined(before: list[LogprobRow] | None, after: list[LogprobRow] | None) -> list[LogprobRow] | None:
    return None if before is None or after is None else before + after
