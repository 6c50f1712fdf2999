"""Takes the detokenizer's messages and applies them to the samples.

Owns the counting of outputs, and the limit on output that a client has not read. Each `ReqState` owns its output. Runs in the tokenizer
manager's event loop.
"""

from collections.abc import Callable

from headrace.frontend.endings import Endings, count_prompt
from headrace.frontend.engine_link import EngineLink
from headrace.frontend.request_state import ReqState
from headrace.frontend.sample_table import SampleTable
from headrace.log import get_logger
from headrace.messages.control import AbortReq
from headrace.messages.outputs import BatchStrOut, FinishReason, SamplesMoved, TokenIDOut
from headrace.metrics.catalog import Metrics

logger = get_logger(__name__)


class Outputs:
    """See the module docstring. max_unread_bytes: limit per streaming sample. num_unknown: outputs for rids that are not in the table."""

    def __init__(
        self,
        table: SampleTable,
        endings: Endings,
        link: EngineLink,
        metrics: Metrics,
        clock: Callable[[], float],
        hidden_size: int,
        max_unread_bytes: int,
    ) -> None:
        self.num_unknown = 0
        self._table = table
        self._endings = endings
        self._link = link
        self._metrics = metrics
        self._clock = clock
        self._hidden_size = hidden_size
        self._max_unread_bytes = max_unread_bytes

    def handle(self, batch: BatchStrOut) -> None:
        """Apply the outputs of one step. A malformed output ends its sample only."""
        if batch.source in self._link.gone:
            return
        now_s = self._clock()
        new_tokens = 0
        for row in batch.rows:
            sample = self._table.samples.get(row.tokens.rid)
            if sample is None:
                self.num_unknown += 1
                continue
            try:
                new_tokens += self._apply(sample, row.text, row.tokens, now_s)
            except Exception:
                logger.exception("could not process an output of rid %s", sample.rid)
                self._link.send(AbortReq((sample.rid,), message="internal error"))
                self._endings.end(sample, FinishReason("abort", message="internal error", status_code=500))
        self._metrics.generation_tokens.value += new_tokens

    def note_moved(self, moved: SamplesMoved) -> None:
        """Note which samples run, and which wait again, and how far prompts are."""
        if moved.source in self._link.gone:
            return
        samples, now_s = self._table.samples, self._clock()
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
                self._endings.end(sample, row.finish)
            return len(row.ids) // 4
        had_tokens, last_s = len(sample.output_ids), sample.last_token_s
        sample.apply(text, row, now_s, self._hidden_size)
        new_tokens = len(sample.output_ids) - had_tokens
        if new_tokens:
            self._count_tokens(sample, had_tokens, new_tokens, now_s - last_s)
            sample.call.tenant.use_tokens(new_tokens)
            self._metrics.key_generation_tokens.add(sample.call.tenant.name, new_tokens)
            if sample.call.stream and sample.num_unread_bytes > self._max_unread_bytes:
                self._cut_off(sample)
        if row.finish is not None:
            self._endings.end(sample, row.finish)
        return new_tokens

    def _count_tokens(self, sample: ReqState, had_tokens: int, new_tokens: int, elapsed_s: float) -> None:
        """had_tokens: before this output. elapsed_s: since the previous output."""
        if had_tokens:
            self._metrics.inter_token_latency_s.add(elapsed_s / new_tokens, new_tokens)
            return
        self._table.begin(sample, sample.first_token_s)
        self._metrics.time_to_first_token_s.observe(sample.first_token_s - sample.created_s)
        count_prompt(sample, self._metrics)

    def _cut_off(self, sample: ReqState) -> None:
        """Abort a sample whose client does not read. The client can still read what there is."""
        if not sample.abort_asked:
            sample.abort_asked = True
            limit = self._max_unread_bytes
            rid = sample.timeline.own_rid
            logger.warning("aborted rid %s: its client left more than %d bytes unread", rid, limit)
            self._link.send(AbortReq((sample.rid,), message=f"more than {limit} bytes were left unread"))
