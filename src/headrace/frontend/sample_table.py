"""The table of live samples: by rid, by the names of their calls, with the count of those that wait; and their aborts.

Either all samples of a call enter the table or none. A sample stays until `forget`, possibly longer than its client (`leave`): its rid is in
use until the engine's last output for it has arrived.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.errors import CapacityError, HeadraceError, RequestError
from headrace.frontend.request_state import CallState, ReqState
from headrace.frontend.tenants import Caller, QueuePace
from headrace.messages.channel import Sender
from headrace.messages.control import AbortReq
from headrace.messages.requests import PromptContent
from headrace.turns import OWN_PER_FREE, Shares

MAX_MEDIA_BYTES = 1 << 30
"""Most bytes of decoded media of all live samples: they are kept until a sample has ended, to be sent again after a death."""

MAX_GIVEN_BYTES = 1 << 30
"""Most bytes of the files and texts that all waiting clients have given as media: who called keeps them until the call has ended."""

_TOO_MUCH = "the media of all requests take too much memory now; try again when others have ended"

REPLIES_AT_ONCE = 8
"""How many replies of the largest size may be in memory at once; of a tenant that is alone, six."""

ALONE_S = 60.0
"""Without keys, a tenant beside which no other has come for so long may have all of the queue."""


@dataclass(slots=True)
class SampleQueue:
    """How many samples may wait: the count behind --max-queued-requests.

    It counts what the front end can see, so that a request can be accepted or refused at once: a sample *runs* from its first token to its end
    (also while the scheduler computes it again), and is *queued* before. Queued samples take the free running slots; those beyond them *wait*.

    ```
     slots   |rrrrrrrrr|qqq|        r runs, q queued: these q start at once
     waiting               |qqqqq......|    at most max_waiting
    ```

    num_slots: most samples that run at a time, over all replicas. max_waiting: most samples beyond those. has_keys: there is a file of keys.
    """

    num_slots: int
    max_waiting: int
    num_queued: int = 0
    num_running: int = 0
    has_keys: bool = False
    _latest: str = ""
    _changed_s: float = -ALONE_S
    _pace: QueuePace = field(default_factory=QueuePace)

    @property
    def num_waiting(self) -> int:
        return max(0, self.num_queued - max(0, self.num_slots - self.num_running))

    @property
    def most_at_once(self) -> int:
        """Most samples that an idle server accepts."""
        return self.num_slots + self.max_waiting

    def note_turn(self, turn: str, now_s: float) -> bool:
        """A tenant comes, named as in `Caller.turn`; whether it must leave places for others."""
        if turn and turn != self._latest:
            if self._latest:
                self._changed_s = now_s
            self._latest = turn
        return turn != "" and (self.has_keys or now_s < self._changed_s + ALONE_S)

    def check(self, count: int, now_s: float, own: int | None = None) -> None:
        """Raises CapacityError unless there is room for `count` more.

        own: queued samples of the calling tenant; None = it may have all. Else it may have at most `OWN_PER_FREE` times as many samples queued as
        there are free places, or one, so that there is always room for another. This is the dynamic threshold of A. K. Choudhury and E. L. Hahne,
        "Dynamic queue length thresholds for shared-memory packet switches" (1998).
        """
        room = max(0, self.num_slots - self.num_running) + self.max_waiting
        left = room - self.num_queued - count
        if own is not None and left >= 0 and own + count > max(1, OWN_PER_FREE * left):
            raise CapacityError(
                f"the limit of this client is reached (queued samples: {own}, in this request: {count}, places left for others: {left})",
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
        self.num_queued += count

    def begin(self, now_s: float) -> None:
        self.num_queued -= 1
        self.num_running += 1
        self._pace.note(now_s)

    def leave(self, was_queued: bool, now_s: float) -> None:
        if was_queued:
            self.num_queued -= 1
            self._pace.note(now_s)
        else:
            self.num_running -= 1

    def retry_after_s(self, now_s: float) -> float:
        """Seconds until about half of the queue will be gone: soon enough to keep the slots full, late enough to find room."""
        return self._pace.wait_s(max(1, self.num_queued // 2), now_s)


class SampleTable:
    """samples: the live samples by rid, a view of the table. max_output_bytes: of logprobs and hidden states, see `hold_output`."""

    def __init__(self, queue: SampleQueue, max_output_bytes: int = 1 << 30) -> None:
        self.queue = queue
        self._outputs = Shares(max_output_bytes)
        self._by_rid: dict[str, ReqState] = {}
        self.samples: Mapping[str, ReqState] = self._by_rid
        self._calls_by_name: dict[str, CallState] = {}
        self._calls: set[CallState] = set()
        self._num_queued: Counter[str] = Counter()
        self._media_bytes = 0
        self._given_bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_empty(self) -> bool:
        return not (self._calls or self._by_rid or self._calls_by_name)

    async def wait_until_empty(self) -> None:
        await self._idle.wait()

    def adapters_in_use(self) -> tuple[set[str], set[str]]:
        """Names of the adapters of samples that run, and of those that wait."""
        running: set[str] = set()
        waiting: set[str] = set()
        for sample in self._by_rid.values():
            if sample.adapter is not None:
                (running if sample.runs else waiting).add(sample.adapter.name)
        return running, waiting

    def enter(self, call: CallState, rid: str, now_s: float) -> None:
        """Add all samples of a call under their rids, and the call under its names. rid: the call's own, for the error message.

        Raises RequestError for a rid in use, CapacityError when the queue is full (503) or a limit of the caller is reached (429); the table is
        then as before.
        """
        self._check_unused(call, rid)
        tenant, count = call.tenant, len(call.samples)
        own = self._num_queued[call.turn] if self.queue.note_turn(call.turn, now_s) else None
        self.queue.check(count, now_s, own)
        tenant.enter(count, now_s)
        call.created_s = now_s
        self.queue.enter(count)
        self._num_queued[call.turn] += count
        self._by_rid.update((sample.rid, sample) for sample in call.samples)
        self._calls_by_name.update(dict.fromkeys(call.names, call))
        self._calls.add(call)
        self._idle.clear()

    def begin(self, sample: ReqState, now_s: float) -> None:
        """The sample has its first token: it no longer counts as waiting. Later calls do nothing."""
        if sample.queued:
            sample.queued = False
            self.queue.begin(now_s)
            self._leave_queue(sample.call)

    def hold_given(self, call: CallState, num_bytes: int) -> None:
        """The call's media as its client gave them are kept until the client leaves. Raises CapacityError if those of others leave no room."""
        if num_bytes and self._given_bytes and self._given_bytes + num_bytes > MAX_GIVEN_BYTES:
            raise CapacityError(_TOO_MUCH)
        self._given_bytes += num_bytes
        call.given_bytes += num_bytes

    def hold_media(self, samples: Sequence[ReqState], content: PromptContent) -> None:
        """Each of these live samples of a prompt keeps its media until it is forgotten. Raises CapacityError if that is too much."""
        num_bytes = content.media_bytes
        live = [sample for sample in samples if self._by_rid.get(sample.rid) is sample]
        if self._media_bytes + num_bytes * len(live) > MAX_MEDIA_BYTES:
            raise CapacityError(_TOO_MUCH)
        self._media_bytes += num_bytes * len(live)
        for sample in live:
            sample.media_bytes, sample.media_tokens = num_bytes, content.media_tokens

    def hold_output(self, sample: ReqState) -> bool:
        """The logprobs and hidden states that a live sample has now are kept until its client leaves. False if that is above its tenant's share;
        a program in this process and the operator have none."""
        more, call = sample.packed_bytes - sample.held_bytes, sample.call
        if not call.turn:
            return True
        if not self._outputs.take(call.turn, more, sample.held_bytes, call.tenant.limits.weight):
            return False
        sample.held_bytes += more
        return True

    def leave(self, call: CallState, now_s: float) -> None:
        """The client of the call has its answer or has left. The samples stay until each is forgotten."""
        call.abandoned = True
        for sample in call.samples:
            self._outputs.give_back(call.turn, sample.held_bytes)
            sample.held_bytes = 0
        self._given_bytes -= call.given_bytes
        call.given_bytes = 0
        self._calls.discard(call)
        call.tenant.leave(now_s - call.created_s)
        self._note_idle()

    def forget(self, sample: ReqState, now_s: float) -> bool:
        """Remove a sample. Its rid may be used again, and so may a name once all of its samples are removed. False if it was not there."""
        if self._by_rid.get(sample.rid) is not sample:
            return False
        del self._by_rid[sample.rid]
        self._media_bytes -= sample.media_bytes
        for name in sample.call.forget_names(sample):
            del self._calls_by_name[name]
        self.queue.leave(sample.queued, now_s)
        if sample.queued:
            self._leave_queue(sample.call)
        self._note_idle()
        return True

    def _leave_queue(self, call: CallState) -> None:
        call.tenant.leave_queue()
        self._num_queued[call.turn] -= 1
        if not self._num_queued[call.turn]:
            del self._num_queued[call.turn]

    def fail(self, error: HeadraceError) -> None:
        for call in self._calls:
            call.fail(error)

    def find(self, scope: str, rid: str) -> list[ReqState]:
        """The live sample `rid` of the key with this scope, or all samples of its call or prompt with that name, or else those of a request that
        was split into calls, whose samples are `rid`/0, `rid`/1, ..."""
        name = scope + rid
        if name in self._by_rid:
            found = [self._by_rid[name]]
        elif name in self._calls_by_name:
            found = self._calls_by_name[name].names[name]
        else:
            found = [sample for own, sample in self._by_rid.items() if own.startswith(f"{name}/")]
        return [sample for sample in found if sample.call.tenant.scope == scope]

    def scopes(self) -> set[str]:
        return {call.tenant.scope for call in self._calls}

    def _check_unused(self, call: CallState, rid: str) -> None:
        rids = [*(sample.rid for sample in call.samples), *call.names]
        taken = [each for each in rids if each in self._by_rid or each in self._calls_by_name]
        if taken or len(set(rids)) != len(rids):
            shown = taken[0].removeprefix(call.tenant.scope) if taken else rid
            raise RequestError(f"Duplicate request ID {shown[:100]!r}: the rid is in use by another request", "rid")

    def _note_idle(self) -> None:
        if not self._calls and not self._by_rid:
            self._idle.set()


@dataclass(eq=False)
class Aborts:
    """Aborts samples on request. They are only marked, and stay in the table: a scheduler ends those that it has, and the others end when they would
    be sent. to_schedulers: sends to all live schedulers."""

    table: SampleTable
    to_schedulers: Sender

    def abort(self, rid: str, caller: Caller) -> None:
        """Abort the caller's sample `rid`, or all samples of its call or prompt with that name. An admin aborts those of every key."""
        scopes = {caller.scope} | (self.table.scopes() if caller.is_admin else set())
        found = [sample for scope in scopes for sample in self.table.find(scope, rid)]
        self.abort_samples(sample for sample in found if caller.is_admin or sample.call.owner == caller.owner)

    def abort_all(self) -> None:
        """Abort all samples, including those that only the schedulers know."""
        _mark(self.table.samples.values())
        self.to_schedulers.send(AbortReq(abort_all=True))

    def abort_samples(self, samples: Iterable[ReqState]) -> None:
        """Abort the given samples, except those that have ended."""
        if sent := _mark(samples):
            self.to_schedulers.send(AbortReq(sent))


def _mark(samples: Iterable[ReqState]) -> tuple[str, ...]:
    """Mark samples as aborted. Returns the rids of those that were sent to a scheduler."""
    sent = []
    for sample in samples:
        if sample.finish is None:
            sample.abort_asked = True
            if sample.sent_s:
                sent.append(sample.rid)
    return tuple(sent)
