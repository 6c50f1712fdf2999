"""The body of `POST /v1/responses`: every field of OpenAI's API, and additional ones, e.g. `top_k`.

A field is supported, or refused by name if it requests something that is not supported (`refuse_unsupported`). Fields that are not listed here
are refused by the decoder, unless they request nothing (`messages/bodies.py`). Runs in the event loop that serves HTTP.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.errors import RequestError
from headrace.messages.bodies import asks_for_nothing
from headrace.sampling.grammar_fields import GrammarFields, Schema
from headrace.server.notes import NO_EFFECT, without_effect
from headrace.server.openai.protocol import AskedEffort, ReasoningEffort, check_temperature

MAX_LOGPROBS = 20
"""Most alternatives per token."""

LOGPROBS = "message.output_text.logprobs"

INCLUDABLE = frozenset(
    {
        LOGPROBS,
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
"""What `include` may ask for.

Logprobs are added. Reasoning is never encrypted: its text is in the item. The others belong to items that no reply has.
"""


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`reasoning`. effort: for templates that know it. summary: accepted; the reasoning is given as it is and not summarised."""

    effort: AskedEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`text.format`. name and description have no effect. The schema is always enforced; strict: a `oneOf` exactly, or not at all."""

    type: Literal["text", "json_object", "json_schema"] | None = None
    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`stream_options`. include_obfuscation: accepted without effect."""

    include_obfuscation: bool | None = None


class ResponsesRequest(GrammarFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/responses.

    input: a text, or a list of items. model: "" and "default" mean the served model. The fields of `GrammarFields` say what the output must match,
    as `text.format` does. metadata, user, safety_identifier, prompt_cache_key and client_metadata are labels without effect. max_tool_calls limits
    tools that the server runs, of which there are none.
    """

    input: str | list[dict[str, object]] | None = None
    model: str = ""
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int | None, Meta(extra_json_schema={"minimum": 1})] = None
    max_tool_calls: Annotated[int | None, Meta(extra_json_schema={"minimum": 0})] = None
    temperature: Annotated[float | None, Meta(extra_json_schema={"minimum": 0, "maximum": 2})] = None
    top_p: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] = None
    top_logprobs: Annotated[int | None, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_LOGPROBS})] = None
    include: list[str] | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    client_metadata: object | None = None
    service_tier: str | None = None
    background: bool | None = None
    conversation: object | None = None
    prompt: object | None = None
    context_management: object | None = None
    moderation: object | None = None
    prompt_cache_options: object | None = None
    prompt_cache_retention: str | None = None
    access_programs: object | None = None
    image: object | None = None
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
    # Ollama's; as on /v1/chat/completions.
    format: str | Schema | None = None
    think: bool | ReasoningEffort | None = None
    repeat_penalty: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 2})] = None
    # Ours.
    stop: str | list[str] | None = None
    seed: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    top_k: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    min_p: Annotated[float | None, Meta(extra_json_schema={"minimum": 0, "maximum": 1})] = None
    typical_p: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] = None
    frequency_penalty: Annotated[float | None, Meta(extra_json_schema={"minimum": -2, "maximum": 2})] = None
    presence_penalty: Annotated[float | None, Meta(extra_json_schema={"minimum": -2, "maximum": 2})] = None
    repetition_penalty: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 2})] = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    lora_path: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    routed_dp_rank: Annotated[int | None, Meta(extra_json_schema={"minimum": 0})] = None
    data_parallel_rank: Annotated[int | None, Meta(extra_json_schema={"minimum": 0})] = None

    @property
    def effort(self) -> str | None:
        """How much the model shall think: `reasoning.effort`, or else the word of `think`."""
        asked = self.reasoning.effort if self.reasoning is not None else None
        return asked if asked not in (None, "default") else self.think if isinstance(self.think, str) else None

    @property
    def wants_logprobs(self) -> bool:
        """The texts of the reply have logprobs."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


_NOT_SUPPORTED = (
    "background",
    "conversation",
    "prompt",
    "context_management",
    "moderation",
    "prompt_cache_options",
    "prompt_cache_retention",
    "access_programs",
    "image",
)
"""Fields that are accepted only at values that ask for nothing."""

_INSTEAD = {
    "background": "send the request without it and wait, or stream",
    "conversation": "send the items in input, or use previous_response_id",
    "prompt": "send the text in instructions and input",
}


def noted_in(request: ResponsesRequest) -> list[str]:
    """The fields that have no effect."""
    noted = without_effect(request, NO_EFFECT)
    if request.text is not None and not asks_for_nothing("verbosity", request.text.verbosity):
        noted.append("text.verbosity")
    if request.reasoning is not None and request.reasoning.effort == "default":
        noted.append("reasoning.effort")
    if isinstance(request.think, str) and request.think != request.effort:
        noted.append(f"think={request.effort}")
    return noted


def refuse_unsupported(request: ResponsesRequest) -> None:
    """Raises RequestError naming the first field that asks for something this server does not do."""
    for name in _NOT_SUPPORTED:
        if not asks_for_nothing(name, getattr(request, name)):
            instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise RequestError(f"{name} is not supported{instead}", name, "unsupported_parameter")
    check_temperature(request.temperature)
    penalties = {request.repeat_penalty, request.repetition_penalty} - {None}
    if len(penalties) > 1:
        raise RequestError("repeat_penalty and repetition_penalty differ: give one of them", "repeat_penalty")
    reasoning = request.reasoning
    if reasoning is not None:
        for name, neutral in (("context", "auto"), ("mode", "standard")):
            if getattr(reasoning, name) not in (None, "", neutral):
                field = f"reasoning.{name}"
                raise RequestError(f"{field} is not supported", field, "unsupported_parameter")
    for number, name in enumerate(request.include or ()):
        if name not in INCLUDABLE:
            raise RequestError(f"include[{number}]: {name[:100]!r} is unknown", "include")
    for name, least in (("max_output_tokens", 1), ("max_tool_calls", 0)):
        value = getattr(request, name)
        if value is not None and value < least:
            raise RequestError(f"{name} must be at least {least}, got {value}", name)
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= MAX_LOGPROBS:
        message = f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {request.top_logprobs}"
        raise RequestError(message, "top_logprobs")
    if request.stream_options is not None and not request.stream and request.stream_options.include_obfuscation:
        raise RequestError("stream_options is only allowed when stream is true", "stream_options")
