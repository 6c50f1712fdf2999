"""What stands for an image in a prompt: tokens, and which of them are rows of the encoder's output.

Owns `TokenLayout`. Which tokens a family takes, `families` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """See `frontend.images.Layout`. tokens: in place of an image token. spans: (start, length, first_row) of the rows among them."""

    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...]

    @property
    def num_rows(self) -> int:
        """Tokens that are rows of the encoder's output."""
        return sum(length for _, length, _ in self.spans)


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
