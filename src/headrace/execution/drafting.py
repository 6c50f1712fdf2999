"""Guesses by a model: a smaller one of the same vocabulary, or an EAGLE-3 head. Used by the thread that runs the steps.

Both have a KV cache whose slots are those of the target's: what the scheduler decides about pages holds for both, and a cached prefix is cached for
both. They draw with the random numbers of the target, at the same positions: where both think alike, both draw the same token. Whatever they guess,
no token changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from headrace.attention.base import AttentionBackend, ReadTokens
from headrace.execution.device import Device, upload_parts
from headrace.execution.forward_batch import (
    ForwardBatch,
    HostTables,
    SequenceTable,
    cumulative,
    last_tokens,
    token_places,
)
from headrace.messages.step import Int32Array, ModelWorkerBatch, NewSequence
from headrace.models.decoder import DecoderLM
from headrace.models.eagle3 import EagleHead
from headrace.models.spec import CausalLM
from headrace.sampling.sampler import Sampler
from headrace.speculative.base import NOTHING, Drafter, Guess
from headrace.speculative.pace import FIRST_CHANCE, learnt_from

Guessed = Callable[[], list[int]]
"""Reads the tokens that were guessed."""

_RECOVERY = 0.02
"""How far the chance of a sequence whose guesses do not pay goes back to the first one in a step, until they are tried again."""


_NO_FEATURE = torch.empty(0)


@dataclass(slots=True)
class DraftRow:
    """One sequence. chance: see `pace`. tokens: those guessed last.

    num_kv, known: of a draft model, the tokens whose KV it has, and those that were known when the last step began. feature: of a head on the CPU,
    [hidden_size] of the token before the next guess, as the head guesses it.
    """

    chance: float = FIRST_CHANCE
    tokens: list[int] = field(default_factory=list)
    num_kv: int = 0
    known: int = 0
    feature: torch.Tensor = _NO_FEATURE


class DraftSteps:
    """attention: with the KV pool of the model that guesses. table, sampler: the target's."""

    def __init__(self, attention: AttentionBackend, table: SequenceTable, sampler: Sampler) -> None:
        self.attention = attention
        self._table = table
        self._sampler = sampler

    @property
    def _host(self) -> HostTables:
        assert self._table.host is not None, "tables on a device"
        return self._table.host

    def enter_slots(self, plan: ModelWorkerBatch) -> None:
        """Of a step that begins, as the target will, a moment later."""
        places = _places(plan.seqs, plan.starts, plan.counts)
        self._host.enter_slots(*places, plan.out_slots, self._table.page_size)

    def batch(self, plan: ModelWorkerBatch, seqs: Int32Array, begins: Int32Array, ends: Int32Array) -> ForwardBatch:
        """Positions begins[i] .. ends[i] - 1 of sequence seqs[i], whose slots are known; attention is prepared for them. plan: of the step beside
        which they are computed."""
        counts = ends - begins
        slots = self._host.slots_at(*_places(seqs, begins, counts), self._table.page_size)
        num_logits = np.zeros_like(counts)
        own = replace(plan, seqs=seqs, starts=begins, counts=counts, num_logits=num_logits, out_slots=slots, new=())
        batch = ForwardBatch.from_plan(own, self._table)
        self.attention.prepare(batch.rows)
        return batch

    def next_ids(self, seqs: Int32Array, begins: Int32Array, ends: Int32Array) -> torch.Tensor:
        """int64[num_tokens]: of each position of such a batch, the token one position further."""
        rows, positions = _places(seqs, begins, ends - begins)
        return torch.from_numpy(self._host.tokens[rows, positions + 1])

    def reads(self, counts: Int32Array, num_read: Int32Array) -> ReadTokens | None:
        """The last num_read[i] of the counts[i] tokens of each row; None if that is every token."""
        return last_tokens(counts, num_read, torch.device("cpu"))

    def guess(self, logits: torch.Tensor, seqs: Int32Array, positions: Int32Array) -> Guessed:
        """Draw the token of each sequence at its position, and write it to the token buffer.

        logits: float32[rows, n]; ids from n on are impossible.
        """
        ids = self._drawn(logits, seqs, positions).numpy()
        inside = positions <= self._table.context_length
        self._host.tokens[seqs[inside], positions[inside]] = ids[inside]
        drawn = ids.tolist()
        return lambda: drawn

    def _drawn(self, logits: torch.Tensor, seqs: Int32Array, positions: Int32Array) -> torch.Tensor:
        missing = self._sampler.vocab_size - logits.shape[1]
        if missing:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return self._sampler.guess(logits, seqs.tolist(), positions.tolist())


class DeviceDraftSteps(DraftSteps):
    """`DraftSteps` of a model on a device: its steps are queued between those of the target, and nothing waits. link: to the device."""

    def __init__(self, attention: AttentionBackend, table: SequenceTable, sampler: Sampler, link: Device) -> None:
        super().__init__(attention, table, sampler)
        self._link = link

    def enter_slots(self, plan: ModelWorkerBatch) -> None:
        rows, positions, slots = self.uploaded(*_places(plan.seqs, plan.starts, plan.counts), plan.out_slots)
        self._table.slots.index_put_((rows, positions), slots.int())

    def batch(self, plan: ModelWorkerBatch, seqs: Int32Array, begins: Int32Array, ends: Int32Array) -> ForwardBatch:
        batch = ForwardBatch.of_entered(seqs, begins, ends - begins, self._table, self._link)
        self.attention.prepare(batch.rows)
        return batch

    def next_ids(self, seqs: Int32Array, begins: Int32Array, ends: Int32Array) -> torch.Tensor:
        rows, positions = self.uploaded(*_places(seqs, begins, ends - begins))
        return self._table.tokens[rows, positions + 1]

    def reads(self, counts: Int32Array, num_read: Int32Array) -> ReadTokens | None:
        found = super().reads(counts, num_read)
        return None if found is None else ReadTokens(self._link.upload(found.index.numpy()), found.starts)

    def guess(self, logits: torch.Tensor, seqs: Int32Array, positions: Int32Array) -> Guessed:
        """See `DraftSteps`. What it returns waits for the device."""
        ids = self._drawn(logits, seqs, positions)
        # What has no place in the buffer goes to a row of no sequence.
        inside = positions <= self._table.context_length
        rows, places = self.uploaded(np.where(inside, seqs, self._table.spare), np.where(inside, positions, 0))
        self._table.tokens.index_put_((rows, places), ids)
        download = self._link.download(ids)
        return lambda: download.wait().tolist()

    def uploaded(self, *parts: Int32Array) -> list[torch.Tensor]:
        """On the device, int64, in one copy."""
        return upload_parts(self._link, [part.astype(np.int64) for part in parts])


def _places(seqs: Int32Array, starts: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
    return token_places(seqs, starts, counts, cumulative(counts))


class _ModelDrafter(Drafter):
    """Owns the sequences, and the guesses of the last step that the host may not have yet. most: tokens that are guessed at a time."""

    def __init__(self, steps: DraftSteps, most: int) -> None:
        self._steps = steps
        self._most = most
        self._rows: dict[int, DraftRow] = {}
        self._unread: list[tuple[Sequence[DraftRow], Guessed]] = []

    def add(self, new: NewSequence) -> None:
        self._rows[new.seq] = DraftRow(num_kv=len(new.prefix_slots))

    def leave(self, seq: int) -> None:
        self._rows.pop(seq, None)

    def extend(self, seq: int, ids: Sequence[int]) -> None:
        self._read()
        row = self._rows[seq]
        if not row.tokens:
            row.chance += _RECOVERY * (FIRST_CHANCE - row.chance)
        row.chance = learnt_from(row.chance, ids, row.tokens)
        row.tokens = []

    def guess(self, seq: int) -> Guess:
        """A promise."""
        return Guess([0] * self._most, self._rows[seq].chance)

    def _read(self) -> None:
        """Give the rows their guesses. On a device it waits for them, unless a result has come since."""
        for rows, guessed in self._unread:
            for row, token_id in zip(rows, guessed(), strict=True):
                row.tokens.append(token_id)
        self._unread.clear()


class DraftModel(_ModelDrafter):
    """A smaller model (Y. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023).

    It follows the steps: when one begins, it computes those of its known tokens that it has not seen, and then, token by token, what was promised:

        target     step n: a b c . . . . . . samples d   | step n+1: d e' f' g', samples e f x       | step n+2: x ...
        draft                                 (promised 3) a b c d -> e', e' -> f', f' -> g'            (promised 3) x -> ...
                                                                             ^ e' and f' were right: their KV stays

    vocab_size: of the draft model; to it, tokens beyond are its last one.
    """

    def __init__(self, model: CausalLM, vocab_size: int, steps: DraftSteps, most: int) -> None:
        super().__init__(steps, most)
        self._model = model
        self._last_id = vocab_size - 1

    def extend(self, seq: int, ids: Sequence[int]) -> None:
        super().extend(seq, ids)
        row = self._rows[seq]
        row.num_kv = min(row.num_kv, row.known + len(ids) - 1)

    def begin(self, plan: ModelWorkerBatch) -> None:
        self._read()
        self._steps.enter_slots(plan)
        promised = np.maximum(plan.num_logits - 1, 0)
        known = plan.starts + plan.counts - promised
        rows = [self._rows[seq] for seq in plan.seqs.tolist()]
        begins = np.minimum(plan.starts, np.array([row.num_kv for row in rows], np.int32))
        for row, count, num_promised in zip(rows, known.tolist(), promised.tolist(), strict=True):
            row.known, row.num_kv = count, count + max(0, num_promised - 1)
            row.tokens = []
        wanted = np.flatnonzero(promised)
        hidden = self._forward(plan, plan.seqs, begins, known, np.minimum(promised, 1))
        for number in range(int(promised.max(initial=0))):
            if number:
                wanted = np.flatnonzero(promised > number)
                ends = known[wanted] + number
                hidden = self._forward(plan, plan.seqs[wanted], ends - 1, ends, np.ones_like(ends))
            guessed = self._steps.guess(self._model.logits(hidden), plan.seqs[wanted], known[wanted] + number)
            self._unread.append(([rows[index] for index in wanted], guessed))

    def _forward(
        self, plan: ModelWorkerBatch, seqs: Int32Array, begins: Int32Array, ends: Int32Array, num_read: Int32Array
    ) -> torch.Tensor:
        """Compute positions begins[i] .. ends[i] - 1 of sequence seqs[i]. Returns the hidden states after the last num_read[i] of them."""
        batch = self._steps.batch(plan, seqs, begins, ends)
        of_reads = self._steps.reads(ends - begins, num_read)
        inputs = self._model.embed(batch.token_ids.clamp(max=self._last_id))
        return self._model.forward(inputs, batch.rows.positions, self._steps.attention, of_reads)


class _HeadDrafter(_ModelDrafter):
    """An EAGLE-3 head: `models/eagle3.py` says what it computes. target: keeps the streams that it reads."""

    def __init__(self, head: EagleHead, target: DecoderLM, steps: DraftSteps, most: int) -> None:
        super().__init__(steps, most)
        self._head = head
        self._target = target

    def _forward(
        self, plan: ModelWorkerBatch, features: torch.Tensor, seqs: Int32Array, begins: Int32Array, ends: Int32Array
    ) -> torch.Tensor:
        """features: at positions begins[i] .. ends[i] - 1 of sequence seqs[i]. Returns those one position further, as the head guesses them."""
        batch = self._steps.batch(plan, seqs, begins, ends)
        next_ids = self._steps.next_ids(seqs, begins, ends)
        return self._head.forward(features, next_ids, batch.rows.positions, self._steps.attention)


class EagleDrafter(_HeadDrafter):
    """A head on the CPU. After a step it follows: of each token that stays, it computes the feature of the next, and the last one gives the first
    guess. The other guesses come when the next step begins, one pass each, and are computed from the head's own features; their KV is overwritten
    when the target's are there.

        target     step n: a b c, samples d        | step n+1: d e' f', samples e f x
        head       after it: a b c (with b c d) -> e' | before: e' -> f' ... after: d e f (with e f x) -> ...
    """

    def guess(self, seq: int) -> Guess:
        """The first is known."""
        row = self._rows[seq]
        return Guess([*row.tokens, *[0] * (self._most - 1)], row.chance) if row.tokens else NOTHING

    def end(self, plan: ModelWorkerBatch, kept: Int32Array) -> None:
        rows = np.flatnonzero(kept)
        if not len(rows):
            return
        seqs, begins, counts = plan.seqs[rows], plan.starts[rows], kept[rows]
        ends = begins + counts
        places = np.arange(counts.sum()) + np.repeat(cumulative(plan.counts)[rows] - cumulative(counts)[:-1], counts)
        index = torch.from_numpy(places)
        features = self._head.features([stream[index] for stream in self._target.tapped(plan.num_tokens)])
        features = self._forward(plan, features, seqs, begins, ends)
        sampled = [place for place, row in enumerate(rows.tolist()) if plan.num_logits[row]]
        for seq in seqs[sampled].tolist():
            self._rows[seq].tokens = []
        if sampled:
            last = torch.from_numpy(cumulative(counts)[1:][sampled] - 1).long()
            self._guess(features[last], seqs[sampled], ends[sampled] + 1)

    def begin(self, plan: ModelWorkerBatch) -> None:
        promised = np.maximum(plan.num_logits - 1, 0)
        if promised.max(initial=0) < 2:
            return
        self._steps.enter_slots(plan)
        known = plan.starts + plan.counts - promised
        for number in range(1, int(promised.max())):
            wanted = np.flatnonzero(promised > number)
            seqs, ends = plan.seqs[wanted], known[wanted] + number - 1
            features = torch.stack([self._rows[seq].feature for seq in seqs.tolist()])
            self._guess(self._forward(plan, features, seqs, ends - 1, ends), seqs, ends + 1)

    def _guess(self, features: torch.Tensor, seqs: Int32Array, positions: Int32Array) -> None:
        """Guess the tokens at these positions, after the features of the tokens before."""
        ids = self._steps.guess(self._head.logits(features), seqs, positions)()
        for seq, feature, token_id in zip(seqs.tolist(), features, ids, strict=True):
            row = self._rows[seq]
            row.feature = feature
            row.tokens.append(token_id)


class DeviceEagleDrafter(_HeadDrafter):
    """The same on a device, where a step is queued before the one before it has run.

    The head follows a step as soon as its ids are queued: the streams of the step are still there (`DecoderLM.tapped`), and whatever overwrites them
    is queued later. Which drafts are right is not known by then, so the head computes what follows every token of the step, and the feature after
    each token that may be the last one to stay is kept. When the next step begins, the host knows which that was, and all its guesses are queued
    before it:

        device   step n: d e' f' -> e f x | head: d e' f' (with e f x) -> features after them | f -> y', y' -> z' | step n+1: x y' z' ...
        host     submit n                                                | collect n: x is new | submit n+1

    What the head has computed of a draft that was wrong is overwritten with the next step.

    target: keeps the streams that the head reads (`DecoderLM.keep_tapped`).
    features: [max_seqs, 1 + most, hidden_size], of each sequence the last ones of a step; that after position p is number p % (1 + most).
    """

    _steps: DeviceDraftSteps

    def __init__(self, head: EagleHead, target: DecoderLM, steps: DeviceDraftSteps, features: torch.Tensor) -> None:
        super().__init__(head, target, steps, features.shape[1] - 1)
        self._features = features

    def follow(self, plan: ModelWorkerBatch) -> None:
        ends = plan.starts + plan.counts
        features = self._head.features(self._target.tapped(plan.num_tokens))
        features = self._forward(plan, features, plan.seqs, plan.starts, ends)
        # A row that samples has a logit for each token that may be the last one to stay.
        num_read = plan.num_logits
        if not num_read.any():
            return
        reads = self._steps.reads(plan.counts, num_read)
        at = self._places(*token_places(plan.seqs, ends - num_read, num_read, cumulative(num_read)))
        self._features.index_put_(at, features if reads is None else features[reads.index])

    def begin(self, plan: ModelWorkerBatch) -> None:
        self._read()
        rows = [self._rows[seq] for seq in plan.seqs.tolist()]
        for row in rows:
            row.tokens = []
        promised = np.maximum(plan.num_logits - 1, 0)
        wanted = np.flatnonzero(promised)
        if not len(wanted):
            return
        self._steps.enter_slots(plan)
        known = plan.starts + plan.counts - promised
        features = self._features[self._places(plan.seqs[wanted], known[wanted] - 2)]
        for number in range(int(promised.max())):
            if number:
                still = np.flatnonzero(promised[wanted] > number).astype(np.int32)
                if len(still) < len(wanted):
                    [index] = self._steps.uploaded(still)
                    wanted, features = wanted[still], features[index]
                ends = known[wanted] + number - 1
                features = self._forward(plan, features, plan.seqs[wanted], ends - 1, ends)
            guessed = self._steps.guess(self._head.logits(features), plan.seqs[wanted], known[wanted] + number)
            self._unread.append(([rows[row] for row in wanted], guessed))

    def _places(self, seqs: Int32Array, positions: Int32Array) -> tuple[torch.Tensor, torch.Tensor]:
        at_seqs, numbers = self._steps.uploaded(seqs, positions % self._features.shape[1])
        return at_seqs, numbers
