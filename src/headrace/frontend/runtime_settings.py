"""The few settings that may change while the server runs, and what every process has been told of them.

Owns their values and bounds: the log level, the scheduler's limits (/set_internal_state), frozen garbage collection (/freeze_gc). A process that is
started again is told what differs from its options, before it gets a request. Does not own what the request log shows. Used by the
tokenizer manager, in its event loop.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from headrace.config.server_args import ServerArgs
from headrace.errors import RequestError
from headrace.garbage import freeze
from headrace.log import get_logger, set_level
from headrace.messages.channel import Message, Sender
from headrace.messages.control import ConfigureLoggingReq, FreezeGCReq, ReadyInfo, SetLimitsReq

logger = get_logger(__name__)

LogLevel = Literal["debug", "info", "warning", "error"]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class LimitChanges(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options that may change at run time; None = as it is. Their meaning is that of the option of the same name."""

    max_running_requests: Count | None = None
    max_queued_requests: Count | None = None
    chunked_prefill_size: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    schedule_conservativeness: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)] | None = None


class Limits(msgspec.Struct, frozen=True):
    """What holds now."""

    max_running_requests: int
    max_queued_requests: int
    chunked_prefill_size: int
    schedule_conservativeness: float


class RuntimeSettings:
    """See the module's text. to_schedulers: all that are up. on_limits: told what holds when the limits have changed."""

    def __init__(
        self,
        args: ServerArgs,
        ready: ReadyInfo,
        to_schedulers: Callable[[Message], None],
        to_detokenizer: Callable[[Message], None],
        on_limits: Callable[[Limits], None],
    ) -> None:
        self._args = args
        self._most_running = ready.max_running_requests
        self._to_schedulers = to_schedulers
        self._to_detokenizer = to_detokenizer
        self._on_limits = on_limits
        self._is_frozen = False
        self.log_level: LogLevel = args.log_level
        self._first = Limits(
            ready.max_running_requests,
            args.max_queued_requests,
            ready.chunked_prefill_size,
            args.schedule_conservativeness,
        )
        self.limits = self._first

    def set_log_level(self, level: LogLevel) -> None:
        """In every process."""
        self.log_level = level
        set_level(level)
        self._tell_all(ConfigureLoggingReq(level))

    def freeze_gc(self) -> None:
        """Whatever lives now in any process is never looked at again by its garbage collector."""
        self._is_frozen = True
        frozen = freeze()
        logger.info("%d objects are left out of garbage collection", frozen)
        self._tell_all(FreezeGCReq())

    def change_limits(self, changes: LimitChanges) -> Limits:
        """What holds now, in every replica. Raises RequestError, and then nothing has changed."""
        given = {name: value for name, value in msgspec.structs.asdict(changes).items() if value is not None}
        if not given:
            names = ", ".join(LimitChanges.__struct_fields__)
            raise RequestError(f"name at least one value to change: {names}", "server_args")
        running = given.get("max_running_requests", 1)
        if running > self._most_running:
            raise RequestError(
                f"max_running_requests is {running}; the server was started with room for {self._most_running}",
                "max_running_requests",
            )
        if given.get("chunked_prefill_size") == 0:
            raise RequestError("chunked_prefill_size must be -1 or at least 1, got 0", "chunked_prefill_size")
        if (size := given.get("chunked_prefill_size")) is not None:
            most = self._args.max_prefill_tokens
            given["chunked_prefill_size"] = most if size == -1 else min(size, most)
        self.limits = msgspec.structs.replace(self.limits, **given)
        self._on_limits(self.limits)
        self._to_schedulers(self._limits_message())
        logger.info("limits changed: %s", ", ".join(f"{name}={value}" for name, value in given.items()))
        return self.limits

    def shown(self) -> dict[str, Any]:
        """For /server_info: options that have changed."""
        now, first = msgspec.structs.asdict(self.limits), msgspec.structs.asdict(self._first)
        changed = {name: value for name, value in now.items() if value != first[name]}
        return changed | ({"log_level": self.log_level} if self.log_level != self._args.log_level else {})

    def tell_scheduler(self, sender: Sender) -> None:
        """To a scheduler's new life: what differs from its options."""
        self._tell_process(sender.send)
        if self.limits != self._first:
            sender.send(self._limits_message())

    def tell_detokenizer(self) -> None:
        """To the detokenizer's new life."""
        self._tell_process(self._to_detokenizer)

    def _tell_process(self, send: Callable[[Message], None]) -> None:
        if self.log_level != self._args.log_level:
            send(ConfigureLoggingReq(self.log_level))
        if self._is_frozen:
            send(FreezeGCReq())

    def _tell_all(self, message: Message) -> None:
        self._to_schedulers(message)
        self._to_detokenizer(message)

    def _limits_message(self) -> SetLimitsReq:
        limits = self.limits
        most_queued = self._most_running * self._args.dp_size + limits.max_queued_requests
        return SetLimitsReq(
            limits.max_running_requests, most_queued, limits.chunked_prefill_size, limits.schedule_conservativeness
        )
