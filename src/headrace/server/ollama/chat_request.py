"""The messages and tools of Ollama's API as a `Conversation`.

Owns their checks, and the ids of calls, which have none in most clients. Pure functions, run in the event loop that serves HTTP.
"""

from collections.abc import Sequence

from headrace.errors import RequestError
from headrace.messages.bodies import is_empty
from headrace.server.chat.conversation import (
    ROLES,
    Conversation,
    Message,
    Tool,
    check_history,
    check_num_messages,
    check_tools,
    function_call,
    function_tool,
    unsupported,
)
from headrace.server.chat.parts import base64_image
from headrace.server.ollama.protocol import OllamaMessage

EFFORTS = ("low", "medium", "high")


def conversation_of(
    messages: Sequence[OllamaMessage], tools: Sequence[dict[str, object]], think: bool | str | None, context_length: int
) -> Conversation:
    """The conversation of a request; messages is not empty. Raises RequestError that names the field."""
    check_num_messages("messages", "messages", len(messages), context_length)
    shown: list[Message] = []
    num_calls = 0
    for number, message in enumerate(messages):
        shown.append(_template_message(f"messages[{number}]", message, num_calls))
        num_calls += len(message.tool_calls or ())
    check_history("messages", shown)
    return Conversation(
        messages=shown,
        tools=_tools(tools),
        thinking=None if think is None else think is not False,
        effort=think if isinstance(think, str) else None,
    )


def checked_think(think: bool | str | None, reasons: bool) -> bool | str | None:
    """`think`, None for "". reasons: the model's reasoning is known. Raises RequestError."""
    if think == "":
        return None
    if isinstance(think, str) and think not in EFFORTS:
        raise RequestError(f"think must be true, false, {', '.join(EFFORTS)}, got {think[:50]!r}", "think")
    if think and not reasons:
        raise unsupported(
            "think",
            "think: this model does not support thinking, or this server does not know how it writes it "
            "(see --reasoning-parser)",
        )
    return think


def _template_message(where: str, message: OllamaMessage, num_calls: int) -> Message:
    """num_calls: in the messages before, for the ids of calls that have none."""
    role = message.role
    if not role:
        raise RequestError(f"{where}.role is empty", f"{where}.role")
    for name, owner in (
        ("thinking", "assistant"),
        ("tool_calls", "assistant"),
        ("tool_call_id", "tool"),
        ("tool_name", "tool"),
    ):
        if role in ROLES and role != owner and not is_empty(getattr(message, name)):
            raise RequestError(f"{where}.{name} belongs to the role {owner}", f"{where}.{name}")
    for name in ("audios", "videos"):
        if not is_empty(getattr(message, name)):
            place = f"{where}.{name}"
            raise unsupported(place, f"{place} is not supported: /v1/chat/completions takes audio and videos")
    text = _text(f"{where}.content", message.content)
    shown: Message = {"role": role, "content": text or ""}
    if message.images:
        images = [base64_image(f"{where}.images[{number}]", image) for number, image in enumerate(message.images)]
        shown["content"] = [*images, *([{"type": "text", "text": text}] if text else [])]
    if message.thinking:
        shown["reasoning_content"] = message.thinking
    if message.tool_calls:
        shown["tool_calls"] = [
            function_call(call.id or f"call_{place}", call.function.name, call.function.arguments)
            for place, call in enumerate(message.tool_calls, num_calls)
        ]
        if not all(call.function.name for call in message.tool_calls):
            raise RequestError(f"{where}.tool_calls: a function has no name", f"{where}.tool_calls")
    speaker = message.tool_name or message.name if role == "tool" else message.name
    if role == "tool" and message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    elif speaker:
        shown["name"] = speaker
    return shown


def _text(where: str, content: str | list[object] | None) -> str | None:
    """A content as text; None if there is none. Raises RequestError for parts that are no text."""
    if not isinstance(content, list):
        return content
    texts = []
    for number, part in enumerate(content):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                place = f"{where}[{number}]"
                raise RequestError(f'{place} must be {{"type": "text", "text": ...}}; images go into `images`', place)
    return "\n".join(texts) if texts else None


def _tools(tools: Sequence[dict[str, object]]) -> tuple[Tool, ...]:
    found = tuple(_tool(f"tools[{number}]", tool) for number, tool in enumerate(tools))
    check_tools("tools", found)
    return found


def _tool(where: str, tool: dict[str, object]) -> Tool:
    kind, function = tool.get("type") or "function", tool.get("function")
    if kind != "function":
        raise unsupported(f"{where}.type", f"{where}.type must be 'function', got {str(kind)[:50]!r}")
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function is missing", f"{where}.function")
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    return function_tool(f"{where}.function", name, description, parameters, function.get("strict") is True, function)
