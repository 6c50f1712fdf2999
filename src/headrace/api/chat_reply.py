"""The replies of `chat`, the same on `Engine` and `Runtime`: a whole one, or what is new in a stream.

Owns these types, and how they are read from chat completions, which both get, and the terminal chat of any server. Pure functions; any thread.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call. arguments: JSON, or the text of a custom tool (is_custom)."""

    id: str
    name: str
    arguments: str
    is_custom: bool = False

    def parsed(self) -> dict[str, Any]:
        """The arguments as an object. Raises ValueError if the model wrote something else."""
        value = json.loads(self.arguments or "{}")
        if not isinstance(value, dict):
            raise ValueError(f"the arguments of {self.name} are no object: {self.arguments[:100]}")
        return value

    def result(self, content: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.id, "content": content}


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the call number `index` of the reply. id, name: with its first piece only."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ChatUsage:
    """Token counts. reasoning_tokens: of completion_tokens; 0 for a model without reasoning."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How many tokens of the prompt are computed or were cached (`cache`), and the milliseconds since that began."""

    total: int
    cache: int
    processed: int
    time_ms: int


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What is new in a stream. finish_reason: once, with the last output; usage: with the last delta. progress: before the first output, with
    return_progress."""

    text: str = ""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None
    finish_reason: str | None = None
    usage: ChatUsage | None = None
    progress: PromptProgress | None = None


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A whole reply. reasoning: None if there is none. finish_reason: stop, length, tool_calls or abort.

    message: the reply as a message, for the messages of the next call.
    """

    text: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    usage: ChatUsage
    message: dict[str, Any] = field(repr=False)


def read_reply(completion: Mapping[str, Any]) -> ChatReply:
    choice = completion["choices"][0]
    message = choice["message"]
    kept = {"role": "assistant", "content": message["content"]}
    if message.get("reasoning_content") is not None:
        kept["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        kept["tool_calls"] = message["tool_calls"]
    return ChatReply(
        text=message["content"] or "",
        reasoning=message.get("reasoning_content"),
        tool_calls=tuple(_call(call) for call in message.get("tool_calls") or ()),
        finish_reason=choice["finish_reason"],
        usage=_usage(completion["usage"]),
        message=kept,
    )


def read_chunk(chunk: Mapping[str, Any]) -> list[ChatDelta]:
    """What a `chat.completion.chunk` object adds; empty if nothing. Other servers leave fields out, and may call the reasoning `reasoning`."""
    deltas = []
    if progress := chunk.get("prompt_progress"):
        deltas.append(ChatDelta(progress=PromptProgress(*(progress.get(name, 0) for name in PromptProgress.__slots__))))
    for choice in chunk.get("choices") or ():
        delta, reason = choice.get("delta") or {}, choice.get("finish_reason")
        text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""
        calls = [_call_delta(call) for call in delta.get("tool_calls") or ()]
        if text or reasoning or reason or calls:
            deltas.append(ChatDelta(text, reasoning, calls[0] if calls else None, reason))
        deltas += [ChatDelta(tool_call=call) for call in calls[1:]]
    if chunk.get("usage"):
        deltas.append(ChatDelta(usage=_usage(chunk["usage"])))
    return deltas


def _call(call: Mapping[str, Any]) -> ToolCall:
    if call["type"] == "custom":
        return ToolCall(call["id"], call["custom"]["name"], call["custom"]["input"], is_custom=True)
    return ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])


def _call_delta(call: Mapping[str, Any]) -> ToolCallDelta:
    index, custom = call.get("index", 0), call.get("custom")
    if custom is not None:
        return ToolCallDelta(index, custom.get("input") or "", call.get("id"), custom.get("name"), True)
    function = call.get("function") or {}
    return ToolCallDelta(index, function.get("arguments") or "", call.get("id"), function.get("name"))


def _usage(usage: Mapping[str, Any]) -> ChatUsage:
    details = usage.get("completion_tokens_details") or {}
    return ChatUsage(usage.get("prompt_tokens", 0), usage["completion_tokens"], details.get("reasoning_tokens", 0))
