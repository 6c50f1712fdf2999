"""Request bodies of the OpenAI routes: every field of OpenAI's API, and additional ones, e.g. `top_k`.

A field is supported, noted as without effect (`noted`), or refused by name if it requests something that is not supported
(`refuse_unsupported`); docs/fields.md has them all. Fields that are not listed here are refused by the decoder, unless they request nothing
(`messages/bodies.py`). `user`, `safety_identifier`, `metadata` and `prompt_cache_key` are labels. Runs in the event loop that serves HTTP.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from headrace.media_kinds import MediaParts
from headrace.messages.requests import SessionParams
from headrace.sampling.params import SamplingParams
from headrace.server.chat.conversation import refused, unsupported
from headrace.server.notes import NO_EFFECT, without_effect
from headrace.server.openai.fields import (
    AskedEffort,
    From0,
    From1,
    FromMinus1,
    FromMinus2,
    NumLogprobs,
    StructuredFields,
    check_num_logprobs,
    check_same,
)

AS_MANY_AS_FIT = -1
"""llama.cpp's default for the number of output tokens."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of OpenAI's API; others are the client's own, and the chat template's to show."""


class ReasoningFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`reasoning`, OpenRouter's object. effort and enabled as SGLang reads them. max_tokens: the budget. exclude: the reply has no reasoning.

    Without effect: summary, generate_summary.
    """

    effort: AskedEffort | None = None
    enabled: bool | str | None = None
    max_tokens: From0 = None
    exclude: bool | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ThinkingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`thinking`, an object of Anthropic's, DeepSeek's and GLM's clients. adaptive and auto: as the template does.

    Without effect: clear_thinking, display.
    """

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: From0 = None
    clear_thinking: bool | None = None
    display: str | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`include_usage`: one more chunk with the token counts before `[DONE]`.

    continuous_usage_stats: every chunk carries the counts of its choice so far. include_obfuscation: accepted without effect.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict", "num_predict")
"""Names of the limit of output tokens."""


class GenerationRequest(StructuredFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of both completions and chat completions, beside those of `StructuredFields`; None = not set.

    max_tokens: -1 = as many as fit; n_predict and num_predict are llama.cpp's and Ollama's names of it. include_stop_str_in_output: no_stop_trim, as
    vLLM calls it.
    """

    NOTED: ClassVar[tuple[str, ...]] = NO_EFFECT
    """Fields that have no effect."""

    stream_options: StreamOptions | None = None
    n: From1 = None
    max_tokens: FromMinus1 = None
    max_completion_tokens: FromMinus1 = None
    n_predict: FromMinus2 = None
    num_predict: FromMinus2 = None
    logit_bias: dict[str, float] | None = None
    # Ours.
    sampling_seed: FromMinus1 = None
    min_tokens: From0 = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    session_params: SessionParams | None = None
    rid: str | None = None
    return_routed_experts: bool | None = None
    # vLLM's.
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: FromMinus1 = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: NumLogprobs = None
    logprob_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    kv_transfer_params: dict[str, object] | None = None
    # llama.cpp's.
    return_progress: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the reply has logprobs of the output."""
        return False

    @property
    def num_top_logprobs(self) -> int:
        """Alternatives per output token."""
        return 0

    @property
    def output_limit(self) -> int | None:
        """Most output tokens, from whichever field names them; -2 of Ollama fills the context, too."""
        value: int | None = getattr(self, self.limit_field)
        return AS_MANY_AS_FIT if value == -2 and self.limit_field in ("n_predict", "num_predict") else value

    @property
    def max_new_tokens(self) -> int | None:
        """The limit under the runtime's name; None = none given, or as many as fit."""
        return None if self.output_limit == AS_MANY_AS_FIT else self.output_limit

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def limit_field(self) -> str:
        """Name of the field that limits the output in this request."""
        return next((name for name in _LIMITS if getattr(self, name) is not None), "max_tokens")

    @property
    def noted(self) -> list[str]:
        return without_effect(self, self.NOTED)

    @property
    def num_samples(self) -> int:
        """Choices per prompt; its range is checked with the other sampling parameters."""
        return 1 if self.n is None else self.n

    @property
    def num_candidates(self) -> int:
        """Samples per prompt, of which `num_samples` become choices."""
        return self.num_samples

    def sampling_params(self, max_new_tokens: int | None) -> SamplingParams:
        """The sampling parameters of the request under the runtime's names. Raises RequestError, see `asked_grammar`."""
        asked = self.asked_grammar()
        fields = self.sampling_fields() | {
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": self.min_tokens or 0,
            "n": self.num_candidates,
            "no_stop_trim": bool(self.no_stop_trim or self.include_stop_str_in_output),
        }
        return SamplingParams(**fields if asked is None else fields | asked.fields)

    def call_fields(self, whole_prompt: bool = False) -> dict[str, Any]:
        """The fields of `GenerateReqInput` beside its prompt and how it is sampled. whole_prompt: the prompt's logprobs are wanted for an echo."""
        prompt = self.prompt_logprobs
        wanted = self.wants_logprobs or prompt is not None
        return super().call_fields() | {
            "return_progress": bool(self.return_progress),
            "session_params": self.session_params,
            "kv_transfer_params": self.kv_transfer_params,
            "return_logprob": wanted,
            "logprob_start_len": 0 if prompt is not None or (whole_prompt and self.wants_logprobs) else -1,
            "top_logprobs_num": max(self.num_top_logprobs, prompt or 0),
            "token_ids_logprob": list(self.logprob_token_ids) if self.logprob_token_ids else None,
            "return_text_in_logprobs": wanted,
        }

    def check(self) -> None:
        """Raises RequestError for fields that contradict each other, and for values that these routes refuse."""
        options = self.stream_options
        if not self.stream and options is not None and (options.include_usage or options.continuous_usage_stats):
            raise refused("stream_options", "is only allowed when stream is true")
        check_same({name: getattr(self, name) for name in ("max_tokens", *_LIMITS)})
        self.check_sampling()
        if self.prompt_logprobs is not None and self.stream:
            raise refused("prompt_logprobs", "are not available in a stream")
        check_num_logprobs("prompt_logprobs", self.prompt_logprobs)
        if self.logprob_token_ids and not self.wants_logprobs:
            raise refused("logprob_token_ids", "needs logprobs")
        if self.session_params is not None and self.return_token_ids:
            raise refused("return_token_ids", ": a request of a session does not show its prompt")
        field, kept = "truncate_prompt_tokens", self.truncate_prompt_tokens
        if kept is not None and kept != AS_MANY_AS_FIT and kept < 1:
            raise refused(field, f"must be at least 1, or -1 for as many as fit, got {kept}")

    def truncated(self, ids: list[int], context_length: int) -> list[int]:
        """The prompt's tokens that `truncate_prompt_tokens` keeps: the last ones, or the first with truncation_side "right".

        -1 keeps as many as fit into the context beside the requested output (one token if it is not limited; at most half of the context if that
        would leave the prompt nothing).
        """
        count = self.truncate_prompt_tokens
        if count is None:
            return ids
        if count == AS_MANY_AS_FIT:
            output = max(1, self.output_limit or 1)
            count = context_length - (output if output < context_length else context_length // 2)
        return ids[:count] if self.truncation_side == "right" else ids[-count:]


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/completions. `prompt`: a text, a list of texts, token ids, or a list of lists of token ids.

    best_of: so many samples are made of each prompt, and the n with the highest mean logprob are the choices.
    """

    NOTED = (*NO_EFFECT, "think")

    prompt: str | list[str | int | list[int]]
    best_of: From1 = None
    echo: bool | None = None
    logprobs: NumLogprobs = None
    suffix: str | None = None

    @property
    def num_candidates(self) -> int:
        return self.num_samples if self.best_of is None else self.best_of

    @property
    def wants_logprobs(self) -> bool:
        """0 asks for the chosen token's."""
        return self.logprobs is not None

    @property
    def num_top_logprobs(self) -> int:
        return self.logprobs or 0


class ContentPart(MediaParts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a message: text, or media (`chat_request`); others are refused by their type, with the fields they have.

    cache_control, prompt_cache_breakpoint: hints for caches that work by marks; accepted without effect.
    """

    type: str
    text: str | None = None
    file: object | None = None
    refusal: object | None = None
    cache_control: object | None = None
    prompt_cache_breakpoint: object | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a chat, any role. function_call: a call of the time before `tool_calls`, answered by the role `function`.

    Fields that are not listed here are labels of the client's own (ids, times, costs, cache marks of other servers): no template
    sees them, and they are accepted without effect. `reasoning` is `reasoning_content` by another name.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    images: object | None = None
    audios: object | None = None
    videos: object | None = None
    audio: object | None = None
    tool_calls: list[dict[str, object]] | None = None
    tool_call_id: str | None = None
    function_call: object | None = None
    annotations: list[object] | None = None
    prefix: bool | None = None
    partial: bool | None = None


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text that the reply may contain, a source of draft tokens: a string, or parts of text."""

    type: Literal["content"] = "content"
    content: str | list[ContentPart]


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/chat/completions.

    separate_reasoning: false leaves reasoning in the content. stream_reasoning: false sends it in one piece when it is complete.
    include_reasoning: false leaves it out of the reply. thinking_budget: most tokens of reasoning, -1 = no limit; the other names
    are those of vLLM and llama.cpp. functions, function_call: tools and their choice as they were before `tools`.
    """

    NOTED = (*NO_EFFECT, "verbosity")

    messages: Annotated[list[ChatMessage], Meta(extra_json_schema={"minItems": 1})]
    logprobs: bool | None = None
    top_logprobs: NumLogprobs = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    thinking_budget: FromMinus1 = None
    thinking_token_budget: FromMinus1 = None
    thinking_budget_tokens: FromMinus1 = None
    reasoning_budget_tokens: FromMinus1 = None
    reasoning_effort: AskedEffort | None = None
    reasoning: ReasoningFields | None = None
    thinking: ThinkingFields | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[object] | None = None
    function_call: str | dict[str, object] | None = None
    modalities: list[str] | None = None
    audio: object | None = None
    prediction: Prediction | None = None
    moderation: object | None = None
    web_search_options: object | None = None
    verbosity: str | None = None
    store: bool | None = None
    prompt_cache_options: object | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, object] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def num_top_logprobs(self) -> int:
        return self.top_logprobs or 0

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False and not (self.reasoning is not None and self.reasoning.exclude)


_NOT_YET = (
    "modalities",
    "audio",
    "moderation",
    "web_search_options",
    "prompt_cache_options",
    "prompt_cache_retention",
)
"""Chat fields that are not supported: accepted only at values that ask for nothing."""


def refuse_unsupported(request: ChatCompletionRequest) -> None:
    """Raises RequestError naming the first field that asks for something this server does not do."""
    if asked := without_effect(request, _NOT_YET):
        raise unsupported(asked[0], "is not supported yet")
