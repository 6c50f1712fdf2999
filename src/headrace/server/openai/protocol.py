"""Request bodies of the OpenAI routes: every field of OpenAI's API, and additional ones, e.g. `top_k`.

A field is supported, noted as without effect (`noted`), or refused by name if it requests something that is not supported
(`refuse_unsupported`); docs/fields.md has them all. Fields that are not listed here are refused by the decoder, unless they request nothing
(`messages/bodies.py`). `user`, `safety_identifier`, `metadata` and `prompt_cache_key` are labels. Bounds in `extra_json_schema` are for
openapi.json; they are checked elsewhere, with better messages. Runs in the event loop that serves HTTP.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.errors import RequestError
from headrace.media_kinds import MediaParts
from headrace.messages.bodies import asks_for_nothing
from headrace.messages.requests import SessionParams
from headrace.sampling.params import SamplingParams
from headrace.server.notes import NO_EFFECT, without_effect
from headrace.server.openai.structured_outputs import StructuredFields

MAX_LOGPROBS = 20
"""Most alternatives per token on the OpenAI routes, the same as OpenAI's."""

AS_MANY_AS_FIT = -1
"""llama.cpp's default for the number of output tokens."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of OpenAI's API; others are the client's own, and the chat template's to show."""

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
AskedEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "default"]

_MOST_TOKENS = Annotated[int | None, Meta(extra_json_schema={"minimum": 0})]


class ReasoningFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`reasoning`, OpenRouter's object. effort and enabled as SGLang reads them. max_tokens: the budget. exclude: the reply has no reasoning.

    Without effect: summary, generate_summary.
    """

    effort: AskedEffort | None = None
    enabled: bool | str | None = None
    max_tokens: _MOST_TOKENS = None
    exclude: bool | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ThinkingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`thinking`, an object of Anthropic's, DeepSeek's and GLM's clients. adaptive and auto: as the template does.

    Without effect: clear_thinking, display.
    """

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: _MOST_TOKENS = None
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

MAX_TEMPERATURE = 2.0
"""Of OpenAI's API; `/generate` has no such limit."""


def check_temperature(temperature: float | None) -> None:
    """Raises RequestError for one that OpenAI's API does not have. Negative ones are refused with the other parameters."""
    if temperature is not None and temperature > MAX_TEMPERATURE:
        raise RequestError(f"temperature must be between 0 and {MAX_TEMPERATURE:g}, got {temperature}", "temperature")


class GenerationRequest(StructuredFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of both completions and chat completions, beside those of `StructuredFields`; None = not set.

    model: "" and "default" mean the served model. max_tokens: -1 = as many as fit; n_predict and num_predict are llama.cpp's and Ollama's names of
    it. repeat_penalty: Ollama's name of repetition_penalty. include_stop_str_in_output: no_stop_trim, as vLLM calls it.
    """

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, Meta(extra_json_schema={"minimum": 1})] = None
    max_tokens: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    max_completion_tokens: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    n_predict: Annotated[int | None, Meta(extra_json_schema={"minimum": -2})] = None
    num_predict: Annotated[int | None, Meta(extra_json_schema={"minimum": -2})] = None
    temperature: Annotated[float | None, Meta(extra_json_schema={"minimum": 0, "maximum": 2})] = None
    top_p: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] = None
    frequency_penalty: Annotated[float | None, Meta(extra_json_schema={"minimum": -2, "maximum": 2})] = None
    presence_penalty: Annotated[float | None, Meta(extra_json_schema={"minimum": -2, "maximum": 2})] = None
    stop: str | list[str] | None = None
    seed: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    sampling_seed: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # Ours.
    top_k: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    min_p: Annotated[float | None, Meta(extra_json_schema={"minimum": 0, "maximum": 1})] = None
    typical_p: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] = None
    min_tokens: Annotated[int | None, Meta(extra_json_schema={"minimum": 0})] = None
    repetition_penalty: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 2})] = None
    repeat_penalty: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 2})] = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    lora_path: str | None = None
    session_params: SessionParams | None = None
    rid: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    routed_dp_rank: Annotated[int | None, Meta(extra_json_schema={"minimum": 0})] = None
    data_parallel_rank: Annotated[int | None, Meta(extra_json_schema={"minimum": 0})] = None
    return_routed_experts: bool | None = None
    # vLLM's, see token_details.py.
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: Annotated[int | None, Meta(extra_json_schema={"minimum": 0, "maximum": 20})] = None
    logprob_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # llama.cpp's.
    return_progress: bool | None = None
    # Ollama's and llama.cpp's; noted.
    options: object | None = None
    num_ctx: object | None = None
    num_keep: object | None = None
    num_batch: object | None = None
    num_gpu: object | None = None
    num_thread: object | None = None
    main_gpu: object | None = None
    low_vram: object | None = None
    numa: object | None = None
    use_mmap: object | None = None
    use_mlock: object | None = None
    keep_alive: object | None = None
    timings_per_token: object | None = None
    request_id: object | None = None
    id_slot: object | None = None
    service_tier: str | None = None
    think: bool | ReasoningEffort | None = None

    @property
    def wants_logprobs(self) -> bool:
        """The reply has logprobs of the output."""
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
        """Whether a usage chunk ends the stream."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_everywhere(self) -> bool:
        """Whether every chunk has the counts of its choice."""
        return self.wants_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def limit_field(self) -> str:
        """Name of the field that limits the output in this request."""
        return next((name for name in _LIMITS if getattr(self, name) is not None), "max_tokens")

    @property
    def noted(self) -> list[str]:
        """Fields that have no effect."""
        return without_effect(self, NO_EFFECT)

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
        sampling = SamplingParams(
            grammar_after=self.grammar_after,
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_tokens or 0,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            stop_regex=self.stop_regex,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            typical_p=self.typical_p,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=self.repeat_penalty if self.repetition_penalty is None else self.repetition_penalty,
            n=self.num_candidates,
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
            spaces_between_special_tokens=self.spaces_between_special_tokens is not False,
            no_stop_trim=bool(self.no_stop_trim or self.include_stop_str_in_output),
            logit_bias=self.logit_bias,
            bad_words=self.bad_words,
            allowed_token_ids=self.allowed_token_ids,
            seed=self.seed,
            sampling_seed=self.sampling_seed,
        )
        return sampling if asked is None else msgspec.structs.replace(sampling, **asked.fields)

    def check_output_limit(self) -> None:
        """Raises RequestError if names of the output limit are given with different values."""
        given = {name: value for name in reversed(_LIMITS) if (value := getattr(self, name)) is not None}
        if len(set(given.values())) > 1:
            first, *_, last = sorted(given, key=("max_tokens", *_LIMITS).index)
            raise RequestError(f"{first} and {last} differ: give one of them", first)

    def check_sampling(self) -> None:
        """Raises RequestError for what only these routes refuse, and for two names with different values."""
        check_temperature(self.temperature)
        if (
            None not in (self.repeat_penalty, self.repetition_penalty)
            and self.repeat_penalty != self.repetition_penalty
        ):
            raise RequestError("repeat_penalty and repetition_penalty differ: give one of them", "repeat_penalty")

    def check_stream_options(self) -> None:
        """Raises RequestError for stream options without a stream."""
        options = self.stream_options
        if not self.stream and options is not None and (options.include_usage or options.continuous_usage_stats):
            raise RequestError("stream_options is only allowed when stream is true", "stream_options")


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/completions. `prompt`: a text, a list of texts, token ids, or a list of lists of token ids.

    best_of: so many samples are made of each prompt, and the n with the highest mean logprob are the choices.
    """

    prompt: str | list[str | int | list[int]]
    best_of: Annotated[int | None, Meta(extra_json_schema={"minimum": 1})] = None
    echo: bool | None = None
    logprobs: Annotated[int | None, Meta(extra_json_schema={"minimum": 0, "maximum": 20})] = None
    suffix: str | None = None

    @property
    def noted(self) -> list[str]:
        """Fields that have no effect."""
        return without_effect(self, (*NO_EFFECT, "think"))

    @property
    def num_candidates(self) -> int:
        """Samples per prompt."""
        return self.num_samples if self.best_of is None else self.best_of

    @property
    def wants_logprobs(self) -> bool:
        """0 asks for the chosen token's."""
        return self.logprobs is not None

    @property
    def num_top_logprobs(self) -> int:
        """Alternatives per output token."""
        return self.logprobs or 0


class ContentPart(MediaParts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a message: text, or media (`media_parts`); others are refused by their type, with the fields they have.

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

    messages: Annotated[list[ChatMessage], Meta(extra_json_schema={"minItems": 1})]
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Meta(extra_json_schema={"minimum": 0, "maximum": 20})] = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    thinking_budget: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    thinking_token_budget: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    thinking_budget_tokens: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    reasoning_budget_tokens: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
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
        """The reply has logprobs of the output."""
        return bool(self.logprobs)

    @property
    def num_top_logprobs(self) -> int:
        """Alternatives per output token."""
        return self.top_logprobs or 0

    @property
    def noted(self) -> list[str]:
        """Fields that have no effect."""
        return without_effect(self, (*NO_EFFECT, "verbosity"))

    @property
    def shows_reasoning(self) -> bool:
        """Whether the reply has the reasoning."""
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
    for name in _NOT_YET:
        if not asks_for_nothing(name, getattr(request, name)):
            raise RequestError(f"{name} is not supported yet", name, "unsupported_parameter")
