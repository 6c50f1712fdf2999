"""Bodies of Anthropic's routes: every field of its API.

A field is honoured, accepted without effect (`NO_EFFECT`), or refused by name if it requests something that is not supported
(`refuse_unsupported`). Fields that are not listed here are refused by the decoder, unless they request nothing (`messages/bodies.py`).
Runs in the event loop that serves HTTP.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.errors import NotFoundError
from headrace.messages.bodies import asks_for_nothing, is_empty
from headrace.messages.requests import SessionParams
from headrace.server.chat.conversation import refused, unsupported, unsupported_type
from headrace.server.error_forms import THREAD_NOT_FOUND

NO_EFFECT = frozenset({"cache_control", "diagnostics", "metadata", "service_tier", "user_profile_id", "workspace_id"})
"""Accepted without effect: labels, hints for caches that work by marks, and requests for the vendor's own reports."""


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A block of a message, of any type; `request.py` says which types are supported.

    cache_control, citations and signature are accepted without effect. caller: who made a call; only the model itself (`direct`).
    """

    type: str
    text: str | None = None
    cache_control: object | None = None
    citations: object | None = None
    # tool_use
    id: str | None = None
    name: str | None = None
    input: object | None = None
    caller: object | None = None
    toolset_name: str | None = None
    # tool_result; content: of documents and search results, too
    tool_use_id: str | None = None
    content: object | None = None
    is_error: bool | None = None
    # thinking, redacted_thinking
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    # image, document, search_result
    source: object | None = None
    title: str | None = None
    context: str | None = None


class InputMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message. Fields that are not listed here are the client's own labels: no template sees them.

    role: user, assistant, system, or one of the client's own. content: a text, or blocks; their types differ in their fields, see `request.py`.
    """

    role: str
    content: str | list[dict[str, object]] | None = None


class AnthropicTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of the client (no type, or `custom`). Tools of other types have more fields, and are not offered to the model.

    Without effect: cache_control, eager_input_streaming (arguments are always streamed as they are written).
    """

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, object] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: object | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[object] | None = None
    allowed_callers: list[str] | None = None


class AnthropicToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """auto: the model decides. any: at least one call. tool: a call of `name`. none: no call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """enabled: at most `budget_tokens` of thinking. adaptive: the model decides. display: `omitted` leaves the text of thinking out of the reply."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Meta(extra_json_schema={"minimum": 0})] = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormatConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text of the reply must match. name: accepted without effect."""

    type: Literal["json_schema"]
    schema: dict[str, object]
    name: str | None = None


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """effort: how much the model shall think, for templates that know it. format: what the reply must match."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormatConfig | None = None
    task_budget: object | None = None


class ContextEdit(msgspec.Struct, frozen=True, kw_only=True):
    """An edit of the conversation; other types have more fields."""

    type: str
    keep: object | None = None


class ContextManagement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Only the edit that keeps everything is supported."""

    edits: list[ContextEdit] | None = None


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """Labels for the vendor's bookkeeping; without effect."""

    user_id: str | None = None


class PromptRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a message and of counting its tokens, which clients ask for with the whole message; None = not set.

    rid, priority and cache_salt are ours, as on the other routes.
    """

    model: str
    messages: Annotated[list[InputMessage], Meta(extra_json_schema={"minItems": 1})]
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormatConfig | None = None
    context_management: ContextManagement | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float | None, Meta(extra_json_schema={"minimum": 0})] = None
    top_k: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    top_p: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] = None
    # Ours.
    rid: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    # Without effect.
    cache_control: object | None = None
    diagnostics: object | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # Not supported.
    billing_policy: object | None = None
    compaction: object | None = None
    container: object | None = None
    fallback_credit_token: object | None = None
    fallbacks: object | None = None
    inference_geo: str | None = None
    mcp_servers: list[object] | None = None
    speed: str | None = None
    # Only a new one.
    thread: object | None = None

    @property
    def shows_thinking(self) -> bool:
        """Whether the reply has the text of the thinking."""
        return self.thinking is None or self.thinking.display != "omitted"


class CountTokensRequest(PromptRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/messages/count_tokens. What does not change the prompt has no effect."""

    max_tokens: int = 0


class MessagesRequest(PromptRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/messages. max_tokens: 0 = only fill the prefix cache; lowered to the room in the context. session_params is ours."""

    max_tokens: Annotated[int, Meta(extra_json_schema={"minimum": 0})]
    session_params: SessionParams | None = None


_NOT_YET: dict[str, tuple[object, ...]] = {
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "fallback_credit_token": (),
    "fallbacks": (),
    "inference_geo": (),
    "mcp_servers": (),
    "speed": ("standard",),
}
"""Fields that are not supported, each with the non-empty values at which it asks for nothing."""

_KEEPS_ALL = "clear_thinking_20251015"


def refuse_unsupported(request: PromptRequest) -> None:
    """Raises RequestError naming the first field that asks for something this server does not do, NotFoundError for a thread."""
    _check_thread(request.thread)
    for name, neutral in _NOT_YET.items():
        value = getattr(request, name)
        if not (asks_for_nothing(name, value) or value in neutral):
            raise unsupported(name)
    if request.output_config is not None and not is_empty(request.output_config.task_budget):
        raise unsupported("output_config.task_budget")
    edits = request.context_management.edits if request.context_management is not None else None
    for number, edit in enumerate(edits or ()):
        where = f"context_management.edits[{number}]"
        if edit.type != _KEEPS_ALL:
            raise unsupported_type(where, "edits", edit.type, "; the conversation is used as it is")
        if edit.keep not in ("all", {"type": "all"}):
            raise unsupported(f"{where}.keep", "must be 'all': this server clears no thinking")


def _check_thread(thread: object) -> None:
    """A new thread is as none: the messages are sent in full. One to go on with is never here, and clients then send all messages."""
    match thread:
        case {"type": "continue"}:
            raise NotFoundError(
                "thread: this server keeps no threads; send the whole conversation in messages",
                "thread",
                THREAD_NOT_FOUND,
            )
        case {"type": "create"}:
            pass
        case dict() if thread:
            raise refused("thread.type", 'must be "create"')
        case _ if not is_empty(thread):
            raise refused("thread", 'must be {"type": "create"}')
