"""The text that perplexities are measured on, and the one that weights are calibrated on. Every machine has both.

Python's own reference, the topics of `help()`: every fourth topic is held out. Another Python version has a slightly different text.
"""

import pydoc_data.topics
from typing import Literal

from headrace.text.tokenizers import Tokenizer

_HELD_OUT_EVERY = 4
WINDOW = 512
"""Tokens that a perplexity sees at a time."""


def default_text(part: Literal["calibration", "held out"]) -> str:
    """One part of the text; they share no topic."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(
        topics[name]
        for index, name in enumerate(sorted(topics))
        if (index % _HELD_OUT_EVERY == 0) == (part == "held out")
    )


def windows_of(tokenizer: Tokenizer, text: str, max_tokens: int) -> list[list[int]]:
    """The text's first `max_tokens` tokens in windows of 512, the last one dropped when it is short, unless it is the only one."""
    ids = tokenizer.encode(text)[:max_tokens]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    return [window for window in windows if len(window) == WINDOW] or windows[:1]
