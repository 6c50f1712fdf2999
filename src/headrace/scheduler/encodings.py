"""Outputs of the media encoder: which of them the worker has, which it is to compute, and which it may drop.

A request begins when the worker has the outputs of all its items whose tokens are not cached. Until then it waits, and others pass it. It holds
these outputs until its prompt is computed. What nobody holds is kept for others, until there is no room: `turns.Kept` says which goes first. Items
are encoded in batches, one at a time, each in slices, of which a step computes a few, so that decode rows do not wait for all of it.

There is room for `max_rows` rows of outputs. It is given in the order in which requests are admitted: the first that finds too little takes it from
those that wait behind it, and until there is enough, nobody behind it gets any. A request that needs more gets it when nobody holds any.

Does not encode, and does not decide the order. Runs in the scheduler's thread.
"""

import math
import sys
from collections.abc import Mapping

from msgspec.structs import replace

from headrace.messages.media import MAX_BATCH_BYTES, EncodingStats, MediaItem, num_parts
from headrace.messages.step import EncodeWork, StepResult
from headrace.scheduler.request import Req
from headrace.turns import Kept

_SMOOTHING = 0.3
"""Weight of the latest step in the time that a slice is expected to take."""

_Items = Mapping[bytes, MediaItem]


class Encodings:
    """See the module docstring. max_rows: bound on what is kept, not on what one request needs. num_slices: of each part of a batch."""

    def __init__(self, max_rows: int = 0, num_slices: int = 1) -> None:
        self.stats = EncodingStats()
        self._max_rows = max_rows
        self._num_slices = num_slices
        # What the worker has, of it what nobody holds, and what it is to compute, in the order in which it was asked for.
        self._ready: dict[bytes, int] = {}
        self._left: Kept[bytes, None] = Kept(sys.maxsize)
        self._wanted: dict[bytes, MediaItem] = {}
        self._batch: dict[bytes, MediaItem] = {}
        self._num_parts = 1
        self._slices_left = 0
        self._dropped: list[bytes] = []
        self._epoch = 0
        # Who holds what, by request and by item.
        self._held: dict[Req, dict[bytes, MediaItem]] = {}
        self._holders: dict[bytes, set[Req]] = {}
        # Of the plan that is being made: who has asked, and whether one of them found no room.
        self._asked: set[Req] = set()
        self._is_blocked = False
        self._slice_s_per_byte = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no request holds an item or asks for one."""
        return not (self._held or self._holders or self._wanted)

    def begin_plan(self) -> None:
        """A step is about to be planned: requests ask again, in the order of this plan."""
        self._asked.clear()
        self._is_blocked = False

    def is_ready(self, req: Req, num_cached: int) -> bool:
        """Whether a waiting request may begin, the KV of whose first `num_cached` tokens is cached: the worker has what it needs, and it holds that.
        Otherwise what is missing is asked for, if there is room."""
        if not (needed := _needed(req, num_cached)):
            return True
        return self._hold(req, needed) and all(key in self._ready for key in needed)

    def limit(self, req: Req, start: int, count: int) -> int:
        """How many of the next `count` tokens of a running request can be computed: those before the first item that there is not, which is then
        asked for. It is missing only if the outputs have been cleared."""
        if not (needed := _needed(req, start)):
            return count
        self._hold(req, needed)
        content = req.asked.content
        missing = (
            span for span in content.spans if span.end > start and content.media[span.item].key not in self._ready
        )
        first = next(missing, None)
        return count if first is None else max(0, min(count, first.start - start))

    def release(self, req: Req) -> None:
        """The request needs its items no more: its prompt is computed, it has ended, or it waits again."""
        for key in self._held.pop(req, ()):
            holders = self._holders[key]
            holders.discard(req)
            if not holders:
                del self._holders[key]
                self._wanted.pop(key, None)
                if key in self._ready:
                    self._left.put(key, None, self._ready[key], req.asked.tenant)

    def take_work(self, decode_s: float, max_step_s: float) -> EncodeWork | None:
        """What the step that is being planned does for the encoder, or None. decode_s: expected time of its decode rows, infinite without
        any. max_step_s: how long a step should take at most."""
        begun: tuple[MediaItem, ...] = ()
        if not self._batch and self._wanted:
            begun = self._begin_batch()
        self._drop_excess()
        num_slices = self._slices_in(min(decode_s, max_step_s))
        self._slices_left -= num_slices
        if not num_slices and not self._dropped:
            return None
        work = EncodeWork(self._epoch, begun, num_slices, tuple(self._dropped))
        self._dropped = []
        return work

    def take_result(self, work: EncodeWork, result: StepResult) -> dict[Req, str]:
        """A step has done its work. Returns the requests that end, since an item of theirs could not be encoded, and the reason."""
        self._count(seconds=result.encode_s)
        if work.epoch != self._epoch:
            return {}
        if work.num_slices and self._batch and result.encode_s:
            slice_s_per_byte = result.encode_s / work.num_slices / self._part_bytes()
            before = self._slice_s_per_byte or slice_s_per_byte
            self._slice_s_per_byte = before + _SMOOTHING * (slice_s_per_byte - before)
        for key in result.encoded:
            if (item := self._batch.pop(key, None)) is not None:
                self._ready[key] = item.num_tokens
                if key not in self._holders:
                    self._left.put(key, None, item.num_tokens, "")
                self._count(num_encoded=1, num_tokens=item.num_tokens)
        failed: dict[Req, str] = {}
        for key, message in result.encode_errors.items():
            if self._batch.pop(key, None) is not None:
                self._count(num_failed=1)
                failed |= dict.fromkeys(self._holders.get(key, ()), message)
        return failed

    def fail(self) -> set[Req]:
        """A step with work has failed as a whole, so that nothing is known of the outputs. Returns the requests that waited for the batch."""
        waiting = {req for key in self._batch for req in self._holders.get(key, ())}
        self._count(num_failed=len(self._batch))
        self.clear()
        return waiting

    def clear(self) -> None:
        """Drop all outputs, since the weights change, and what is being computed. Requests ask again for what they need."""
        self._ready.clear()
        self._left = Kept(sys.maxsize)
        self._wanted.clear()
        self._batch.clear()
        self._slices_left = 0
        self._dropped.clear()
        self._epoch += 1
        self._held.clear()
        self._holders.clear()

    def _hold(self, req: Req, needed: _Items) -> bool:
        """Let the request hold these items, and ask for those that there are not. False: there is no room, and it holds nothing more."""
        self._asked.add(req)
        held = self._held.get(req, {})
        more = {key: item for key, item in needed.items() if key not in held}
        if not more:
            return True
        num_rows = sum(item.num_tokens for key, item in more.items() if key not in self._holders)
        if num_rows and not self._has_room(num_rows, req):
            return False
        self._held[req] = held | more
        for key, item in more.items():
            self._holders.setdefault(key, set()).add(req)
            if key in self._ready:
                self._left.drop(key)
                self._count(num_hits=1)
            elif key not in self._batch:
                self._wanted.setdefault(key, item)
        return True

    def _has_room(self, num_rows: int, req: Req) -> bool:
        """Whether a request may hold so many rows more; those behind it that wait give up theirs if it needs them."""
        if self._is_blocked:
            return False
        if not self._fits(num_rows, req):
            for other in [other for other in self._held if other.seq < 0 and other not in self._asked]:
                self.release(other)
        self._is_blocked = not self._fits(num_rows, req)
        return not self._is_blocked

    def _fits(self, num_rows: int, req: Req) -> bool:
        if not self._held.keys() - {req}:
            return True
        sizes = {key: item.num_tokens for items in self._held.values() for key, item in items.items()}
        return sum(sizes.values()) + num_rows <= self._max_rows

    def _begin_batch(self) -> tuple[MediaItem, ...]:
        """Take the first items that are wanted."""
        while self._wanted:
            key = next(iter(self._wanted))
            num_bytes = _num_bytes(self._batch) + self._wanted[key].num_bytes
            if self._batch and num_bytes > MAX_BATCH_BYTES:
                break
            self._batch[key] = self._wanted.pop(key)
        self._num_parts = num_parts(item.shape for item in self._batch.values())
        self._slices_left = self._num_slices * self._num_parts
        return tuple(self._batch.values())

    def _drop_excess(self) -> None:
        """Drop what nobody holds until the rest, with the batch, is no more than there is room for."""
        num_rows = sum(self._ready.values()) + sum(item.num_tokens for item in self._batch.values())
        while num_rows > self._max_rows and len(self._left):
            key = self._left.next_to_go()
            self._left.drop(key)
            num_rows -= self._ready.pop(key)
            self._dropped.append(key)

    def _slices_in(self, seconds: float) -> int:
        """How many slices of the batch a step computes that has so much time for them: at least one."""
        if seconds == math.inf or not self._slices_left:
            return self._slices_left
        # As long as nothing is known of a slice, one is enough to learn from.
        slice_s = self._slice_s_per_byte * self._part_bytes()
        return min(self._slices_left, max(1, int(seconds / slice_s)) if slice_s else 1)

    def _part_bytes(self) -> float:
        return _num_bytes(self._batch) / self._num_parts

    def _count(self, seconds: float = 0.0, **more: int) -> None:
        before = self.stats
        self.stats = replace(
            before,
            seconds=before.seconds + seconds,
            **{name: getattr(before, name) + count for name, count in more.items()},
        )


def _needed(req: Req, num_cached: int) -> dict[bytes, MediaItem]:
    """The items of a request that have tokens after the first `num_cached`, by key."""
    content = req.asked.content
    items = (content.media[span.item] for span in content.spans if span.end > num_cached)
    return {item.key: item for item in items}


def _num_bytes(items: _Items) -> int:
    return sum(item.num_bytes for item in items.values())
