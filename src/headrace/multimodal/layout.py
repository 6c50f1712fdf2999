"""What stands for an item in a prompt: tokens, and which of them are rows of the encoder's output.

Owns `TokenLayout`, `LoadedItem`, and how tokens join those of the text around them. Which tokens a family takes, `families` says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.messages.media import MediaItem


class ItemFacts(NamedTuple):
    """What the tokens of an item depend on. shape, grid, step_s: see `MediaItem`. num_frames: of a video."""

    shape: tuple[int, ...]
    grid: tuple[int, int, int] = (0, 0, 0)
    step_s: float = 0.0
    num_frames: int = 0


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """What stands for an item in a prompt. tokens: in place of its own token. spans: (start, length, first_row) of the rows among
    them. extra_places: how many more positions than tokens it may take."""

    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...]
    extra_places: int = 0

    @property
    def num_rows(self) -> int:
        """Tokens that are rows of the encoder's output."""
        return sum(length for _, length, _ in self.spans)


@dataclass(frozen=True, slots=True)
class LoadedItem:
    """An item that is ready for the encoder, and its tokens."""

    item: MediaItem
    layout: TokenLayout


def layout_of(tokens: Sequence[int], row_token: int) -> TokenLayout:
    """The layout of these tokens, of which each `row_token` stands for the next row."""
    spans: list[tuple[int, int, int]] = []
    start = row = 0
    for index, token in enumerate([*tokens, None]):
        if token == row_token:
            continue
        if index > start:
            spans.append((start, index - start, row))
            row += index - start
        start = index + 1
    return TokenLayout(tuple(tokens), tuple(spans))


class Joints:
    """Puts layouts and text together, so that the tokens are those of the whole text.

    letter_runs: of the tokens that are runs of one letter, such as line ends, the number of letters. encode: the tokens of a run of so many. Where a
    layout and the text beside it have such runs, the text has one run, which the tokenizer may read as other tokens.
    """

    def __init__(self, letter_runs: Mapping[int, int], encode: Callable[[int], Sequence[int]]) -> None:
        self._runs = letter_runs
        self._encode = encode

    def append(self, tokens: list[int], more: Sequence[int]) -> int:
        """Append to the tokens of a text those of the text after it. Returns the index at which `more` would begin; it may be none of
        theirs, if both meet in a run."""
        before = 0
        while before < len(tokens) and tokens[-1 - before] in self._runs:
            before += 1
        after = 0
        while after < len(more) and more[after] in self._runs:
            after += 1
        if before and after:
            run = [*tokens[len(tokens) - before :], *more[:after]]
            tokens[len(tokens) - before :] = self._encode(sum(self._runs[token] for token in run))
            more = more[after:]
        else:
            after = 0
        start = len(tokens) - after
        tokens += more
        return start


PLAIN = Joints({}, lambda count: ())
"""Of layouts that begin and end with special tokens."""
