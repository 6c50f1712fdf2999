"""Control operations (`messages.operations`) as methods, the same on `Engine` and `Runtime`.

Owns their names, defaults and results. The subclass reaches the engine: in this process, or by the operation's route. Runs in the caller's
thread. Every method raises ExecutionError if the engine is gone, and RequestError for invalid arguments.
"""

from abc import ABC, abstractmethod
from typing import Any, Literal

import msgspec

from headrace.messages.cache_tree import CacheTree
from headrace.messages.operations import (
    CACHE_TREE,
    RANKS,
    SLOW_DOWN,
    START_PROFILE,
    STOP_PROFILE,
    CacheTreeQuery,
    Nothing,
    Operation,
    SlowDownBody,
    StartProfileBody,
)


class Operations(ABC):
    """See the module docstring."""

    @abstractmethod
    def _ask(self, operation: Operation[Any, Any], request: msgspec.Struct) -> Any:
        """What the operation's route replies with."""

    def cache_trees(self, max_depth: int = 8, max_nodes: int = 200) -> list[CacheTree]:
        """The outline of each replica's prefix cache: how its tree branches, without any text. Raises RequestError."""
        found = self._ask(CACHE_TREE, CacheTreeQuery(max_depth, max_nodes))
        return msgspec.convert(found["data"], list[CacheTree])

    def get_ranks(self) -> list[dict[str, Any]]:
        """The process of each rank of each replica, and its bytes: resident, of weights, of the KV cache."""
        return list(self._ask(RANKS, Nothing())["data"])

    def slow_down(self, forward_sleep_time: float | None = None) -> str:
        """Let every scheduler sleep so many seconds after each step, to see how load behaves on a slower engine; None = full speed.

        Returns a line for the operator. Raises RequestError.
        """
        return str(self._ask(SLOW_DOWN, SlowDownBody(forward_sleep_time))["message"])

    def start_profile(
        self, output_name: str = "", num_steps: int = 0, activities: tuple[Literal["CPU", "GPU"], ...] = ("CPU",)
    ) -> str:
        """Record the worker's steps to a file below `profile_dir`. Returns a line for the operator.

        num_steps: stop after this many steps; 0 = at `stop_profile`. Raises RequestError.
        """
        request = StartProfileBody(output_name or None, num_steps or None, activities)
        return str(self._ask(START_PROFILE, request)["message"])

    def stop_profile(self) -> str:
        """Stop and write the trace. Returns a line with the file's name. Raises RequestError."""
        return str(self._ask(STOP_PROFILE, Nothing())["message"])
