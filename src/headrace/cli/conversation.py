"""What a terminal chat remembers: its messages, its tools, and the schema and the media of what comes next.

Owns the file format of a saved conversation. Used in the main thread.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from headrace.cli.chat_sources import ChatSampling, ChatSource, Message, Tools
from headrace.errors import ConfigError, RequestError
from headrace.media_kinds import FILE_KINDS, PARTS
from headrace.plain_types import plain_reason

MAX_FILE_BYTES = 64 << 20
"""Largest file that `load` reads."""


class Conversation:
    """The messages so far, the system message first when there is one, the tools, the schema of the next reply, the media of the next message."""

    def __init__(self, system: str | None, tools: Tools = ()) -> None:
        self._system = system
        self.tools = tools
        self.json_schema: str | None = None
        self.messages: list[Message] = []
        self.media: list[dict[str, Any]] = []
        self._kept: list[Message] = []
        self.clear()

    @property
    def is_kept(self) -> bool:
        """Whether nothing would be lost: it is empty, or as it was saved or loaded."""
        return self.messages == self._kept or all(message["role"] == "system" for message in self.messages)

    def clear(self) -> None:
        """Forget everything but the system message and the schema."""
        self.media = []
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, text: str) -> None:
        """Add a message of the user, with the media that wait for it."""
        parts, self.media = self.media, []
        content = [*parts, {"type": "text", "text": text}] if parts else text
        self.messages.append({"role": "user", "content": content})

    def set_system(self, text: str) -> None:
        """Begin again with another system message; empty = none."""
        self._system = text or None
        self.clear()

    def save(self, path: Path, source: ChatSource, overwrite: bool = False) -> None:
        """Write the conversation, its schema and its settings as JSON, as a whole or not at all.

        Raises FileExistsError unless `overwrite`, and OSError.
        """
        schema = None if self.json_schema is None else json.loads(self.json_schema)
        value = {
            "model": source.name,
            "settings": source.sampling.given(),
            "json_schema": schema,
            "messages": self.messages,
        }
        _write(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n", overwrite)
        self._kept = [dict(message) for message in self.messages]

    def load(self, path: Path, source: ChatSource) -> None:
        """Go on with a saved conversation, or with a list of messages. What the file does not set stays as it is.

        Raises ConfigError for a file that cannot be used; then nothing has changed.
        """
        value = _read(path)
        saved = value if isinstance(value, dict) else {"messages": value}
        if unknown := saved.keys() - {"model", "settings", "json_schema", "messages"}:
            raise ConfigError(f"{path}: a conversation has no field {min(unknown)!r}")
        messages = _messages(path, saved.get("messages"))
        sampling, settings = source.sampling, saved.get("settings")
        if settings is not None:
            if not isinstance(settings, dict):
                raise ConfigError(f"{path}: settings must be an object")
            sampling = ChatSampling()
            for name, setting in settings.items():
                sampling = sampling.with_value(name, setting)
        if "json_schema" in saved:
            schema = saved["json_schema"]
            self.json_schema = None if schema is None else json.dumps(schema, ensure_ascii=False)
        source.sampling = sampling
        self.media = []
        self.messages, self._kept = messages, [dict(message) for message in messages]
        first = messages[0]
        self._system = first["content"] if first["role"] == "system" else None


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes: it is no conversation")
        return json.loads(raw)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def _messages(path: Path, given: object) -> list[Message]:
    """The messages, if a chat completion would take them. Raises ConfigError."""
    from headrace.server.openai.chat_request import template_messages
    from headrace.server.openai.protocol import ChatCompletionRequest

    if not isinstance(given, list):
        raise ConfigError(f"{path} has no messages")
    try:
        request = msgspec.convert({"messages": given}, ChatCompletionRequest)
        template_messages(request.messages, len(given))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {plain_reason(error)}") from None
    except RequestError as error:
        raise ConfigError(f"{path}: {error.message}") from None
    for number, message in enumerate(given):
        content = message.get("content") or ""
        if not isinstance(content, str) and (message["role"] != "user" or not _is_shown(content)):
            what = "a text; only a user's may be a list of texts, images and audio"
            raise ConfigError(f"{path}: messages[{number}].content must be {what}")
    return given


def _is_shown(content: list[dict[str, Any]]) -> bool:
    return all(part["type"] == "text" or PARTS.get(part["type"]) in FILE_KINDS for part in content)


def _write(path: Path, text: str, overwrite: bool) -> None:
    if not overwrite:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
        return
    # The old file stays until the new one is whole.
    path = path.resolve()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o600)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
