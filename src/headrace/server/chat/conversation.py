"""A conversation as every chat API means it: messages, tools, and what the reply may be; and the checks that all APIs share. Pure functions; any
thread.

Messages are dicts with the keys of chat templates: `role` (`ROLES`, or one of the client's own), `content` (text, or a list of
`{"type": "text", "text": ...}`), `reasoning_content`, `tool_calls` (`{"id", "type": "function", "function": {"name", "arguments"}}`, where the
arguments are an object), `tool_call_id` and `name`.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from headrace.errors import ContextLengthError, RequestError

MAX_TOOLS = 1024
"""Most tools of a request."""

MAX_NAME_CHARS = 256
"""Longest name of a tool; OpenAI allows 64, other vendors 128."""

ROLES = frozenset({"system", "user", "assistant", "tool"})
"""Roles that every chat template may be expected to know."""

NOT_AN_OBJECT = "invalid_arguments"
"""Where an object has the text of a call's arguments that are none themselves (the model was cut off, or erred)."""

Message = dict[str, Any]

_NAME = re.compile(r"[^\s\"'<>{}\\\x00-\x1f]+")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    parameters: the JSON schema of its arguments; None = any object. strict: arguments must match it. definition: what templates show the
    model, as the client wrote it: `{"type": "function", "function": {...}}`. is_custom: the client takes a text (`custom_tools.py`).
    lark: the definition of this text, "" for any text, or one that matches the parameter's schema.
    """

    name: str
    parameters: Mapping[str, object] | None
    strict: bool
    definition: Mapping[str, Any]
    is_custom: bool = False
    lark: str = ""

    @property
    def function(self) -> Mapping[str, object]:
        function: Mapping[str, object] = self.definition["function"]
        return function


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """auto: the model decides. none: no call. required: at least one call, to `name` if it is given."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


def plain_choice(choice: object) -> ToolChoice | None:
    """The choice that a word makes, or no choice at all; None if it is something else."""
    match choice:
        case None | "" | "auto":
            return ToolChoice()
        case "none" | "required":
            return ToolChoice(choice)
        case _:
            return ToolChoice() if choice == {} else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a model is asked.

    parallel: several calls in one reply are allowed. template_kwargs: more variables of the template. effort: how much the model shall think, for
    templates that know it. thinking: whether it shall think; None = as the template does. splits_reasoning: reasoning is kept apart from the content.
    thinking_budget: most tokens of reasoning; None = no limit. budget_is_hint: if it cannot be kept there is none.
    opens_reply: the prompt ends with the beginning of the assistant's message. continues_last: it ends with the unfinished last message.
    """

    messages: Sequence[Message]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    effort: str | None = None
    thinking: bool | None = None
    thinking_budget: int | None = None
    budget_is_hint: bool = False
    splits_reasoning: bool = True
    opens_reply: bool = True
    continues_last: bool = False

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.choice.mode != "none"

    @property
    def custom_names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools if tool.is_custom)

    @property
    def num_calls_before(self) -> int:
        return sum(len(calls_of(message)) for message in self.messages)


def refused(where: str, why: str, code: str | None = None) -> RequestError:
    """The refusal of a request for its field `where`. why: how the sentence goes on, or with a colon what follows the field."""
    return RequestError(f"{where}{'' if why.startswith(':') else ' '}{why}", where, code)


def missing(where: str) -> RequestError:
    return refused(where, "is missing")


def unsupported(where: str, why: str = "is not supported") -> RequestError:
    """The same for a field that asks for something that this server does not do."""
    return refused(where, why, "unsupported_parameter")


def unsupported_type(where: str, what: str, kind: object, more: str = "") -> RequestError:
    """The refusal of one of the `what` (parts, items, ...) for its type. more: of the message."""
    message = f"{where}: {what} of type {str(kind)[:50]!r} are not supported{more}"
    return RequestError(message, f"{where}.type", "unsupported_parameter")


def text_of(where: str, value: object) -> str:
    """A field that must be a text with at least one character. Raises RequestError."""
    if not isinstance(value, str) or not value:
        raise missing(where)
    return value


def object_of(where: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise missing(where)
    return value


def text_or_none(where: str, value: object) -> str | None:
    """A field that may be a text. Raises RequestError."""
    if value is not None and not isinstance(value, str):
        raise refused(where, "must be a string")
    return value


def check_num_messages(field: str, what: str, count: int, context_length: int) -> None:
    """Raises ContextLengthError for more messages than the context has tokens. what: their name."""
    if count > context_length:
        raise ContextLengthError(field, context_length, f"there are {count} {what}")


def calls_of(message: Message) -> list[Message]:
    calls: list[Message] = message.get("tool_calls") or []
    return calls


def function_tool(
    where: str,
    name: object,
    description: object,
    parameters: object,
    strict: bool,
    function: Mapping[str, object] | None = None,
) -> Tool:
    """A tool from the fields that all APIs have. where: its place in the request. function: as templates shall see it; None = from these fields.
    Raises RequestError."""
    name = text_of(f"{where}.name", name)
    if len(name) > MAX_NAME_CHARS:
        raise refused(f"{where}.name", f"has {len(name)} characters, at most {MAX_NAME_CHARS}")
    if not _NAME.fullmatch(name):
        raise refused(f"{where}.name", f"{name!r}: spaces, quotes, braces and angle brackets are not allowed")
    description = text_or_none(f"{where}.description", description)
    if parameters is not None and not isinstance(parameters, dict):
        raise refused(f"{where}.parameters", "must be a JSON schema (an object)")
    if function is None:
        given = {"name": name, "description": description, "parameters": parameters}
        function = {key: value for key, value in given.items() if value is not None}
    return Tool(name, parameters, strict, {"type": "function", "function": dict(function)})


def check_tools(field: str, tools: Sequence[Tool]) -> None:
    """Raises RequestError for too many tools, and for two with one name."""
    if len(tools) > MAX_TOOLS:
        raise refused(field, f": at most {MAX_TOOLS} tools, got {len(tools)}")
    seen: set[str] = set()
    for number, tool in enumerate(tools):
        if tool.name in seen:
            raise RequestError(
                f"{field}[{number}]: there are two tools called {tool.name!r}", f"{field}[{number}].name"
            )
        seen.add(tool.name)


def check_choice(field: str, choice: ToolChoice, tools: Sequence[Tool]) -> None:
    """Raises RequestError for a choice that needs tools that are not there."""
    if choice.mode == "required" and not tools:
        raise refused(field, "asks for a tool call, but there are no tools")
    if choice.name is not None and all(tool.name != choice.name for tool in tools):
        shown = choice.name[:100]
        raise refused(field, f": there is no tool called {shown!r} among the tools")


def allowed_tools(names: Sequence[str], tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The tools with these names, the only ones that the model is offered. Raises RequestError for a name that no tool has."""
    known, allowed = {tool.name for tool in tools}, frozenset(names)
    for name in names:
        if name not in known:
            raise refused("tool_choice", f": there is no tool called {name[:100]!r} among the tools")
    return tuple(tool for tool in tools if tool.name in allowed)


def check_history(field: str, messages: Sequence[Message]) -> None:
    """Check that the calls of a message have different ids, and give each result of the last message with calls the name of its tool.

    A result without an id answers the first of these calls, of its name if it has one, that has no result yet. One whose call is not there stays
    as it is: clients shorten histories. field: name of the list of messages. Raises RequestError that names the message.
    """
    asked: dict[str, str] = {}
    waiting: dict[str | None, deque[str]] = {}  # the ids of the calls of each name, and under None of all
    answered: set[str] = set()
    for number, message in enumerate(messages):
        where = f"{field}[{number}]"
        match message["role"]:
            case "tool":
                calls = waiting.get(message.get("name"), deque())
                while calls and calls[0] in answered:
                    calls.popleft()
                call_id = message.get("tool_call_id") or next(iter(calls), None)
                if isinstance(call_id, str) and call_id in asked:
                    message["tool_call_id"] = call_id
                    answered.add(call_id)
                    message.setdefault("name", asked[call_id])
            case _ if calls_of(message):
                asked, waiting, answered = {}, {None: deque()}, set()
                for place, call in enumerate(calls_of(message)):
                    call_id = str(call["id"])
                    if call_id in asked:
                        shown = f"{where}.tool_calls[{place}].id"
                        raise refused(shown, f": there are two calls with the id {call_id[:100]!r}")
                    asked[call_id] = name = str(call["function"]["name"])
                    waiting[None].append(call_id)
                    waiting.setdefault(name, deque()).append(call_id)


def is_unasked(messages: Sequence[Message]) -> list[bool]:
    """Of each message, whether it is the result of a call that is not in the last message with calls before it."""
    asked: set[object] = set()
    found = []
    for message in messages:
        if message["role"] != "tool":
            asked = {call["id"] for call in calls_of(message)} or asked
        found.append(message["role"] == "tool" and message.get("tool_call_id") not in asked)
    return found


def function_call(call_id: str, name: str, arguments: object) -> Message:
    """An element of `tool_calls`. arguments: an object, or its JSON; what is neither is shown in an object, because templates take no other."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_of(arguments)}}


def arguments_of(given: object) -> dict[str, object]:
    """The arguments of a call as an object: itself, what its JSON says, nothing for none, or one that holds what is given as its text."""
    if isinstance(given, dict):
        return given
    text = "" if given is None else given if isinstance(given, str) else msgspec.json.encode(given).decode()
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        value = None
    return value if isinstance(value, dict) else {NOT_AN_OBJECT: text}


def with_arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """The same for templates that expect the arguments of calls as JSON."""

    def as_text(call: Message) -> Message:
        arguments = msgspec.json.encode(call["function"]["arguments"]).decode()
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**message, "tool_calls": [as_text(call) for call in calls_of(message)]} if calls_of(message) else message
        for message in messages
    ]
