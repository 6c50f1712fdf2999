"""The tokens that begin and end a model's reasoning, for limits of it. Pure functions; any thread."""

from collections.abc import Callable
from typing import NamedTuple

from headrace.parsers.registry import OutputFormat


class ReasoningTokens(NamedTuple):
    """end_id: the token that ends reasoning. end_ids: all that do. begins: sequences of tokens, of which each begins it."""

    end_id: int
    end_ids: tuple[int, ...]
    begins: tuple[tuple[int, ...], ...]


def reasoning_tokens(format: OutputFormat, encode: Callable[[str], list[int]]) -> ReasoningTokens | None:
    """Those of a format; None if no single token ends its reasoning.

    encode: the ids of a text in which the texts of special tokens are these tokens, without bos.
    """
    table = format.reasoning
    if table is None and format.table is not None:
        table = format.table.reasoning
    if table is None:
        return None
    end_id = next((format.special[text] for text in table.closes if text in format.special), None)
    if end_id is None:
        return None
    begins = dict.fromkeys(tuple(encode(text)) for text in table.opens)
    return ReasoningTokens(end_id, tuple(sorted(format.reasoning_end_ids)), tuple(filter(None, begins)))
