"""Control operations (`messages.operations`) as methods, the same on `Engine` and `Runtime`.

Owns their names, defaults and results. The subclass reaches the engine: in this process, or by the operation's route. Runs in the caller's
thread. Every method raises ExecutionError if the engine is gone, and RequestError for invalid arguments.
"""

from abc import ABC, abstractmethod
from typing import Any, Literal, TypeVar

import msgspec

from headrace.messages.cache_tree import CacheTree
from headrace.messages.field_errors import field_error
from headrace.messages.operations import (
    CACHE_TREE,
    CONFIGURE_LOGGING,
    DUMP_EXPERTS,
    DUMP_REQUESTS,
    FREEZE_GC,
    RANKS,
    SET_INTERNAL_STATE,
    SLOW_DOWN,
    START_EXPERTS,
    START_PROFILE,
    STOP_EXPERTS,
    STOP_PROFILE,
    CacheTreeQuery,
    ConfigureLoggingBody,
    LimitChanges,
    LogLevel,
    Nothing,
    Operation,
    SetInternalStateBody,
    SlowDownBody,
    StartProfileBody,
)

T = TypeVar("T")


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

    def start_expert_distribution_record(self) -> None:
        """Start counting the tokens that each layer of a mixture sends to each expert. Raises RequestError."""
        self._ask(START_EXPERTS, Nothing())

    def stop_expert_distribution_record(self) -> None:
        """Stop counting; the counts can still be dumped. Raises RequestError."""
        self._ask(STOP_EXPERTS, Nothing())

    def dump_expert_distribution_record(self) -> dict[str, Any]:
        """Return the reply of the route, with the tokens per expert under `layers`, and reset the counts. Raises RequestError."""
        return dict(self._ask(DUMP_EXPERTS, Nothing()))

    def configure_logging(
        self, level: LogLevel | None = None, log_requests: bool | None = None, log_requests_level: int | None = None
    ) -> dict[str, Any]:
        """Change what is logged, in every process; None = unchanged. Returns the current settings. Raises RequestError."""
        asked = {"level": level, "log_requests": log_requests, "log_requests_level": log_requests_level}
        now = self._ask(CONFIGURE_LOGGING, _converted(asked, ConfigureLoggingBody))
        return {name: now[name] for name in asked}

    def freeze_gc(self) -> None:
        """Exclude all objects that exist now from garbage collection, in every process."""
        self._ask(FREEZE_GC, Nothing())

    def set_internal_state(self, **limits: float) -> dict[str, Any]:
        """Change limits (fields of `LimitChanges`) in every replica. Returns the current limits. Raises RequestError."""
        request = SetInternalStateBody(_converted(limits, LimitChanges))
        return dict(self._ask(SET_INTERNAL_STATE, request)["server_args"])

    def dump_requests(self) -> str:
        """Write a dump of the most recent requests to `dump_requests_dir` and return the file's name. Raises RequestError, ExecutionError."""
        return str(self._ask(DUMP_REQUESTS, Nothing())["file"])


def _converted(fields: dict[str, Any], kind: type[T]) -> T:
    """Raises RequestError that names the field."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise field_error(str(error), kind) from None
