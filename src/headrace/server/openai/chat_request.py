"""The messages, tools, choices and thinking of a chat completion as a `Conversation`.

Owns the checks of a chat request's messages and tools, how each type of part is read, in the shapes of OpenAI's API and of other servers, and what
the fields about thinking mean together, in the words of every API that clients speak: OpenAI, SGLang, vLLM, llama.cpp, OpenRouter, Anthropic,
Ollama. Pure functions, run in the event loop that serves HTTP.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import RequestError
from headrace.media_kinds import DEFAULT_FPS, PARTS, REFS, ImageRef, MediaKind, VideoRef
from headrace.messages.bodies import asks_for_nothing, is_empty
from headrace.server.chat.conversation import (
    Conversation,
    Message,
    Tool,
    ToolChoice,
    allowed_tools,
    check_choice,
    check_history,
    check_num_messages,
    check_tools,
    function_call,
    function_tool,
    missing,
    object_of,
    plain_choice,
    refused,
    text_of,
    unsupported,
    unsupported_type,
)
from headrace.server.chat.custom_tools import custom_call, custom_tool
from headrace.server.chat.parts import asks_for, base64_audio, file_text, image_detail, part_of, text_part
from headrace.server.openai.protocol import (
    ROLES,
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    Prediction,
    ReasoningFields,
    ThinkingFields,
)

_MESSAGE_FIELDS_NOT_YET = ("audio", "prefix", "partial", *(kind.plural for kind in MediaKind))
_MAY_BE_EMPTY = ("assistant", "tool", "function")
"""Roles whose messages may say nothing: a tool returned nothing, or the model did."""

_ROLE_OF = {"developer": "system", "function": "tool"}
"""Roles of OpenAI's that templates call otherwise."""

OLD_CALL_ID = "call_0"
"""The id of every `function_call`, of which a message has only one."""

_VALUES = ("text", *PARTS, "file", "refusal")
"""Fields of parts, each with the value of its type."""

_BUDGETS = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens")
"""The limit of reasoning, as we, vLLM and llama.cpp call it."""

_TRUE = ("1", "true", "yes", "y", "on")


def conversation_of(request: ChatCompletionRequest, context_length: int) -> Conversation:
    """The conversation of a request. Raises RequestError that names the unsupported or invalid field."""
    thinking, _ = asked_thinking(request)
    messages = template_messages(request.messages, context_length)
    if request.continue_final_message and messages[-1]["role"] != "assistant":
        raise refused("continue_final_message", "needs a last message of the role assistant")
    choice, tools = choice_of(request.tool_choice, tools_of(request.tools))
    if request.functions or not asks_for_nothing("function_call", request.function_call):
        choice, tools = _functions_of(request)
    return Conversation(
        messages=messages,
        tools=tools,
        choice=choice,
        parallel=request.parallel_tool_calls is not False and not request.functions,
        template_kwargs=request.chat_template_kwargs or {},
        **thinking,
        splits_reasoning=request.separate_reasoning is not False,
        opens_reply=request.add_generation_prompt is not False,
        continues_last=bool(request.continue_final_message),
    )


def _functions_of(request: ChatCompletionRequest) -> tuple[ToolChoice, tuple[Tool, ...]]:
    if request.tools:
        raise refused("functions", "and tools are both given: give tools")
    tools: list[Tool] = []
    for number, function in enumerate(request.functions or ()):
        where = f"functions[{number}]"
        if not isinstance(function, dict):
            raise refused(where, "must be an object")
        tools.append(_function(where, function))
    check_tools("functions", tools)
    choice = plain_choice(request.function_call)
    match request.function_call:
        case {"name": str(name)}:
            choice = ToolChoice("required", name)
        case "required":
            choice = None
    if choice is None:
        raise refused("function_call", 'must be auto, none, or an object {"name": ...}')
    check_choice("function_call", choice, tools)
    return choice, tuple(tools)


def template_messages(messages: Sequence[ChatMessage], context_length: int) -> list[Message]:
    """The messages in the form for templates. Raises RequestError that names the unsupported or invalid one."""
    if not messages:
        raise refused("messages", "is empty")
    check_num_messages("messages", "messages", len(messages), context_length)
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
        raise refused("prediction.content", "is empty")
    return "".join(_text(f"prediction.content[{place}]", part) for place, part in enumerate(content))


def _check_message(where: str, message: ChatMessage) -> None:
    if not message.role:
        raise refused(f"{where}.role", "is empty")
    for name in _MESSAGE_FIELDS_NOT_YET:
        if not is_empty(getattr(message, name)):
            raise unsupported(f"{where}.{name}")
    if message.role not in ROLES:
        return
    for name, role in (
        ("reasoning_content", "assistant"),
        ("tool_calls", "assistant"),
        ("function_call", "assistant"),
        ("tool_call_id", "tool"),
    ):
        if message.role != role and not is_empty(getattr(message, name)):
            raise refused(f"{where}.{name}", f"belongs to the role {role}")


def _content(where: str, message: ChatMessage) -> str | list[Message]:
    content = message.content
    if content is None or content == []:
        if message.role in _MAY_BE_EMPTY:
            return message.refusal or ""
        raise missing(f"{where}.content")
    if isinstance(content, str):
        return content
    return [_part(f"{where}.content[{place}]", part) for place, part in enumerate(content)]


def _part(where: str, part: ContentPart) -> Message:
    if part.type in PARTS:
        return _media(where, part)
    if part.type == "file" and isinstance(part.file, dict):
        text = file_text(part.file.get("filename"), part.file.get("file_data"))
        if text is not None:
            return text_part(text)
    if part.type == "refusal" and isinstance(part.refusal, str):
        return text_part(part.refusal)
    return text_part(_text(where, part))


def _text(where: str, part: ContentPart) -> str:
    """Of a part of text. Raises RequestError for any other."""
    if part.type != "text":
        served = f"text, {', '.join(PARTS)}, and file with a text"
        raise unsupported_type(where, "parts", part.type, f", only {served}")
    if part.text is None:
        raise missing(f"{where}.text")
    _check_fields(where, part)
    return part.text


def _check_fields(where: str, part: ContentPart) -> None:
    """Raises RequestError for a value of another type."""
    for name in _VALUES:
        if name != part.type and not is_empty(getattr(part, name)):
            raise refused(f"{where}.{name}", f"does not belong to a part of type {part.type}")


def _media(where: str, part: ContentPart) -> Message:
    """A part of media as the engine takes it. Raises RequestError."""
    _check_fields(where, part)
    where, given = f"{where}.{part.type}", getattr(part, part.type)
    match part.type:
        case "image_url":
            return part_of(_image(where, given))
        case "input_audio":
            return base64_audio(where, given)
        case "video_url":
            return part_of(_video(where, given).checked(where))
        case _:
            return part_of(REFS[PARTS[part.type]].of_text(where, _url(where, given)[0]))


def _image(where: str, given: object) -> ImageRef:
    url, others = _url(where, given, "detail")
    return ImageRef(url=url, detail=image_detail(f"{where}.detail", others.get("detail")))


def _video(where: str, given: object) -> VideoRef:
    """Of frames: in one URL, or as images."""
    if not isinstance(given, Mapping) or "frames" not in given:
        url, others = _url(where, given, "fps")
        return VideoRef.of_text(where, url, _fps(where, others))
    _check_names(where, given, "frames", "fps")
    frames = given["frames"]
    if not isinstance(frames, list):
        raise refused(f"{where}.frames", "must be a list of images")
    images = tuple(_image(f"{where}.frames[{number}]", frame) for number, frame in enumerate(frames))
    return VideoRef(frames=images, fps=_fps(where, given))


def _fps(where: str, given: Mapping[str, object]) -> float:
    fps = given.get("fps")
    if is_empty(fps):
        return DEFAULT_FPS
    if isinstance(fps, bool) or not isinstance(fps, int | float):
        raise refused(f"{where}.fps", "must be a number")
    return float(fps)


def _url(where: str, given: object, *names: str) -> tuple[str, Mapping[str, object]]:
    """The URL of a part, and the object with it. names: other fields that the object may have. Raises RequestError."""
    found = {"url": given} if isinstance(given, str) else given
    if not isinstance(found, Mapping) or not isinstance(found.get("url"), str):
        listed = " and ".join(f'"{name}"' for name in ("url", *names))
        raise refused(where, f"must be a URL, or an object with {listed}")
    if not found["url"]:
        raise refused(where, "is empty: it must be a URL")
    _check_names(where, found, "url", *names)
    return found["url"], found


def _check_names(where: str, given: Mapping[str, object], *names: str) -> None:
    if unknown := sorted(map(str, asks_for(given) - set(names))):
        raise RequestError(
            f"{where}: the field {unknown[0][:50]!r} is not known here; those that are: {', '.join(names)}",
            f"{where}.{unknown[0][:50]}",
        )


def _old_call(where: str, call: object) -> Message:
    """A call as it was made before there were tools. It has no id: a result of the role `function` answers the call before it."""
    if not isinstance(call, dict):
        raise refused(where, "must be an object")
    return function_call(OLD_CALL_ID, text_of(f"{where}.name", call.get("name")), call.get("arguments"))


def _tool_call(where: str, call: dict[str, object]) -> Message:
    call_id, kind = text_of(f"{where}.id", call.get("id")), call.get("type")
    if kind == "custom":
        custom = object_of(f"{where}.custom", call.get("custom"))
        name, text = text_of(f"{where}.custom.name", custom.get("name")), custom.get("input")
        if not isinstance(text, str):
            raise refused(f"{where}.custom.input", "must be a string")
        return custom_call(call_id, name, text)
    if kind not in (None, "function"):
        raise refused(f"{where}.type", "must be 'function' or 'custom'")
    function = object_of(f"{where}.function", call.get("function"))
    return function_call(call_id, text_of(f"{where}.function.name", function.get("name")), function.get("arguments"))


def tools_of(tools: Sequence[dict[str, object]] | None) -> tuple[Tool, ...]:
    """The tools of a request. Raises RequestError that names the invalid one."""
    found = tuple(_tool(f"tools[{number}]", tool) for number, tool in enumerate(tools or ()))
    check_tools("tools", found)
    return found


def _tool(where: str, tool: dict[str, object]) -> Tool:
    kind = tool.get("type", "function")
    if kind == "custom":
        custom = object_of(f"{where}.custom", tool.get("custom"))
        return custom_tool(f"{where}.custom", custom.get("name"), custom.get("description"), custom.get("format"))
    if kind != "function":
        raise unsupported(f"{where}.type", f"must be 'function' or 'custom', got {str(kind)[:50]!r}")
    return _function(f"{where}.function", object_of(f"{where}.function", tool.get("function")))


def _function(where: str, function: dict[str, object]) -> Tool:
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    return function_tool(where, name, description, parameters, function.get("strict") is True, function)


def choice_of(choice: str | dict[str, object] | None, tools: tuple[Tool, ...]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """`tool_choice`, and the tools that it leaves. Raises RequestError."""
    found = plain_choice(choice)
    match choice:
        case (
            {"type": "function", "function": {"name": str(name)}}
            | {"type": "custom", "custom": {"name": str(name)}}
            | {"type": "function" | "custom", "name": str(name)}
        ):
            found = ToolChoice("required", name)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)},
        }:
            found = ToolChoice("required" if mode == "required" else "auto")
            tools = allowed_tools([_allowed_name(number, one) for number, one in enumerate(allowed)], tools)
    if found is None:
        raise refused(
            "tool_choice",
            "must be auto, none, required, or an object that names a tool "
            '({"type": "function", "function": {"name": ...}}) or the allowed ones '
            '({"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": ...}})',
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


def asked_thinking(request: ChatCompletionRequest) -> tuple[dict[str, Any], list[str]]:
    """What the fields of a chat mean together, as fields of a `Conversation`, and those that had no effect, or another value.

    Raises RequestError that names the one at fault.
    """
    reasoning, thinking = request.reasoning or ReasoningFields(), request.thinking or ThinkingFields()
    ignored = {
        "reasoning.summary": reasoning.summary,
        "reasoning.generate_summary": reasoning.generate_summary,
        "thinking.clear_thinking": thinking.clear_thinking,
        "thinking.display": thinking.display,
    }
    notes = [name for name, value in ignored.items() if value is not None]
    level = request.think if isinstance(request.think, str) and request.think else None
    efforts = {"reasoning.effort": reasoning.effort, "reasoning_effort": request.reasoning_effort, "think": level}
    effort = next((value for value in efforts.values() if value not in (None, "default")), None)
    notes += [
        name if effort is None else f"{name}={effort}" for name, value in efforts.items() if value not in (None, effort)
    ]
    switch = _switch(request, reasoning, thinking)
    budget, is_hint = _budget(request), False
    wishes = {"reasoning.max_tokens": reasoning.max_tokens, "thinking.budget_tokens": thinking.budget_tokens}
    for name, value in wishes.items():
        if value is None:
            continue
        if value < 0:
            raise refused(name, f"must be at least 0, got {value}")
        if budget is None:
            budget, is_hint = value, True
            switch = True if switch is None and effort is None else switch
        elif budget != value:
            notes.append(f"{name}={budget}")
    asked = {"effort": effort, "thinking": switch, "thinking_budget": budget, "budget_is_hint": is_hint}
    return asked, notes


def _switch(request: ChatCompletionRequest, reasoning: ReasoningFields, thinking: ThinkingFields) -> bool | None:
    """Whether the model shall think; None = not said. Raises RequestError if two fields contradict each other."""
    enabled = reasoning.enabled
    given = {
        "reasoning.enabled": enabled.strip().lower() in _TRUE if isinstance(enabled, str) else enabled,
        "thinking.type": {"enabled": True, "disabled": False}.get(thinking.type or ""),
        "think": request.think if isinstance(request.think, bool) else True if request.think else None,
    }
    said = {name: value for name, value in given.items() if value is not None}
    if len(set(said.values())) > 1:
        names = list(said)
        raise RequestError(f"{names[0]} and {names[-1]} contradict each other: give one of them", names[-1])
    return next(iter(said.values()), None)


def _budget(request: ChatCompletionRequest) -> int | None:
    """The limit of reasoning that must be kept; None = no limit. Raises RequestError."""
    given = {name: value for name in _BUDGETS if (value := getattr(request, name)) is not None}
    for name, value in given.items():
        if value < -1:
            raise refused(name, f"must be -1 (no limit) or at least 0, got {value}")
    if len(set(given.values())) > 1:
        names = list(given)
        raise RequestError(f"{names[0]} and {names[1]} differ: give one of them", names[1])
    value = next(iter(given.values()), -1)
    return None if value == -1 else value
