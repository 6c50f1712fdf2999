"""The items of an input as messages for chat templates.

Owns which items are understood, and how the items of one turn of the assistant become one message. Pure functions, run in the event loop that
serves HTTP.
"""

from collections.abc import Callable, Mapping, Sequence

from headrace.errors import RequestError
from headrace.messages.neutral import is_empty
from headrace.server.chat.conversation import Message, calls_of, function_call
from headrace.server.chat.custom_tools import custom_call
from headrace.server.chat.media import base64_audio, image_detail, image_part
from headrace.server.responses.tools import shown_name

Item = Mapping[str, object]
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")


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
        raise RequestError(f"{field} is empty", field)
    reader.close()
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
        """Begin the next message."""
        self.close()
        self.messages.append(message)
        self._contents, self._thoughts, self._call_ids = [], [], set()

    def read(self, where: str, item: Item) -> None:
        """The next item."""
        kind = item.get("type", "message")
        readers: dict[str, Callable[[str, Item], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "custom_tool_call": self._call,
            "function_call_output": self._result,
            "custom_tool_call_output": self._result,
        }
        reader = readers.get(kind) if isinstance(kind, str) else None
        if reader is None:
            raise RequestError(
                f"{where}: items of type {str(kind)[:50]!r} are not supported", f"{where}.type", "unsupported_parameter"
            )
        reader(where, item)

    def text(self, role: str, content: str | list[Message]) -> None:
        """A message, which joins the one before it within a turn of the assistant, and within the system messages at the beginning."""
        last = self._last()
        joins = last is not None and last["role"] == role
        if role == "assistant":
            joins = joins and (not self._contents or bool(self._call_ids))
        elif role == "system":
            joins = joins and len(self.messages) == 1
        else:
            joins = False
        if not joins:
            self._open({"role": role, "content": ""})
        if content or self._contents:
            self._contents.append(content)

    def _last(self) -> Message | None:
        return self.messages[-1] if self.messages else None

    def _turn(self) -> Message:
        """The assistant's message that calls join."""
        last = self._last()
        if last is None or last["role"] != "assistant":
            last = {"role": "assistant", "content": ""}
            self._open(last)
        return last

    def _message(self, where: str, item: Item) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise RequestError(
                f"{where}.role must be one of {', '.join(_ROLES)}, got {str(role)[:50]!r}", f"{where}.role"
            )
        content = content_parts(f"{where}.content", item.get("content"))
        if role != "user" and isinstance(content, list):
            raise RequestError(f"{where}.content: images and sounds belong to the role user", f"{where}.content")
        self.text("system" if role == "developer" else str(role), content)

    def _reasoning(self, where: str, item: Item) -> None:
        thought = _joined(f"{where}.content", item.get("content")) or _joined(f"{where}.summary", item.get("summary"))
        if not thought:
            return  # Encrypted by somebody else: nobody here can read it.
        last = self._last()
        if last is None or last["role"] != "assistant" or (self._contents and not self._call_ids):
            self._open({"role": "assistant", "content": ""})
        self._thoughts.append(thought)

    def _call(self, where: str, item: Item) -> None:
        call_id, name, namespace = _text(where, item, "call_id"), _text(where, item, "name"), item.get("namespace")
        if not is_empty(namespace) and not isinstance(namespace, str):
            raise RequestError(f"{where}.namespace must be a string", f"{where}.namespace")
        name = shown_name(namespace if isinstance(namespace, str) else None, name)
        is_custom = item.get("type") == "custom_tool_call"
        given = item.get("input" if is_custom else "arguments")
        if given is not None and not isinstance(given, str):
            field = f"{where}.{'input' if is_custom else 'arguments'}"
            raise RequestError(f"{field} must be a string", field)
        turn = self._turn()
        if call_id in self._call_ids:
            raise RequestError(
                f"{where}.call_id: there are two calls with the id {call_id[:100]!r}", f"{where}.call_id"
            )
        call = custom_call(call_id, name, given or "") if is_custom else function_call(call_id, name, given or "")
        turn["tool_calls"] = calls = calls_of(turn)
        calls.append(call)
        self._call_ids.add(call_id)
        self.asked[call_id] = name

    def _result(self, where: str, item: Item) -> None:
        call_id = _text(where, item, "call_id")
        if call_id not in self.asked:
            raise RequestError(
                f"{where} is the output of a tool call, but no call before it has the id {call_id[:100]!r}",
                f"{where}.call_id",
            )
        output = content_parts(f"{where}.output", item.get("output"), may_be_empty=True)
        self._open({"role": "tool", "content": output, "tool_call_id": call_id, "name": self.asked[call_id]})


def _joined_contents(contents: Sequence[str | list[Message]], between: str) -> str | list[Message]:
    """The contents of several messages as that of one."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return between.join(texts)
    parts: list[Message] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def content_parts(where: str, content: object, may_be_empty: bool = False) -> str | list[Message]:
    """A content as one text or, with images and sounds, as parts. Raises RequestError for parts of other types."""
    if not isinstance(content, list) or not any(map(_is_media, content)):
        return content_text(where, content, may_be_empty)
    return [
        _media(f"{where}[{number}]", part)
        if _is_media(part)
        else {"type": "text", "text": _part(f"{where}[{number}]", part)}
        for number, part in enumerate(content)
    ]


def _is_media(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in ("input_image", "input_audio")


def _media(where: str, part: Mapping[str, object]) -> Message:
    """Raises RequestError."""
    if part.get("type") == "input_audio":
        return base64_audio(f"{where}.input_audio", part.get("input_audio"))
    return _image(where, part)


def _image(where: str, part: Mapping[str, object]) -> Message:
    """Raises RequestError."""
    if not is_empty(part.get("file_id")):
        raise RequestError(
            f"{where}.file_id: there are no files here; send image_url", f"{where}.file_id", "unsupported_parameter"
        )
    url = part.get("image_url")
    if not isinstance(url, str) or not url:
        raise RequestError(f"{where}.image_url must be a URL", f"{where}.image_url")
    return image_part(url, image_detail(f"{where}.detail", part.get("detail")))


def content_text(where: str, content: object, may_be_empty: bool = False) -> str:
    """A content, a text or a list of parts, as one text. Raises RequestError for parts that are no text."""
    if isinstance(content, str):
        return content
    if content is None or content == []:
        if may_be_empty and content is not None:
            return ""
        raise RequestError(f"{where} is missing", where)
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts", where)
    return "\n".join(_part(f"{where}[{number}]", part) for number, part in enumerate(content))


def _part(where: str, part: object) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"{where} must be an object", where)
    kind = part.get("type")
    field = "refusal" if kind == "refusal" else "text"
    if kind not in _TEXT_PARTS and kind != "refusal":
        raise RequestError(
            f"{where}: parts of type {str(kind)[:50]!r} are not supported, only text, input_image and input_audio",
            f"{where}.type",
            "unsupported_parameter",
        )
    text = part.get(field)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{field} must be a string", f"{where}.{field}")
    return text


def _joined(where: str, parts: object) -> str:
    """The texts of the parts of a reasoning item."""
    if parts is None:
        return ""
    if not isinstance(parts, list):
        raise RequestError(f"{where} must be a list", where)
    texts = []
    for number, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise RequestError(f"{where}[{number}].text must be a string", where)
        texts.append(text)
    return "\n".join(texts)


def _text(where: str, item: Item, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{where}.{name} is missing", f"{where}.{name}")
    return value
