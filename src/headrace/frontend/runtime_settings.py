"""The few settings that may change while the server runs, and their distribution to all processes.

Owns their values and bounds: the log level, the scheduler's limits (/set_internal_state), frozen garbage collection (/freeze_gc). A process
that is restarted gets the changed settings before any request.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.config.server_args import ServerArgs
from headrace.errors import RequestError
from headrace.frontend.records import RequestLog
from headrace.frontend.sample_table import SampleQueue
from headrace.garbage import freeze
from headrace.log import get_logger, set_level
from headrace.messages.channel import Message, Sender
from headrace.messages.control import ConfigureLoggingReq, FreezeGCReq, ReadyInfo, SetLimitsReq
from headrace.messages.operations import LimitChanges, LogLevel

logger = get_logger(__name__)


class Limits(msgspec.Struct, frozen=True):
    """The current limits. max_step_ms: -1 = no bound."""

    max_running_requests: int
    max_queued_requests: int
    chunked_prefill_size: int
    schedule_conservativeness: float
    max_step_ms: int


@dataclass(eq=False)
class RuntimeSettings:
    """check: raises while the engine takes no control calls. to_schedulers: reaches all that are up. queue, request_log: changed in this
    process.
    """

    args: ServerArgs
    ready: ReadyInfo
    check: Callable[[], None]
    to_schedulers: Callable[[Message], None]
    to_detokenizer: Callable[[Message], None]
    queue: SampleQueue
    request_log: RequestLog

    def __post_init__(self) -> None:
        args, ready = self.args, self.ready
        self._is_frozen = False
        self.log_level: LogLevel = args.log_level
        self._first = Limits(
            ready.max_running_requests,
            args.max_queued_requests,
            ready.chunked_prefill_size,
            args.schedule_conservativeness,
            -1 if ready.max_step_ms is None else ready.max_step_ms,
        )
        self.limits = self._first

    def configure_logging(
        self, level: LogLevel | None = None, log_requests: bool | None = None, log_requests_level: int | None = None
    ) -> dict[str, Any]:
        """Change what is logged, in every process; None = unchanged. Returns the current settings.

        Turning log_requests off also resets its level to 0. Raises RequestError for a level above 0 without log_requests.
        """
        log = self.request_log
        enabled = log.enabled if log_requests is None else log_requests
        if log_requests_level is None:
            # Off resets the level, so that turning it on again does not log prompts unless that is requested.
            requests_level = log.level if enabled else 0
        else:
            requests_level = log_requests_level
        if requests_level and not enabled:
            raise RequestError(
                f"log_requests_level {requests_level} has no effect while log_requests is off: turn both on",
                "log_requests_level",
            )
        log.enabled, log.level = enabled, requests_level
        if level is not None:
            self.log_level = level
            set_level(level)
            self._tell_all(ConfigureLoggingReq(level))
        return {"level": self.log_level, "log_requests": enabled, "log_requests_level": requests_level}

    def freeze_gc(self) -> None:
        """Exclude all objects that exist now from garbage collection, in every process. Raises CapacityError, ExecutionError."""
        self.check()
        self._is_frozen = True
        frozen = freeze()
        logger.info("excluded %d objects from garbage collection", frozen)
        self._tell_all(FreezeGCReq())

    def change_limits(self, changes: LimitChanges) -> Limits:
        """Change limits in every replica, and in those started later. Returns the current limits.

        Raises RequestError, CapacityError; then nothing has changed.
        """
        self.check()
        given = {name: value for name, value in msgspec.structs.asdict(changes).items() if value is not None}
        if not given:
            names = ", ".join(LimitChanges.__struct_fields__)
            raise RequestError(f"name at least one value to change: {names}", "server_args")
        running = given.get("max_running_requests", 1)
        if running > self.ready.max_running_requests:
            raise RequestError(
                f"max_running_requests is {running}, but the server was started with {self.ready.max_running_requests}",
                "max_running_requests",
            )
        for name in ("chunked_prefill_size", "max_step_ms"):
            if given.get(name) == 0:
                raise RequestError(f"{name} must be -1 or at least 1, got 0", name)
        if given.get("max_step_ms", -1) > 0 and self._first.max_step_ms < 0:
            # Where tokens depend on how prompts are cut, the server starts without a bound.
            raise RequestError(
                "max_step_ms cannot be set: the server was started without a bound on the time of a step", "max_step_ms"
            )
        if (size := given.get("chunked_prefill_size")) is not None:
            most = self.args.max_prefill_tokens
            given["chunked_prefill_size"] = most if size == -1 else min(size, most)
        self.limits = msgspec.structs.replace(self.limits, **given)
        self.queue.num_slots = self.limits.max_running_requests * self.args.num_replicas
        self.queue.max_waiting = self.limits.max_queued_requests
        self.to_schedulers(self._limits_message())
        logger.info("limits changed: %s", ", ".join(f"{name}={value}" for name, value in given.items()))
        return self.limits

    async def changed_options(self) -> dict[str, Any]:
        """Options changed since the start, with their current values."""
        now, first = msgspec.structs.asdict(self.limits), msgspec.structs.asdict(self._first)
        changed = {name: value for name, value in now.items() if value != first[name]}
        return changed | ({"log_level": self.log_level} if self.log_level != self.args.log_level else {})

    def tell_scheduler(self, sender: Sender) -> None:
        self._tell_process(sender.send)
        if self.limits != self._first:
            sender.send(self._limits_message())

    def tell_detokenizer(self) -> None:
        self._tell_process(self.to_detokenizer)

    def _tell_process(self, send: Callable[[Message], None]) -> None:
        if self.log_level != self.args.log_level:
            send(ConfigureLoggingReq(self.log_level))
        if self._is_frozen:
            send(FreezeGCReq())

    def _tell_all(self, message: Message) -> None:
        self.to_schedulers(message)
        self.to_detokenizer(message)

    def _limits_message(self) -> SetLimitsReq:
        limits = self.limits
        most_queued = self.ready.max_running_requests * self.args.num_replicas + limits.max_queued_requests
        return SetLimitsReq(
            limits.max_running_requests,
            most_queued,
            limits.chunked_prefill_size,
            limits.schedule_conservativeness,
            math.inf if limits.max_step_ms < 0 else limits.max_step_ms / 1000,
        )
