"""ScheduleBatch: the plan of one step with the requests it is for; its `worker_batch` is what crosses to the worker."""

from dataclasses import dataclass, field

import numpy as np

from headrace.messages.control import FaultReq
from headrace.messages.step import ModelWorkerBatch, NewSequence
from headrace.scheduler.request import Req


@dataclass(frozen=True, slots=True)
class Row:
    """`count` tokens of `req` from position `start`; `samples`: the step also samples the token after them."""

    req: Req
    start: int
    count: int
    samples: bool


@dataclass(slots=True)
class ScheduleBatch:
    """The plan of one step. Rows hold requests; `worker_batch` copies integers out, so nothing is aliased."""

    step: int
    page_size: int
    rows: list[Row] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    faults: list[FaultReq] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return sum(row.count for row in self.rows)

    def worker_batch(self) -> ModelWorkerBatch:
        """The plan in integers."""
        num_rows = len(self.rows)
        seqs = np.empty(num_rows, np.int32)
        starts = np.empty(num_rows, np.int32)
        counts = np.empty(num_rows, np.int32)
        samples = np.empty(num_rows, np.bool_)
        slots: list[int] = []
        size = self.page_size
        for i, row in enumerate(self.rows):
            seqs[i], starts[i], counts[i], samples[i] = row.req.seq, row.start, row.count, row.samples
            pages = row.req.pages
            if row.count == 1:
                slots.append(pages[row.start // size] * size + row.start % size)
            else:
                slots += [pages[p // size] * size + p % size for p in range(row.start, row.start + row.count)]
        return ModelWorkerBatch(
            step=self.step,
            new=tuple(self.new),
            seqs=seqs,
            starts=starts,
            counts=counts,
            samples=samples,
            out_slots=np.array(slots, np.int32),
            faults=tuple(self.faults),
        )
