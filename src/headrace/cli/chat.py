"""The terminal chat.

Owns the turns, and how a reply is shown. Replies come from a `ChatSource` (`chat_sources`). Runs in the main thread; Ctrl-C during a reply ends that
reply only.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.markup import escape

from headrace.cli.chat_commands import Commands
from headrace.cli.chat_sources import ChatSource, Message, Part, Reading, Tools, ToolUse
from headrace.cli.conversation import Conversation
from headrace.cli.media import number_of
from headrace.cli.reply_writer import ReplyWriter
from headrace.cli.typed_input import History, PipedInput, TypedInput, interrupts_heard, keys_unseen
from headrace.errors import HeadraceError


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
    source: ChatSource, conversation: Conversation, line: str, console: Console, entered: PipedInput | TypedInput
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


def _answer(source: ChatSource, conversation: Conversation, console: Console, interactive: bool) -> list[ToolUse]:
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
        self._writer = ReplyWriter(console)
        self._shows_reasoning = shows_reasoning
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._num_tokens = 0
        self._is_cut = False
        self._is_in_line = False
        self._start_s = self._first_s = time.perf_counter()

    def add(self, piece: Part) -> None:
        """The next piece."""
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
        cut = ", cut at the limit of tokens" if self._is_cut else ""
        return f"{tokens}, {rate}first after {self._first_s - self._start_s:.2f} s{cut}"


def _close(pieces: Iterator[Part]) -> None:
    close = getattr(pieces, "close", None)
    if close is not None:
        close()
