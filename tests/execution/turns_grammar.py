"""A grammar by arithmetic, for tests."""

import threading
from typing import Any

import numpy as np
from msgspec.structs import replace
from runner_harness import GREEDY, VOCAB_SIZE

from headrace.errors import ExecutionError
from headrace.messages.grammar import GrammarSpec, MaskWords
from headrace.sampling.params import ResolvedSamplingParams


class Turns:
    """Token n + 1 has another remainder by `modulus` than token n. gate: masks wait for it. broken: the token before which it fails."""

    def __init__(self, modulus: int, gate: threading.Event | None = None, broken: int = -1) -> None:
        self.modulus, self.gate, self.broken = modulus, gate, broken
        self.tokens: list[int] = []
        self.is_complete = False

    def start(self) -> "Turns":
        return Turns(self.modulus, self.gate, self.broken)

    def allowed(self, tokens: list[int]) -> np.ndarray:
        """bool[vocab]"""
        last = tokens[-1] if tokens else 0
        return np.arange(VOCAB_SIZE) % self.modulus != last % self.modulus

    def fill(self, words: MaskWords) -> None:
        if self.gate is not None:
            self.gate.wait()
        if len(self.tokens) == self.broken:
            raise ExecutionError("the grammar is broken")
        bits = np.zeros(len(words) * 32, np.bool_)
        bits[:VOCAB_SIZE] = self.allowed(self.tokens)
        words[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> None:
        if not self.allowed(self.tokens)[token_id]:
            raise ExecutionError(f"{token_id} is not allowed")
        self.tokens.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= len(self.tokens)
        del self.tokens[-num_tokens:]


def under(grammar: Turns, sampling: ResolvedSamplingParams = GREEDY) -> dict[str, Any]:
    """What makes a new sequence a constrained one."""
    return {"grammar": grammar, "sampling": replace(sampling, grammar=GrammarSpec("regex", "", "regex"))}
