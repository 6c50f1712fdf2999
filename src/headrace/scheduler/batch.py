"""ScheduleBatch: the plan of one step and the requests in it. `worker_batch` is what is sent to the worker."""

from dataclasses import dataclass, field

import numpy as np

from headrace.messages.control import FaultReq
from headrace.messages.step import ModelWorkerBatch, NewSequence
from headrace.scheduler.request import Req


@dataclass(frozen=True, slots=True)
class Row:
    """`count` tokens of `req` from position `start`. num_logits: 1 = the step also samples the token after them, else 0."""

    req: Req
    start: int
    count: int
    num_logits: int


@dataclass(slots=True)
class ScheduleBatch:
    """The plan of one step. Rows refer to requests; `worker_batch` copies their integers, so nothing is shared."""

    step: int
    page_size: int
    rows: list[Row] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    faults: list[FaultReq] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return sum(row.count for row in self.rows)

    def worker_batch(self) -> ModelWorkerBatch:
        """The plan as plain integers, for the worker."""
        slots: list[int] = []
        size = self.page_size
        for row in self.rows:
            pages, start = row.req.pages, row.start
            if row.count == 1:
                slots.append(pages[start // size] * size + start % size)
            else:
                slots += [pages[p // size] * size + p % size for p in range(start, start + row.count)]
        numbers = np.array([(row.req.seq, row.start, row.count, row.num_logits) for row in self.rows], np.int32)
        seqs, starts, counts, num_logits = np.ascontiguousarray(numbers.T)
        return ModelWorkerBatch(
            step=self.step,
            new=tuple(self.new),
            seqs=seqs,
            starts=starts,
            counts=counts,
            num_logits=num_logits,
            out_slots=np.array(slots, np.int32),
            faults=tuple(self.faults),
        )
