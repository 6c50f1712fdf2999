"""How a reply looks on the screen while it is written. The reference is Python's textwrap."""

import io
import random
import re
import textwrap

import pytest
from rich.console import Console

from headrace.cli.terminal import ReplyWriter

WIDTH = 20


class Screen(io.StringIO):
    """What a terminal would show: it knows new lines, moving left and erasing the rest of the line."""

    def __init__(self):
        super().__init__()
        self.lines = [""]
        self.column = 0

    def write(self, text):
        for command in re.findall(r"\x1b\[\d*[A-Z]|.|\n", text):
            if command == "\n":
                self.lines.append("")
                self.column = 0
            elif command == "\x1b[K":
                self.lines[-1] = self.lines[-1][: self.column]
            elif command.startswith("\x1b["):
                assert command.endswith("D")
                self.column -= int(command[2:-1])
                assert self.column >= 0
            else:
                assert self.column == len(self.lines[-1]), "nothing is written over"
                self.lines[-1] += command
                self.column += 1
        return len(text)


def shown(pieces, is_terminal=True):
    screen = Screen()
    writer = ReplyWriter(Console(file=screen, width=WIDTH + 1, force_terminal=is_terminal, legacy_windows=False))
    for piece in pieces:
        writer.write(piece)
    return screen.lines


def cut(text, rng):
    places = sorted(rng.sample(range(len(text)), min(len(text) // 3, len(text))))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_lines_break_between_words_however_the_text_arrives(seed):
    rng = random.Random(seed)
    paragraphs = [
        " ".join("x" * rng.randint(1, 12) + rng.choice(("", ".", ",")) for _ in range(rng.randint(1, 12)))
        for _ in range(4)
    ]
    want = [line for text in paragraphs for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False)]

    lines = shown(cut("\n".join(paragraphs), rng))

    assert [line.rstrip() for line in lines] == want


def test_a_word_that_fills_a_line_is_cut_and_indentation_is_kept():
    assert shown(["    if x:\n", "y" * 45]) == ["    if x:", "y" * 20, "y" * 20, "y" * 5]


def test_wide_characters_take_two_columns_and_lines_break_between_them():
    assert shown(["ab ", "漢字" * 6]) == ["ab 漢字漢字漢字漢字", "漢字漢字"]


def test_a_tab_goes_to_its_stop():
    assert shown(["ab", "\tc\n\td"]) == ["ab      c", "        d"]


def test_a_model_cannot_steer_the_terminal():
    assert shown(["a\x1b[2Jb\x07\x9b1m\r\n"]) == ["a␛[2Jb␇\ufffd1m", ""]


def test_a_pipe_gets_the_text_as_it_is():
    assert shown(["word " * 10, "\x07"], is_terminal=False) == ["word " * 10 + "\x07"]
