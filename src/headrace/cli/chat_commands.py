"""The commands of the terminal chat: what begins with a slash.

Owns their names and what they print. Runs in the main thread.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from headrace.cli.chat_sources import ChatSource
from headrace.cli.conversation import Conversation
from headrace.cli.media import number_of, read_part, shown
from headrace.cli.reply_writer import ReplyWriter
from headrace.errors import ConfigError
from headrace.media_kinds import PARTS, MediaKind

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
        self, source: ChatSource, conversation: Conversation, console: Console, confirm: Callable[[str], bool]
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
            "/help": self._help,
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

    def _help(self, _: str) -> None:
        self._console.print(HELP)

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        self._note("new conversation")

    def _set_system(self, text: str) -> None:
        self._conversation.set_system(text)
        self._note("new conversation with this system message" if text else "new conversation without a system message")

    def _set_schema(self, given: str) -> None:
        """Let replies match a schema from now on; empty = any text. One that cannot be used changes nothing."""
        from headrace.cli.schema import read_schema

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
