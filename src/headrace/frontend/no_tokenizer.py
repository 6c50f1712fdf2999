"""The tokenizer of a server without one (--skip-tokenizer-init): token ids in, token ids out.

Tokens have no text, so all text is empty. Used wherever a tokenizer is used.
"""

from collections.abc import Sequence
from typing import Literal

import tokenizers
from tokenizers import models

from headrace.frontend.prompts import refuse_text
from headrace.text.tokenizers import RenderedPrompt, Tokenizer


class NoTokenizer(Tokenizer):
    """Reads no files and knows no tokens."""

    def __init__(self) -> None:
        super().__init__(tokenizers.Tokenizer(models.BPE({}, [])))

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, allow_special: bool = False
    ) -> list[list[int]]:
        """Raises RequestError."""
        refuse_text("text")

    def encode_whole(
        self,
        texts: Sequence[str | tuple[str, str]],
        most_tokens: int | None = None,
        side: Literal["right", "left"] = "right",
    ) -> list[tuple[list[int], list[int]]]:
        """Raises RequestError."""
        refuse_text("text")

    def encode_rendered(self, prompt: RenderedPrompt) -> list[int]:
        """Raises RequestError."""
        refuse_text("messages")
