"""ScheduleBatch: the plan of one step and the requests in it. `worker_batch` is what is sent to the worker."""

from array import array
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from headrace.messages.step import EncodeWork, ModelWorkerBatch, NewSequence
from headrace.scheduler.request import Req
from headrace.scheduler.step_cost import StepWork

Row = tuple[Req, int, int, int]
"""Request, start, count and num_logits: the step computes `count` of its tokens from position `start` on.

num_logits: 0, or 1 if the step also samples the token after them, and one more for each draft.
"""


@dataclass(slots=True)
class ScheduleBatch:
    """The plan of one step.

    planned_s: when the step was planned. left, part_starts, encode: see `ModelWorkerBatch`. out_slots: where the KV of the rows' tokens goes.
    num_prompt_tokens: how many of the tokens catch up with known ones; expected_s: how long the step should then take. 0 if that is not known.
    """

    step: int
    page_size: int
    planned_s: float
    rows: list[Row] = field(default_factory=list)
    out_slots: "array[int]" = field(default_factory=lambda: array("i"))
    new: list[NewSequence] = field(default_factory=list)
    left: tuple[int, ...] = ()
    part_starts: tuple[int, ...] = ()
    encode: EncodeWork | None = None
    num_prompt_tokens: int = 0
    expected_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return len(self.out_slots)

    @property
    def samples_last(self) -> bool:
        """Whether the row that was added last gives a token."""
        return self.rows[-1][3] > 0

    def work(self) -> StepWork:
        """What determines how long the step takes."""
        attended = sum(count * (start + 0.5 * count) for _, start, count, _ in self.rows)
        return StepWork(self.num_tokens, attended, sum(num_logits for *_, num_logits in self.rows))

    def add(self, req: Req, count: int) -> None:
        """Add a row for the next `count` tokens of the request, which has pages for them."""
        start, pages, size = req.num_scheduled, req.pages, self.page_size
        self.rows.append((req, start, count, req.join_step(count, self.planned_s)))
        if count == 1:
            self.out_slots.append(pages[start // size] * size + start % size)
        else:
            self.out_slots.extend(pages[p // size] * size + p % size for p in range(start, start + count))

    def sort_by_part(self, num_parts: int) -> None:
        """Put the rows of each part of the KV cache together, the first part's first."""
        ends = accumulate(count for _, _, count, _ in self.rows)
        slots = [self.out_slots[end - count : end] for (_, _, count, _), end in zip(self.rows, ends, strict=True)]
        order = sorted(range(len(self.rows)), key=lambda row: self.rows[row][0].part)
        self.rows = [self.rows[row] for row in order]
        self.out_slots = array("i")
        for row in order:
            self.out_slots += slots[row]
        num_rows = [0] * num_parts
        for req, *_ in self.rows:
            num_rows[req.part] += 1
        self.part_starts = tuple(accumulate(num_rows, initial=0))

    def worker_batch(self) -> ModelWorkerBatch:
        """The plan as plain integers, for the worker. Without rows it has work for the encoder."""
        reqs, starts, counts, num_logits = zip(*self.rows, strict=True) if self.rows else ((), (), (), ())
        return ModelWorkerBatch(
            step=self.step,
            new=tuple(self.new),
            left=self.left,
            part_starts=self.part_starts,
            seqs=np.array([req.seq for req in reqs], np.int32),
            starts=np.array(starts, np.int32),
            counts=np.array(counts, np.int32),
            num_logits=np.array(num_logits, np.int32),
            out_slots=np.array(self.out_slots, np.int32),
            encode=self.encode,
        )
