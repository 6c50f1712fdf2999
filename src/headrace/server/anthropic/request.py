"""A body of Anthropic's routes as a `Conversation` and as sampling parameters. Owns the types of blocks, the fields of each, and which are shown to
the model as text; the checks of messages; and which tools the model is offered. Pure functions, run in the event loop that serves HTTP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from headrace.errors import RequestError
from headrace.grammar.schema_walk import with_one_of_as_any_of
from headrace.media_kinds import ImageRef, MediaKind
from headrace.messages.bodies import as_meant, field_error, is_empty
from headrace.sampling.params import SamplingParams
from headrace.server.anthropic.protocol import (
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    InputMessage,
    MessagesRequest,
    PromptRequest,
    ThinkingConfig,
)
from headrace.server.chat.conversation import (
    Conversation,
    Message,
    Tool,
    ToolChoice,
    check_choice,
    check_history,
    check_num_messages,
    check_tools,
    function_call,
    function_tool,
    missing,
    refused,
    text_of,
    unsupported,
    unsupported_type,
)
from headrace.server.chat.parts import (
    asks_for,
    base64_image,
    decoded_text,
    document,
    part_of,
    text_part,
    written_out,
)

ATTRIBUTION = "x-anthropic-billing-header:"
"""Begins a system block of Claude Code that names its version. It would change the beginning of every prompt, so it is left out."""

_ROLE_OF = {"developer": "system"}

_CALLERS = (None, "direct", "code_execution_20250825", "code_execution_20260120")
"""Who may have made a call of the history: the model, or a program that it wrote for the vendor's servers to run."""

WRITTEN_OUT = frozenset(
    {
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "browser_state",
        "code_execution_tool_result",
        "compaction",
        "container_upload",
        "fallback",
        "mcp_tool_listing",
        "mcp_tool_result",
        "mcp_tool_use",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_addition",
        "tool_reference",
        "tool_removal",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    }
)
"""Types of blocks that the vendor's servers make, in a conversation that was begun there: shown to the model as text."""

FIELDS_OF_TYPE = {
    "text": {"text", "citations"},
    "tool_use": {"id", "name", "input", "caller", "toolset_name"},
    "tool_result": {"tool_use_id", "content", "is_error", "toolset_name"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
    MediaKind.IMAGE: {"source"},
    "document": {"source", "title", "context", "citations"},
    "search_result": {"source", "title", "content", "citations"},
}
"""The fields of each supported type of block, beside those of all types."""

_OF_EVERY_TYPE = {"type", "cache_control"}

Placed = tuple[str, Block]
"""A block, and before it its place in the request."""


def conversation_of(request: PromptRequest, context_length: int) -> tuple[Conversation, list[str]]:
    """The conversation of a request, and the names of the tools that are skipped. Raises RequestError that names the field at fault."""
    messages = _messages(request, context_length)
    tools, skipped = tools_of(request.tools)
    choice, parallel = choice_of(request.tool_choice, tools)
    effort = request.output_config.effort if request.output_config is not None else None
    # Without a word about thinking the model shall not think, unless it is told how much.
    thinking = request.thinking or ThinkingConfig(type="adaptive" if effort else "disabled")
    budget, field = thinking.budget_tokens, "thinking.budget_tokens"
    if thinking.type == "enabled" and budget is None:
        raise missing(field)
    if thinking.type != "enabled" and budget is not None:
        raise refused(field, "belongs to the type enabled")
    if budget is not None and budget < 0:
        raise refused(field, f"must be at least 0, got {budget}")
    conversation = Conversation(
        messages=messages,
        tools=tools,
        choice=choice,
        parallel=parallel,
        effort=effort,
        thinking={"enabled": True, "disabled": False}.get(thinking.type),
        thinking_budget=budget,
        budget_is_hint=True,
        continues_last=messages[-1]["role"] == "assistant" and bool(messages[-1]["content"]),
    )
    return conversation, skipped


def sampling_of(request: MessagesRequest) -> SamplingParams:
    if request.max_tokens < 0:
        raise refused("max_tokens", f"must be at least 0, got {request.max_tokens}")
    asked = request.output_config.format if request.output_config is not None else None
    if asked is not None and request.output_format is not None:
        raise refused("output_format", "and output_config.format are both given: give one of them")
    asked = request.output_format if asked is None else asked
    return SamplingParams(
        max_new_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        # An empty schema allows every JSON value.
        json_schema=None if asked is None else with_one_of_as_any_of(asked.schema) or "{}",
    )


def _messages(request: PromptRequest, context_length: int) -> list[Message]:
    if not request.messages:
        raise refused("messages", "is empty")
    check_num_messages("messages", "messages", len(request.messages), context_length)
    system = _system_text(request.system)
    shown: list[Message] = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(request.messages):
        shown += _template_messages(f"messages[{number}]", message)
    check_history("messages", shown)
    last = shown[-1]
    if last.get("tool_calls"):
        where = f"messages[{len(request.messages) - 1}]"
        raise refused(where, ": the results of its tool calls are missing")
    if last == {"role": "assistant", "content": ""} and len(shown) > 1:
        shown.pop()  # A reply that was begun with nothing is a new one.
    return shown


def _template_messages(where: str, message: InputMessage) -> list[Message]:
    role, content = _ROLE_OF.get(message.role, message.role), message.content
    if not role:
        raise refused(f"{where}.role", "is empty")
    if not content and not isinstance(content, str) and role in ("assistant", "tool"):
        content = ""  # The model said nothing.
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not content:
        raise refused(f"{where}.content", "is empty")
    blocks = read_blocks(f"{where}.content", content)
    match role:
        case "assistant":
            return [_assistant(blocks)]
        case "system":
            return [{"role": role, "content": "\n".join(_text_for(role, place, block) for place, block in blocks)}]
        case _:
            return _of_user(role, blocks)


def _of_user(role: str, blocks: Sequence[Placed]) -> list[Message]:
    """Results of tools come before the text, because templates expect them right after the calls. role: user, or one of the client's own."""
    results = [_result(place, block) for place, block in blocks if block.type == "tool_result"]
    parts = [
        _image(place, block.source) if block.type == MediaKind.IMAGE else text_part(_text_for("user", place, block))
        for place, block in blocks
        if block.type != "tool_result"
    ]
    return [*results, {"role": role, "content": parts}] if parts else results


def _result(where: str, block: Block) -> Message:
    call_id = text_of(f"{where}.tool_use_id", block.tool_use_id)
    content = _result_content(f"{where}.content", block.content)
    if block.is_error:
        if isinstance(content, list):
            content = [text_part("Error:"), *content]
        else:
            content = f"Error: {content}" if content else "Error"
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _assistant(blocks: Sequence[Placed]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: dict[str, Message] = {}
    for place, block in blocks:
        match block.type:
            case "text":
                texts.append(block_text(place, block))
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                call = _call(place, block, calls)
                calls[call["id"]] = call
            case _:
                raise _wrong_role(place, block.type, "assistant")
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [*calls.values()]
    return message


def _system_text(system: str | Sequence[Block] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    blocks = [(f"system[{place}]", block) for place, block in enumerate(system)]
    for place, block in blocks:
        check_block(place, block)
    texts = [_text_for("system", place, block) for place, block in blocks]
    return "\n".join(text for text in texts if not text.startswith(ATTRIBUTION))


def _text_for(role: str, where: str, block: Block) -> str:
    """The text of a block in a message of this role. Raises RequestError for a block of another type."""
    if block.type != "text":
        raise _wrong_role(where, block.type, role)
    return block_text(where, block)


def _wrong_role(where: str, kind: str, role: str) -> RequestError:
    return RequestError(f"{where}: blocks of type {kind} do not belong to the role {role}", f"{where}.type")


def _call(where: str, block: Block, before: Mapping[str, Message]) -> Message:
    """before: the calls of the same message, by their ids."""
    call_id, name = text_of(f"{where}.id", block.id), text_of(f"{where}.name", block.name)
    if call_id in before:
        raise refused(f"{where}.id", f": there are two calls with the id {call_id[:100]!r}")
    if not (is_empty(block.caller) or (isinstance(block.caller, dict) and block.caller.get("type") in _CALLERS)):
        raise unsupported(f"{where}.caller", ": only calls by the model itself are supported")
    return function_call(call_id, name, block.input)


def _image(where: str, source: object) -> Message:
    match source:
        case {"type": "base64", "data": str(data), **others} if asks_for(others) <= {"media_type"}:
            return base64_image(f"{where}.source.data", data)
        case {"type": "url", "url": str(url), **others} if url and not asks_for(others):
            return part_of(ImageRef(url=url))
        case {"type": "file"}:
            raise unsupported(f"{where}.source", ": there are no files here; send base64 or url")
        case _:
            raise refused(
                f"{where}.source",
                'must be {"type": "base64", "media_type": ..., "data": ...} or {"type": "url", "url": ...}',
            )


def _result_content(where: str, content: object) -> str | list[Message]:
    """The content of a result: a text, of blocks of text, too; or parts, if there are images among them."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise refused(where, "must be a string or a list of blocks")
    blocks = read_blocks(where, content)
    for place, block in blocks:
        if block.type not in ("text", MediaKind.IMAGE):
            raise unsupported_type(place, "blocks", block.type, " yet in the result of a tool")
    if all(block.type == "text" for _, block in blocks):
        return "\n".join(block_text(place, block) for place, block in blocks)
    return [
        _image(place, block.source) if block.type == MediaKind.IMAGE else text_part(block_text(place, block))
        for place, block in blocks
    ]


def read_blocks(where: str, given: Sequence[object]) -> list[Placed]:
    """The blocks of a content; what is shown as text is a block of text. Raises RequestError that names the place."""
    placed: list[Placed] = []
    for number, one in enumerate(given):
        place = f"{where}[{number}]"
        placed += [(place, block) for block in _read(place, one)]
    return placed


def _read(where: str, given: object) -> list[Block]:
    if not isinstance(given, dict):
        raise refused(where, "must be an object")
    kind = given.get("type")
    if isinstance(kind, str) and kind in WRITTEN_OUT:
        return [Block(type="text", text=written_out(where, given))]
    block = _decoded(where, given)
    check_block(where, block)
    match block.type:
        case "document":
            return _document(where, block)
        case "search_result":
            if not isinstance(block.content, list):
                raise refused(f"{where}.content", "must be a list of blocks of text")
            text = "\n".join(block_text(place, one) for place, one in read_blocks(f"{where}.content", block.content))
            return [Block(type="text", text=document("search_result", text, title=block.title, source=block.source))]
        case _:
            return [block]


def _decoded(where: str, given: Mapping[str, object]) -> Block:
    try:
        try:
            return msgspec.convert(given, Block)
        except msgspec.ValidationError:
            return msgspec.convert(as_meant(given, Block), Block)
    except msgspec.ValidationError as error:
        found = field_error(str(error), Block)
        name = f"{where}.{found.param}" if found.param else where
        message = found.message.replace(found.param, name, 1) if found.param else f"{where}: {found.message}"
        raise RequestError(message, name, found.code) from None


def check_block(where: str, block: Block) -> None:
    """Raises RequestError for a block of another type, or with fields of another type."""
    known = FIELDS_OF_TYPE.get(block.type)
    if known is None:
        raise unsupported_type(where, "blocks", block.type, " yet")
    for name in block.__struct_fields__:
        if name not in known and name not in _OF_EVERY_TYPE and not is_empty(getattr(block, name)):
            raise refused(f"{where}.{name}", f"does not belong to a block of type {block.type}")


def block_text(where: str, block: Block) -> str:
    if block.text is None:
        raise missing(f"{where}.text")
    return block.text


def _document(where: str, block: Block) -> list[Block]:
    """A document as text; its images, if it is made of blocks, follow it."""
    images: list[Block] = []
    match block.source:
        case {"type": "text", "data": str(text)}:
            pass
        case {"type": "base64", "data": str(data)} if (found := decoded_text(data)) is not None:
            text = found
        case {"type": "content", "content": str(text)}:
            pass
        case {"type": "content", "content": list(inner)}:
            blocks = read_blocks(f"{where}.source.content", inner)
            images = [one for _, one in blocks if one.type == MediaKind.IMAGE]
            text = "\n".join(block_text(place, one) for place, one in blocks if one.type != MediaKind.IMAGE)
        case _:
            raise unsupported(
                f"{where}.source",
                ": of documents only their text is read here; send it as "
                '{"type": "text", "media_type": "text/plain", "data": ...}',
            )
    shown = document("document", text, title=block.title, context=block.context)
    return [Block(type="text", text=shown), *images]


def tools_of(tools: Sequence[AnthropicTool] | None) -> tuple[tuple[Tool, ...], list[str]]:
    """The tools for the model, and the names of those that are skipped, which a header of the reply says. Raises RequestError.

    Tools that only the vendor can run, or whose schemas only the vendor's models know, are skipped, because clients send them unasked; so are tools
    that wait for a search (`defer_loading`).
    """
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
        raise missing(f"{where}.input_schema")
    for caller in tool.allowed_callers or ():
        if caller != "direct":
            place = f"{where}.allowed_callers"
            raise unsupported(place, f": {caller[:50]!r} is not supported, only 'direct'")
    made = function_tool(where, tool.name, tool.description, tool.input_schema, tool.strict is True)
    if not tool.input_examples:
        return made
    function = {**made.function, "input_examples": tool.input_examples}
    return replace(made, definition={"type": "function", "function": function})


def choice_of(choice: AnthropicToolChoice | None, tools: Sequence[Tool]) -> tuple[ToolChoice, bool]:
    if choice is None:
        return ToolChoice(), True
    if choice.type == "tool" and not choice.name:
        raise missing("tool_choice.name")
    if choice.type != "tool" and choice.name:
        raise refused("tool_choice.name", "belongs to the type tool")
    found = ToolChoice(choice.type if choice.type in ("auto", "none") else "required", choice.name or None)
    check_choice("tool_choice", found, tools)
    return found, choice.disable_parallel_tool_use is not True
