"""Ends samples: removes them from the table, counts and logs them, wakes the waiting client.

Owns the order of these effects, and releases what a sample held: its turn in a session, its adapter, its share of a replica's load. Does not
decide when a sample ends: `outputs` does at the last output, `engine_link` when it cannot be sent, the tokenizer manager when the client leaves.
Used by the tokenizer manager, in its event loop only.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from headrace.frontend.balancers import Balancer
from headrace.frontend.engine_link import leave_replica
from headrace.frontend.request_log import RequestLog
from headrace.frontend.request_state import ReqState
from headrace.frontend.sample_table import SampleTable
from headrace.frontend.sessions import Sessions
from headrace.messages.outputs import WAITED_TOO_LONG, FinishReason
from headrace.metrics.catalog import Metrics
from headrace.metrics.timeline import Timeline, Timelines

DEADLINE_STATUS = 408
"""Status code of requests that the scheduler aborted at their deadline."""
NO_ROOM_STATUS = 503
"""Status code of requests that waited too long in the queue, or found the scheduler's queue full."""


class SpanSink(Protocol):
    """Receives the timeline of each sample, for traces."""

    def add(self, timeline: Timeline) -> None:
        """A sample has ended. Must not block."""


class Endings:
    """See the module docstring. clock: in seconds. balancer: None with one replica. spans: receives every sample that has ended."""

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
        """End a sample. No scheduler works on it any more."""
        now_s = self._clock()
        if sample.turn is not None and finish.type != "abort" and not sample.call.abandoned:
            self._sessions.finish(sample.turn, sample.output_ids)
        if finish.status_code == DEADLINE_STATUS and sample.output_ids:
            # With some output, reaching the deadline is not an error.
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
        """Remove a sample from the table and release what it held. Later calls do nothing."""
        if not self._table.forget(sample, self._clock()):
            return
        sample.write_timeline()
        leave_replica(sample, self._balancer)
        self._timelines.finish(sample.rid)
        if sample.turn is not None:
            self._sessions.give_up(sample.turn)
        if sample.adapter is not None:
            sample.adapter.release()

    def _count(self, sample: ReqState, finish: FinishReason) -> None:
        metrics = self._metrics
        metrics.count_end(finish.type)
        metrics.key_requests.add(sample.call.tenant.name, 1)
        metrics.e2e_latency_s.observe(sample.finished_s - sample.created_s)
        metrics.generation_length.observe(len(sample.output_ids))
        metrics.prompt_length.observe(sample.num_prompt_tokens)
        for event in sample.stats.events:
            if event.kind == "grammar_compiled":
                metrics.grammar_compile_s.observe(event.at_s - sample.timeline.sent_s)
        if sample.first_token_s:
            metrics.queue_time_s.observe(sample.stats.queue_time_s)
        elif finish.type != "abort":
            count_prompt(sample, metrics)
        if sample.pooled is not None:
            metrics.pooled_requests.inc(1)
            metrics.queue_time_s.observe(sample.stats.queue_time_s)


def count_prompt(sample: ReqState, metrics: Metrics) -> None:
    """Count a computed prompt: its sample has the first token, or has ended regularly without one."""
    if sample.first_of_prompt:
        metrics.prompt_tokens.inc(sample.num_prompt_tokens)
        metrics.cached_tokens.inc(sample.stats.cached_tokens)
        metrics.key_prompt_tokens.add(sample.call.tenant.name, sample.num_prompt_tokens)
        sample.call.tenant.use_tokens(sample.num_prompt_tokens - sample.stats.cached_tokens)
