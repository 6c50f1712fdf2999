"""The tools of a body: those of the client, and those that are not offered to the model.

Tools that only the vendor can run, or whose schemas only the vendor's models know, are skipped, because clients send them unasked; so are tools
that wait for a search (`defer_loading`). The reply says which in the header `x-headrace-skipped-tools`. Pure functions, run in the event loop
that serves HTTP.
"""

from collections.abc import Sequence

from headrace.errors import RequestError
from headrace.server.anthropic.protocol import AnthropicTool, AnthropicToolChoice
from headrace.server.chat.conversation import Tool, ToolChoice, check_choice, check_tools, function_tool


def tools_of(tools: Sequence[AnthropicTool] | None) -> tuple[tuple[Tool, ...], list[str]]:
    """The tools for the model, and the names of those that are skipped. Raises RequestError that names the invalid one."""
    found: list[Tool] = []
    skipped: list[str] = []
    for number, tool in enumerate(tools or ()):
        if tool.type not in (None, "", "custom"):
            skipped.append(tool.name or tool.type)
        elif tool.defer_loading:
            skipped.append(tool.name or "")
        else:
            found.append(_tool(f"tools[{number}]", tool))
    check_tools("tools", found)
    return tuple(found), skipped


def _tool(where: str, tool: AnthropicTool) -> Tool:
    if tool.input_schema is None:
        raise RequestError(f"{where}.input_schema is missing", f"{where}.input_schema", "missing_field")
    for caller in tool.allowed_callers or ():
        if caller != "direct":
            raise RequestError(
                f"{where}.allowed_callers: {caller[:50]!r} is not supported, only 'direct'",
                f"{where}.allowed_callers",
                "unsupported_parameter",
            )
    made = function_tool(where, tool.name, tool.description, tool.input_schema, tool.strict is True)
    if not tool.input_examples:
        return made
    examples = {"input_examples": tool.input_examples}
    return function_tool(
        where, tool.name, tool.description, tool.input_schema, tool.strict is True, {**made.function, **examples}
    )


def choice_of(choice: AnthropicToolChoice | None, tools: Sequence[Tool]) -> tuple[ToolChoice, bool]:
    """`tool_choice`, and whether several calls are allowed. Raises RequestError."""
    if choice is None:
        return ToolChoice(), True
    if choice.type == "tool" and not choice.name:
        raise RequestError("tool_choice.name is missing", "tool_choice.name", "missing_field")
    if choice.type != "tool" and choice.name:
        raise RequestError("tool_choice.name belongs to the type tool", "tool_choice.name")
    match choice.type:
        case "auto":
            found = ToolChoice()
        case "none":
            found = ToolChoice("none")
        case "any":
            found = ToolChoice("required")
        case "tool":
            found = ToolChoice("required", choice.name)
    check_choice("tool_choice", found, tools)
    return found, choice.disable_parallel_tool_use is not True
