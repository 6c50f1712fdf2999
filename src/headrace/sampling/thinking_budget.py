"""A limit of reasoning: after so many tokens of it, the token that ends it is forced, once.

Owns the parameter (`ThinkingBudget`) and what it means for a sequence (`ThinkingLimit`), which depends on nothing but the sequence's own outputs,
so that a retracted or replayed sequence goes on with the same tokens. No torch; any process.
"""

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import RequestError

MAX_SEQUENCES = 16
MAX_SEQUENCE_TOKENS = 64


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """At most `num_tokens` tokens of reasoning, then `end_id` if nothing else forbids it.

    end_ids: other tokens that end reasoning. begins: sequences of token ids, of which each begins reasoning. is_open: the prompt ends within it.
    Tokens that begin and end reasoning are not counted.
    """

    num_tokens: int
    end_id: int
    end_ids: tuple[int, ...] = ()
    begins: tuple[tuple[int, ...], ...] = ()
    is_open: bool = False

    def check(self, vocab_size: int) -> None:
        """Raises RequestError for values out of bounds."""
        name = "thinking_budget"
        if self.num_tokens < 0:
            raise RequestError(f"{name}.num_tokens must be at least 0, got {self.num_tokens}", name)
        sizes = [len(self.end_ids), *map(len, self.begins)]
        if len(self.begins) > MAX_SEQUENCES or max(sizes) > MAX_SEQUENCE_TOKENS or not all(self.begins):
            raise RequestError(
                f"{name}: at most {MAX_SEQUENCES} sequences, with 1 to {MAX_SEQUENCE_TOKENS} ids each", name
            )
        for token_id in (self.end_id, *self.end_ids, *(token_id for begin in self.begins for token_id in begin)):
            if not 0 <= token_id < vocab_size:
                raise RequestError(f"{name}: {token_id} is not a token id (0 to {vocab_size - 1})", name)


class ThinkingLimit:
    """Where one sequence stands with its budget."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._ends = {budget.end_id, *budget.end_ids}
        self.rewind()

    def rewind(self) -> None:
        """Forget what was read of the outputs."""
        self._num_read = 0
        self._num_tokens = 0
        self._is_open = self._budget.is_open
        self._is_spent = False

    def is_due(self, outputs: npt.NDArray[np.int32]) -> bool:
        """Whether reasoning is to end now. outputs: int32[n], all so far, which begin with those of the last call unless `rewind` was called."""
        for end in range(self._num_read + 1, len(outputs) + 1):
            self._read(outputs, end)
        self._num_read = len(outputs)
        return self._is_over

    @property
    def _is_over(self) -> bool:
        return self._is_open and not self._is_spent and self._num_tokens >= self._budget.num_tokens

    def _read(self, outputs: npt.NDArray[np.int32], end: int) -> None:
        """Read the output before index `end`."""
        token_id = int(outputs[end - 1])
        if not self._is_open:
            self._is_open = any(
                token_id == begin[-1] and tuple(outputs[max(0, end - len(begin)) : end].tolist()) == begin
                for begin in self._budget.begins
            )
        elif token_id in self._ends:
            self._is_spent = self._is_over
            self._is_open = False
        else:
            self._num_tokens += 1
