"""The terminal chat: its turns, its commands (what begins with a slash), and what it remembers.

Owns how a reply is shown, and the file format of a saved conversation. Replies come from a `ChatSource` (`chat_sources`).
Runs in the main thread; Ctrl-C during a reply ends that reply only.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from headrace.cli.chat_sources import ChatSampling, ChatSource, Message, Part, Reading, Tools, ToolUse
from headrace.cli.given import number_of, read_part, shown
from headrace.cli.terminal import History, PipedInput, ReplyWriter, TypedInput, interrupts_heard, keys_unseen
from headrace.errors import ConfigError, HeadraceError, RequestError
from headrace.media_kinds import FILE_KINDS, PARTS, MediaKind
from headrace.plain_types import plain_reason

MAX_FILE_BYTES = 64 << 20
"""Largest file that `load` reads."""


def run_chat(
    source: ChatSource,
    console: Console,
    system: str | None = None,
    tools: Tools = (),
    history: History | None = None,
    media: Sequence[dict[str, Any]] = (),
    prompt: str | None = None,
) -> None:
    """Talk until the user leaves.

    tools: what the model may call; each call is shown, and the next line is its result. history: of what was typed; None = lines cannot be
    edited, and nothing is kept. media: parts of the first message. When input is no terminal, each line is a message or a result, also one that
    begins with a slash, and only replies and calls are printed; the first reply that fails is raised as its HeadraceError. prompt: the only message,
    as if it came from a pipe.
    """
    conversation = Conversation(system, tools)
    conversation.media += media
    if prompt is not None:
        _take_turn(source, conversation, prompt, console, PipedInput())
        return
    if not sys.stdin.isatty():
        piped = PipedInput()
        while (line := piped.read()) is not None:
            if line and not _take_turn(source, conversation, line, console, piped):
                return
        return
    console.print(f"[bold]{escape(source.name)}[/bold]  [dim]/help lists the commands, Ctrl-D quits[/dim]")
    typed_input = TypedInput(console, history)
    commands = Commands(source, conversation, console, typed_input.confirm)
    while (typed := typed_input.read()) is not None:
        if not typed.is_block and commands.knows(typed.text):
            if not commands.carry_out(typed.text):
                return
        elif typed.text.strip() and not _take_turn(source, conversation, typed.text, console, typed_input):
            return


def _take_turn(
    source: ChatSource, conversation: "Conversation", line: str, console: Console, entered: PipedInput | TypedInput
) -> bool:
    """Ask, and go on while the model calls tools. A failed turn is forgotten, with its media. Returns False at the end of input.

    Raises HeadraceError when not interactive.
    """
    interactive = isinstance(entered, TypedInput)
    before = len(conversation.messages)
    sent = number_of(conversation.media)
    conversation.ask(line)
    try:
        while calls := _answer(source, conversation, console, interactive):
            for call in calls:
                console.print(f"[yellow]{escape(f'{call.name}({call.arguments})')}[/yellow]", soft_wrap=True)
                result = entered.read_result(call.name)
                if result is None:
                    return False
                conversation.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    except HeadraceError as error:
        if not interactive:
            raise
        del conversation.messages[before:]
        console.print(f"[red]{escape(error.message)}[/red]")
        if sent:
            console.print(f"[dim]not sent: {sent}[/dim]")
    return True


def _answer(source: ChatSource, conversation: "Conversation", console: Console, interactive: bool) -> list[ToolUse]:
    """Print the next reply as it comes, and remember it; a stopped one keeps what came. Returns its tool calls.

    Reasoning is dimmed, and shown only when interactive. Raises HeadraceError.
    """
    reply = _Reply(console, shows_reasoning=interactive)
    stopped = False
    pieces = source.reply(conversation.messages, conversation.json_schema, conversation.tools)
    try:
        with keys_unseen(), interrupts_heard() if interactive else nullcontext():
            for piece in pieces:
                reply.add(piece)
    except KeyboardInterrupt:
        stopped = True
        reply.calls.clear()
        # Closing the iterator is what tells the engine or the server to stop.
        getattr(pieces, "close", lambda: None)()
    except HeadraceError:
        reply.end_line()
        raise
    reply.end_line(always=not reply.calls)
    conversation.messages.append(reply.message())
    if interactive:
        console.print(f"[dim]{'stopped: ' if stopped else ''}{reply.speed()}[/dim]\n")
    return reply.calls


class _Reply:
    """Shows a reply while it comes, and keeps it."""

    def __init__(self, console: Console, shows_reasoning: bool) -> None:
        self.calls: list[ToolUse] = []
        self._writer = ReplyWriter(console)
        self._shows_reasoning = shows_reasoning
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._num_tokens = 0
        self._is_cut = False
        self._is_in_line = False
        self._start_s = self._first_s = time.perf_counter()

    def add(self, piece: Part) -> None:
        if isinstance(piece, Reading):
            if self._shows_reasoning and piece.processed < piece.total:
                percent = 100 * piece.processed // piece.total
                self._writer.show_status(f"reading the prompt: {percent} % of {piece.total:,} tokens")
            return
        if isinstance(piece, ToolUse):
            self.calls.append(piece)
            return
        if not self._num_tokens:
            self._first_s = time.perf_counter()
        self._num_tokens = piece.num_tokens
        self._is_cut |= piece.is_cut
        if not piece.text:
            return
        if piece.is_reasoning:
            self._reasoning.append(piece.text)
            if self._shows_reasoning:
                self._write(piece.text, "dim")
            return
        if self._reasoning and not self._text:
            self.end_line()
        self._text.append(piece.text)
        self._write(piece.text)

    def _write(self, text: str, style: str | None = None) -> None:
        self._writer.write(text, style)
        self._is_in_line = True

    def end_line(self, always: bool = False) -> None:
        """End the line that is being written. always: even if nothing is."""
        self._writer.clear_status()
        if self._is_in_line or always:
            self._writer.write("\n")
        self._is_in_line = False

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": "".join(self._text)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message

    def speed(self) -> str:
        count, writing_s = self._num_tokens, time.perf_counter() - self._first_s
        rate = f"{(count - 1) / writing_s:.1f} tok/s, " if count > 1 and writing_s > 0 else ""
        tokens = "1 token" if count == 1 else f"{count} tokens"
        cut = ", cut at the limit of tokens" if self._is_cut else ""
        return f"{tokens}, {rate}first after {self._first_s - self._start_s:.2f} s{cut}"


HELP = '''[bold]/clear[/bold]           begin again (keeps the system message)
[bold]/system TEXT[/bold]     set the system message and begin again; without TEXT: remove it
[bold]/schema FILE[/bold]     make replies JSON that matches the schema in FILE, or given here; without FILE: any text again
[bold]/image FILE[/bold]      send the image in FILE with the next message; without FILE: send none
[bold]/audio FILE[/bold]      the same for the audio in FILE
[bold]/set NAME VALUE[/bold]  sample replies with temperature, top_p, top_k, max_tokens, seed ...; without VALUE: the default again
[bold]/show[/bold]            show the settings and the conversation
[bold]/save FILE[/bold]       write the conversation to FILE, as JSON
[bold]/load FILE[/bold]       go on with the conversation in FILE
[bold]/help[/bold]            this
[bold]/exit[/bold], Ctrl-D    leave
"""             begins and ends a message of several lines
Ctrl-C           stop the reply that is being written'''


class Commands:
    """The commands of one chat. confirm: asks the user a question, and says whether the answer is yes."""

    def __init__(
        self, source: ChatSource, conversation: "Conversation", console: Console, confirm: Callable[[str], bool]
    ) -> None:
        self._source = source
        self._conversation = conversation
        self._console = console
        self._confirm = confirm
        self._known: dict[str, Callable[[str], None]] = {
            "/clear": self._clear,
            "/system": self._set_system,
            "/schema": self._set_schema,
            "/image": partial(self._add, MediaKind.IMAGE),
            "/audio": partial(self._add, MediaKind.AUDIO),
            "/set": self._set,
            "/show": self._show,
            "/save": self._save,
            "/load": self._load,
            "/help": lambda _: console.print(HELP),
        }
        self._leaving = ("/exit", "/quit", "/bye")

    def knows(self, text: str) -> bool:
        """Whether the text is a command: any line that begins with a slash; of several lines, those that begin with a known one."""
        return text.startswith("/") and ("\n" not in text or text.split(None, 1)[0] in self._known)

    def carry_out(self, text: str) -> bool:
        """Carry out a command. False when the chat is to end."""
        name, *rest = text.split(None, 1)
        if name in self._leaving:
            return False
        command = self._known.get(name)
        if command is None:
            self._console.print(f"[yellow]no such command: {escape(name)}[/yellow]; /help lists them")
            return True
        try:
            command(rest[0].strip() if rest else "")
        except ConfigError as error:
            self._console.print(f"[red]{escape(error.message)}[/red]")
        return True

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, emoji=False)

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        self._note("new conversation")

    def _set_system(self, text: str) -> None:
        self._conversation.set_system(text)
        self._note("new conversation with this system message" if text else "new conversation without a system message")

    def _set_schema(self, given: str) -> None:
        """Let replies match a schema from now on; empty = any text. One that cannot be used changes nothing."""
        from headrace.cli.given import read_schema

        self._conversation.json_schema = read_schema(given) if given else None
        self._note("replies match this schema" if given else "replies are any text")

    def _add(self, kind: MediaKind, given: str) -> None:
        """Send a file with the next message; of no path: send none of this kind."""
        media = self._conversation.media
        if given:
            media.append(read_part(kind, _path(f"/{kind}", given)))
        else:
            media[:] = [other for other in media if PARTS[other["type"]] is not kind]
        self._note(self._waiting() or f"the next message has no {kind.one}")

    def _waiting(self) -> str:
        media = self._conversation.media
        return f"the next message has {number_of(media)}" if media else ""

    def _set(self, given: str) -> None:
        if given:
            name, *value = given.split(None, 1)
            self._source.sampling = self._source.sampling.with_value(name, value[0] if value else None)
        self._note(self._settings())

    def _settings(self) -> str:
        given = self._source.sampling.given()
        shown = ", ".join(f"{name} {value}" for name, value in given.items())
        return f"settings: {shown or 'the defaults of the model'}"

    def _show(self, _: str) -> None:
        self._note(f"model: {self._source.name}")
        self._note(self._settings())
        if self._conversation.json_schema is not None:
            self._note(f"schema: {self._conversation.json_schema}")
        for tool in self._conversation.tools:
            self._note(f"tool: {tool['function']['name']}")
        for message in self._conversation.messages:
            self._note(f"{message['role']}:")
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            lines = [shown(message.get("content")), *(f"{call['name']}({call['arguments']})" for call in calls)]
            ReplyWriter(self._console).write("\n".join(filter(None, lines)) + "\n")
        if waiting := self._waiting():
            self._note(waiting)

    def _save(self, given: str) -> None:
        path = _path("/save", given)
        try:
            try:
                self._conversation.save(path, self._source)
            except FileExistsError:
                if not self._confirm(f"{path} exists. Overwrite it?"):
                    self._note("not saved")
                    return
                self._conversation.save(path, self._source, overwrite=True)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        self._note(f"saved to {path}")

    def _load(self, given: str) -> None:
        path = _path("/load", given)
        if not self._conversation.is_kept and not self._confirm("This conversation is not saved. Give it up?"):
            self._note("not loaded")
            return
        self._conversation.load(path, self._source)
        count = len(self._conversation.messages)
        self._note(f"loaded {count} messages; {self._settings()}")


def _path(command: str, given: str) -> Path:
    if not given:
        raise ConfigError(f"{command} needs the name of a file")
    return Path(given).expanduser()


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
        self.media = []
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, text: str) -> None:
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
            raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes: it is not a conversation")
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
