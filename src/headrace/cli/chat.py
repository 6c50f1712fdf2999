"""The terminal chat.

Owns the conversation, the commands that begin with a slash, and how a reply is shown. Replies come from a `ChatSource`
(`chat_sources`). Runs in the main thread; Ctrl-C during a reply ends that reply only.
"""

import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

from headrace.cli.chat_sources import ChatSource, Message, Piece, Tools, ToolUse
from headrace.errors import ConfigError, HeadraceError

HELP = """[bold]/clear[/bold]           begin again (keeps the system message)
[bold]/system TEXT[/bold]     set the system message and begin again; without TEXT: remove it
[bold]/schema FILE[/bold]     make replies JSON that matches the schema in FILE, or given here; without FILE: any text again
[bold]/help[/bold]            this
[bold]/exit[/bold], Ctrl-D    leave
Ctrl-C           stop the reply that is being written"""


def run_chat(source: ChatSource, console: Console, system: str | None = None, tools: Tools = ()) -> None:
    """Talk until the user leaves.

    tools: what the model may call; each call is shown, and the next line is its result. When input is no terminal, each line is a message or a
    result, also one that begins with a slash, and only replies and calls are printed; the first reply that fails is raised as its HeadraceError.
    """
    interactive = sys.stdin.isatty()
    conversation = Conversation(system, tools)
    if interactive:
        console.print(f"[bold]{escape(source.name)}[/bold]  [dim]/help lists the commands, Ctrl-D quits[/dim]")
    while (line := _read_line(console, interactive)) is not None:
        if interactive and line.startswith("/"):
            if not _command(line, conversation, console):
                break
        elif line and not _take_turn(source, conversation, line, console, interactive):
            break


class Conversation:
    """The messages so far, the system message first when there is one, the tools, and the schema of the next reply."""

    def __init__(self, system: str | None, tools: Tools = ()) -> None:
        self._system = system
        self.tools = tools
        self.json_schema: str | None = None
        self.messages: list[Message] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system message and the schema."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def set_system(self, text: str) -> None:
        """Begin again with another system message; empty = none."""
        self._system = text or None
        self.clear()


def _read_line(console: Console, interactive: bool, prompt: str = "[bold green]>[/bold green] ") -> str | None:
    """The next line, stripped; None at the end of input. Ctrl-C at the prompt only empties the line."""
    while True:
        try:
            line = console.input(prompt) if interactive else sys.stdin.readline()
        except EOFError:
            console.print()
            return None
        except KeyboardInterrupt:
            console.print()
            continue
        if not interactive and not line:
            return None
        return line.strip()


def _command(line: str, conversation: Conversation, console: Console) -> bool:
    """Carry out a slash command; False when the chat is to end."""
    name, _, rest = line.partition(" ")
    match name:
        case "/exit" | "/quit" | "/bye":
            return False
        case "/clear":
            conversation.clear()
            console.print("[dim]new conversation[/dim]")
        case "/system":
            conversation.set_system(rest.strip())
            console.print(
                "[dim]new conversation with this system message[/dim]"
                if rest.strip()
                else "[dim]new conversation without a system message[/dim]"
            )
        case "/schema":
            _set_schema(conversation, rest.strip(), console)
        case "/help":
            console.print(HELP)
        case _:
            console.print(f"[yellow]no such command: {escape(name)}[/yellow]; /help lists them")
    return True


def _set_schema(conversation: Conversation, given: str, console: Console) -> None:
    """Let replies match a schema from now on; empty = any text. One that cannot be used changes nothing."""
    from headrace.cli.schema import read_schema

    try:
        conversation.json_schema = read_schema(given) if given else None
    except ConfigError as error:
        console.print(f"[red]{escape(error.message)}[/red]")
        return
    console.print("[dim]replies match this schema[/dim]" if given else "[dim]replies are any text[/dim]")


def _take_turn(source: ChatSource, conversation: Conversation, line: str, console: Console, interactive: bool) -> bool:
    """Ask, and go on while the model calls tools. A failed turn is forgotten. Returns False at the end of input.

    Raises HeadraceError when not interactive.
    """
    before = len(conversation.messages)
    conversation.messages.append({"role": "user", "content": line})
    try:
        while calls := _answer(source, conversation, console, interactive):
            for call in calls:
                result = _ask_result(call, console, interactive)
                if result is None:
                    return False
                conversation.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    except HeadraceError as error:
        if not interactive:
            raise
        del conversation.messages[before:]
        console.print(f"[red]{escape(error.message)}[/red]")
    return True


def _ask_result(call: ToolUse, console: Console, interactive: bool) -> str | None:
    """Show a call and read its result; None at the end of input."""
    console.print(f"[yellow]{escape(f'{call.name}({call.arguments})')}[/yellow]", soft_wrap=True)
    return _read_line(console, interactive, f"[bold yellow]result of {escape(call.name)}>[/bold yellow] ")


def _answer(source: ChatSource, conversation: Conversation, console: Console, interactive: bool) -> list[ToolUse]:
    """Print the next reply as it comes, and remember it; a stopped one keeps what came. Returns its tool calls.

    Reasoning is dimmed, and shown only when interactive. Raises HeadraceError.
    """
    reply = _Reply(console, shows_reasoning=interactive)
    stopped = False
    pieces = source.reply(conversation.messages, conversation.json_schema, conversation.tools)
    try:
        for piece in pieces:
            reply.add(piece)
    except KeyboardInterrupt:
        stopped = True
        reply.calls.clear()
        # Closing the iterator is what tells the engine or the server to stop.
        _close(pieces)
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
        self._console = console
        self._shows_reasoning = shows_reasoning
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._num_tokens = 0
        self._is_in_line = False
        self._start_s = self._first_s = time.perf_counter()

    def add(self, piece: Piece | ToolUse) -> None:
        """The next piece."""
        if isinstance(piece, ToolUse):
            self.calls.append(piece)
            return
        if not self._num_tokens:
            self._first_s = time.perf_counter()
        self._num_tokens = piece.num_tokens
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
        self._console.out(text, end="", style=style, highlight=False)
        self._is_in_line = True

    def end_line(self, always: bool = False) -> None:
        """End the line that is being written. always: even if nothing is."""
        if self._is_in_line or always:
            self._console.print()
        self._is_in_line = False

    def message(self) -> Message:
        """The reply as a message of the conversation."""
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
        """How many tokens there were, how fast, and when the first came."""
        count, writing_s = self._num_tokens, time.perf_counter() - self._first_s
        rate = f"{(count - 1) / writing_s:.1f} tok/s, " if count > 1 and writing_s > 0 else ""
        tokens = "1 token" if count == 1 else f"{count} tokens"
        return f"{tokens}, {rate}first after {self._first_s - self._start_s:.2f} s"


def _close(pieces: Iterator[Piece | ToolUse]) -> None:
    close = getattr(pieces, "close", None)
    if close is not None:
        close()
