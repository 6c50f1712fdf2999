"""Steps whose work is queued on a device: queueing them, when their ids come to the host, and when the rows that a grammar constrains are sampled.

A `StepQueue` queues the layers of a step and the writing of its tokens without waiting, on the device of a whole model, and of each rank. It owns
the tensors of such a step, and does not choose how it runs (`device_runner`), nor which ids it gives: a follower gets them from the leader's device.
Does not own the masks (the sampler's). Runs in the thread that runs the steps; the rest in the scheduler's.

What a constrained row may sample in step n + 1 depends on its token of step n, which the host must have read. Only the sampling of these rows
waits for that, and on the host only where the scheduler waits anyway:

    compute stream   layers n+1, its other rows   | masks and constrained rows of n+1 | layers n+2 ...
    host             collect n: begin the masks of n+1, commit n, plan n+2 | submit n+2: queue the rest of n+1, then n+2
    mask threads                fill the masks of n+1
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from headrace.attention.base import ReadTokens
from headrace.execution.device import Device, Download, upload_parts
from headrace.execution.forward_batch import ForwardBatch, SequenceTable
from headrace.execution.graphs import GraphPool
from headrace.execution.model_runner import ModelRunner
from headrace.execution.profiler import StepClock
from headrace.execution.worker import Pending
from headrace.messages.ranks import QueuedKind
from headrace.messages.step import Int32Array, ModelWorkerBatch, StepResult, one_id_a_row
from headrace.messages.weights import Adapters
from headrace.sampling.grammar_rows import NO_MASKS, ReadyMasks
from headrace.sampling.sampler import BAD_LOGITS, Sampler

Pick = Callable[[torch.Tensor, Int32Array, Int32Array, Sequence[int]], torch.Tensor]
"""(logits, seqs, positions, constrained) -> ids: see `Sampler.pick`. A follower's logits are its part."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """ids: int64[R] of the rows that sample, on the device; those of constrained rows mean nothing. logits: float32[R, V], until the next step."""

    ids: torch.Tensor
    logits: torch.Tensor


class StepQueue:
    """graphs: None = every step runs eagerly. pick: chooses the ids of a step whose graph does not."""

    def __init__(self, runner: ModelRunner, device: Device, graphs: GraphPool | None, pick: Pick) -> None:
        self._runner = runner
        self._device = device
        self._graphs = graphs
        self._pick = pick

    def run(self, plan: ModelWorkerBatch, kind: QueuedKind, constrained: Sequence[int] = ()) -> Sampled:
        """Queue a step whose new sequences have been added. constrained: of the rows that sample, those that are sampled later."""
        self._runner.loras.step.rows = None
        if kind == "eager":
            return self._eager(plan, constrained)
        assert self._graphs is not None, kind
        return self._replay(plan, self._graphs, kind == "greedy graph", constrained)

    def _replay(
        self, plan: ModelWorkerBatch, graphs: GraphPool, is_greedy: bool, constrained: Sequence[int]
    ) -> Sampled:
        """A decode step. is_greedy: the graph's own choice of ids is used, and lies in the token buffer."""
        step = graphs.replay(plan.seqs, plan.starts, plan.out_slots)
        if is_greedy:
            return Sampled(step.greedy.clone(), step.logits)
        ids = self._pick(step.logits, plan.seqs, plan.starts + 1, constrained)
        self._runner.table.tokens.index_put_((step.seqs, step.positions + 1), ids.clamp(min=0))
        return Sampled(ids, step.logits)

    def _eager(self, plan: ModelWorkerBatch, constrained: Sequence[int]) -> Sampled:
        runner = self._runner
        rows = np.flatnonzero(plan.num_logits)
        batch = ForwardBatch.from_plan(plan, runner.table)
        if not len(rows):
            nothing = torch.empty(0, dtype=torch.int64, device=batch.token_ids.device)
            runner.hidden_states(batch, ReadTokens(nothing, [0] * (len(plan.seqs) + 1)))
            # The host waits for it anyway, or the scheduler would plan all chunks of a long prompt ahead.
            return Sampled(nothing, nothing)
        ends = np.cumsum(plan.counts, dtype=np.int64)[rows]
        seqs, positions = plan.seqs[rows], (plan.starts + plan.counts)[rows]
        last, at_rows, at_positions = upload_parts(
            self._device, [ends - 1, seqs.astype(np.int64), positions.astype(np.int64)]
        )
        reads = None
        if len(rows) < plan.num_tokens:
            reads = ReadTokens(last, [0, *np.cumsum(plan.num_logits).tolist()])
        logits = runner.model.logits(runner.hidden_states(batch, reads))
        ids = self._pick(logits, seqs, positions, constrained)
        runner.table.tokens.index_put_((at_rows, at_positions), ids.clamp(min=0))
        return Sampled(ids, logits)


class Followers:
    """The other ranks, as the leader's queued steps see them: none of a model on one device. All but `turn` is called within a turn.

    runner: of this rank. adapters: of all ranks.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.adapters: Adapters = runner.adapters

    def turn(self) -> AbstractContextManager[None]:
        """What a step, and what comes between two steps, runs in: see `Turn`."""
        return nullcontext()

    def add(self, plan: ModelWorkerBatch) -> None:
        self.runner.add(plan)

    def begin(self, plan: ModelWorkerBatch, kind: QueuedKind | Literal["whole"]) -> None:
        """See `ModelRunner.begin`; they queue the step, too, or run it whole."""
        self.runner.begin(plan)

    def share(self, ids: torch.Tensor) -> None:
        """Queue the sending of the step's ids int64[R], those of constrained rows aside."""

    def share_late(self, ids: torch.Tensor, seqs: Int32Array, positions: Int32Array) -> None:
        """Queue the sending of further ids int64[n] of the last step; where they go."""

    def capture(self) -> None:
        """They capture their graphs, as the leader is about to."""


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was waited for when it was queued."""

    step: StepResult

    def result(self) -> StepResult:
        return self.step


@dataclass(slots=True)
class QueuedStep:
    """rows: those that sample, in the order of the ids. begin: when it was queued; it runs when the previous step is done.

    ids: set when all of it is queued.
    """

    step: int
    num_rows: int
    rows: Int32Array
    begin: float
    clock: StepClock
    ids: Download | None = None

    def read(self) -> npt.NDArray[np.int64]:
        """Wait for the ids of `rows`, -1 where the logits are bad."""
        assert self.ids is not None, self.step
        return self.ids.wait()

    def result(self) -> StepResult:
        return self.result_of(self.read())

    def result_of(self, ids: npt.NDArray[np.int64], masks: ReadyMasks = NO_MASKS, masks_s: float = 0.0) -> StepResult:
        """The result with these ids, which have just been read. masks: of the rows that are constrained."""
        token_ids = np.full(self.num_rows, -1, np.int32)
        token_ids[self.rows] = ids
        errors = dict.fromkeys(self.rows[ids < 0].tolist(), BAD_LOGITS)
        for row in self.rows[[*masks.late, *masks.errors]].tolist():
            token_ids[row] = -1
            errors.pop(row, None)
        errors.update((int(self.rows[i]), message) for i, message in masks.errors.items())
        found = one_id_a_row(token_ids.tolist())
        return StepResult(self.step, *found, errors, forward_s=self.clock.took(self.begin), masks_s=masks_s)


@dataclass(frozen=True, slots=True)
class GuessingStep:
    """A queued step, after which tokens are guessed once its ids have come to the host. is_last: whether no other has been queued since."""

    step: Pending
    plan: ModelWorkerBatch
    runner: ModelRunner
    is_last: Callable[[], bool]

    def result(self) -> StepResult:
        """See `Pending`. After the next step has been queued, a guess is too late to be written, but not to be told: the scheduler then waits for
        that step, whose own guess is written."""
        found = self.step.result()
        ids = [found.ids[begin:end].tolist() for begin, end in pairwise(found.id_starts.tolist())]
        return replace(found, drafts=self.runner.draft(self.plan, ids, writes=self.is_last()))


@dataclass(frozen=True, slots=True)
class Unmasked:
    """What the layers of a step and the sampling of its other rows give; constrained rows are still to be sampled from it.

    seqs, positions: int32[R], of the rows that sample; where their tokens go. logits: float32[R, V], with penalties applied. ids: int64[R].
    follow: to be called when all rows have been sampled, see `Drafter.follow`.
    """

    seqs: Int32Array
    positions: Int32Array
    logits: torch.Tensor
    ids: torch.Tensor
    follow: Callable[[], None]


class ConstrainedStep:
    """A queued step with rows that a grammar constrains. They are sampled by `sample`, which must come before the next step is queued.

    before: the last step that had such rows, whose tokens their grammars need. followers: the other ranks; all but `result` is called in a turn of
    theirs. Whatever goes wrong is raised by `result`, not by the call that came upon it, which may be for another step.
    """

    def __init__(
        self,
        step: QueuedStep,
        unmasked: Unmasked,
        sampler: Sampler,
        table: SequenceTable,
        device: Device,
        before: "ConstrainedStep | None",
        followers: Followers,
    ) -> None:
        self._step = step
        self._unmasked: Unmasked | None = unmasked
        self._sampler = sampler
        self._table = table
        self._device = device
        self._followers = followers
        self._is_computed = device.record()
        self._masks = NO_MASKS
        # What takes the token of each row that its grammar let sample.
        self._acceptors: dict[int, Callable[[int], None]] = {}
        self._ids: npt.NDArray[np.int64] | None = None
        self._error: Exception | None = None
        self._before = before
        self._next: ConstrainedStep | None = None
        if before is None or before.is_read:
            self._begin()
        else:
            before._next = self

    @property
    def is_read(self) -> bool:
        """Whether the grammars know the step's tokens."""
        return self._ids is not None or self._error is not None

    def _begin(self) -> None:
        """Begin to fill the masks: the tokens before are known."""
        self._before = None
        if self._unmasked is None:
            return
        try:
            self._sampler.grammars.begin(self._unmasked.seqs.tolist(), self._unmasked.positions.tolist())
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._unmasked = None
        self._acceptors.clear()

    @torch.inference_mode()
    def sample(self) -> None:
        """Queue the sampling of the constrained rows, those whose masks are late excepted. Waits for the masks, and for the tokens of the step
        before if nobody has. Idempotent."""
        if self._before is not None:
            self._before.read()
        if self._unmasked is None:
            return
        try:
            self._sample(self._unmasked)
        except Exception as error:
            self._fail(error)
        self._unmasked = None

    def _sample(self, unmasked: Unmasked) -> None:
        masks = self._sampler.grammars.ready(
            unmasked.seqs.tolist(), unmasked.positions.tolist(), lambda: not self._is_computed()
        )
        if masks.tokens is not None:
            rows = np.flatnonzero(masks.tokens.rows >= 0)
            seqs, positions = unmasked.seqs[rows], unmasked.positions[rows]
            at_rows, at_seqs, at_positions = upload_parts(
                self._device, [part.astype(np.int64) for part in (rows, seqs, positions)]
            )
            words = self._device.upload(masks.tokens.words)
            ids = self._sampler.pick_allowed(unmasked.logits, at_rows, words, seqs, positions)
            unmasked.ids.index_put_((at_rows,), ids)
            self._table.tokens.index_put_((at_seqs, at_positions), ids.clamp(min=0))
            self._followers.share_late(ids, seqs, positions)
            self._acceptors = dict(zip(rows.tolist(), self._sampler.grammars.acceptors(seqs.tolist()), strict=True))
        self._step.ids = self._device.download(unmasked.ids)
        self._masks = masks
        unmasked.follow()

    def read(self) -> None:
        """Wait for the step's tokens and give the grammars theirs; the masks of the next step can begin then. Idempotent."""
        self.sample()
        if not self.is_read:
            try:
                ids = self._ids = self._step.read()
            except Exception as error:
                self._fail(error)
            else:
                for row, accept in self._acceptors.items():
                    if ids[row] >= 0:
                        accept(int(ids[row]))
                # The runner keeps its last step; what a sequence holds that has left must not stay with it.
                self._acceptors.clear()
        following, self._next = self._next, None
        if following is not None:
            following._begin()

    def result(self) -> StepResult:
        with self._followers.turn():
            self.read()
        if self._error is not None:
            raise self._error
        assert self._ids is not None, self._step.step
        return self._step.result_of(self._ids, self._masks, self._sampler.grammars.take_masks_s())
