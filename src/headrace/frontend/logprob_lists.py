"""Growing lists of a sample's logprobs, converted from the engine's arrays to the form of replies.

Owned by a `ReqState`; the prompt's are shared by the samples of a prompt. Used in the tokenizer manager's event loop only.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.frontend.sample_update import LogprobItem, LogprobRow, TokenLogprobs
from headrace.messages.outputs import LogprobBlock
from headrace.messages.packing import unpack_float32, unpack_int32

TokenText = Callable[[int], str | None]
"""Text of a token for logprob lists, or None if it is not requested."""


@dataclass(slots=True)
class LogprobLists:
    """Logprobs of consecutive tokens, an entry per token in each list. top, picked: empty rows if they were not requested."""

    tokens: list[LogprobItem] = field(default_factory=list)
    top: list[LogprobRow] = field(default_factory=list)
    picked: list[LogprobRow] = field(default_factory=list)

    def since(self, start: int, has_top: bool, has_picked: bool) -> TokenLogprobs:
        """The logprobs of the tokens from `start` on."""
        top = self.top[start:] if has_top else None
        return TokenLogprobs(self.tokens[start:], top, self.picked[start:] if has_picked else None)

    def add_unknown(self, token_id: int, text: TokenText) -> None:
        """Add a token without a logprob: the first of the prompt."""
        self.tokens.append((None, token_id, text(token_id)))
        self.top.append(None)
        self.picked.append(None)

    def extend(self, block: LogprobBlock, picked_ids: tuple[int, ...], text: TokenText) -> None:
        """Append a block. Raises ValueError when its arrays do not fit together."""
        ids = unpack_int32(block.token_ids)
        if not ids:
            return
        values = unpack_float32(block.values)
        self.tokens += [(_finite(v), i, text(i)) for v, i in zip(values, ids, strict=True)]
        top_ids, top_values = unpack_int32(block.top_ids), unpack_float32(block.top_values)
        width = len(top_ids) // len(ids)
        items = [(_finite(v), i, text(i)) for v, i in zip(top_values, top_ids, strict=True)]
        self.top += [items[row * width : (row + 1) * width] for row in range(len(ids))]
        picked = unpack_float32(block.picked)
        if len(picked) != len(picked_ids) * len(ids):
            raise ValueError(f"{len(picked)} picked logprobs for {len(ids)} tokens of {len(picked_ids)} ids")
        width = len(picked_ids)
        for row in range(len(ids)):
            row_values = picked[row * width : (row + 1) * width]
            self.picked.append([(_finite(v), i, text(i)) for v, i in zip(row_values, picked_ids, strict=True)])


def _finite(value: float) -> float | None:
    """`value`, or None for NaN and infinity, which JSON does not have and which mean that there is no logprob."""
    return value if math.isfinite(value) else None
