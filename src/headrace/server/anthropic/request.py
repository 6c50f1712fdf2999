"""A body of Anthropic's routes as a `Conversation` and as sampling parameters.

Owns the checks of its messages. Pure functions, run in the event loop that serves HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.errors import ContextLengthError, RequestError
from headrace.grammar.schema_walk import with_one_of_as_any_of
from headrace.media_kinds import ImageRef, MediaKind
from headrace.messages.bodies import is_empty
from headrace.sampling.params import SamplingParams
from headrace.server.anthropic.blocks import block_text, check_block, read_blocks
from headrace.server.anthropic.protocol import (
    Block,
    InputMessage,
    MessagesRequest,
    OutputFormatConfig,
    PromptRequest,
)
from headrace.server.anthropic.tools import choice_of, tools_of
from headrace.server.chat.conversation import Conversation, Message, function_call
from headrace.server.chat.media import asks_for, base64_image, part_of

ATTRIBUTION = "x-anthropic-billing-header:"
"""Begins a system block of Claude Code that names its version. It would change the beginning of every prompt, so it is left out."""

_ROLE_OF = {"developer": "system"}

_CALLERS = (None, "direct", "code_execution_20250825", "code_execution_20260120")
"""Who may have made a call of the history: the model, or a program that it wrote for the vendor's servers to run."""


def conversation_of(request: PromptRequest, context_length: int) -> tuple[Conversation, list[str]]:
    """The conversation of a request, and the names of the tools that are skipped. Raises RequestError that names the field at fault."""
    messages = _Messages().read(request, context_length)
    tools, skipped = tools_of(request.tools)
    choice, parallel = choice_of(request.tool_choice, tools)
    thinking = request.thinking
    effort = request.output_config.effort if request.output_config is not None else None
    thinks: bool | None = False if effort is None else None
    if thinking is not None:
        if thinking.type == "enabled" and thinking.budget_tokens is None:
            raise RequestError("thinking.budget_tokens is missing", "thinking.budget_tokens", "missing_field")
        if thinking.type != "enabled" and thinking.budget_tokens is not None:
            raise RequestError("thinking.budget_tokens belongs to the type enabled", "thinking.budget_tokens")
        if thinking.budget_tokens is not None and thinking.budget_tokens < 0:
            raise RequestError(
                f"thinking.budget_tokens must be at least 0, got {thinking.budget_tokens}", "thinking.budget_tokens"
            )
        thinks = {"enabled": True, "disabled": False}.get(thinking.type)
    conversation = Conversation(
        messages=messages,
        tools=tools,
        choice=choice,
        parallel=parallel,
        effort=effort,
        thinking=thinks,
        thinking_budget=thinking.budget_tokens if thinking is not None else None,
        budget_is_hint=True,
        continues_last=messages[-1]["role"] == "assistant" and bool(messages[-1]["content"]),
    )
    return conversation, skipped


def sampling_of(request: MessagesRequest) -> SamplingParams:
    """The sampling parameters of a request. Raises RequestError."""
    if request.max_tokens < 0:
        raise RequestError(f"max_tokens must be at least 0, got {request.max_tokens}", "max_tokens")
    asked = _format_of(request)
    return SamplingParams(
        max_new_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        # An empty schema allows every JSON value.
        json_schema=None if asked is None else with_one_of_as_any_of(asked.schema) or "{}",
    )


def _format_of(request: PromptRequest) -> OutputFormatConfig | None:
    inner = request.output_config.format if request.output_config is not None else None
    if inner is not None and request.output_format is not None:
        raise RequestError("output_format and output_config.format are both given: give one of them", "output_format")
    return request.output_format if inner is None else inner


@dataclass(slots=True)
class _Messages:
    """Messages in the form for templates. asked: the calls of the last message with calls, by id, with their names."""

    shown: list[Message] = field(default_factory=list)
    asked: dict[str, str] = field(default_factory=dict)

    def read(self, request: PromptRequest, context_length: int) -> list[Message]:
        """All messages of a request, the system prompt first."""
        if not request.messages:
            raise RequestError("messages is empty", "messages")
        if len(request.messages) > context_length:
            raise ContextLengthError("messages", context_length, f"there are {len(request.messages)} messages")
        system = _system_text(request.system)
        if system:
            self.shown.append({"role": "system", "content": system})
        for number, message in enumerate(request.messages):
            self._add(f"messages[{number}]", message)
        last = self.shown[-1]
        if last.get("tool_calls"):
            where = f"messages[{len(request.messages) - 1}]"
            raise RequestError(f"{where}: the results of its tool calls are missing", where)
        if last == {"role": "assistant", "content": ""} and len(self.shown) > 1:
            self.shown.pop()  # A reply that was begun with nothing is a new one.
        return self.shown

    def _add(self, where: str, message: InputMessage) -> None:
        role, content = _ROLE_OF.get(message.role, message.role), message.content
        if not role:
            raise RequestError(f"{where}.role is empty", f"{where}.role")
        if not content and not isinstance(content, str) and role in ("assistant", "tool"):
            content = ""  # The model said nothing.
        if isinstance(content, str):
            self.shown.append({"role": role, "content": content})
            return
        if not content:
            raise RequestError(f"{where}.content is empty", f"{where}.content")
        places, blocks = read_blocks(f"{where}.content", content)
        match role:
            case "assistant":
                self._add_assistant(places, blocks)
            case "system":
                self.shown.append({"role": "system", "content": "\n".join(_texts(places, blocks, "system"))})
            case _:
                self._add_user(role, places, blocks)

    def _add_user(self, role: str, places: Sequence[str], blocks: Sequence[Block]) -> None:
        """Results of tools come before the text, because templates expect them right after the calls. role: user, or one of the client's own."""
        others = []
        for place, block in zip(places, blocks, strict=True):
            if block.type == "tool_result":
                self.shown.append(self._result(place, block))
            else:
                others.append((place, block))
        if others:
            parts = [_user_part(place, block) for place, block in others]
            self.shown.append({"role": role, "content": parts})

    def _result(self, where: str, block: Block) -> Message:
        if not block.tool_use_id:
            raise RequestError(f"{where}.tool_use_id is missing", f"{where}.tool_use_id", "missing_field")
        content = _result_content(f"{where}.content", block.content)
        if block.is_error:
            if isinstance(content, list):
                content = [{"type": "text", "text": "Error:"}, *content]
            else:
                content = f"Error: {content}" if content else "Error"
        named = {"name": self.asked[block.tool_use_id]} if block.tool_use_id in self.asked else {}
        return {"role": "tool", "content": content, "tool_call_id": block.tool_use_id, **named}

    def _add_assistant(self, places: Sequence[str], blocks: Sequence[Block]) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[Message] = []
        asked: dict[str, str] = {}
        for place, block in zip(places, blocks, strict=True):
            match block.type:
                case "text":
                    texts.append(block_text(place, block))
                case "thinking":
                    thoughts.append(block.thinking or "")
                case "redacted_thinking":
                    pass
                case "tool_use":
                    calls.append(_call(place, block, asked))
                case _:
                    raise _wrong_role(place, block.type, "assistant")
        message: Message = {"role": "assistant", "content": "\n".join(texts)}
        if any(thoughts):
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
            self.asked = asked
        self.shown.append(message)


def _system_text(system: str | Sequence[Block] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    places = [f"system[{place}]" for place in range(len(system))]
    for place, block in zip(places, system, strict=True):
        check_block(place, block)
    texts = _texts(places, system, "system")
    return "\n".join(text for text in texts if not text.startswith(ATTRIBUTION))


def _texts(places: Sequence[str], blocks: Sequence[Block], role: str) -> list[str]:
    for place, block in zip(places, blocks, strict=True):
        if block.type != "text":
            raise _wrong_role(place, block.type, role)
    return [block_text(place, block) for place, block in zip(places, blocks, strict=True)]


def _wrong_role(where: str, kind: str, role: str) -> RequestError:
    return RequestError(f"{where}: blocks of type {kind} do not belong to the role {role}", f"{where}.type")


def _call(where: str, block: Block, asked: dict[str, str]) -> Message:
    """A call in the history; enters its id into `asked`."""
    for name in ("id", "name"):
        if not getattr(block, name):
            raise RequestError(f"{where}.{name} is missing", f"{where}.{name}", "missing_field")
    assert block.id is not None and block.name is not None, "checked"  # noqa: PT018
    if block.id in asked:
        raise RequestError(f"{where}.id: there are two calls with the id {block.id[:100]!r}", f"{where}.id")
    if not (is_empty(block.caller) or (isinstance(block.caller, dict) and block.caller.get("type") in _CALLERS)):
        raise RequestError(
            f"{where}.caller: only calls by the model itself are supported", f"{where}.caller", "unsupported_parameter"
        )
    asked[block.id] = block.name
    return function_call(block.id, block.name, block.input)


def _user_part(where: str, block: Block) -> Message:
    """A part of what the user says: text or an image."""
    if block.type == MediaKind.IMAGE:
        return _image(where, block.source)
    (text,) = _texts([where], [block], "user")
    return {"type": "text", "text": text}


def _image(where: str, source: object) -> Message:
    """Raises RequestError."""
    match source:
        case {"type": "base64", "data": str(data), **others} if asks_for(others) <= {"media_type"}:
            return base64_image(f"{where}.source.data", data)
        case {"type": "url", "url": str(url), **others} if url and not asks_for(others):
            return part_of(ImageRef(url=url))
        case {"type": "file"}:
            raise RequestError(
                f"{where}.source: there are no files here; send base64 or url",
                f"{where}.source",
                "unsupported_parameter",
            )
        case _:
            raise RequestError(
                f'{where}.source must be {{"type": "base64", "media_type": ..., "data": ...}} or {{"type": "url", "url": ...}}',
                f"{where}.source",
            )


def _result_content(where: str, content: object) -> str | list[Message]:
    """The content of a result: a text, of blocks of text, too; or parts, if there are images among them."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of blocks", where)
    places, blocks = read_blocks(where, content)
    for place, block in zip(places, blocks, strict=True):
        if block.type not in ("text", MediaKind.IMAGE):
            raise RequestError(
                f"{place}: blocks of type {block.type[:50]!r} are not supported yet in the result of a tool",
                f"{place}.type",
                "unsupported_parameter",
            )
    if any(block.type == MediaKind.IMAGE for block in blocks):
        return [
            _image(place, block.source)
            if block.type == MediaKind.IMAGE
            else {"type": "text", "text": block_text(place, block)}
            for place, block in zip(places, blocks, strict=True)
        ]
    return "\n".join(block_text(place, block) for place, block in zip(places, blocks, strict=True))
