"""The one end of each sample: out of the table, counted, logged, its waiter woken.

Owns the order of these effects, and gives back what the sample held: its turn of a session, its adapter, its share of a replica's load.
Does not decide that a sample ends: its output does (`outputs`), or the way to the engine (`replay`), or its waiter leaves. Used by the
tokenizer manager, in its event loop only.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from headrace.frontend.replay import Balancer, leave_replica
from headrace.frontend.request_log import RequestLog
from headrace.frontend.request_state import ReqState
from headrace.frontend.sample_table import SampleTable
from headrace.frontend.sessions import Sessions
from headrace.frontend.timeline import Timeline, Timelines
from headrace.messages.outputs import WAITED_TOO_LONG, FinishReason
from headrace.metrics.catalog import Metrics

DEADLINE_STATUS = 408
"""Status of the scheduler's aborts of requests that ran out of time."""
NO_ROOM_STATUS = 503
"""Status of aborts of requests that waited too long, or found the scheduler's queue full."""


class SpanSink(Protocol):
    """Takes what happened to each sample, for traces."""

    def add(self, timeline: Timeline) -> None:
        """A sample has ended. Must not block."""


class Endings:
    """See the module's text. clock: seconds. balancer: None for one replica. spans: is told of every sample that ended."""

    def __init__(
        self,
        table: SampleTable,
        sessions: Sessions,
        timelines: Timelines,
        request_log: RequestLog,
        metrics: Metrics,
        clock: Callable[[], float],
        balancer: Balancer | None = None,
        spans: SpanSink | None = None,
    ) -> None:
        self.spans = spans
        self._table = table
        self._sessions = sessions
        self._timelines = timelines
        self._request_log = request_log
        self._metrics = metrics
        self._clock = clock
        self._balancer = balancer

    def end(self, sample: ReqState, finish: FinishReason) -> None:
        """End a sample, which no scheduler works on any more."""
        now_s = self._clock()
        if sample.turn is not None and finish.type != "abort" and not sample.call.abandoned:
            self._sessions.finish(sample.turn, sample.output_ids)
        if finish.status_code == DEADLINE_STATUS and sample.output_ids:
            # What there is when time is up is an answer, and no error.
            finish = msgspec.structs.replace(finish, status_code=0)
        if finish.status_code == NO_ROOM_STATUS:
            self._metrics.count_rejected("queue_timeout" if finish.message == WAITED_TOO_LONG else "queue_full")
            sample.retry_after_s = self._table.queue.retry_after_s(now_s)
        sample.end(finish, now_s)
        self.forget(sample)
        if self.spans is not None:
            self.spans.add(sample.timeline)
        self._count(sample, finish)
        self._request_log.write(sample)

    def forget(self, sample: ReqState) -> None:
        """Take a sample out of the table, and give back what it held; its rid may be used again. Later calls do nothing."""
        if not self._table.forget(sample, self._clock()):
            return
        leave_replica(sample, self._balancer)
        sample.write_timeline()
        self._timelines.finish(sample.rid)
        if sample.turn is not None:
            self._sessions.give_up(sample.turn)
        if sample.adapter is not None:
            sample.adapter.release()

    def _count(self, sample: ReqState, finish: FinishReason) -> None:
        metrics = self._metrics
        metrics.count_end(finish.type)
        metrics.e2e_latency_s.observe(sample.finished_s - sample.created_s)
        metrics.generation_length.observe(len(sample.output_ids))
        metrics.prompt_length.observe(sample.num_prompt_tokens)
        if sample.first_token_s:
            metrics.queue_time_s.observe(sample.stats.queue_time_s)
        elif finish.type != "abort":
            count_prompt(sample, metrics)


def count_prompt(sample: ReqState, metrics: Metrics) -> None:
    """The prompt has been computed: the sample has its first token, or ended without one as it was asked to."""
    if sample.first_of_prompt:
        metrics.prompt_tokens.inc(sample.num_prompt_tokens)
        metrics.cached_tokens.inc(sample.stats.cached_tokens)
        sample.call.tenant.use_tokens(sample.num_prompt_tokens - sample.stats.cached_tokens)
