"""The tools of a response, and which of them the model may or must call.

Owns what the shapes of the Responses API mean: flat functions, custom tools, namespaces, and tools that only their vendor's servers run.
Pure functions, run in the event loop that serves HTTP.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.errors import RequestError
from headrace.messages.bodies import is_empty
from headrace.server.chat.conversation import (
    MAX_TOOLS,
    Tool,
    ToolChoice,
    allowed_tools,
    check_choice,
    check_tools,
    function_tool,
)
from headrace.server.chat.custom_tools import custom_tool

SERVER_RUN = frozenset(
    {
        "code_interpreter",
        "file_search",
        "image_generation",
        "mcp",
        "programmatic_tool_calling",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""Types of tools that only their vendor can run. They are not offered to the model; the reply's header and the log name them."""


@dataclass(frozen=True, slots=True)
class CalledTool:
    """How a call of a tool is told to the client. namespace: None if it has none."""

    name: str
    namespace: str | None
    is_custom: bool


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """tools: what the model is offered. called: by the name that the model sees. skipped: types of tools that it is not offered."""

    tools: tuple[Tool, ...] = ()
    called: Mapping[str, CalledTool] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()

    def called_as(self, name: str) -> CalledTool:
        """How a call of `name` is told, also of a tool that does not exist."""
        return self.called.get(name) or CalledTool(name, None, False)


def is_server_run(tool: Mapping[str, object]) -> bool:
    """Whether only the tool's vendor can run it."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind in SERVER_RUN


def shown_name(namespace: str | None, name: str) -> str:
    """The name under which the model sees a tool of a namespace."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("_") else f"{namespace}__{name}"


def offered_tools(given: Sequence[Mapping[str, object]] | None) -> OfferedTools:
    """`tools`. Raises RequestError that names the one at fault."""
    tools: list[Tool] = []
    called: dict[str, CalledTool] = {}
    skipped: list[str] = []
    for number, one in enumerate(given or ()):
        where = f"tools[{number}]"
        kind = one.get("type", "function")
        if is_server_run(one):
            skipped.append(str(kind))
            continue
        namespace = one.get("name") if kind == "namespace" else None
        for tool in _in_namespace(where, one) if kind == "namespace" else (_tool(where, one),):
            name = tool.name
            if isinstance(namespace, str):
                name = name.removeprefix(shown_name(namespace, ""))
            tools.append(tool)
            called[tool.name] = CalledTool(name, str(namespace) if namespace else None, tool.is_custom)
        if len(tools) > MAX_TOOLS:
            break
    check_tools("tools", tools)
    return OfferedTools(tuple(tools), called, tuple(dict.fromkeys(skipped)))


def _tool(where: str, given: Mapping[str, object], namespace: str | None = None, about: str = "") -> Tool:
    """A function or custom tool. about: what its description begins with."""
    kind = given.get("type", "function")
    if not isinstance(kind, str) or kind not in ("function", "custom"):
        shown = str(kind)[:50]
        raise RequestError(
            f"{where}.type {shown!r} is not supported: it must be function, custom or namespace",
            f"{where}.type",
            "unsupported_parameter",
        )
    _check_callers(where, given)
    name, description = given.get("name"), given.get("description")
    if isinstance(name, str) and name:
        name = shown_name(namespace, name)
    if about and (description is None or isinstance(description, str)):
        description = f"{about}\n{description}" if description else about
    if kind == "custom":
        return custom_tool(where, name, description, given.get("format"))
    return function_tool(where, name, description, given.get("parameters"), given.get("strict") is True)


def _in_namespace(where: str, given: Mapping[str, object]) -> Iterator[Tool]:
    """The tools of a namespace; the first one carries its description."""
    _check_callers(where, given)
    name, about, tools = given.get("name"), given.get("description"), given.get("tools")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.name is missing", f"{where}.name")
    if about is not None and not isinstance(about, str):
        raise RequestError(f"{where}.description must be a string", f"{where}.description")
    if not isinstance(tools, list):
        raise RequestError(f"{where}.tools must be a list", f"{where}.tools")
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise RequestError(f"{where}.tools[{number}] must be an object", f"{where}.tools")
        yield _tool(f"{where}.tools[{number}]", tool, name, about or "" if number == 0 else "")


def _check_callers(where: str, given: Mapping[str, object]) -> None:
    """Raises RequestError for a tool that only a program may call. A deferred tool is offered at once; other keys are the client's own labels, as in
    the other APIs: what a function returns, cache marks."""
    callers = given.get("allowed_callers")
    if not is_empty(callers) and (not isinstance(callers, list) or "direct" not in callers):
        raise RequestError(
            f'{where}.allowed_callers must contain "direct": no program calls tools here',
            f"{where}.allowed_callers",
            "unsupported_parameter",
        )


def chosen_tools(choice: str | dict[str, object] | None, offered: OfferedTools) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """`tool_choice`, and the tools that it leaves. Raises RequestError."""
    tools = offered.tools
    match choice:
        case None | "" | "auto":
            found = ToolChoice()
        case "none":
            found = ToolChoice("none")
        case "required":
            found = ToolChoice("required")
        case {"type": "function" | "custom"}:
            found = ToolChoice("required", _named("tool_choice", choice, offered))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            found = ToolChoice("required" if mode == "required" else "auto")
            names = [_named(f"tool_choice.tools[{number}]", one, offered) for number, one in enumerate(allowed)]
            tools = allowed_tools("tool_choice", [name for name in names if name is not None], tools)
        case dict() if not choice:
            found = ToolChoice()
        case {"type": str(kind)} if kind in SERVER_RUN:
            raise RequestError(
                f"tool_choice: {kind} is a tool that this server does not run", "tool_choice", "unsupported_parameter"
            )
        case _:
            raise RequestError(
                "tool_choice must be auto, none, required, an object that names a tool "
                '({"type": "function", "name": ...}) or the allowed ones ({"type": "allowed_tools", "mode": ..., "tools": ...})',
                "tool_choice",
            )
    check_choice("tool_choice", found, tools)
    return found, tools


def _named(where: str, one: object, offered: OfferedTools) -> str | None:
    """The shown name of the tool that an object names; None for a skipped one among the allowed tools. Raises RequestError."""
    namespace = one.get("namespace") if isinstance(one, dict) else None
    match one:
        case {"type": str(kind)} if kind in offered.skipped:
            return None
        case {"type": "function" | "custom", "name": str(name)}:
            shown = shown_name(namespace if isinstance(namespace, str) else None, name)
            if shown in offered.called:
                return shown
            inside = [key for key, called in offered.called.items() if called.name == name]
            return inside[0] if len(inside) == 1 and not namespace else shown
        case _:
            raise RequestError(f"{where} must name a tool", "tool_choice")
