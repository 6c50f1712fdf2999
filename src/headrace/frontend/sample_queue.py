"""How many samples may wait: the count behind --max-queued-requests.

Used by the tokenizer manager, in its event loop only. What counts here is what the front end can see, so that the answer to one more request is
at hand: a sample *runs* from its first token to its end (also while the scheduler computes it again), and is *queued* before. Queued samples take
the running slots that nobody runs in; those beyond them *wait*.

```
 slots   |rrrrrrrrr|qqq|        r runs, q queued: these q begin at once
 waiting               |qqqqq......|    at most max_waiting
```
"""

from dataclasses import dataclass, field

from headrace.errors import CapacityError
from headrace.frontend.tenants import QueuePace


@dataclass(slots=True)
class SampleQueue:
    """Counts of live samples. num_slots: samples that run together, over all replicas. max_waiting: beyond those."""

    num_slots: int
    max_waiting: int
    num_queued: int = 0
    num_running: int = 0
    _pace: QueuePace = field(default_factory=QueuePace)

    @property
    def num_waiting(self) -> int:
        """Samples for which there is no slot."""
        return max(0, self.num_queued - max(0, self.num_slots - self.num_running))

    @property
    def most_at_once(self) -> int:
        """Samples that an idle server takes."""
        return self.num_slots + self.max_waiting

    def check(self, count: int, now_s: float) -> None:
        """Raises CapacityError unless there is room for `count` more."""
        free = max(0, self.num_slots - self.num_running)
        if self.num_queued + count > free + self.max_waiting:
            raise CapacityError(
                f"the queue is full: {self.num_running} samples run, {self.num_waiting} of at most {self.max_waiting} wait, "
                f"and {count} more were asked for",
                self.retry_after_s(now_s),
            )

    def enter(self, count: int) -> None:
        """So many samples have been taken."""
        self.num_queued += count

    def begin(self, now_s: float) -> None:
        """A queued sample has its first token."""
        self.num_queued -= 1
        self.num_running += 1
        self._pace.note(now_s)

    def leave(self, was_queued: bool, now_s: float) -> None:
        """A sample has ended, or was given up."""
        if was_queued:
            self.num_queued -= 1
            self._pace.note(now_s)
        else:
            self.num_running -= 1

    def retry_after_s(self, now_s: float) -> float:
        """When about half of the queue will be gone: early enough to keep the slots full, late enough to find room."""
        return self._pace.wait_s(max(1, self.num_queued // 2), now_s)
