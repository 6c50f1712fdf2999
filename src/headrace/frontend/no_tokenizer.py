"""The tokenizer of a server that was told to have none (--skip-tokenizer-init): token ids in, token ids out.

No token has a text, so every text that would be made of ids is empty. Used wherever a tokenizer is.
"""

from collections.abc import Sequence

import tokenizers
from tokenizers import models

from headrace.frontend.prompts import refuse_text
from headrace.text.tokenizers import RenderedPrompt, Tokenizer


class NoTokenizer(Tokenizer):
    """Reads no file, and knows no token."""

    def __init__(self) -> None:
        super().__init__(tokenizers.Tokenizer(models.BPE({}, [])))

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, allow_special: bool = False
    ) -> list[list[int]]:
        """Raises RequestError."""
        refuse_text("text")

    def encode_rendered(self, prompt: RenderedPrompt) -> list[int]:
        """Raises RequestError."""
        refuse_text("messages")
