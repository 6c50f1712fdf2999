"""ScheduleBatch: the plan of one step and the requests in it. `worker_batch` is what is sent to the worker."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from headrace.messages.control import FaultReq
from headrace.messages.step import ModelWorkerBatch, NewSequence
from headrace.scheduler.request import Req


def _column() -> "array[int]":
    return array("i")


@dataclass(slots=True)
class ScheduleBatch:
    """The plan of one step, in columns: row r computes counts[r] tokens of reqs[r] from position starts[r] on.

    num_logits: 1 = the step also samples the token after them, else 0. seqs: of the requests, when they were added.
    planned_s: when the step was planned.
    out_slots: where the KV of the rows' tokens goes, row after row.
    """

    step: int
    page_size: int
    planned_s: float
    reqs: list[Req] = field(default_factory=list)
    seqs: "array[int]" = field(default_factory=_column)
    starts: "array[int]" = field(default_factory=_column)
    counts: "array[int]" = field(default_factory=_column)
    num_logits: "array[int]" = field(default_factory=_column)
    out_slots: "array[int]" = field(default_factory=_column)
    new: list[NewSequence] = field(default_factory=list)
    faults: list[FaultReq] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return len(self.out_slots)

    def rows(self) -> Iterable[tuple[Req, int, int, int]]:
        """Request, start, count and num_logits of each row."""
        return zip(self.reqs, self.starts, self.counts, self.num_logits, strict=True)

    def add(self, req: Req, count: int) -> None:
        """Add a row for the next `count` tokens of the request, which has pages for them."""
        start, pages, size = req.num_scheduled, req.pages, self.page_size
        if count > 1 or start < req.num_prompt_tokens:
            req.note("chunk", self.planned_s, count)
        self.reqs.append(req)
        self.seqs.append(req.seq)
        self.starts.append(start)
        self.counts.append(count)
        self.num_logits.append(req.join_step(count))
        if count == 1:
            self.out_slots.append(pages[start // size] * size + start % size)
        else:
            self.out_slots.extend(pages[p // size] * size + p % size for p in range(start, start + count))

    def worker_batch(self) -> ModelWorkerBatch:
        """The plan as plain integers, for the worker."""
        return ModelWorkerBatch(
            step=self.step,
            new=tuple(self.new),
            seqs=np.array(self.seqs, np.int32),
            starts=np.array(self.starts, np.int32),
            counts=np.array(self.counts, np.int32),
            num_logits=np.array(self.num_logits, np.int32),
            out_slots=np.array(self.out_slots, np.int32),
            faults=tuple(self.faults),
        )
