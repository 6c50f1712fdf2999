"""A body of `/v1/responses` as a conversation and sampling parameters. Owns what its shapes of tools mean (flat functions, custom tools, namespaces,
and tools that only their vendor's servers run), and which messages a conversation that is too long loses. Rendering and tokenizing run in a thread;
all else is pure, in the event loop that serves HTTP.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.errors import ContextLengthError, RequestError
from headrace.grammar.schema_walk import with_one_of_as_any_of
from headrace.messages.bodies import is_empty
from headrace.sampling.grammar_fields import GRAMMAR_KINDS, check_only_one
from headrace.sampling.params import SamplingParams
from headrace.server.chat.conversation import (
    MAX_TOOLS,
    Conversation,
    Tool,
    ToolChoice,
    allowed_tools,
    check_choice,
    check_num_messages,
    check_tools,
    function_tool,
    plain_choice,
    refused,
    text_of,
    text_or_none,
    unsupported,
)
from headrace.server.chat.custom_tools import custom_tool
from headrace.server.chat.prompt import chat_prompt
from headrace.server.context import Asker, ServingContext
from headrace.server.openai.fields import ollamas_format, required_schema
from headrace.server.responses.items import Item, messages_of, shown_name
from headrace.server.responses.protocol import ResponsesRequest, TextFormat

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


def input_items(given: str | Sequence[Item] | None) -> list[Item]:
    """`input` as items. Raises RequestError if there is none."""
    if given is None:
        raise refused("input", "is missing", "missing_field")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not given:
        raise refused("input", "is empty")
    return list(given)


def conversation_of(
    request: ResponsesRequest, items: Sequence[Item], context_length: int
) -> tuple[Conversation, OfferedTools]:
    """What a body asks, and the tools that it offers. items: all of the conversation. Raises RequestError."""
    check_num_messages("input", "items", len(items), context_length)
    tools = offered_tools(request.tools)
    choice, left = chosen_tools(request.tool_choice, tools)
    conversation = Conversation(
        messages=messages_of(items, "input", request.instructions),
        tools=left,
        choice=choice,
        parallel=request.parallel_tool_calls is not False,
        template_kwargs=request.chat_template_kwargs or {},
        thinking=None if request.think is None else request.think is not False,
        effort=request.effort,
    )
    return conversation, tools


def grammar_field(request: ResponsesRequest) -> str | None:
    """The field that says what the output must match; None = none does."""
    own = next((kind for kind in GRAMMAR_KINDS if not is_empty(getattr(request, kind))), None)
    text_format = request.text.format if request.text is not None else None
    is_bound = text_format is not None and text_format.type in ("json_schema", "json_object")
    return own or ("text.format" if is_bound else "format" if request.format else None)


def sampling_of(request: ResponsesRequest) -> SamplingParams:
    """The sampling parameters of a body. Raises RequestError."""
    asked: dict[str, object] = {kind: value for kind in GRAMMAR_KINDS if not is_empty(value := getattr(request, kind))}
    if (schema := ollamas_format(request.format)) not in (None, "", {}):
        check_only_one([*asked, "format"])
        asked["json_schema"] = schema
    text_format = request.text.format if request.text is not None else None
    if text_format is not None and (schema := _schema_of(text_format)) is not None:
        check_only_one([*(["format"] if request.format else asked), "text.format"])
        asked["json_schema"] = schema
    if "json_schema" in asked and not (text_format is not None and text_format.strict):
        asked["json_schema"] = with_one_of_as_any_of(asked["json_schema"])
    check_only_one(list(asked))
    return SamplingParams(**request.sampling_fields() | {"max_new_tokens": request.max_output_tokens} | asked)


def _schema_of(text_format: TextFormat) -> object:
    if text_format.type == "json_schema":
        return required_schema("text.format.schema", text_format.schema)
    if not is_empty(text_format.schema):
        kind = text_format.type or "text"
        raise refused("text.format.schema", f"does not belong to the type {kind}")
    return {"type": "object"} if text_format.type == "json_object" else None


def is_server_run(tool: Mapping[str, object]) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and kind in SERVER_RUN


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
        raise unsupported(
            f"{where}.type", f"{str(kind)[:50]!r} is not supported: it must be function, custom or namespace"
        )
    _check_callers(where, given)
    name = shown_name(namespace, text_of(f"{where}.name", given.get("name")))
    description = text_or_none(f"{where}.description", given.get("description"))
    if about:
        description = f"{about}\n{description}" if description else about
    if kind == "custom":
        return custom_tool(where, name, description, given.get("format"))
    return function_tool(where, name, description, given.get("parameters"), given.get("strict") is True)


def _in_namespace(where: str, given: Mapping[str, object]) -> Iterator[Tool]:
    """The tools of a namespace; the first one carries its description."""
    _check_callers(where, given)
    name = text_of(f"{where}.name", given.get("name"))
    about, tools = text_or_none(f"{where}.description", given.get("description")), given.get("tools")
    if not isinstance(tools, list):
        raise refused(f"{where}.tools", "must be a list")
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise RequestError(f"{where}.tools[{number}] must be an object", f"{where}.tools")
        yield _tool(f"{where}.tools[{number}]", tool, name, about or "" if number == 0 else "")


def _check_callers(where: str, given: Mapping[str, object]) -> None:
    """Raises RequestError for a tool that only a program may call. A deferred tool is offered at once; other keys are the client's own labels, as in
    the other APIs: what a function returns, cache marks."""
    callers = given.get("allowed_callers")
    if not is_empty(callers) and (not isinstance(callers, list) or "direct" not in callers):
        raise unsupported(f"{where}.allowed_callers", 'must contain "direct": no program calls tools here')


def chosen_tools(choice: str | dict[str, object] | None, offered: OfferedTools) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """`tool_choice`, and the tools that it leaves. Raises RequestError."""
    found, tools = plain_choice(choice), offered.tools
    match choice:
        case {"type": "function" | "custom"}:
            found = ToolChoice("required", _named("tool_choice", choice, offered))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            found = ToolChoice("required" if mode == "required" else "auto")
            names = [_named(f"tool_choice.tools[{number}]", one, offered) for number, one in enumerate(allowed)]
            tools = allowed_tools([name for name in names if name is not None], tools)
        case {"type": str(kind)} if kind in SERVER_RUN:
            raise unsupported("tool_choice", f": {kind} is a tool that this server does not run")
    if found is None:
        raise refused(
            "tool_choice",
            "must be auto, none, required, an object that names a tool "
            '({"type": "function", "name": ...}) or the allowed ones ({"type": "allowed_tools", "mode": ..., "tools": ...})',
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


async def fitting(
    context: ServingContext, conversation: Conversation, max_output_tokens: int | None, asker: Asker
) -> Conversation:
    """The conversation without as many of its oldest messages as is needed to leave room for the output.

    The room is `max_output_tokens`, or an eighth of the context if it is not limited, and at most half of it. The system message at the
    beginning and the last message stay; if these alone do not fit, the conversation is returned with no others.
    """
    messages, length = conversation.messages, context.model.context_length
    most = length - min(max_output_tokens or length // 8, length // 2)
    num_kept_first = 1 if messages[0]["role"] == "system" else 0

    def without(count: int) -> Conversation:
        """Without the `count` oldest messages after the system message, and without results whose calls are gone."""
        rest = list(messages[num_kept_first + count :])
        while count and len(rest) > 1 and rest[0]["role"] == "tool":
            rest.pop(0)
        return replace(conversation, messages=[*messages[:num_kept_first], *rest])

    async def fits(count: int) -> bool:
        try:
            prompt = await context.in_text_thread(lambda: chat_prompt(context, without(count)))
        except ContextLengthError:
            return False
        return len(await prompt.ids_with_media(context, asker)) <= most

    if await fits(0):
        return conversation
    # The fewest dropped messages that are enough: between `too_few`, which are not, and `enough`.
    too_few, enough = 0, max(0, len(messages) - num_kept_first - 1)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if await fits(middle):
            enough = middle
        else:
            too_few = middle
    return without(enough)
