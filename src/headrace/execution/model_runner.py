"""Runs one step: tokens in, one sampled token per row out.

Owns the tables of sequences and the order of a step (add, forward, logits where they are needed, sample, write back). Does not own
the model, the attention backend or the sampler, and does not decide what runs. Used by one thread: the worker's.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from headrace.attention.base import AttentionBackend, ReadTokens
from headrace.distributed.base import ALL_LAYERS, Stage
from headrace.execution.device import upload_parts
from headrace.execution.forward_batch import ForwardBatch, SequenceTable, last_tokens
from headrace.execution.lora import LoraPool
from headrace.execution.media import MediaRows
from headrace.execution.pooling import PooledRows
from headrace.execution.profiler import StepClock
from headrace.execution.verify import Place, SampledRow, waves
from headrace.garbage import give_back_free_memory
from headrace.layers.pooler import Pooler
from headrace.messages.outputs import LogprobBlock
from headrace.messages.requests import PoolTask, SampleTask
from headrace.messages.step import MOST_VERIFIED, ModelWorkerBatch, NewSequence, StepResult, one_id_a_row, ragged
from headrace.messages.weights import Adapters
from headrace.models.spec import CausalLM
from headrace.sampling.logprobs import has_bad_logits, prompt_logprobs
from headrace.sampling.sampler import BAD_LOGITS, Sampler, SamplerOutput
from headrace.speculative.base import Drafts

PROMPT_LOGIT_ROWS = 64
"""Prompt logprobs are computed for this many positions at a time, to limit memory (rows x vocabulary x 4 bytes)."""

Picker = Callable[[Sequence[Place]], SamplerOutput]
"""Samples some positions of a step, whose logits it knows. A row of its result for each."""


@dataclass(slots=True)
class Outcome:
    """Results of a step, by row of the plan."""

    token_ids: list[list[int]]
    errors: dict[int, str] = field(default_factory=dict)
    drafts: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, LogprobBlock] = field(default_factory=dict)
    prompt_logprobs: dict[int, LogprobBlock] = field(default_factory=dict)
    hidden_states: dict[int, bytes] = field(default_factory=dict)
    pooled: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Begun:
    """A step whose layers of this stage were run. special: its rows with more than tokens as result. begun_s: by `time.perf_counter`.

    num_hidden: rows of hidden states after all layers; hidden: these, or if other stages run the last layers, what this one gave the next.
    """

    plan: ModelWorkerBatch
    seqs: list[int]
    special: list[int]
    batch: ForwardBatch
    starts: list[int]
    num_hidden: int
    hidden: torch.Tensor
    begun_s: float


class Peers(Protocol):
    """The other ranks of a step, as the runner that samples for all of them meets them; see `ranks`.

    only_peaks: whether they give the largest logits of the step that is finished, in place of all.
    """

    only_peaks: bool

    def settle(self) -> None:
        """Wait until nothing that is queued on a device waits for them: values are read next."""
        return

    def note(self, seqs: list[int], positions: list[int], ids: list[int]) -> None:
        """These tokens were written to the token buffer: ids[i] at positions[i] of sequence seqs[i]."""
        return


class _NoPeers(Peers):
    """Those of a whole model."""

    only_peaks = False


def logits_shape(max_seqs: int, vocab_size: int) -> tuple[int, int]:
    """Rows and columns of the logits that are computed at once."""
    return max(max_seqs + MOST_VERIFIED, PROMPT_LOGIT_ROWS), vocab_size


class ModelRunner:
    """A model with its attention backend (with an allocated pool), its tables, its sampler and the adapters of its layers.

    stage: of the model. Without others, `start` is followed by `finish`; else several steps may be between the two.
    drafts: guesses of the tokens after those that a step samples, None = nothing is guessed. pooler: of a model that makes vectors. media: outputs of
    the encoder of a model that has one. peers: the other ranks, if it samples for them.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        table: SequenceTable,
        sampler: Sampler,
        loras: LoraPool,
        stage: Stage = ALL_LAYERS,
        drafts: Drafts | None = None,
        pooler: Pooler | None = None,
        media: MediaRows | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.table = table
        self.sampler = sampler
        self.loras = loras
        self.adapters: Adapters = loras
        self.stage = stage
        self.drafts = drafts
        self.media = media
        self.peers: Peers = _NoPeers()
        self._pools = PooledRows(pooler) if pooler is not None else None
        self._begun_s = 0.0
        self._clock = StepClock()
        self._has_freed = False
        # Kept from step to step: malloc would map and unmap a block of more than 32 MiB every time, and each new page costs a fault.
        # Pages that no step has used take no memory.
        on_host = table.host is not None
        self._logits = torch.empty(logits_shape(table.max_seqs, sampler.vocab_size)) if on_host else None

    @torch.inference_mode()
    def run(self, plan: ModelWorkerBatch, on_layers: Callable[[], None] = lambda: None) -> StepResult:
        """Run one step. Raises ExecutionError if the whole step failed; an error of one row is in the result's `errors`.

        on_layers: called when everything is prepared and the layers are about to run.
        """
        self.add(plan)
        self.begin(plan)
        return self.compute(plan, on_layers)

    def add(self, plan: ModelWorkerBatch) -> None:
        """Enter the plan's new sequences in the tables, and forget those that have left."""
        self._leave(plan.left)
        for new in plan.new:
            self.table.add(new, self._input_embeds(new))
            if self.media is not None:
                self.media.add(new.seq, new.content)
            if isinstance(new.task, PoolTask):
                assert self._pools is not None, "a model that generates has no such tasks"
                self._pools.add(new)
                continue
            self.sampler.add(new.seq, new)
            if self.drafts is not None:
                self.drafts.add(new)

    def idle(self, left: Iterable[int]) -> None:
        """Forget the sequences that have left, while no step follows. Memory of their grammars and guesses goes to the system."""
        self._leave(left)
        if self._has_freed:
            self._has_freed = False
            give_back_free_memory()

    def _leave(self, left: Iterable[int]) -> None:
        for seq in left:
            self._has_freed |= self.drafts is not None or len(self.sampler.grammars) > 0
            self.sampler.grammars.discard(seq)
            if self.drafts is not None:
                self.drafts.leave(seq)
            if self._pools is not None:
                self._pools.leave(seq)

    def needs_host(self, plan: ModelWorkerBatch) -> bool:
        """Whether the host has work in the middle of the step: a row has logprobs, hidden states, input embeddings, images, an adapter, logit edits
        other than penalties, or drafts, or there is work for the encoder. The plan's new sequences have been added."""
        if plan.encode is not None or bool((plan.num_logits > 1).any()):
            return True
        by_host = (self.table.special, self.table.adapted, self.sampler.edited)
        seqs = plan.seqs.tolist()
        return not all(rows.isdisjoint(seqs) for rows in by_host)

    def needs_only_logits(self, plan: ModelWorkerBatch) -> bool:
        """Whether the rows of a step have no adapter, take tokens alone, and want no hidden states. The plan's new sequences have been added."""
        seqs = plan.seqs.tolist()
        special = (self.table.specs[seq] for seq in self.table.special.intersection(seqs))
        return self.table.adapted.isdisjoint(seqs) and not any(
            spec.has_inputs or spec.new.task.reads_all for spec in special
        )

    def _input_embeds(self, new: NewSequence) -> torch.Tensor | None:
        """What the prompt gives the first layer itself, float32[num_prompt_tokens, hidden_size], or None."""
        if not new.content.embeds:
            return None
        values = torch.frombuffer(bytearray(new.content.embeds), dtype=torch.float32)
        return values.view(new.num_prompt_tokens, -1).to(self.table.tokens.device)

    def hidden_states(self, batch: ForwardBatch, reads: ReadTokens | None) -> torch.Tensor:
        """[num_read, hidden_size] after the final norm, of rows without input embeddings."""
        inputs = self.model.embed(batch.token_ids)
        self.attention.prepare(batch.rows)
        return self.model.forward(inputs, batch.rows.positions, self.attention, reads)

    def begin(self, plan: ModelWorkerBatch) -> None:
        """The step begins: its time counts from here. Raises ExecutionError if it fails before anything is computed."""
        self._begun_s = time.perf_counter()

    def compute(self, plan: ModelWorkerBatch, on_layers: Callable[[], None] = lambda: None) -> StepResult:
        """The rest of `run`, for a step that has begun."""
        if plan.encode is None:
            return self.finish(self.start(plan, on_layers))
        assert self.media is not None, "work for an encoder that there is not"
        on_layers()
        encoded = self.media.work(plan.encode)
        result = self.finish(self.start(plan)) if len(plan.seqs) else StepResult(plan.step, *one_id_a_row(()))
        return replace(
            result,
            forward_s=result.forward_s + encoded.seconds,
            encoded=encoded.keys,
            encode_errors=encoded.errors,
            encode_s=encoded.seconds,
        )

    def start(self, plan: ModelWorkerBatch, on_layers: Callable[[], None] = lambda: None) -> Begun:
        """Run this stage's layers, for a step that has begun."""
        seqs = plan.seqs.tolist()
        special = [row for row, seq in enumerate(seqs) if seq in self.table.special] if self.table.special else []
        if self.drafts is not None:
            self.drafts.begin(plan)
        batch = ForwardBatch.from_plan(plan, self.table)
        reads = self._reads(plan, seqs, special)
        hidden = self._forward(plan, seqs, special, batch, reads, on_layers)
        starts = batch.row_starts if reads is None else reads.starts
        return Begun(plan, seqs, special, batch, starts, starts[-1], hidden, self._begun_s)

    @torch.inference_mode()
    def finish(self, begun: Begun) -> StepResult:
        """What comes after the layers. Steps are finished in the order in which they were started."""
        self.peers.settle()
        plan, seqs, batch, starts = begun.plan, begun.seqs, begun.batch, begun.starts
        hidden = self.final_hidden(begun)
        outcome = Outcome([[] for _ in seqs])
        for row in begun.special:
            new = self.table.specs[seqs[row]].new
            if isinstance(new.task, PoolTask):
                assert self._pools is not None, new.rid
                self._pools.take(row, new, hidden[starts[row] : starts[row + 1]], batch.starts[row] + batch.counts[row])
                continue
            if new.task.return_hidden_states:
                part = hidden[starts[row] : starts[row + 1]]
                outcome.hidden_states[row] = part.float().cpu().numpy().tobytes()
            positions, part = self.prompt_part(begun, row, hidden)
            if positions:
                outcome.prompt_logprobs[row] = block = self._prompt_logprobs(new, seqs[row], positions, part)
                if has_bad_logits(block, self.sampler.vocab_size):
                    outcome.errors[row] = BAD_LOGITS
        if self._pools is not None:
            outcome.pooled, outcome.errors = self._pools.results()
        sampled = np.flatnonzero(plan.num_logits).tolist()
        if sampled:
            hidden = self.sampled_hidden(begun, hidden, sampled)
            self._sample_places(self._rows_to_sample(plan, seqs, sampled), self._picker(hidden), outcome)
        return self._result(plan, outcome, begun.begun_s)

    def final_hidden(self, begun: Begun) -> torch.Tensor:
        """[num_hidden, hidden_size] after all layers; receives them if other stages have the last of these."""
        if self.stage.before is None:
            return begun.hidden
        self.begin_masks(begun.plan)
        return self.stage.before.receive(begun.num_hidden)

    def prompt_part(self, begun: Begun, row: int, hidden: torch.Tensor) -> tuple[range, torch.Tensor]:
        """The positions of a row that predict a prompt token whose logprob was asked for, and the part of `final_hidden` after them."""
        batch = begun.batch
        start, count = batch.starts[row], batch.counts[row]
        positions = _logprob_positions(self.table.specs[begun.seqs[row]].new, start, count)
        first = begun.starts[row + 1] - (start + count - positions.start)
        return positions, hidden[first : first + len(positions)]

    def sampled_hidden(self, begun: Begun, hidden: torch.Tensor, sampled: Sequence[int]) -> torch.Tensor:
        """[sum of their num_logits, hidden_size], of `final_hidden`: that from which the rows `sampled` are sampled."""
        num_logits = begun.plan.num_logits.tolist()
        if sum(num_logits) == hidden.shape[0]:
            return hidden
        ends = ((begun.starts[row + 1], num_logits[row]) for row in sampled)
        last = [place for end, count in ends for place in range(end - count, end)]
        return hidden[torch.tensor(last, device=hidden.device)]

    @torch.inference_mode()
    def verify(self, plan: ModelWorkerBatch, logits: torch.Tensor, drafts: Sequence[int], begun_s: float) -> StepResult:
        """`finish` of a step all of whose tokens are sampled, of a whole model, when its layers have run elsewhere.

        logits: float32[num_tokens, V]. drafts: the token that was guessed to follow each of its tokens; those after the last of a row are ignored.
        """
        outcome = Outcome([[] for _ in plan.seqs])
        ends = np.cumsum(plan.counts)
        places = zip(
            plan.seqs.tolist(), (plan.starts + 1).tolist(), (ends - plan.counts).tolist(), ends.tolist(), strict=True
        )
        rows = [
            SampledRow(row, seq, place, first, drafts[place : end - 1])
            for row, (seq, first, place, end) in enumerate(places)
        ]
        self._sample_places(rows, self._pick_from(logits), outcome)
        return self._result(plan, outcome, begun_s)

    def _result(self, plan: ModelWorkerBatch, outcome: Outcome, begun_s: float) -> StepResult:
        """Of a step that has been sampled, with guesses of what follows."""
        self.after_sampling(plan)
        outcome.drafts = self.draft(plan, outcome.token_ids)
        ids, id_starts = ragged(outcome.token_ids)
        return StepResult(
            step=plan.step,
            ids=ids,
            id_starts=id_starts,
            errors=outcome.errors,
            logprobs=outcome.logprobs,
            prompt_logprobs=outcome.prompt_logprobs,
            hidden_states=outcome.hidden_states,
            pooled=outcome.pooled,
            drafts=outcome.drafts,
            forward_s=self._clock.took(begun_s),
            masks_s=self.sampler.grammars.take_masks_s(),
        )

    def _reads(self, plan: ModelWorkerBatch, seqs: list[int], special: list[int]) -> ReadTokens | None:
        """The tokens that are sampled from, or whose hidden states or logprobs were asked for; None = all."""
        num_read = plan.num_logits
        if special:
            num_read = num_read.copy()
            for row in special:
                new = self.table.specs[seqs[row]].new
                start, count = int(plan.starts[row]), int(plan.counts[row])
                positions = _logprob_positions(new, start, count)
                if new.task.reads_all:
                    num_read[row] = count
                elif isinstance(new.task, PoolTask):
                    num_read[row] = start + count == new.num_prompt_tokens
                elif positions:
                    num_read[row] = start + count - positions.start
        return last_tokens(plan.counts, num_read, self.table.tokens.device)

    def _forward(
        self,
        plan: ModelWorkerBatch,
        seqs: list[int],
        special: list[int],
        batch: ForwardBatch,
        reads: ReadTokens | None,
        on_layers: Callable[[], None],
    ) -> torch.Tensor:
        """What comes out of this stage's layers: hidden states [num_read, hidden_size] after the final norm, or what the next stage takes."""
        inputs = self._inputs(seqs, special, batch)
        rows, positions = batch.rows, batch.rows.positions
        if self.media is not None and special:
            rows = self.media.rows(rows, {row: self.table.specs[seqs[row]].new.content for row in special})
            positions = self.media.positions(rows, seqs)
        if batch.own is None or batch.own.num_tokens:
            self.attention.prepare(rows)
        loras = None
        if self.table.adapted:
            loras = self.loras.rows([self.table.specs[seq].new.lora_id for seq in seqs], batch.row_starts)
        self.loras.step.rows = loras
        if self.stage.is_whole:
            self.begin_masks(plan)
        on_layers()
        if not self.stage.is_last:
            reads = None
        with nullcontext(False) if self.media is None else self.media.adding() as adds:
            if loras is None:
                by_layer = adds or rows.last_keys is not None
                hidden = self.model.forward(inputs, positions, self.attention, reads, own=batch.own, by_layer=by_layer)
            else:
                assert batch.own is None, "adapters are refused where ranks have different sequences"
                # An adapter finds its rows by their place in the whole step.
                hidden = self.model.forward(inputs, positions, self.attention, by_layer=True)
                hidden = hidden if reads is None else hidden[reads.index]
        if self.stage.after is not None:
            self.stage.after.send(hidden)
        return hidden

    def _inputs(self, seqs: list[int], special: list[int], batch: ForwardBatch) -> torch.Tensor:
        """What the first of this stage's layers takes, [num_tokens, hidden_size]."""
        if not self.stage.is_first:
            assert self.stage.before is not None, self.stage
            return self.stage.before.receive(batch.row_starts[-1])
        inputs = self.model.embed(batch.token_ids)
        if self.media is not None:
            self.media.begin_step()
        for row in special:
            spec, start, begin = self.table.specs[seqs[row]], batch.starts[row], batch.row_starts[row]
            if self.media is not None and spec.new.content.spans:
                self.media.place(inputs, begin, spec.new.content, start, batch.counts[row])
            embeds = spec.input_embeds
            if embeds is not None and start < len(embeds):
                given = embeds[start : start + batch.counts[row]]
                inputs[begin : begin + len(given)] = given.to(inputs.dtype)
        return inputs

    def begin_masks(self, plan: ModelWorkerBatch) -> None:
        """Let the sampler fill the masks of grammars while the layers run."""
        if self.sampler.grammars:
            sampled = np.flatnonzero(plan.num_logits)
            positions = (plan.starts + plan.counts - plan.num_logits)[sampled] + 1
            self.sampler.grammars.begin(plan.seqs[sampled].tolist(), positions.tolist())

    def _logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[rows, vocab_size] of hidden [rows, hidden_size]; on the CPU only until the next call."""
        logits = self.model.logits(hidden, None if self._logits is None else self._logits[: hidden.shape[0]])
        self.peers.settle()
        return logits

    def _prompt_logprobs(self, new: NewSequence, seq: int, positions: range, hidden: torch.Tensor) -> LogprobBlock:
        """Logprobs of the prompt tokens after `positions`. hidden: [len(positions), hidden_size]."""
        assert isinstance(new.task, SampleTask), new.rid
        assert new.task.logprobs is not None, new.rid
        blocks = []
        for part, low in zip(hidden.split(PROMPT_LOGIT_ROWS), positions[::PROMPT_LOGIT_ROWS], strict=True):
            next_ids = self.table.tokens[seq, low + 1 : low + 1 + len(part)]
            blocks.append(prompt_logprobs(self._logits_of(part), next_ids.cpu().numpy(), new.task.logprobs))
        joined = LogprobBlock.joined(blocks)
        assert joined is not None, positions
        return joined

    def _sample_places(self, rows: Sequence[SampledRow], pick: Picker, outcome: Outcome) -> None:
        for number, places in enumerate(waves(rows, self.sampler.depends_on_ids)):
            if number:  # the masks of the first positions have been begun before the layers
                self.sampler.grammars.begin([place.row.seq for place in places], [place.position for place in places])
            self._take(places, pick(places), outcome)
        for row in rows:
            outcome.token_ids[row.row] = row.ids

    def _rows_to_sample(self, plan: ModelWorkerBatch, seqs: list[int], sampled: list[int]) -> list[SampledRow]:
        rows = []
        place = 0
        tokens = self.table.tokens if self.table.host is None else self.table.host.tokens
        counts, ends = plan.num_logits.tolist(), (plan.starts + plan.counts).tolist()
        for row in sampled:
            count, seq = counts[row], seqs[row]
            first = ends[row] - count + 1
            drafts = tokens[seq, first : ends[row]].tolist() if count > 1 else ()
            rows.append(SampledRow(row, seq, place, first, drafts))
            place += count
        return rows

    def _picker(self, hidden: torch.Tensor) -> Picker:
        """What samples after hidden states [sum of num_logits, hidden_size] of a step."""
        if not self.peers.only_peaks:
            return self._pick_from(self._logits_of(hidden))
        peaks = self.model.peaks(hidden)
        output = self.sampler.take_largest(torch.from_numpy(peaks.ids), peaks.values.tolist())
        return lambda places: output  # none of these rows depends on its ids, so all are sampled at once

    def _pick_from(self, logits: torch.Tensor) -> Picker:
        """What samples from the logits float32[sum of num_logits, V] of a step."""

        def pick(places: Sequence[Place]) -> SamplerOutput:
            own = logits
            if len(places) < len(logits):
                own = logits[torch.tensor([place.logits for place in places], device=logits.device)]
            seqs, positions = [place.row.seq for place in places], [place.position for place in places]
            specs = [self.table.specs[seq].new for seq in seqs]
            num_outputs = [position - new.num_prompt_tokens for position, new in zip(positions, specs, strict=True)]
            rids = [new.rid for new in specs]
            return self.sampler.sample(own, seqs, positions, num_outputs, rids)

        return pick

    def _take(self, places: Sequence[Place], output: SamplerOutput, outcome: Outcome) -> None:
        """Write what was sampled at these places to the token buffer, and give rows the ids that count."""
        token_ids, errors = output.token_ids, output.errors
        without = {*errors, *output.late}
        host_ids = token_ids.tolist()
        for index in without:
            # A step planned before this is known may still read these tokens, so they must be valid ids.
            host_ids[index] = 0
        self.write_tokens([place.row.seq for place in places], [place.position for place in places], host_ids)
        for index, place in enumerate(places):
            row = place.row
            if row.is_done:  # the draft before this position was wrong
                continue
            if index not in without:
                row.take(host_ids[index])
                if index in output.logprobs:
                    before = outcome.logprobs.get(row.row)
                    outcome.logprobs[row.row] = output.logprobs[index].after(before)
                continue
            row.is_done = True
            # After ids that count, the next step comes to this position again, and to the error.
            if index in errors and not row.ids:
                outcome.errors[row.row] = errors[index]

    def after_sampling(self, plan: ModelWorkerBatch) -> None:
        """The ids of a step are in the token buffer, or what writes them is queued: see `Drafter.follow`."""
        if self.drafts is not None:
            self.drafts.follow(plan)

    def draft(self, plan: ModelWorkerBatch, token_ids: Sequence[Sequence[int]], writes: bool = True) -> dict[int, int]:
        """Guess what follows the ids of a step, by row. Returns how many tokens are guessed, by row.

        writes: they are written to the token buffer after the ids; not where a later step is on its way that writes to the same positions.
        """
        if self.drafts is None:
            return {}
        counts = np.array([len(ids) for ids in token_ids], np.int32)
        kept = plan.counts - plan.num_logits + counts
        rows = np.flatnonzero(counts).tolist()
        seqs, ends = plan.seqs[rows].tolist(), (plan.starts + kept + 1)[rows].tolist()
        for row, seq in zip(rows, seqs, strict=True):
            self.drafts.extend(seq, token_ids[row])
        self.drafts.end(plan, kept)
        found: dict[int, int] = {}
        at_seqs: list[int] = []
        positions: list[int] = []
        guessed: list[int] = []
        for row, seq, end, tokens in zip(rows, seqs, ends, self.drafts.propose(seqs), strict=True):
            guess = tokens[: max(0, self.table.context_length - end)]
            if guess:
                found[row] = len(guess)
                at_seqs += [seq] * len(guess)
                positions += range(end, end + len(guess))
                guessed += guess
        if guessed and writes:
            self.write_tokens(at_seqs, positions, guessed)
        return found

    def write_tokens(self, seqs: list[int], positions: list[int], ids: list[int]) -> None:
        """Write tokens to the buffer: ids[i] at positions[i] of sequence seqs[i]."""
        if self.table.host is not None:
            tokens = self.table.host.tokens
            for seq, position, token_id in zip(seqs, positions, ids, strict=True):
                tokens[seq, position] = token_id
        else:
            assert self.table.link is not None, "tables of a device without a link to it"
            parts = upload_parts(self.table.link, [np.array(part, np.int64) for part in (seqs, positions, ids)])
            self.table.tokens.index_put_((parts[0], parts[1]), parts[2])
        self.peers.note(seqs, positions, ids)


def _logprob_positions(new: NewSequence, start: int, count: int) -> range:
    """Of the positions start .. start + count - 1, those that predict a prompt token whose logprob was asked for."""
    spec = new.task.logprobs if isinstance(new.task, SampleTask) else None
    if spec is None:
        return range(0)
    return range(max(start, spec.prompt_start - 1), min(start + count, new.num_prompt_tokens - 1))
