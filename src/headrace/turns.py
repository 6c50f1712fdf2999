"""Turns and shares: who is next where work waits, and how much one may hold of what cannot be taken back, and keep of what can.

A tenant is a name for turns alone (`frontend.tenants.Caller.turn`): nothing is owned by it. The empty one is the operator and the server itself,
which are outside all shares. Owns the threads in which work takes turns, and the order in which requests begin. Does not know what the work is:
a thread may as well ask a child process to do it.
"""

import asyncio
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from headrace.errors import CapacityError, RequestError

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

OWN_PER_FREE = 4
"""A tenant that is alone may hold four fifths."""

LEAST_WEIGHT, MOST_WEIGHT = 0.25, 4.0
"""A smaller or larger weight says as much of what a tenant may hold: it may always hold something, and leaves something to others."""

SMALL_S = 0.02
"""Work that is expected to take longer is large."""

ROUND_S = 0.002
LEAST_BEGUN, MOST_BEGUN = 2, 16
"""So much time, and so many requests, may begin in a round of the event loop."""

LONGEST_RETRY_S = 120.0
MAX_TENANTS = 10_000
LEAST_BYTES = 1024
"""Work of fewer bytes takes as long as of so many."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Whose request a task works for. weight: its share beside others. num_bytes: of the request's body."""

    tenant: str = ""
    weight: float = 1.0
    num_bytes: int = 0


_NOBODY = Asked()
_ASKED = ContextVar("asked", default=_NOBODY)
_IS_LARGE = ContextVar("is_large", default=False)


def work_for(tenant: str, weight: float = 1.0) -> None:
    """What the running task and its children do from now on is a tenant's."""
    _ASKED.set(Asked(tenant, weight))


def note_size(num_bytes: int) -> None:
    """The body of the running task's request has so many bytes."""
    _ASKED.set(replace(_ASKED.get(), num_bytes=num_bytes))


def is_large() -> bool:
    """Whether the work that the calling thread does in its turn is large."""
    return _IS_LARGE.get()


def asking() -> Asked:
    """Whose request the running task works for."""
    return _ASKED.get()


def is_within_share(
    tenant: str, own: int, held: int, most: int, own_per_free: float = OWN_PER_FREE, weight: float = 1.0
) -> bool:
    """Whether a tenant may hold `own` of the `held` of all, which are at most `most`.

    It may hold at most `own_per_free` times its weight times what is free, so that there is always room for another: the dynamic
    threshold of A. K. Choudhury and E. L. Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (1998).
    """
    return held <= most and (not tenant or own <= own_per_free * _bounded(weight) * (most - held))


def most_of_one(most: int, weight: float = 1.0) -> int:
    """What a tenant that is alone may hold."""
    own_per_free = OWN_PER_FREE * _bounded(weight)
    return int(most * own_per_free / (1 + own_per_free))


def _bounded(weight: float) -> float:
    return min(max(weight, LEAST_WEIGHT), MOST_WEIGHT)


@dataclass(slots=True)
class Shares:
    """What is held until its holder gives it back: see `is_within_share`. most: of all tenants. always: so much of each item is never refused, and
    not counted."""

    most: int
    always: int = 0
    own_per_free: int = OWN_PER_FREE
    held: int = 0
    _own: dict[str, int] = field(default_factory=dict)

    def take(self, tenant: str, amount: int, of_item: int = 0, weight: float = 1.0) -> bool:
        """Hold `amount` more, for an item of which `of_item` is held already. False if that is above the tenant's share; then nothing changes."""
        amount = self._counted(of_item + amount) - self._counted(of_item)
        own, held = self._own.get(tenant, 0) + amount, self.held + amount
        if amount and not is_within_share(tenant, own, held, self.most, self.own_per_free, weight):
            return False
        self.held = held
        self._own[tenant] = own
        return True

    def give_back(self, tenant: str, of_item: int) -> None:
        """An item of which `of_item` is held is gone."""
        amount = self._counted(of_item)
        self.held -= amount
        own = self._own.pop(tenant, 0) - amount
        if own > 0:
            self._own[tenant] = own

    def _counted(self, of_item: int) -> int:
        return max(0, of_item - self.always)


class Places:
    """How many are in at a time, in all and by host, of which each tenant leaves some to others (`Shares`). Those who wait come in in order, but not
    before there is room for their host and their tenant. Used in one event loop."""

    def __init__(self, most: int, most_of_host: int | None = None) -> None:
        self._most_of_host = most if most_of_host is None else most_of_host
        self._shares = Shares(most)
        self._of_host: dict[str, Shares] = {}
        self._waiting: list[tuple[str, str, asyncio.Future[None]]] = []

    @property
    def num_taken(self) -> int:
        return self._shares.held

    @property
    def hosts(self) -> list[str]:
        """Those of which some are in."""
        return [*self._of_host]

    @asynccontextmanager
    async def one(self, refusal: str, limit_s: float | None = None, host: str = "") -> AsyncIterator[None]:
        """A place of the running task's tenant. Raises CapacityError if it has to be waited for longer than that."""
        tenant = await self.take(refusal, limit_s, host)
        try:
            yield
        finally:
            self.leave(tenant, host)

    async def take(self, refusal: str = "", limit_s: float | None = None, host: str = "") -> str:
        """As `one`, until `leave`. Returns the tenant."""
        tenant = asking().tenant
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((host, tenant, place))
        self._let_in()
        try:
            async with asyncio.timeout(limit_s):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled():
                self.leave(tenant, host)
            if not isinstance(error, TimeoutError):
                raise
            raise CapacityError(refusal, retry_after_s=5) from None
        return tenant

    def leave(self, tenant: str, host: str = "") -> None:
        self._shares.give_back(tenant, 1)
        self._of_host[host].give_back(tenant, 1)
        if not self._of_host[host].held:
            del self._of_host[host]
        self._let_in()

    def _let_in(self) -> None:
        left = []
        for host, tenant, place in self._waiting:
            if place.done():
                continue
            of_host = self._of_host.get(host) or Shares(self._most_of_host)
            if of_host.take(tenant, 1):
                if self._shares.take(tenant, 1):
                    self._of_host[host] = of_host
                    place.set_result(None)
                    continue
                of_host.give_back(tenant, 1)
            left.append((host, tenant, place))
        self._waiting = left


@dataclass(slots=True)
class _Part(Generic[K]):
    """What is kept of a tenant: sizes, the oldest first."""

    sizes: dict[K, int] = field(default_factory=dict)
    total: int = 0


class Kept(Generic[K, V]):
    """What is kept as long as there is room, so a tenant that is alone may have all of it. Where there is none, the oldest goes of the tenant that
    has the largest part, of the sizes or of the number, what is new included. Not locked.

    max_size: of all, in any unit.
    """

    def __init__(self, max_size: int, max_items: int = sys.maxsize) -> None:
        self.size = 0
        self._max_size = max_size
        self._max_items = max_items
        self._values: dict[K, tuple[V, str]] = {}
        self._parts: dict[str, _Part[K]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> list[tuple[K, V]]:
        return [(key, value) for key, (value, _) in [*self._values.items()]]

    def get(self, key: K) -> V | None:
        found = self._values.get(key)
        return None if found is None else found[0]

    def use(self, key: K) -> V | None:
        """`get`; it becomes the newest of its tenant."""
        if (found := self._values.get(key)) is None:
            return None
        sizes = self._parts[found[1]].sizes
        sizes[key] = sizes.pop(key)
        return found[0]

    def put(self, key: K, value: V, size: int, tenant: str) -> int:
        """Keep a value, in place of another of this key, unless it is larger than all that may be kept. Returns the size of what goes."""
        gone = self.drop(key)
        if size > self._max_size or not self._max_items:
            return gone + size
        while len(self) >= self._max_items or self.size + size > self._max_size:
            gone += self.drop(self.next_to_go(tenant, size))
        self._values[key] = value, tenant
        part = self._parts.setdefault(tenant, _Part())
        part.sizes[key] = size
        part.total += size
        self.size += size
        return gone

    def next_to_go(self, tenant: str = "", more: int | None = None) -> K:
        """What goes if there is no room, for a value of size `more` of a tenant. Something must be kept."""
        most = max(self._parts, key=lambda name: self._part(name, more if name == tenant else None))
        return next(iter(self._parts[most].sizes))

    def drop(self, key: K) -> int:
        """Returns its size; 0 if it is not there."""
        if key not in self._values:
            return 0
        _, tenant = self._values.pop(key)
        part = self._parts[tenant]
        size = part.sizes.pop(key)
        part.total -= size
        self.size -= size
        if not part.sizes:
            del self._parts[tenant]
        return size

    def _part(self, tenant: str, more: int | None) -> float:
        """What a tenant has, with one more value of this size."""
        part, is_more = self._parts[tenant], more is not None
        return max((len(part.sizes) + is_more) / self._max_items, (part.total + (more or 0)) / max(1, self._max_size))


class _Work(Future[Any]):
    """until_s: it must have begun by then."""

    def __init__(
        self, turns: "Turns", function: Callable[[], Any], asked: Asked, num_bytes: int, cost_s: float, is_large: bool
    ) -> None:
        super().__init__()
        self.function = function
        self.asked = asked
        self.num_bytes = num_bytes
        self.cost_s = cost_s
        self.flow = asked.tenant, is_large
        self.until_s = time.monotonic() + turns.wait_limit_s
        self.begun_s = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self._turns = turns

    def cancel(self) -> bool:
        return super().cancel() and self._turns.forget(self)

    def settle(self, result: object, error: BaseException | None) -> None:
        """Give the result or the error to who waits, unless it has been refused meanwhile."""
        with suppress(InvalidStateError):
            if error is not None:
                self.set_exception(error)
            else:
                self.set_result(result)


@dataclass(slots=True, eq=False)
class _Flow:
    """The small or the large work of a tenant that waits, in order. name: the tenant, and whether it is large."""

    name: tuple[str, bool]
    used_s: float
    works: dict[_Work, None] = field(default_factory=dict)


class Turns:
    """Threads in which tenants take turns by the time that their work has taken.

    Deficit round robin over the tenants (M. Shreedhar and G. Varghese, "Efficient fair queuing using deficit round robin", 1995), small and large
    work of a tenant apart. What work costs is known only when it is done, so a tenant pays afterwards: it is charged an estimate, by bytes and by
    what its bytes have cost before, which the measured time replaces; one in debt waits until every other that waits has been given as much. The
    rounds in which nobody is out of debt are skipped. Idle time earns no credit. Of several threads one is left for small work; in a single thread
    small work goes first, as far as rounds allow. Work of a request that has gone does not begin. Used from any thread.
    """

    def __init__(
        self,
        num_threads: int,
        name: str,
        *,
        seconds_per_byte: float = 1e-6,
        wait_limit_s: float = 60.0,
        work_limit_s: float | None = None,
        clock: Callable[[], float] = time.thread_time,
        leaves_one: bool = False,
        stack_bytes: int = 0,
    ) -> None:
        """seconds_per_byte: usual cost of work. wait_limit_s: work that has not begun by then is refused. work_limit_s: of its time, after which its
        request is refused; the thread goes on. clock: measures work, within its thread. leaves_one: no tenant has all threads, for work that may
        take much longer than it looks. stack_bytes: of a thread; 0 = as usual."""
        self.wait_limit_s = wait_limit_s
        self.work_limit_s = work_limit_s
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._num_threads = num_threads
        self._most_large = max(1, num_threads - 1)
        self._seconds_per_byte = seconds_per_byte
        self._clock = clock
        self._leaves_one = leaves_one
        self._stack_bytes = stack_bytes
        self._lock = threading.Lock()
        # Guarded by the lock: flows that wait, in the order of their turns; seconds that tenants have used; seconds given to each in all rounds.
        self._waiting: dict[tuple[str, bool], _Flow] = {}
        self._used_s: dict[tuple[str, bool], float] = {}
        self._round_s = 0.0
        self._paces: dict[str, float] = {}
        self._num_serving = 0
        self._num_large = 0
        self._running: Counter[str] = Counter()
        self._closed = False

    async def run(self, function: Callable[[], T], num_bytes: int | None = None, is_small: bool = False) -> T:
        """`function()` in a thread when it is its tenant's turn, which is that of the running task's request (`work_for`).

        num_bytes: what it works on; None = the body of the request. is_small: it counts as small in any case. Raises CapacityError (503) when it has
        waited too long, or the server stops; RequestError when it takes too long; and what it raises itself.
        """
        asked, loop = asking(), asyncio.get_running_loop()
        work = self._add(function, asked, asked.num_bytes if num_bytes is None else num_bytes, is_small)
        work.timer = loop.call_later(self.wait_limit_s, self._late, work)
        try:
            result: T = await asyncio.wrap_future(work)
            return result
        finally:
            work.timer.cancel()
            # The traceback of an error refers to this frame: with it, all that the work has read would wait for the garbage collection.
            del work

    def submit(self, function: Callable[[], T], asked: Asked = _NOBODY, num_bytes: int = 0) -> "Future[T]":
        """The same outside of an event loop, for `asked`. The future may be cancelled; that it waited too long is noticed when other work ends."""
        return self._add(function, asked, num_bytes)

    def close(self) -> None:
        """Stop the threads; waiting work is given up. Idempotent."""
        with self._lock:
            self._closed = True
            waiting = [work for flow in self._waiting.values() for work in flow.works]
            self._waiting.clear()
        for work in waiting:
            work.settle(None, _stopping())
        self._pool.shutdown(wait=False, cancel_futures=True)

    def forget(self, work: _Work) -> bool:
        """Work that has been cancelled does not begin."""
        with self._lock:
            self._remove(work)
        return True

    def _add(self, function: Callable[[], Any], asked: Asked, num_bytes: int, is_small: bool = False) -> _Work:
        size = max(LEAST_BYTES, num_bytes)
        with self._lock:
            if self._closed:
                raise _stopping()
            cost_s = size * self._paces.get(asked.tenant, self._seconds_per_byte)
            work = _Work(self, function, asked, size, cost_s, not is_small and cost_s > SMALL_S)
            flow = self._waiting.get(work.flow)
            if flow is None:
                used_s = max(self._round_s, self._used_s.get(work.flow, 0.0))
                flow = self._waiting[work.flow] = _Flow(work.flow, used_s)
            flow.works[work] = None
            self._begin_to_serve()
        return work

    def _begin_to_serve(self) -> None:
        """One more thread, if there is one, and work that it may do. The lock is held."""
        if self._num_serving == self._num_threads or self._best() is None:
            return
        self._num_serving += 1
        before = threading.stack_size(self._stack_bytes) if self._stack_bytes else 0
        self._pool.submit(self._serve)
        if self._stack_bytes:
            threading.stack_size(before)

    def _remove(self, work: _Work) -> None:
        """It does not wait any more."""
        flow = self._waiting.get(work.flow)
        if flow is not None and work in flow.works:
            del flow.works[work]
            if not flow.works:
                del self._waiting[work.flow]

    def _serve(self) -> None:
        """Do what is next until nothing is left that this thread may do."""
        while True:
            self._expire()
            with self._lock:
                work = self._next()
                if work is None:
                    self._num_serving -= 1
                    if not self._num_serving:
                        self._used_s.clear()
                        self._round_s = 0.0
                    return
                # What ended may have been what others had to wait for.
                self._begin_to_serve()
            self._do(work)
            # Or what it works on would be kept until the next work.
            del work

    def _best(self) -> _Flow | None:
        """Whose turn it is."""
        best: _Flow | None = None
        for flow in self._waiting.values():
            tenant, is_large = flow.name
            if (is_large and self._num_large >= self._most_large) or (
                self._leaves_one and self._running[tenant] >= self._most_large
            ):
                continue
            if best is None or self._rank(flow) < self._rank(best):
                best = flow
        return best

    def _next(self) -> _Work | None:
        while (best := self._best()) is not None:
            work = next(iter(best.works))
            self._remove(work)
            if not work.set_running_or_notify_cancel():
                continue
            self._round_s = max(self._round_s, best.used_s)
            best.used_s = self._used_s[work.flow] = best.used_s + work.cost_s / work.asked.weight
            if best.works:
                # The others of this round go first.
                self._waiting[work.flow] = self._waiting.pop(work.flow)
            self._num_large += work.flow[1]
            self._running[work.asked.tenant] += 1
            work.begun_s = time.monotonic()
            return work
        return None

    def _rank(self, flow: _Flow) -> tuple[float, bool]:
        """Those out of debt first, by the order of their turns, and of them those with small work."""
        return max(self._round_s, flow.used_s), flow.name[1]

    def _do(self, work: _Work) -> None:
        _IS_LARGE.set(work.flow[1])
        start_s, result, error = self._clock(), None, None
        try:
            result = work.function()
        except BaseException as raised:
            error = raised
        self._charge(work, max(0.0, self._clock() - start_s))
        work.settle(result, error)
        del work, result, error  # as in `run`

    def _charge(self, work: _Work, taken_s: float) -> None:
        tenant, flow = work.asked.tenant, work.flow
        with self._lock:
            self._num_large -= flow[1]
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
            more_s = (taken_s - work.cost_s) / work.asked.weight
            self._used_s[flow] = self._used_s.get(flow, self._round_s) + more_s
            if len(self._used_s) > MAX_TENANTS:
                self._used_s = {other: used_s for other, used_s in self._used_s.items() if used_s > self._round_s}
            if flow in self._waiting:
                self._waiting[flow].used_s += more_s
            pace = self._paces.pop(tenant, self._seconds_per_byte)
            pace = max(self._seconds_per_byte, (pace + taken_s / work.num_bytes) / 2)
            if pace > self._seconds_per_byte:
                if len(self._paces) >= MAX_TENANTS:
                    self._paces.clear()
                self._paces[tenant] = pace

    def _expire(self) -> None:
        """Refuse what has waited too long."""
        now_s = time.monotonic()
        late: list[tuple[_Work, float]] = []
        with self._lock:
            for flow in list(self._waiting.values()):
                if next(iter(flow.works)).until_s > now_s:
                    continue
                own = [self._waiting.get((flow.name[0], is_large)) for is_large in (False, True)]
                own_s = sum(other.cost_s for each in own if each for other in each.works)
                while flow.works and (work := next(iter(flow.works))).until_s <= now_s:
                    late.append((work, own_s))
                    self._remove(work)
        for work, own_s in late:
            message = f"the request waited {self.wait_limit_s:g} s for its turn: there is too much other work"
            work.settle(None, CapacityError(message, min(LONGEST_RETRY_S, max(1.0, own_s))))

    def _late(self, work: _Work) -> None:
        """A limit has passed. In the event loop."""
        self._expire()
        if self.work_limit_s is not None and work.begun_s and not work.done():
            left_s = work.begun_s + self.work_limit_s - time.monotonic()
            if left_s > 0:
                work.timer = asyncio.get_running_loop().call_later(left_s, self._late, work)
            else:
                work.settle(None, RequestError(f"tokenizing the prompt took longer than {self.work_limit_s:g} s"))


class Beginnings:
    """Which of the requests that have come begin now: a few in each round of the event loop, tenants in turn.

    In a round runs all that is ready, and a request takes several rounds. So where hundreds are ready at once, a round, and with it whatever else is
    being answered, would take as long as all of them. Used in one event loop, without which nothing is late.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, loop_clock: Callable[[], float] | None = None
    ) -> None:
        """loop_clock: as the loop knows the time, which stands still within a round of uvloop's; None = the running loop's."""
        self._clock = clock
        self._loop_clock = loop_clock
        self._waiting: dict[Hashable, deque[Callable[[], None]]] = {}
        self._each_s = 0.0
        self._most = MOST_BEGUN
        self._num_begun = 0
        self._since_s = self._loop_s = 0.0  # what has begun is counted
        self._has_rounds = False

    def add(self, begin: Callable[[], None], flow: Callable[[], Hashable]) -> None:
        """Call `begin()`: at once if there is room. flow: what takes turns with others of its kind, asked only if there is none."""
        if not self._waiting:
            loop_s = (self._loop_clock or asyncio.get_running_loop().time)()
            if loop_s - self._loop_s > ROUND_S and not self._has_rounds:
                self._loop_s, self._num_begun = loop_s, 0
            if self._num_begun < self._most:
                self._num_begun += 1
                begin()
                return
        self._waiting.setdefault(flow(), deque()).append(begin)
        if not self._has_rounds:
            self._has_rounds, self._num_begun, self._since_s = True, 0, self._clock()
            asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        now_s = self._clock()
        if self._num_begun:
            self._each_s += ((now_s - self._since_s) / self._num_begun - self._each_s) / 8
            self._most = max(LEAST_BEGUN, min(MOST_BEGUN, int(ROUND_S / max(self._each_s, 1e-9))))
        self._since_s, self._num_begun = now_s, 0
        try:
            while self._waiting and self._num_begun < self._most:
                flow = next(iter(self._waiting))
                own = self._waiting.pop(flow)
                self._num_begun += 1
                begin = own.popleft()
                if own:
                    self._waiting[flow] = own
                begin()
        finally:
            self._has_rounds = self._num_begun > 0
            if self._has_rounds:
                asyncio.get_running_loop().call_soon(self._next_round)


def _stopping() -> CapacityError:
    return CapacityError("the server is stopping")
