"""How many samples may wait: the count behind --max-queued-requests.

Used by the tokenizer manager, in its event loop only. It counts what the front end can see, so that a request can be accepted or refused
at once: a sample *runs* from its first token to its end (also while the scheduler computes it again), and is *queued* before. Queued samples
take the free running slots; those beyond them *wait*.

```
 slots   |rrrrrrrrr|qqq|        r runs, q queued: these q start at once
 waiting               |qqqqq......|    at most max_waiting
```
"""

from dataclasses import dataclass, field

from headrace.errors import CapacityError
from headrace.frontend.tenants import QueuePace

OWN_PER_FREE = 4
"""A key that is alone may have four fifths of the queue."""


@dataclass(slots=True)
class SampleQueue:
    """Counts of live samples. num_slots: most samples that run at a time, over all replicas. max_waiting: most samples beyond those."""

    num_slots: int
    max_waiting: int
    num_queued: int = 0
    num_running: int = 0
    _pace: QueuePace = field(default_factory=QueuePace)

    @property
    def num_waiting(self) -> int:
        """Number of samples without a slot."""
        return max(0, self.num_queued - max(0, self.num_slots - self.num_running))

    @property
    def most_at_once(self) -> int:
        """Most samples that an idle server accepts."""
        return self.num_slots + self.max_waiting

    def check(self, count: int, now_s: float, own: int | None = None) -> None:
        """Raises CapacityError unless there is room for `count` more.

        own: queued samples of the calling key; None = there is only one key. No key can fill the queue: a key may have at most
        `OWN_PER_FREE` times as many samples queued as there are free places, so that there is always room for another key. This is the dynamic
        threshold of A. K. Choudhury and E. L. Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (1998).
        """
        room = max(0, self.num_slots - self.num_running) + self.max_waiting
        left = room - self.num_queued - count
        if own is not None and left >= 0 and own + count > OWN_PER_FREE * left:
            raise CapacityError(
                f"the limit of this key is reached (queued samples: {own}, in this request: {count}, places left for other keys: {left})",
                self.retry_after_s(now_s),
                status_code=429,
            )
        if left < 0:
            raise CapacityError(
                f"the queue is full (running samples: {self.num_running}, waiting: {self.num_waiting} of at most {self.max_waiting}, "
                f"in this request: {count})",
                self.retry_after_s(now_s),
            )

    def enter(self, count: int) -> None:
        """Count new samples."""
        self.num_queued += count

    def begin(self, now_s: float) -> None:
        """A queued sample has its first token."""
        self.num_queued -= 1
        self.num_running += 1
        self._pace.note(now_s)

    def leave(self, was_queued: bool, now_s: float) -> None:
        """A sample has ended or was given up."""
        if was_queued:
            self.num_queued -= 1
            self._pace.note(now_s)
        else:
            self.num_running -= 1

    def retry_after_s(self, now_s: float) -> float:
        """Seconds until about half of the queue will be gone: soon enough to keep the slots full, late enough to find room."""
        return self._pace.wait_s(max(1, self.num_queued // 2), now_s)
