"""The live samples of each prompt with several (`n` > 1), which are prefilled once. Runs in the scheduler's thread."""

from headrace.scheduler.request import Req


class SampleGroups:
    """How many samples of each prompt are live, and what was cached of the prompt before the first of them ran.

    A group is known while it has live samples. Requests without a group are ignored.
    """

    def __init__(self) -> None:
        self._num_live: dict[str, int] = {}
        self._cached_tokens: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._num_live)

    def arrive(self, req: Req) -> None:
        """A sample becomes live."""
        if group := req.asked.group:
            self._num_live[group] = self._num_live.get(group, 0) + 1

    def leave(self, req: Req) -> None:
        """A live sample has ended."""
        group = req.asked.group
        if not group:
            return
        self._num_live[group] -= 1
        if not self._num_live[group]:
            del self._num_live[group]
            self._cached_tokens.pop(group, None)

    def begin(self, req: Req, cached_tokens: int) -> int:
        """A sample takes part in a step for the first time, with `cached_tokens` prompt tokens from the cache.

        Returns how many of them were cached before its group began: later samples hit the KV that the first one has just computed.
        """
        group = req.asked.group
        return self._cached_tokens.setdefault(group, cached_tokens) if group else cached_tokens

    def has_begun(self, req: Req) -> bool:
        """Whether a sample of its group has taken part in a step."""
        return req.asked.group in self._cached_tokens
