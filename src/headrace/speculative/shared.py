"""What sequences have said lately, by namespace: samples of one prompt, and answers to similar questions, often say the same."""

from array import array
from collections import OrderedDict

from headrace.speculative.history import LONGEST, History

SHARED_AT_A_TIME = 32
"""A sequence tells the others when it has said so many tokens more."""


class SharedOutputs:
    """The last `most_tokens` tokens that sequences have told, of the namespaces that were used last. A namespace knows only its own."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._num_tokens = 0
        self._by_namespace: OrderedDict[str, History] = OrderedDict()

    def add(self, namespace: str, tokens: "array[int]") -> None:
        """Tokens that a sequence of this namespace has said, one after the other."""
        history = self._by_namespace.get(namespace)
        if history is None:
            history = self._by_namespace[namespace] = History(array("i"), (LONGEST,))
        self._by_namespace.move_to_end(namespace)
        for token_id in tokens:
            history.append(token_id)
        self._num_tokens += len(tokens)
        while self._num_tokens > self._most_tokens:
            self._forget()

    def continuation(self, namespace: str, last: "array[int]", most: int) -> list[int]:
        """Up to `most` tokens from where the last `LONGEST` of these tokens were said last, in this namespace."""
        history = self._by_namespace.get(namespace)
        return [] if history is None else history.continuation(last, most, (LONGEST,))

    def _forget(self) -> None:
        """All of the namespace that was used longest ago, or the older half of the only one."""
        namespace, history = self._by_namespace.popitem(last=False)
        self._num_tokens -= len(history.tokens)
        if not self._by_namespace:
            kept = history.tokens[len(history.tokens) - self._most_tokens // 2 :]
            self._by_namespace[namespace] = History(kept, (LONGEST,))
            self._num_tokens = len(kept)
