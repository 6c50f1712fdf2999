"""The body of `POST /v1/responses`: every field of OpenAI's API, and additional ones, e.g. `top_k`.

A field is supported, or refused by name if it requests something that is not supported (`refuse_unsupported`). Fields that are not listed here
are refused by the decoder, unless they request nothing (`messages/bodies.py`). Runs in the event loop that serves HTTP.
"""

from typing import Any, Literal

import msgspec

from headrace.errors import RequestError
from headrace.messages.bodies import asks_for_nothing
from headrace.server.chat.conversation import refused, unsupported
from headrace.server.notes import NO_EFFECT, without_effect
from headrace.server.openai.fields import (
    AskedEffort,
    From0,
    From1,
    JsonSchemaFormat,
    NumLogprobs,
    SharedFields,
    check_num_logprobs,
)

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


class TextFormat(JsonSchemaFormat, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`text.format`. name and description have no effect. The schema is always enforced; strict: a `oneOf` exactly, or not at all."""

    type: Literal["text", "json_object", "json_schema"] | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`stream_options`. include_obfuscation: accepted without effect."""

    include_obfuscation: bool | None = None


class ResponsesRequest(SharedFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/responses.

    input: a text, or a list of items. model: "" and "default" mean the served model. The fields of `GrammarFields` say what the output must match,
    as `text.format` does. metadata, user, safety_identifier, prompt_cache_key and client_metadata are labels without effect. max_tool_calls limits
    tools that the server runs, of which there are none.
    """

    input: str | list[dict[str, object]] | None = None
    instructions: str | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: From1 = None
    max_tool_calls: From0 = None
    top_logprobs: NumLogprobs = None
    include: list[str] | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    client_metadata: object | None = None
    background: bool | None = None
    conversation: object | None = None
    prompt: object | None = None
    context_management: object | None = None
    moderation: object | None = None
    prompt_cache_options: object | None = None
    prompt_cache_retention: str | None = None
    access_programs: object | None = None
    image: object | None = None

    @property
    def effort(self) -> str | None:
        """How much the model shall think: `reasoning.effort`, or else the word of `think`."""
        asked = self.reasoning.effort if self.reasoning is not None else None
        return asked if asked not in (None, "default") else self.think if isinstance(self.think, str) else None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the texts of the reply have logprobs."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def call_fields(self) -> dict[str, Any]:
        """The fields of `GenerateReqInput` beside its prompt and how it is sampled."""
        return super().call_fields() | {
            "return_logprob": self.wants_logprobs,
            "top_logprobs_num": self.top_logprobs or 0,
            "return_text_in_logprobs": self.wants_logprobs,
        }


_NOT_SUPPORTED = {
    "background": ": send the request without it and wait, or stream",
    "conversation": ": send the items in input, or use previous_response_id",
    "prompt": ": send the text in instructions and input",
    "context_management": "",
    "moderation": "",
    "prompt_cache_options": "",
    "prompt_cache_retention": "",
    "access_programs": "",
    "image": "",
}
"""Fields that are accepted only at values that ask for nothing, and what to do instead."""


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
    if asked := without_effect(request, tuple(_NOT_SUPPORTED)):
        raise unsupported(asked[0], f"is not supported{_NOT_SUPPORTED[asked[0]]}")
    request.check_sampling()
    reasoning = request.reasoning or ReasoningOptions()
    if reasoning.context not in (None, "auto"):
        raise unsupported("reasoning.context")
    if reasoning.mode not in (None, "", "standard"):
        raise unsupported("reasoning.mode")
    for number, name in enumerate(request.include or ()):
        if name not in INCLUDABLE:
            raise RequestError(f"include[{number}]: {name[:100]!r} is unknown", "include")
    for name, least in (("max_output_tokens", 1), ("max_tool_calls", 0)):
        value = getattr(request, name)
        if value is not None and value < least:
            raise refused(name, f"must be at least {least}, got {value}")
    check_num_logprobs("top_logprobs", request.top_logprobs)
    if request.stream_options is not None and not request.stream and request.stream_options.include_obfuscation:
        raise refused("stream_options", "is only allowed when stream is true")
