"""The terminal: lines that are typed, their history, and a reply that is shown while it is written, its lines wrapped between words.

Owns the history file, and the column of the cursor and the state of the terminal while a reply is written. Used in the main thread.
"""

import contextlib
import json
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

QUOTES = '"""'
"""Begins and ends a block of lines."""

MAX_ENTRIES = 1000
MAX_ENTRY_CHARS = 10_000
"""Longer entries are not kept after the chat."""

_WAKE_S = 0.2
_TAB_STOP = 8
_CONTROL_PICTURES = 0x2400
"""U+2400 is the picture of NUL, and so on."""

_T = TypeVar("_T")


def state_folder() -> Path:
    """Where state of the user is kept: $XDG_STATE_HOME/headrace, else ~/.local/state/headrace."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "headrace"


class History:
    """What was typed, in a file that only its owner can read: one JSON string for each entry, the newest last.

    Chats that run at the same time share it. If the file cannot be used, entries are forgotten at the end of the chat.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def entries(self) -> list[str]:
        """The newest entries, at most `MAX_ENTRIES`; older ones are removed from the file."""
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        found = [text for line in lines if (text := _entry(line)) is not None]
        if len(lines) > MAX_ENTRIES:
            with contextlib.suppress(OSError):
                part = self._path.with_name(f"{self._path.name}.{os.getpid()}")
                _write(part, os.O_TRUNC, found[-MAX_ENTRIES:])
                os.replace(part, self._path)
        return found[-MAX_ENTRIES:]

    def add(self, text: str) -> None:
        if len(text) > MAX_ENTRY_CHARS:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(self._path, os.O_APPEND, [text])


def _entry(line: str) -> str | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _write(path: Path, how: int, entries: list[str]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        file.write("".join(json.dumps(entry) + "\n" for entry in entries))


@dataclass(frozen=True, slots=True)
class Typed:
    """is_block: it was given as a block, so it is a message whatever it begins with."""

    text: str
    is_block: bool = False


class TypedInput:
    """Reads messages from the terminal, edited by readline.

    history: None = nothing is remembered, and lines cannot be edited.
    """

    def __init__(self, console: Console, history: History | None) -> None:
        self._console = console
        self._history = history
        if history is not None:
            import readline

            readline.set_auto_history(False)
            readline.parse_and_bind("set enable-bracketed-paste on")
            for entry in history.entries():
                readline.add_history(entry)

    def read(self) -> Typed | None:
        """The next message or command, stripped; None at the end of input. Ctrl-C empties what has been typed."""
        return self._asked(self._read)

    def read_result(self, name: str) -> str | None:
        """The result of a call of the tool `name`, stripped; None at the end of input."""
        return self._asked(lambda: input(self._coloured(f"result of {name}>", 33)).strip())

    def _asked(self, read: Callable[[], _T]) -> _T | None:
        while True:
            try:
                with interrupts_heard():
                    return read()
            except EOFError:
                self._console.print()
                return None
            except KeyboardInterrupt:
                self._console.print()

    def confirm(self, question: str) -> bool:
        try:
            with interrupts_heard():
                return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return False

    def _read(self) -> Typed:
        whole = line = input(self._coloured(">", 32))
        start = line.lstrip()
        command = ""
        if start.startswith("/"):
            # A block may be what a command is given.
            command, space, start = start.partition(" ")
            command, start = command + space, start.lstrip()
        if not start.startswith(QUOTES):
            self._remember(line.strip())
            return Typed(line.strip())
        text = start.removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES):
            line = input(self._coloured("…", 32))
            whole, text = f"{whole}\n{line}", f"{text}\n{line}"
        self._remember(whole.strip())
        return Typed(command + text.rstrip().removesuffix(QUOTES).strip("\n"), is_block=not command)

    def _coloured(self, prompt: str, colour: int) -> str:
        if not self._console.is_terminal or self._console.no_color:
            return f"{prompt} "
        # readline must know what takes no column.
        return f"\001\033[1;{colour}m\002{prompt}\001\033[0m\002 "

    def _remember(self, text: str) -> None:
        if self._history is None or not text:
            return
        import readline

        length = readline.get_current_history_length()
        if length and readline.get_history_item(length) == text:
            return
        readline.add_history(text)
        self._history.add(text)


class PipedInput:
    """Reads messages from standard input that is no terminal, one on each line."""

    def read(self) -> str | None:
        """The next line, stripped; None at the end of input."""
        line = sys.stdin.readline()
        return line.strip() if line else None

    def read_result(self, name: str) -> str | None:
        """The result of a call of the tool `name`: the next line."""
        del name
        return self.read()


@contextlib.contextmanager
def interrupts_heard() -> Iterator[None]:
    """Ctrl-C is noticed although it came just before a system call that waits.

    Python handles a signal between two instructions, and such a call, or readline's wait for a key, is one of them; a timer
    interrupts it now and then. In the main thread.
    """
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    # A parent that runs in the background may have left it ignored.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, _WAKE_S, _WAKE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGINT, ignored)


@contextlib.contextmanager
def keys_unseen(has_signals: bool = True) -> Iterator[int | None]:
    """What is typed meanwhile is not shown, and can be read key by key: the file, None if standard input is no terminal.

    has_signals: Ctrl-C works as always, and what has not been read is read afterwards. Else it is a key as the others, also where a parent
    has left its signal ignored; Ctrl-Z does nothing, and what has not been read is dropped.
    """
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):
        yield None
        return
    quiet = termios.tcgetattr(descriptor)
    quiet[3] &= ~(termios.ECHO | termios.ICANON | (0 if has_signals else termios.ISIG))
    termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN if has_signals else termios.TCSAFLUSH, before)


class ReplyWriter:
    """Shows one reply while it is written, its lines wrapped between words. Text for a pipe or a file is passed on unchanged."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._column = 0
        # What has been written of the last word, and how many columns it takes.
        self._word, self._word_columns = "", 0
        self._has_status = False

    def show_status(self, text: str) -> None:
        """Show what goes on before the reply, in a terminal, in place of what was shown so; the reply takes its place."""
        if self._console.is_terminal:
            shown = Style.parse("dim").render(text[: self._console.width - 1], color_system=ColorSystem.STANDARD)
            self._console.file.write(f"\r\x1b[K{shown}")
            self._console.file.flush()
            self._has_status = True

    def clear_status(self) -> None:
        """Take away what `show_status` has shown, if anything."""
        if self._has_status:
            self._console.file.write("\r\x1b[K")
            self._has_status = False

    def write(self, text: str, style: str | None = None) -> None:
        """The next piece. A word that reaches the edge is moved to the next line, also if its beginning has been shown already.

        style: of rich, for terminals; a word has one style.
        """
        self.clear_status()
        file = self._console.file
        if not self._console.is_terminal:
            file.write(text)
        else:
            shown = self._wrapped(text)
            if style is not None:
                shown = Style.parse(style).render(shown, color_system=ColorSystem.STANDARD)
            file.write(shown)
        file.flush()

    def _wrapped(self, text: str) -> str:
        # The last column stays empty: terminals differ in where the cursor is behind it.
        width = max(self._console.width - 1, 2)
        out: list[str] = []
        for char in text:
            if char == "\n":
                out.append(char)
                self._begin_line()
            elif char in " \t":
                # Spaces at the edge are left out.
                count = 1 if char == " " else _TAB_STOP - self._column % _TAB_STOP
                count = min(count, width - self._column)
                out.append(" " * count)
                self._column += count
                self._word, self._word_columns = "", 0
            else:
                out.append(self._placed(_visible(char), width))
        return "".join(out)

    def _placed(self, char: str, width: int) -> str:
        """The character behind the word so far; before it what brings the cursor to its place."""
        columns = cell_len(char)
        moves = ""
        if columns == 2:
            # A line may break on both sides of such a character.
            self._word, self._word_columns = "", 0
        if self._column + columns > width:
            word, word_columns = self._word, self._word_columns
            if word_columns == self._column:
                # The word fills the line: it is cut.
                moves, word, word_columns = "\n", "", 0
            else:
                back = f"\x1b[{word_columns}D\x1b[K" if word_columns else ""
                moves = f"{back}\n{word}"
            self._begin_line()
            self._column, self._word, self._word_columns = word_columns, word, word_columns
        self._column += columns
        if columns < 2:
            self._word += char
            self._word_columns += columns
        return moves + char

    def _begin_line(self) -> None:
        self._column, self._word, self._word_columns = 0, "", 0


def _visible(char: str) -> str:
    """A control character as its picture: a model must not steer the terminal."""
    code = ord(char)
    if char == "\r":
        return ""
    if code < 0x20:
        return chr(_CONTROL_PICTURES + code)
    return "\ufffd" if 0x7F <= code < 0xA0 else char
