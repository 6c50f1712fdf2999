"""Shows a reply while it is written, its lines wrapped between words.

Owns the column of the cursor. Text for a pipe or a file is passed on unchanged.
"""

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

_TAB_STOP = 8
_CONTROL_PICTURES = 0x2400
"""U+2400 is the picture of NUL, and so on."""


class ReplyWriter:
    """Writes one reply to a console."""

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
