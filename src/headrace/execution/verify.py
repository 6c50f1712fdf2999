"""The rows of a step that sample, and which of their drafts were right.

A row with drafts has logits after its last known token and after each draft. They are sampled in order, each as it would be without drafts, up to
the first that is not the draft that stands there:

    known token   draft 0   draft 1   draft 2          drafts were b, c, x; sampled are b, c, d
        a            b         c         x             ids: b, c, d (what is sampled after x means nothing)

Owns the order of sampling. Does not own the sampler. Runs in the thread that runs the steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class SampledRow:
    """A row of the plan that samples.

    place: of its first logits among those of the step. first: the position that its first id takes. drafts: the tokens that stand there and
    after it. ids: what was sampled so far. is_done: no id comes any more.
    """

    row: int
    seq: int
    place: int
    first: int
    drafts: Sequence[int] = ()
    ids: list[int] = field(default_factory=list)
    is_done: bool = False

    def take(self, token_id: int) -> None:
        """The id of the next position."""
        self.is_done = len(self.ids) == len(self.drafts) or token_id != self.drafts[len(self.ids)]
        self.ids.append(token_id)


@dataclass(frozen=True, slots=True)
class Place:
    """A position that is sampled: number `index` of those of a row."""

    row: SampledRow
    index: int

    @property
    def logits(self) -> int:
        return self.row.place + self.index

    @property
    def position(self) -> int:
        """That its id takes in its sequence."""
        return self.row.first + self.index


def waves(rows: Sequence[SampledRow], depends: Callable[[int], bool]) -> Iterator[list[Place]]:
    """What to sample at once, until all rows are done. depends: whether what a sequence samples depends on its ids before, beside the logits;
    then they must have been taken, and it has one place in each wave."""
    left = list(rows)
    while left:
        yield [
            Place(row, index)
            for row in left
            for index in ((len(row.ids),) if not row.drafts or depends(row.seq) else range(len(row.drafts) + 1))
        ]
        left = [row for row in left if not row.is_done]
