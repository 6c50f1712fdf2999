"""The messages, tools and choices of a chat completion as a `Conversation`.

Owns the checks of a chat request's messages and tools. Pure functions, run in the event loop that serves HTTP.
"""

from collections.abc import Sequence

from headrace.errors import ContextLengthError, RequestError
from headrace.media_kinds import PARTS, MediaKind
from headrace.messages.bodies import asks_for_nothing, is_empty
from headrace.server.chat.conversation import (
    Conversation,
    Message,
    Tool,
    ToolChoice,
    allowed_tools,
    check_choice,
    check_history,
    check_tools,
    function_call,
    function_tool,
)
from headrace.server.chat.custom_tools import custom_call, custom_tool
from headrace.server.chat.written_items import file_text
from headrace.server.openai.media_parts import SERVED, media_part
from headrace.server.openai.protocol import ROLES, ChatCompletionRequest, ChatMessage, ContentPart, Prediction
from headrace.server.openai.thinking import AskedThinking, asked_thinking

_MESSAGE_FIELDS_NOT_YET = ("audio", "prefix", "partial", *(kind.plural for kind in MediaKind))
_MAY_BE_EMPTY = ("assistant", "tool", "function")
"""Roles whose messages may say nothing: a tool returned nothing, or the model did."""

_ROLE_OF = {"developer": "system", "function": "tool"}
"""Roles of OpenAI's that templates call otherwise."""

OLD_CALL_ID = "call_0"
"""The id of every `function_call`, of which a message has only one."""

_OTHER_PART_FIELDS = (*PARTS, "file")


def conversation_of(
    request: ChatCompletionRequest, context_length: int, asked: AskedThinking | None = None
) -> Conversation:
    """The conversation of a request. asked: what its fields of thinking mean, if that is known. Raises RequestError that names the unsupported or
    invalid field."""
    asked = asked_thinking(request) if asked is None else asked
    messages = template_messages(request.messages, context_length)
    if request.continue_final_message and messages[-1]["role"] != "assistant":
        raise RequestError(
            "continue_final_message needs a last message of the role assistant", "continue_final_message"
        )
    choice, tools = choice_of(request.tool_choice, tools_of(request.tools))
    if request.functions or not asks_for_nothing("function_call", request.function_call):
        choice, tools = _functions_of(request)
    return Conversation(
        messages=messages,
        tools=tools,
        choice=choice,
        parallel=request.parallel_tool_calls is not False and not request.functions,
        template_kwargs=request.chat_template_kwargs or {},
        effort=asked.effort,
        thinking=asked.thinking,
        thinking_budget=asked.budget,
        budget_is_hint=asked.is_hint,
        splits_reasoning=request.separate_reasoning is not False,
        opens_reply=request.add_generation_prompt is not False,
        continues_last=bool(request.continue_final_message),
    )


def _functions_of(request: ChatCompletionRequest) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """`functions` and `function_call`. Raises RequestError."""
    if request.tools:
        raise RequestError("functions and tools are both given: give tools", "functions")
    tools = tuple(
        _tool(f"functions[{number}]", {"function": function}, f"functions[{number}]")
        for number, function in enumerate(request.functions or ())
    )
    check_tools("functions", tools)
    match request.function_call:
        case None | "" | "auto":
            choice = ToolChoice()
        case "none":
            choice = ToolChoice("none")
        case {"name": str(name)}:
            choice = ToolChoice("required", name)
        case dict() as empty if not empty:
            choice = ToolChoice()
        case _:
            raise RequestError('function_call must be auto, none, or an object {"name": ...}', "function_call")
    check_choice("function_call", choice, tools)
    return choice, tools


def template_messages(messages: Sequence[ChatMessage], context_length: int) -> list[Message]:
    """The messages in the form for templates. Raises RequestError that names the unsupported or invalid one."""
    if not messages:
        raise RequestError("messages is empty", "messages")
    if len(messages) > context_length:
        raise ContextLengthError("messages", context_length, f"there are {len(messages)} messages")
    shown = [_template_message(f"messages[{number}]", message) for number, message in enumerate(messages)]
    check_history("messages", shown)
    return shown


def _template_message(where: str, message: ChatMessage) -> Message:
    _check_message(where, message)
    shown: Message = {"role": _ROLE_OF.get(message.role, message.role)}
    shown["content"] = _content(where, message)
    if message.name is not None:
        shown["name"] = message.name
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        shown["reasoning_content"] = reasoning
    if message.tool_calls:
        shown["tool_calls"] = [
            _tool_call(f"{where}.tool_calls[{place}]", call) for place, call in enumerate(message.tool_calls)
        ]
    elif not is_empty(message.function_call):
        shown["tool_calls"] = [_old_call(f"{where}.function_call", message.function_call)]
    if message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def predicted_text(prediction: Prediction | None) -> str | None:
    """All of a prediction. Raises RequestError for a part that is not text, and if there is none."""
    content = None if prediction is None else prediction.content
    if content is None or isinstance(content, str):
        return content
    if not content:
        raise RequestError("prediction.content is empty", "prediction.content")
    return "".join(_text(f"prediction.content[{place}]", part) for place, part in enumerate(content))


def _check_message(where: str, message: ChatMessage) -> None:
    if not message.role:
        raise RequestError(f"{where}.role is empty", f"{where}.role")
    for name in _MESSAGE_FIELDS_NOT_YET:
        if not is_empty(getattr(message, name)):
            raise RequestError(f"{where}.{name} is not supported", f"{where}.{name}", "unsupported_parameter")
    if message.role not in ROLES:
        return
    for name, role in (
        ("reasoning_content", "assistant"),
        ("tool_calls", "assistant"),
        ("function_call", "assistant"),
        ("tool_call_id", "tool"),
    ):
        if message.role != role and not is_empty(getattr(message, name)):
            raise RequestError(f"{where}.{name} belongs to the role {role}", f"{where}.{name}")


def _content(where: str, message: ChatMessage) -> str | list[Message]:
    content = message.content
    if content is None or content == []:
        if message.role in _MAY_BE_EMPTY:
            return message.refusal or ""
        raise RequestError(f"{where}.content is missing", f"{where}.content")
    if isinstance(content, str):
        return content
    return [_part(f"{where}.content[{place}]", part) for place, part in enumerate(content)]


def _part(where: str, part: ContentPart) -> Message:
    if (media := media_part(where, part)) is not None:
        return media
    if part.type == "file" and isinstance(part.file, dict):
        text = file_text(part.file.get("filename"), part.file.get("file_data"))
        if text is not None:
            return {"type": "text", "text": text}
    if part.type == "refusal" and isinstance(part.refusal, str):
        return {"type": "text", "text": part.refusal}
    return {"type": "text", "text": _text(where, part)}


def _text(where: str, part: ContentPart) -> str:
    """Of a part of text. Raises RequestError for any other."""
    if part.type != "text":
        raise RequestError(
            f"{where}: parts of type {part.type[:50]!r} are not supported, only {SERVED}",
            f"{where}.type",
            "unsupported_parameter",
        )
    if part.text is None:
        raise RequestError(f"{where}.text is missing", f"{where}.text")
    for name in (*_OTHER_PART_FIELDS, "refusal"):
        if not is_empty(getattr(part, name)):
            raise RequestError(f"{where}.{name} does not belong to a part of type text", f"{where}.{name}")
    return part.text


def _old_call(where: str, call: object) -> Message:
    """A call as it was made before there were tools. It has no id: a result of the role `function` answers the call before it."""
    if not isinstance(call, dict):
        raise RequestError(f"{where} must be an object", where)
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.name is missing", f"{where}.name")
    return function_call(OLD_CALL_ID, name, call.get("arguments"))


def _tool_call(where: str, call: dict[str, object]) -> Message:
    call_id, function = call.get("id"), call.get("function")
    if not isinstance(call_id, str) or not call_id:
        raise RequestError(f"{where}.id is missing", f"{where}.id")
    if call.get("type") == "custom":
        return _custom_call(where, call_id, call.get("custom"))
    if call.get("type") not in (None, "function"):
        raise RequestError(f"{where}.type must be 'function' or 'custom'", f"{where}.type")
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function is missing", f"{where}.function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.function.name is missing", f"{where}.function.name")
    return function_call(call_id, name, arguments)


def _custom_call(where: str, call_id: str, custom: object) -> Message:
    if not isinstance(custom, dict):
        raise RequestError(f"{where}.custom is missing", f"{where}.custom")
    name, text = custom.get("name"), custom.get("input")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.custom.name is missing", f"{where}.custom.name")
    if not isinstance(text, str):
        raise RequestError(f"{where}.custom.input must be a string", f"{where}.custom.input")
    return custom_call(call_id, name, text)


def tools_of(tools: Sequence[dict[str, object]] | None) -> tuple[Tool, ...]:
    """The tools of a request. Raises RequestError that names the invalid one."""
    found = tuple(_tool(f"tools[{number}]", tool) for number, tool in enumerate(tools or ()))
    check_tools("tools", found)
    return found


def _tool(where: str, tool: dict[str, object], place: str = "") -> Tool:
    """One tool. place: of its function, if that is not within it."""
    kind = tool.get("type", "function")
    if kind == "custom":
        custom = tool.get("custom")
        if not isinstance(custom, dict):
            raise RequestError(f"{where}.custom is missing", f"{where}.custom")
        return custom_tool(f"{where}.custom", custom.get("name"), custom.get("description"), custom.get("format"))
    if kind != "function":
        raise RequestError(
            f"{where}.type must be 'function' or 'custom', got {str(kind)[:50]!r}",
            f"{where}.type",
            "unsupported_parameter",
        )
    function, place = tool.get("function"), place or f"{where}.function"
    if not isinstance(function, dict):
        raise RequestError(f"{place} is missing" if place != where else f"{place} must be an object", place)
    return function_tool(
        place,
        function.get("name"),
        function.get("description"),
        function.get("parameters"),
        function.get("strict") is True,
        function,
    )


def choice_of(choice: str | dict[str, object] | None, tools: tuple[Tool, ...]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """`tool_choice`, and the tools that it leaves. Raises RequestError."""
    match choice:
        case None | "" | "auto":
            found = ToolChoice()
        case "none":
            found = ToolChoice("none")
        case "required":
            found = ToolChoice("required")
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            found = ToolChoice("required", name)
        case {"type": "custom", "custom": {"name": str(name)}} | {"type": "custom", "name": str(name)}:
            found = ToolChoice("required", name)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)},
        }:
            found = ToolChoice("required" if mode == "required" else "auto")
            tools = allowed_tools(
                "tool_choice", [_allowed_name(number, one) for number, one in enumerate(allowed)], tools
            )
        case dict() if not choice:
            found = ToolChoice()
        case _:
            raise RequestError(
                "tool_choice must be auto, none, required, or an object that names a tool "
                '({"type": "function", "function": {"name": ...}}) or the allowed ones '
                '({"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": ...}})',
                "tool_choice",
            )
    check_choice("tool_choice", found, tools)
    return found, tools


def _allowed_name(number: int, tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}}:
            return name
        case _:
            raise RequestError(
                f"tool_choice.allowed_tools.tools[{number}] must name a tool: "
                '{"type": "function", "function": {"name": ...}}',
                "tool_choice",
            )
