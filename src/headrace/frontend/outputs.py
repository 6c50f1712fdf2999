"""Takes the detokenizer's messages, applies them to the samples, and ends samples.

Owns the counting of outputs, the limit on output that a client has not read, and the order of what happens at an end: a sample leaves the
table, is counted and logged, its client is woken, and what it held is released. `engine_link` ends those that cannot be sent, the tokenizer
manager those whose client leaves.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from headrace.frontend.balancers import Balancer
from headrace.frontend.engine_link import EngineLink, leave_replica
from headrace.frontend.records import RequestLog
from headrace.frontend.request_state import ReqState
from headrace.frontend.sample_table import SampleTable
from headrace.frontend.sessions import Sessions
from headrace.log import get_logger
from headrace.messages.control import AbortReq
from headrace.messages.outputs import WAITED_TOO_LONG, BatchStrOut, FinishReason, SamplesMoved, TokenIDOut
from headrace.metrics.catalog import Metrics
from headrace.metrics.spans import Spans
from headrace.metrics.timeline import Timelines

DEADLINE_STATUS = 408
"""Status code of requests that the scheduler aborted at their deadline."""
NO_ROOM_STATUS = 503
"""Status code of requests that waited too long in the queue, or found the scheduler's queue full."""


@dataclass(eq=False)
class Endings:
    """clock: in seconds. spans: receives every sample that has ended."""

    table: SampleTable
    sessions: Sessions
    timelines: Timelines
    request_log: RequestLog
    metrics: Metrics
    clock: Callable[[], float]
    balancer: Balancer
    spans: Spans | None = None

    def end(self, sample: ReqState, finish: FinishReason) -> None:
        now_s = self.clock()
        if sample.turn is not None and finish.type != "abort" and not sample.call.abandoned:
            self.sessions.finish(sample.turn, sample.output_ids)
        if finish.status_code == DEADLINE_STATUS and sample.output_ids:
            # With some output, reaching the deadline is not an error.
            finish = msgspec.structs.replace(finish, status_code=0)
        if finish.status_code == NO_ROOM_STATUS:
            self.metrics.count_rejected("queue_timeout" if finish.message == WAITED_TOO_LONG else "queue_full")
            sample.retry_after_s = self.table.queue.retry_after_s(now_s)
        sample.end(finish, now_s)
        self.forget(sample)
        if self.spans is not None:
            self.spans.add(sample.timeline)
        self._count(sample, finish)
        self.request_log.write(sample)

    def forget(self, sample: ReqState) -> None:
        """Remove a sample from the table and release what it held. Later calls do nothing."""
        if not self.table.forget(sample, self.clock()):
            return
        sample.write_timeline()
        leave_replica(sample, self.balancer)
        self.timelines.finish(sample.rid)
        if sample.turn is not None:
            self.sessions.cancel(sample.turn)
        if sample.adapter is not None:
            sample.adapter.release()

    def _count(self, sample: ReqState, finish: FinishReason) -> None:
        metrics = self.metrics
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


logger = get_logger(__name__)


@dataclass(eq=False)
class Outputs:
    """max_unread_bytes: limit per streaming sample. num_unknown: outputs for rids that are not in the table."""

    table: SampleTable
    endings: Endings
    link: EngineLink
    metrics: Metrics
    clock: Callable[[], float]
    hidden_size: int
    max_unread_bytes: int
    num_unknown: int = field(init=False, default=0)

    def handle(self, batch: BatchStrOut) -> None:
        """Apply the outputs of one step. A malformed output ends its sample only."""
        if batch.source in self.link.gone:
            return
        now_s = self.clock()
        new_tokens = 0
        for row in batch.rows:
            sample = self.table.samples.get(row.tokens.rid)
            if sample is None:
                self.num_unknown += 1
                continue
            try:
                new_tokens += self._apply(sample, row.text, row.tokens, now_s)
            except Exception:
                logger.exception("could not process an output of rid %s", sample.rid)
                self.link.send(AbortReq((sample.rid,), message="internal error"))
                self.endings.end(sample, FinishReason("abort", message="internal error", status_code=500))
        self.metrics.generation_tokens.value += new_tokens

    def note_moved(self, moved: SamplesMoved) -> None:
        """Note which samples run, and which wait again, and how far prompts are."""
        if moved.source in self.link.gone:
            return
        samples, now_s = self.table.samples, self.clock()
        for rid in moved.running:
            if (sample := samples.get(rid)) is not None:
                sample.begin(now_s)
        for rid in moved.waiting:
            if (sample := samples.get(rid)) is not None:
                sample.runs = False
        for part in moved.prompts:
            if (sample := samples.get(part.rid)) is not None:
                sample.note_prompt(part, now_s)

    def _apply(self, sample: ReqState, text: str, row: TokenIDOut, now_s: float) -> int:
        """Apply one output. Returns its number of tokens."""
        if sample.call.abandoned:
            if row.finish is not None:
                self.endings.end(sample, row.finish)
            return len(row.ids) // 4
        had_tokens, last_s = len(sample.output_ids), sample.last_token_s
        sample.apply(text, row, now_s, self.hidden_size)
        new_tokens = len(sample.output_ids) - had_tokens
        if new_tokens:
            self._count_tokens(sample, had_tokens, new_tokens, now_s - last_s)
            sample.call.tenant.use_tokens(new_tokens)
            self.metrics.key_generation_tokens.add(sample.call.tenant.name, new_tokens)
            if sample.call.stream and sample.num_unread_bytes > self.max_unread_bytes:
                self._cut_off(sample, f"more than {self.max_unread_bytes} bytes were left unread")
        if (row.logprobs or row.prompt_logprobs or row.hidden_states) and not self.table.hold_output(sample):
            self._cut_off(
                sample, "the logprobs of all requests of this client take too much memory now", status_code=503
            )
        if row.finish is not None:
            self.endings.end(sample, row.finish)
        return new_tokens

    def _count_tokens(self, sample: ReqState, had_tokens: int, new_tokens: int, elapsed_s: float) -> None:
        """had_tokens: before this output. elapsed_s: since the previous output."""
        if had_tokens:
            self.metrics.inter_token_latency_s.add(elapsed_s / new_tokens, new_tokens)
            return
        self.table.begin(sample, sample.first_token_s)
        self.metrics.time_to_first_token_s.observe(sample.first_token_s - sample.created_s)
        count_prompt(sample, self.metrics)

    def _cut_off(self, sample: ReqState, why: str, status_code: int = 0) -> None:
        """Abort a sample that takes too much memory. The client can still read what there is."""
        if not sample.abort_asked:
            sample.abort_asked = True
            logger.warning("aborted rid %s: %s", sample.timeline.own_rid, why)
            self.link.send(AbortReq((sample.rid,), message=why, status_code=status_code))
