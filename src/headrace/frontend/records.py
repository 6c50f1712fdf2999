"""Timelines of the last requests: recorded, looked up for clients, and dumped to files for operators.

Owns the lookup, and when a file is written. What is recorded, and the format of the files, is in `timeline`. Runs in the
tokenizer manager's event loop.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from headrace.config.server_args import ServerArgs
from headrace.errors import ExecutionError, NotFoundError, RequestError
from headrace.frontend.request_state import CallState
from headrace.frontend.sample_table import SampleTable
from headrace.frontend.tenants import NOBODY, Caller
from headrace.messages.weights import (
    ContinueGeneration,
    PauseGeneration,
    ReleaseMemory,
    ResumeMemory,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensors,
    WeightOperation,
)
from headrace.metrics.timeline import Note, Timeline, Timelines, described, write_crash_dump, write_dump


class Records:
    """See the module docstring. timelines: of the samples in `table`, and of the last ones that ended. clock: in seconds."""

    def __init__(self, args: ServerArgs, table: SampleTable, timelines: Timelines, clock: Callable[[], float]) -> None:
        self._args = args
        self._table = table
        self._timelines = timelines
        self._clock = clock

    def begin(self, call: CallState, traceparent: str) -> None:
        """Start the timelines of a call. traceparent: W3C trace context of the caller's span."""
        arrived_unix_s = time.time()
        for sample in call.samples:
            sample.timeline = Timeline(
                sample.rid,
                sample.shown_id,
                call.tenant.name,
                call.created_s,
                arrived_unix_s,
                traceparent=traceparent,
                stream=call.stream,
                scope=call.tenant.scope,
                owner=call.owner,
            )
            self._timelines.add(sample.timeline)

    def note_operation(self, operation: WeightOperation) -> None:
        """Add an operation to the timelines of all live samples."""
        kind = _note_of(operation)
        if kind is None:
            return
        now_s = self._clock()
        for sample in self._table.samples.values():
            sample.note(kind, now_s)

    def timelines(self, rid: str, caller: Caller = NOBODY) -> list[dict[str, Any]]:
        """Timelines of the sample `rid`, or of all samples of the call with that rid; see `Timeline`.

        caller: sees its own samples only; an admin sees all. Raises NotFoundError.
        """
        found = self._timelines.find(rid, None if caller.is_admin else caller.owner)
        if not found:
            kept = self._args.timeline_requests
            raise NotFoundError(f"there is no request {rid[:100]!r} among the last {kept}", "rid", "request_not_found")
        for timeline in found:
            if (sample := self._table.samples.get(timeline.rid)) is not None:
                sample.write_timeline()
        return [timeline.describe() for timeline in found]

    def latest(self, limit: int, caller: Caller = NOBODY) -> list[dict[str, Any]]:
        """The last `limit` samples without their events and with their age, see `Timelines.latest`. caller: as for `timelines`."""
        now_s = self._clock()
        found = self._timelines.latest(limit, None if caller.is_admin else caller.owner)
        for timeline in found:
            if (sample := self._table.samples.get(timeline.rid)) is not None:
                sample.write_timeline()
        return [timeline.summary() | {"age_s": timeline.age_s(now_s)} for timeline in found]

    async def dump(self) -> tuple[str, int]:
        """Write the last requests to a file in --dump-requests-dir. Returns its name and their number. Raises RequestError, ExecutionError."""
        folder = self._args.dump_requests_dir
        if folder is None:
            raise RequestError("there is no folder to write to: start the server with --dump-requests-dir")
        self._write_timelines()
        requests = described(self._timelines, self._args.crash_dump_prompts)
        try:
            path = await asyncio.to_thread(write_dump, folder, "requests", "requested", requests)
        except OSError as error:
            raise ExecutionError(f"the requests could not be written: {error.strerror}") from None
        return path.name, len(requests)

    def crash_dump(self, message: str) -> None:
        """Write the last requests to a file in --crash-dump-dir, if that is set. message: what has crashed."""
        if self._args.crash_dump_dir is not None:
            self._write_timelines()
            write_crash_dump(self._args.crash_dump_dir, message, self._timelines, self._args.crash_dump_prompts)

    def _write_timelines(self) -> None:
        for sample in self._table.samples.values():
            sample.write_timeline()


def _note_of(operation: WeightOperation) -> Note | None:
    """The event of an operation in timelines; None = it has none."""
    match operation:
        case PauseGeneration():
            return "paused"
        case ContinueGeneration():
            return "continued"
        case UpdateFromDisk() | UpdateFromTensors() | UpdateFromDistributed():
            return "weights_updated"
        case ReleaseMemory():
            return "memory_released"
        case ResumeMemory():
            return "memory_resumed"
        case _:
            return None
