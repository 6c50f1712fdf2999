"""Requests: as the front end receives them, and as it sends them to the scheduler."""

import math
import sys
from collections.abc import Mapping, Set
from typing import ClassVar, Literal

import msgspec

from headrace.media_kinds import MediaFields, MediaKind
from headrace.messages.grammar import GrammarSpec
from headrace.messages.media import KEY_BYTES, MediaItem, MediaSpan, pad_spans
from headrace.messages.outputs import DecodeOptions
from headrace.messages.packing import unpack_int32
from headrace.sampling.params import ResolvedSamplingParams, SamplingParams


class SessionParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From where in an open session a request continues.

    id: of the session. rid: the request to continue from; None = the latest one, or with `replace` the beginning of the session.
    offset: keep only this many tokens of what came before (negative: counted from the end); None or 0 = all.
    replace: delete the requests after that one, and abort those that run. drop_previous_output: continue after its prompt, without its output.
    """

    id: str | None = None
    rid: str | None = None
    offset: int | None = None
    replace: bool = False
    drop_previous_output: bool = False


class GenerateReqInput(MediaFields, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One call of `generate`: one prompt or a batch of prompts, `n` samples of each.

    Exactly one of `text`, `input_ids` and `input_embeds` is given; a list of prompts makes a batch.
    `input_embeds` is float[num_tokens][hidden_size] for one prompt, or the same as little-endian float32 bytes (in JSON base64).
    Fields that take
    one value or one per prompt are lists in the second case. bootstrap_host, bootstrap_port, bootstrap_room,
    disagg_prefill_dp_rank, kv_transfer_params: see `frontend.rooms`.
    In each prompt with media (`MediaFields`) one token of the model (docs/images.md) stands where an item is.
    data_parallel_rank: an older name of `routed_dp_rank`, which sglang-router writes. return_progress: a stream also says how far prompts are before
    their first tokens. return_normalized_logprob: give the mean of the prompt's logprobs, after the token logprob_start_len, then 0 by default, whose
    older name is normalized_logprob_start_len. prediction: text that the output may contain, a
    source of draft tokens if the server makes any.
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    input_embeds: bytes | list[bytes | list[float | list[float]]] | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int | list[int]] | None = None
    return_text_in_logprobs: bool = False
    return_normalized_logprob: bool | list[bool] = False
    normalized_logprob_start_len: int | list[int] | None = None
    return_hidden_states: bool | list[bool] = False
    return_routed_experts: bool | list[bool] = False
    return_progress: bool = False
    custom_logit_processor: str | list[str | None] | None = None
    prediction: str | list[str | None] | None = None
    priority: int | None = None
    extra_key: str | list[str | None] | None = None
    cache_salt: str | list[str | None] | None = None
    lora_path: str | list[str | None] | None = None
    session_params: SessionParams | list[SessionParams] | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int | None] | None = None
    disagg_prefill_dp_rank: int | None = None
    kv_transfer_params: dict[str, object] | None = None

    @property
    def replica(self) -> int | None:
        """The replica that the call names, by either name; None = the balancer chooses."""
        return self.data_parallel_rank if self.routed_dp_rank is None else self.routed_dp_rank


class EmbeddingReqInput(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One call of `encode`: one input or a batch; each becomes a vector, or the numbers of a classification.

    Exactly one of `text` and `input_ids` is given. text: a string, or a list of strings; for models that read pairs of texts also a list of pairs
    [query, document], or with is_cross_encoder_request a single one. input_ids: tokens as the model wants them, special tokens included.
    dimensions: give only the first numbers of an embedding, normalised again. truncate_prompt_tokens: of a longer input only the first so many
    tokens are read, special tokens included; -1 = as many as the model reads; None = longer inputs are refused. truncation_side: from which end
    tokens are left out. `rid`, `priority`, `extra_key`, `cache_salt`, `lora_path` and `routed_dp_rank` as in `GenerateReqInput`.
    """

    text: str | list[str | list[str]] | None = None
    input_ids: list[int | list[int]] | None = None
    is_cross_encoder_request: bool = False
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["right", "left"] = "right"
    rid: str | list[str] | None = None
    priority: int | None = None
    extra_key: str | list[str | None] | None = None
    cache_salt: str | list[str | None] | None = None
    lora_path: str | list[str | None] | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None

    # As of a call that generates: an input has one result, without logprobs.
    stream: ClassVar[bool] = False
    return_progress: ClassVar[bool] = False
    return_text_in_logprobs: ClassVar[bool] = False

    @property
    def replica(self) -> int | None:
        """As in `GenerateReqInput`."""
        return self.data_parallel_rank if self.routed_dp_rank is None else self.routed_dp_rank


CONTEXT_TOKENS = 8
"""Number of prompt tokens sent to the detokenizer with the first output."""


class PromptContent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a prompt contains: one object from the front end's encoder to the runner. Those between pass it on and only ask what its methods tell.

    token_ids: int32[num_tokens] little-endian. embeds: float32[num_tokens, hidden_size], which replace the embeddings of the tokens, or
    empty; with them, token_ids are placeholders. token_types: uint8[num_tokens], to which text of a pair each token belongs; empty = all to the
    first. media: its items; spans: where their tokens are, ascending, with placeholders in token_ids. extra_places: how many
    more positions than tokens its videos may take (M-RoPE).
    """

    token_ids: bytes
    embeds: bytes = b""
    token_types: bytes = b""
    media: tuple[MediaItem, ...] = ()
    spans: tuple[MediaSpan, ...] = ()
    extra_places: int = 0

    @property
    def num_tokens(self) -> int:
        """Its length; an incomplete last token is left out."""
        return len(self.token_ids) // 4

    @property
    def has_tokens(self) -> bool:
        """Whether `token_ids` are tokens. Placeholders say nothing of the text, and nobody else may use their KV."""
        return not self.embeds

    @property
    def context_ids(self) -> bytes:
        """The last CONTEXT_TOKENS tokens, on which the text of those that follow may depend, int32 bytes; empty if they are placeholders."""
        end = 4 * self.num_tokens
        return self.token_ids[max(0, end - 4 * CONTEXT_TOKENS) : end] if self.has_tokens else b""

    def cache_key(self, token_ids: bytes) -> bytes:
        """What a prefix cache compares of a sequence that begins with this prompt: 4 bytes a token, equal where the KV is equal.

        token_ids: int32[n] bytes, the first n known tokens of the sequence, n >= 0.
        """
        return pad_spans(token_ids, self.spans, self.media) if self.spans else token_ids

    @property
    def media_tokens(self) -> Mapping[MediaKind, int]:
        """Tokens that stand for media, of each kind that there is."""
        counts: dict[MediaKind, int] = {}
        for span in self.spans:
            kind = self.media[span.item].kind
            counts[kind] = counts.get(kind, 0) + span.length
        return counts

    @property
    def media_bytes(self) -> int:
        return sum(item.num_bytes for item in self.media)

    def check_media(self) -> None:
        """Raises ValueError unless the spans are within the prompt, in order, and cover each item's rows once."""
        rows = [0] * len(self.media)
        end = 0
        for span in self.spans:
            if span.start < end or span.length <= 0 or span.end > self.num_tokens or not 0 <= span.item < len(rows):
                raise ValueError(f"span {span} is outside of the prompt, or out of order")
            if span.first_row != rows[span.item]:
                raise ValueError(f"span {span} does not go on where the item's last one ended")
            rows[span.item] += span.length
            end = span.end
        for item, count in zip(self.media, rows, strict=True):
            if count != item.num_tokens or len(item.key) != KEY_BYTES or len(item.values) != 4 * math.prod(item.shape):
                raise ValueError(f"an item of {item.num_tokens} tokens has {count} in the prompt, or no whole values")

    def ids(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Token ids number `start` up to `stop`, None = up to the end. Raises ValueError for an incomplete last token."""
        return unpack_int32(self.token_ids[4 * start : None if stop is None else 4 * stop])


class LogprobSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which logprobs a sample wants.

    prompt_start: first prompt index whose logprob is wanted, >= 1; num_prompt_tokens or more = outputs only.
    top_num: most likely alternatives per position. token_ids: further ids whose logprob is wanted at each position.
    """

    prompt_start: int
    top_num: int = 0
    token_ids: tuple[int, ...] = ()


class SampleTask(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """The task of a request: sample tokens after the prompt.

    stream: send outputs every few tokens, not only at the end. custom_logit_processor: its name, or empty.
    predicted_ids: int32[n] bytes, tokens that the output may contain. in_chat: the prompt is a chat, rendered by the model's template.
    The properties and methods are what is asked of any task; `params`, `custom_logit_processor` and `predicted_ids` are for those who sample.
    """

    params: ResolvedSamplingParams
    stream: bool = False
    logprobs: LogprobSpec | None = None
    return_hidden_states: bool = False
    custom_logit_processor: str = ""
    predicted_ids: bytes = b""
    in_chat: bool = False

    @property
    def max_new_tokens(self) -> int:
        """Most output tokens; 0 = it only computes its prompt."""
        return self.params.max_new_tokens

    @property
    def ignores_eos(self) -> bool:
        """Whether the model's end of a sequence does not end it, so that it usually makes all `max_new_tokens`."""
        return self.params.ignore_eos

    @property
    def ends_with_turn(self) -> bool:
        """Whether the end of a turn ends it: in chats, and wherever a grammar decides when the output is complete."""
        return self.in_chat or self.grammar is not None

    @property
    def stream_interval(self) -> int:
        """New tokens that make a chunk due; 0 = the server's number."""
        return self.params.stream_interval

    @property
    def grammar(self) -> GrammarSpec | None:
        return self.params.grammar

    @property
    def is_plain(self) -> bool:
        """Whether tokens are all that comes out of it, no logprobs and no hidden states."""
        return self.logprobs is None and not self.return_hidden_states

    @property
    def reads_all(self) -> bool:
        """Whether it needs the hidden state of every token, so that a token is computed even if its KV is cached."""
        return self.return_hidden_states

    @property
    def prompt_logprob_start(self) -> int:
        """First prompt index whose logprob is wanted; beyond every prompt if none is."""
        return self.logprobs.prompt_start if self.logprobs is not None else sys.maxsize

    @property
    def stop_text(self) -> ResolvedSamplingParams | None:
        """Where it is said which text ends it and how text is made of its tokens, or None if no text ends it."""
        return self.params if self.params.stop or self.params.stop_regex else None

    def end_token_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end it. eos_token_ids: of the model, which end a complete output of a grammar even if it ignores them."""
        own = frozenset(self.params.stop_token_ids)
        return own if self.params.ignore_eos and self.grammar is None else own | eos_token_ids

    def check(self, eos_token_ids: Set[int]) -> None:
        """Raises RequestError if it can never be carried out: see `ResolvedSamplingParams.check_allowed`."""
        self.params.check_allowed(eos_token_ids)

    def with_prompt_logprobs_from(self, start: int) -> "SampleTask":
        """The same once the logprobs of the prompt's tokens before `start` have been delivered."""
        if self.logprobs is None or self.logprobs.prompt_start == start:
            return self
        rest = msgspec.structs.replace(self.logprobs, prompt_start=start)
        return msgspec.structs.replace(self, logprobs=rest)

    def decode_options(self, context_ids: bytes, output_ids: bytes, attempt: int) -> DecodeOptions:
        """How text is made of its tokens. The arguments are those of `DecodeOptions`."""
        params = self.params
        return DecodeOptions(
            params.skip_special_tokens,
            params.spaces_between_special_tokens,
            params.no_stop_trim,
            params.stop,
            params.stop_regex,
            context_ids,
            output_ids,
            attempt,
        )

    def described(self) -> str:
        return self.params.described()


class PoolTask(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """The task of a request: make one vector of the prompt, as the model's `PoolingConfig` says, or the numbers of its classification.

    dimensions: only the first so many, normalised; 0 = all. reads_all: it needs the hidden state of every token, so that a token
    is computed even if its KV is cached.
    """

    dimensions: int = 0
    reads_all: bool = False

    # What is asked of any task: it has one output, no tokens, no text and no logprobs.
    stream: ClassVar[bool] = False
    stream_interval: ClassVar[int] = 0
    max_new_tokens: ClassVar[int] = 0
    ignores_eos: ClassVar[bool] = True
    ends_with_turn: ClassVar[bool] = False
    grammar: ClassVar[GrammarSpec | None] = None
    is_plain: ClassVar[bool] = False
    prompt_logprob_start: ClassVar[int] = sys.maxsize
    stop_text: ClassVar[ResolvedSamplingParams | None] = None

    def end_token_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        return frozenset()

    def check(self, eos_token_ids: Set[int]) -> None:
        """It can always be carried out."""

    def with_prompt_logprobs_from(self, start: int) -> "PoolTask":
        return self

    def decode_options(self, context_ids: bytes, output_ids: bytes, attempt: int) -> DecodeOptions:
        """Of no use to it: it has no text."""
        return DecodeOptions(context_ids=context_ids, output_ids=output_ids, attempt=attempt)

    def described(self) -> str:
        return f"pooled dimensions={self.dimensions}" if self.dimensions else "pooled"


EngineTask = SampleTask | PoolTask
"""The tasks that a request may have. Who only asks what any task answers names this type."""


class Room(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a request's prompt is computed for another server (`--disaggregation-mode`). host, port: where the prefill server listens. number: the
    same on both sides, of no other request. first: that of the first sample of its prompt. replica: of the prefill server; -1 = `first` modulo how
    many it has. is_computed: the prompt is computed by the time that this request comes. has_token: its first token is as this request asks for it;
    otherwise only pages are of use."""

    host: str
    port: int
    number: int
    first: int
    replica: int = -1
    is_computed: bool = False
    has_token: bool = True


class TokenizedGenerateReqInput(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """One sample, as sent to the scheduler. `rid` is that of the sample, unique among the live ones.

    content: the prompt. task: what the engine shall do with it; the other fields say for whom and until when.
    group: the same for all samples of a prompt, so that it is prefilled once; empty = a single sample.
    namespace: requests of different namespaces never share KV. created_s: time.monotonic() at arrival (one clock for all processes of a machine).
    deadline_s: time.monotonic() after which it is aborted (0 = none). queue_deadline_s: the same while it has never run.
    tenant, weight: whose turn it takes (see `Caller.turn`), and its share beside others that wait; weight > 0.
    lora_id: a loaded adapter; 0 = the base model.
    output_ids: int32[m], outputs that reached the front end before the scheduler was restarted; generation continues after them.
    attempt: how many times the sample was sent before. room: with --disaggregation-mode.
    """

    rid: str
    content: PromptContent
    task: EngineTask
    namespace: str = ""
    priority: int = 0
    group: str = ""
    created_s: float = 0.0
    deadline_s: float = 0.0
    queue_deadline_s: float = 0.0
    tenant: str = ""
    weight: float = 1.0
    output_ids: bytes = b""
    attempt: int = 0
    lora_id: int = 0
    room: Room | None = None


CallInput = GenerateReqInput | EmbeddingReqInput
"""A call of the front end."""


class BatchTokenizedGenerateReqInput(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Samples that arrived together, in one message."""

    requests: tuple[TokenizedGenerateReqInput, ...]
