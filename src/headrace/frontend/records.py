"""What is known of requests afterwards: timelines of the last ones, looked up and dumped to files, and the lines of --log-requests.

Owns the lookup, when a file is written, and what a line shows. What is recorded, and the format of the files, is in `timeline`.

```
 level 0   counts and times
       1   also the sampling parameters
       2   also the first 2,048 characters of the input and of the output
       3   also all of the input and the output
```
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.config.server_args import ServerArgs
from headrace.errors import ExecutionError, NotFoundError, RequestError
from headrace.frontend.inputs import PromptInput
from headrace.frontend.request_state import CallState, ReqState
from headrace.frontend.sample_table import SampleTable
from headrace.frontend.tenants import ANONYMOUS, Caller
from headrace.log import as_words, get_logger, with_fields
from headrace.messages.requests import PromptContent
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

logger = get_logger(__name__)

MAX_CHARACTERS = 2048
"""Most characters of an input, and of an output, at level 2."""


@dataclass(eq=False)
class RequestLog:
    """enabled, level: as --log-requests and --log-requests-level, until they are changed."""

    enabled: bool
    level: int

    def input_of(self, given: PromptInput, content: PromptContent) -> str:
        """The text of a prompt for the log line; empty if it is not logged. Call it once for all samples: it may be long."""
        if not self.enabled or self.level < 2:
            return ""
        if given.embeds is not None:
            return f"{content.num_tokens} embeddings"
        limit = MAX_CHARACTERS if self.level == 2 else None
        # An id takes at least two characters.
        return _cut(given.text, limit) if given.text is not None else repr(content.ids(stop=limit))[:limit]

    def write(self, sample: ReqState) -> None:
        assert sample.finish is not None
        if not self.enabled:
            return
        queue_s, ttft_s = sample.stats.queue_time_s, max(0.0, sample.first_token_s - sample.created_s)
        e2e_s = sample.finished_s - sample.created_s
        who: dict[str, object] = {"rid": sample.timeline.own_rid, "key": sample.call.tenant.name or "-"}
        counts: dict[str, object] = {
            "reason": sample.finish.type,
            "prompt_tokens": sample.num_prompt_tokens,
            "cached_tokens": sample.stats.cached_tokens,
            "completion_tokens": len(sample.output_ids),
        }
        events: dict[str, object] = {
            "retractions": sample.stats.num_retractions,
            "replays": max(0, sample.num_sends - 1),
            "chunks": sum(event.kind == "chunk" for event in sample.stats.events),
        }
        details: dict[str, object] = {}
        if self.level >= 1 and sample.request is not None:
            details["sampling"] = sample.request.task.described()
        if self.level >= 2:
            details["prompt"] = sample.logged_input
            details["text"] = _cut(sample.text, MAX_CHARACTERS if self.level == 2 else None)
        logger.info(
            "finished %s %s queue=%.3fs ttft=%.3fs e2e=%.3fs %s%s",
            as_words(who),
            as_words(counts),
            queue_s,
            ttft_s,
            e2e_s,
            as_words(events),
            "".join(f" {name}={text}" for name, text in details.items()),
            extra=with_fields(who | counts | {"queue_s": queue_s, "ttft_s": ttft_s, "e2e_s": e2e_s} | events | details),
        )


def _cut(text: str, limit: int | None) -> str:
    if limit is None or len(text) <= limit:
        return repr(text)
    return f"{text[:limit]!r}... ({len(text)} characters)"


class Records:
    """timelines: of the samples in `table`, and of the last ones that ended. clock: in seconds. token_text: of an id, None = it has none."""

    def __init__(
        self,
        args: ServerArgs,
        table: SampleTable,
        timelines: Timelines,
        clock: Callable[[], float],
        token_text: Callable[[int], str | None] = str,
    ) -> None:
        self._args = args
        self._table = table
        self._timelines = timelines
        self._clock = clock
        self._token_text = token_text

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
        kind = _NOTES.get(type(operation))
        if kind is None:
            return
        now_s = self._clock()
        for sample in self._table.samples.values():
            sample.note(kind, now_s)

    async def timelines(self, rid: str, caller: Caller = ANONYMOUS) -> list[dict[str, Any]]:
        """Timelines of the sample `rid`, or of all samples of the call with that rid; see `Timeline`.

        caller: sees its own samples only; an admin sees all. Raises NotFoundError.
        """
        found = self._timelines.find(rid, None if caller.is_admin else caller.owner)
        if not found:
            kept = self._args.timeline_requests
            raise NotFoundError(f"there is no request {rid[:100]!r} among the last {kept}", "rid", "request_not_found")
        described = [timeline.describe() for timeline in self._up_to_date(found)]
        for miss in (one["cache_miss"] for one in described if one["cache_miss"] is not None):
            texts = {"token": self._token_text(miss["token_id"])}
            if miss["cached_id"] >= 0:
                texts["cached"] = self._token_text(miss["cached_id"])
            miss |= texts
        return described

    async def latest(self, limit: int, caller: Caller = ANONYMOUS) -> list[dict[str, Any]]:
        """The last `limit` samples without their events and with their age, see `Timelines.latest`. caller: as for `timelines`."""
        now_s = self._clock()
        found = self._timelines.latest(limit, None if caller.is_admin else caller.owner)
        return [timeline.summary() | {"age_s": timeline.age_s(now_s)} for timeline in self._up_to_date(found)]

    async def dump(self) -> tuple[str, int]:
        """Write the last requests to a file in --dump-requests-dir. Returns its name and their number. Raises RequestError, ExecutionError."""
        folder = self._args.dump_requests_dir
        if folder is None:
            raise RequestError("there is no folder to write to: start the server with --dump-requests-dir")
        requests = described(self._up_to_date(self._timelines), self._args.crash_dump_prompts)
        try:
            path = await asyncio.to_thread(write_dump, folder, "requests", "requested", requests)
        except OSError as error:
            raise ExecutionError(f"the requests could not be written: {error.strerror}") from None
        return path.name, len(requests)

    def crash_dump(self, message: str) -> None:
        """Write the last requests to a file in --crash-dump-dir, if that is set. message: what has crashed."""
        if self._args.crash_dump_dir is not None:
            timelines = self._up_to_date(self._timelines)
            write_crash_dump(self._args.crash_dump_dir, message, timelines, self._args.crash_dump_prompts)

    def _up_to_date(self, timelines: Iterable[Timeline]) -> Iterator[Timeline]:
        for timeline in timelines:
            if (sample := self._table.samples.get(timeline.rid)) is not None:
                sample.write_timeline()
            yield timeline


_NOTES: dict[type[WeightOperation], Note] = {
    PauseGeneration: "paused",
    ContinueGeneration: "continued",
    UpdateFromDisk: "weights_updated",
    UpdateFromTensors: "weights_updated",
    UpdateFromDistributed: "weights_updated",
    ReleaseMemory: "memory_released",
    ResumeMemory: "memory_resumed",
}
"""The events of operations in timelines; the others have none."""
