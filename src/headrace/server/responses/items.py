"""The items of an input as messages for chat templates: which are understood, and how those of one turn of the assistant become one message. Pure
functions, run in the event loop that serves HTTP.
"""

from collections.abc import Mapping, Sequence

from headrace.errors import RequestError
from headrace.media_kinds import ImageRef
from headrace.messages.bodies import is_empty
from headrace.server.chat.conversation import (
    Message,
    check_history,
    function_call,
    missing,
    refused,
    text_of,
    text_or_none,
    unsupported,
    unsupported_type,
)
from headrace.server.chat.custom_tools import custom_call
from headrace.server.chat.parts import (
    base64_audio,
    file_text,
    image_detail,
    media_kind,
    part_of,
    text_part,
    written_out,
)

Item = Mapping[str, object]
_MAY_BE_EMPTY = ("assistant", "tool")

WRITTEN_OUT = {
    "additional_tools": "system",
    "apply_patch_call": "assistant",
    "apply_patch_call_output": "user",
    "code_interpreter_call": "assistant",
    "computer_call": "assistant",
    "computer_call_output": "user",
    "file_search_call": "assistant",
    "image_generation_call": "assistant",
    "local_shell_call": "assistant",
    "local_shell_call_output": "user",
    "mcp_approval_request": "assistant",
    "mcp_approval_response": "user",
    "mcp_call": "assistant",
    "mcp_list_tools": "assistant",
    "program": "assistant",
    "program_output": "user",
    "shell_call": "assistant",
    "shell_call_output": "user",
    "tool_search_call": "assistant",
    "tool_search_output": "user",
    "web_search_call": "assistant",
}
"""Types of items that are shown to the model as text, and who says it: calls of tools that the vendor defines, and their outputs."""

UNREADABLE = frozenset({"compaction", "configuration_update"})
"""Types of items that are passed over: what only the vendor can read, and settings of the vendor's model."""


def messages_of(items: Sequence[Item], field: str, instructions: str | None) -> list[Message]:
    """The messages of a conversation.

    field: how errors name the list. Reasoning, text and calls of the assistant that follow each other become one message, and so do the
    instructions and the system messages right after them. Raises RequestError that names the item at fault.
    """
    reader = _Messages()
    if instructions:
        reader.text("system", instructions)
    for number, item in enumerate(items):
        reader.read(f"{field}[{number}]", item)
    if not reader.messages:
        raise refused(field, "is empty")
    reader.close()
    check_history(field, reader.messages)
    return reader.messages


class _Messages:
    """Collects messages, item by item. The texts of the last one are joined when the next one begins: an input may be many items of one turn."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        # The tool of each call, by its id.
        self.asked: dict[str, str] = {}
        # Of the last message: its content, its reasoning, and the ids of its calls.
        self._contents: list[str | list[Message]] = []
        self._thoughts: list[str] = []
        self._call_ids: set[str] = set()
        # Whether it has calls of tools: what the assistant says next is of the same turn.
        self._acted = False

    def close(self) -> None:
        """The last message is complete."""
        if not self.messages:
            return
        last = self.messages[-1]
        if self._contents:
            last["content"] = _joined_contents(self._contents, "\n\n" if last["role"] == "system" else "\n")
        if self._thoughts:
            last["reasoning_content"] = "\n".join(self._thoughts)

    def _open(self, message: Message) -> None:
        self.close()
        self.messages.append(message)
        self._contents, self._thoughts, self._call_ids, self._acted = [], [], set(), False

    def read(self, where: str, item: Item) -> None:
        match item.get("type") or "message":
            case "message":
                self._message(where, item)
            case "reasoning":
                self._reasoning(where, item)
            case "function_call" | "custom_tool_call":
                self._call(where, item)
            case "function_call_output" | "custom_tool_call_output":
                self._result(where, item)
            case str(kind) if kind in UNREADABLE:
                pass
            case str(kind) if kind in WRITTEN_OUT:
                hidden = ("result",) if kind == "image_generation_call" else ()  # the content of a file
                self._written(WRITTEN_OUT[kind], written_out(where, item, *hidden))
            case kind:
                raise unsupported_type(where, "items", kind)

    def text(self, role: str, content: str | list[Message]) -> None:
        """A message, which joins the one before it within a turn of the assistant, and within the system messages at the beginning."""
        joins = {"assistant": not self._contents or self._acted, "system": len(self.messages) == 1}
        if role != self._role or not joins.get(role):
            self._open({"role": role, "content": ""})
        if content or self._contents:
            self._contents.append(content)

    def _written(self, role: str, text: str) -> None:
        """Text that stands for an item: part of the turn of the assistant, or of what the user says."""
        if self._role != role:
            self._open({"role": role, "content": ""})
        self._contents.append(text)
        self._acted = True

    @property
    def _role(self) -> str | None:
        return str(self.messages[-1]["role"]) if self.messages else None

    def _message(self, where: str, item: Item) -> None:
        role = text_of(f"{where}.role", item.get("role"))
        content = content_parts(f"{where}.content", item.get("content"), may_be_empty=role in _MAY_BE_EMPTY)
        if role != "user" and isinstance(content, list):
            raise refused(f"{where}.content", ": images and audio belong to the role user")
        self.text("system" if role == "developer" else role, content)

    def _reasoning(self, where: str, item: Item) -> None:
        thought = _joined(f"{where}.content", item.get("content")) or _joined(f"{where}.summary", item.get("summary"))
        if not thought:
            return  # Encrypted by somebody else: nobody here can read it.
        if self._role != "assistant" or (self._contents and not self._acted):
            self._open({"role": "assistant", "content": ""})
        self._thoughts.append(thought)

    def _call(self, where: str, item: Item) -> None:
        call_id, name = (text_of(f"{where}.{field}", item.get(field)) for field in ("call_id", "name"))
        name = shown_name(_optional_text(where, item, "namespace"), name)
        if item.get("type") == "custom_tool_call":
            call = custom_call(call_id, name, text_or_none(f"{where}.input", item.get("input")) or "")
        else:
            call = function_call(call_id, name, item.get("arguments"))
        if self._role != "assistant":
            self._open({"role": "assistant", "content": ""})
        turn = self.messages[-1]
        if call_id in self._call_ids:
            raise refused(f"{where}.call_id", f": there are two calls with the id {call_id[:100]!r}")
        turn.setdefault("tool_calls", []).append(call)
        self._call_ids.add(call_id)
        self._acted = True
        self.asked[call_id] = name

    def _result(self, where: str, item: Item) -> None:
        call_id = _optional_text(where, item, "call_id")
        output = content_parts(f"{where}.output", item.get("output"), may_be_empty=True)
        answer: Message = {"role": "tool", "content": output}
        if call_id:
            answer["tool_call_id"] = call_id
        name = self.asked.get(str(call_id), item.get("name"))
        if isinstance(name, str) and name:
            answer["name"] = name
        self._open(answer)


def shown_name(namespace: str | None, name: str) -> str:
    if not namespace:
        return name
    return namespace + name if namespace.endswith("_") else f"{namespace}__{name}"


def _joined_contents(contents: Sequence[str | list[Message]], between: str) -> str | list[Message]:
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return between.join(texts)
    parts: list[Message] = []
    for content in contents:
        parts += [text_part(content)] if isinstance(content, str) else content
    return parts


def content_parts(where: str, content: object, may_be_empty: bool = False) -> str | list[Message]:
    """A content, a text or a list of parts, as one text or, with images and audio, as parts. Raises RequestError for parts of other types."""
    if isinstance(content, str):
        return content
    if content is None or content == []:
        if may_be_empty:
            return ""
        raise missing(where)
    if not isinstance(content, list):
        raise refused(where, "must be a string or a list of parts")
    parts = [_part(f"{where}[{number}]", part) for number, part in enumerate(content)]
    return parts if any(map(media_kind, parts)) else "\n".join(part["text"] for part in parts)


def _part(where: str, part: object) -> Message:
    if not isinstance(part, dict):
        raise refused(where, "must be an object")
    match part.get("type"):
        case "input_image":
            return _image(where, part)
        case "input_audio":
            return base64_audio(f"{where}.input_audio", part.get("input_audio"))
        case "input_file" if (text := file_text(part.get("filename"), part.get("file_data"))) is not None:
            return text_part(text)
        case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
            field = "text"
        case "refusal":
            field = "refusal"
        case kind:
            served = "text, input_image, input_audio, and input_file with a text"
            raise unsupported_type(where, "parts", kind, f", only {served}")
    value = part.get(field)
    if not isinstance(value, str):
        raise refused(f"{where}.{field}", "must be a string")
    return text_part(value)


def _image(where: str, part: Mapping[str, object]) -> Message:
    if not is_empty(part.get("file_id")):
        raise unsupported(f"{where}.file_id", ": there are no files here; send image_url")
    url = part.get("image_url")
    if not isinstance(url, str) or not url:
        raise refused(f"{where}.image_url", "must be a URL")
    return part_of(ImageRef(url=url, detail=image_detail(f"{where}.detail", part.get("detail"))))


def _joined(where: str, parts: object) -> str:
    if parts is None:
        return ""
    if not isinstance(parts, list):
        raise refused(where, "must be a list")
    texts = []
    for number, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise RequestError(f"{where}[{number}].text must be a string", where)
        texts.append(text)
    return "\n".join(texts)


def _optional_text(where: str, item: Item, name: str) -> str | None:
    value = item.get(name)
    return text_or_none(f"{where}.{name}", None if is_empty(value) else value)
