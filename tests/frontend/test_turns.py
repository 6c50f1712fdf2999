"""Who is next where the work of requests waits, and how much one may hold."""

import asyncio
import gc
import threading
import weakref
from collections import Counter
from contextlib import suppress

import pytest

from headrace.errors import CapacityError
from headrace.turns import (
    LEAST_BEGUN,
    MOST_BEGUN,
    OWN_PER_FREE,
    ROUND_S,
    Asked,
    Beginnings,
    Kept,
    Places,
    Shares,
    Turns,
    is_large,
    most_of_one,
    work_for,
)

LARGE = 1 << 20
WAIT_S = 20


class Gate:
    """Work that holds its thread until it is opened."""

    def __init__(self):
        self.begun, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.opened.wait(WAIT_S)

    async def wait(self):
        assert await asyncio.to_thread(self.begun.wait, WAIT_S)


class Clock:
    """Tells how long the works of a single thread have taken."""

    now_s = 0.0

    def __call__(self):
        return self.now_s

    def work(self, done, name, taken_s):
        def run():
            self.now_s += taken_s
            done.append(name)

        return run


@pytest.fixture
def one():
    with_clock = Turns(1, "one", clock=Clock())
    yield with_clock
    with_clock.close()


@pytest.fixture
def two():
    turns = Turns(2, "two")
    yield turns
    turns.close()


async def ask(turns, tenant, work, num_bytes=0, weight=1.0):
    """Work of a tenant that waits, or has begun."""

    async def run():
        work_for(tenant, weight)
        return await turns.run(work, num_bytes)

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    return task


async def order(turns, asked):
    """In which order a thread that was busy does what (tenant, seconds, bytes, weight) have asked for meanwhile, by index."""
    gate, done, clock = Gate(), [], turns._clock
    tasks = [await ask(turns, "", gate)]
    await gate.wait()
    for index, (tenant, taken_s, num_bytes, weight) in enumerate(asked):
        tasks.append(await ask(turns, tenant, clock.work(done, index, taken_s), num_bytes, weight))
    gate.opened.set()
    await asyncio.gather(*tasks)
    return done


async def test_small_work_of_another_does_not_wait_behind_the_large_work_of_one(one):
    done = await order(one, [*[("a", 1.0, LARGE, 1.0)] * 20, ("b", 0.001, 100, 1.0)])
    assert done == [20, *range(20)]


async def test_work_is_charged_by_its_time_and_not_by_its_bytes(one):
    """Forty small ones of b take as long as one of a, which looks as small."""
    done = await order(one, [*[("a", 0.4, 100, 1.0)] * 3, *[("b", 0.01, 100, 1.0)] * 80])
    begun = [done.index(index) for index in range(3)]
    assert begun[0] <= 1
    assert 38 <= begun[1] <= 44
    assert 78 <= begun[2] <= 82


async def test_a_weight_is_a_share(one):
    done = await order(one, [*[("a", 0.1, 100, 1.0)] * 12, *[("b", 0.1, 100, 3.0)] * 12])
    assert sum(index < 12 for index in done[:12]) == 3


async def test_small_work_does_not_starve_large_work(one):
    done = await order(one, [*[("a", 0.01, 100, 1.0)] * 300, *[("a", 1.0, LARGE, 1.0)] * 2])
    assert done[0] == 0
    assert 95 <= done.index(301) - done.index(300) <= 110


async def test_idle_time_earns_no_credit(one):
    """What a did alone is not owed to b, which comes later."""
    await order(one, [("a", 0.1, 100, 1.0)] * 50)
    done = await order(one, [*[("a", 0.1, 100, 1.0)] * 10, *[("b", 0.1, 100, 1.0)] * 10])
    assert 4 <= sum(index < 10 for index in done[:10]) <= 6


async def test_large_work_leaves_a_thread_for_small_work(two):
    gate, done = Gate(), []
    large = await ask(two, "a", gate, LARGE)
    await gate.wait()
    waiting = await ask(two, "b", lambda: done.append("large"), LARGE)
    await (await ask(two, "a", lambda: done.append("small")))
    assert done == ["small"]
    gate.opened.set()
    await asyncio.gather(large, waiting)
    assert done == ["small", "large"]


async def test_what_took_long_is_large_the_next_time():
    gate, clock = Gate(), Clock()
    turns = Turns(2, "two", clock=clock)
    await (await ask(turns, "a", clock.work([], 0, 5.0), 100))
    first, second = await ask(turns, "a", gate, 100), await ask(turns, "a", lambda: None, 100)
    await gate.wait()
    await (await ask(turns, "b", lambda: None, 100))
    assert not second.done()
    gate.opened.set()
    await asyncio.gather(first, second)
    turns.close()


async def test_work_of_a_request_that_has_gone_does_not_begin(one):
    gate, done = Gate(), []
    busy = await ask(one, "a", gate)
    await gate.wait()
    gone, stays = [await ask(one, "a", lambda name=name: done.append(name)) for name in ("gone", "stays")]
    gone.cancel()
    await asyncio.wait([gone])
    gate.opened.set()
    await asyncio.gather(busy, stays)
    assert done == ["stays"]


def submit(turns, tenant, work, num_bytes=0):
    return turns.submit(work, Asked(tenant), num_bytes)


def three():
    return Turns(3, "three", leaves_one=True)


def test_one_tenant_never_has_all_threads_whatever_its_work_looks_like():
    turns, gates, done = three(), [Gate() for _ in range(2)], []
    held = [submit(turns, "a", gate) for gate in gates]
    waiting = submit(turns, "a", lambda: done.append("a"))
    submit(turns, "b", lambda: done.append("b")).result(WAIT_S)
    assert done == ["b"]
    for gate in gates:
        gate.opened.set()
    for each in (*held, waiting):
        each.result(WAIT_S)
    turns.close()


def test_the_end_of_one_lets_all_begin_that_waited_for_it():
    """The end of a large one of a: a may have another, and so may those with large work."""
    turns, gates = three(), [Gate() for _ in range(4)]
    first, second, small, other = gates
    works = [submit(turns, "a", first, LARGE), submit(turns, "a", second, LARGE)]
    works += [submit(turns, "a", small), submit(turns, "c", other, LARGE)]
    first.opened.set()
    assert small.begun.wait(WAIT_S)
    assert other.begun.wait(WAIT_S)
    for gate in gates:
        gate.opened.set()
    for work in works:
        work.result(WAIT_S)
    turns.close()


def test_what_is_cancelled_outside_of_a_loop_does_not_begin(one):
    gate, done = Gate(), []
    busy = submit(one, "a", gate)
    gone, stays = [submit(one, "a", lambda name=name: done.append(name)) for name in ("gone", "stays")]
    assert gate.begun.wait(WAIT_S)
    assert gone.cancel()
    assert not busy.cancel()
    gate.opened.set()
    stays.result(WAIT_S)
    assert done == ["stays"]


def test_what_has_waited_too_long_is_told_how_long_its_own_tenant_will_take():
    turns = Turns(1, "one", clock=Clock())
    gate, begin = Gate(), Gate()
    turns._pool.submit(begin)  # has the thread until all of them wait
    busy = submit(turns, "a", gate)
    turns.wait_limit_s = 0.0
    late = [submit(turns, "a", lambda: None, 30 * LARGE) for _ in range(2)]
    other = submit(turns, "b", lambda: None)
    begin.opened.set()
    gate.opened.set()
    busy.result(WAIT_S)
    for each, at_least_s in ((late[0], 60), (late[1], 60), (other, 1)):
        refused = each.exception(WAIT_S)
        assert isinstance(refused, CapacityError)
        assert at_least_s <= refused.retry_after_s < at_least_s + 5
    turns.close()


def test_work_can_tell_whether_it_is_large(one):
    assert [submit(one, "a", is_large, size).result(WAIT_S) for size in (0, LARGE, 0)] == [False, True, False]
    assert not is_large()


async def test_an_error_is_its_own_requests(one):
    def broken():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await one.run(broken)
    assert await one.run(lambda: 1) == 1


async def test_what_waits_at_the_end_is_given_up(one):
    gate = Gate()
    busy, waiting = await ask(one, "a", gate), await ask(one, "a", lambda: 1)
    await gate.wait()
    one.close()
    with pytest.raises(CapacityError, match="stopping"):
        await waiting
    with pytest.raises(CapacityError, match="stopping"):
        await one.run(lambda: 1)
    gate.opened.set()
    await busy


def test_nobody_holds_so_much_that_another_has_no_room():
    shares = Shares(1000, always=10)
    held = 0
    while held < 1000 and shares.take("a", 1, of_item=10):
        held += 1
    assert held == 1000 * OWN_PER_FREE // (OWN_PER_FREE + 1)
    assert shares.take("b", 150)
    assert not shares.take("b", 50)
    assert not shares.take("a", 1, of_item=10)
    assert shares.take("", 70)
    assert not shares.take("", 1, of_item=10)
    shares.give_back("a", held + 10)
    assert shares.take("a", held // 2, of_item=10)
    assert shares.held == 140 + 60 + held // 2


def test_two_that_take_all_they_may_hold_as_their_weights_are():
    shares, own = Shares(2100), Counter()
    weights = {"heavy": 4.0, "light": 1.0}
    for _ in range(2100):
        own.update(tenant for tenant, weight in weights.items() if shares.take(tenant, 1, weight=weight))
    for _ in range(2100):
        for tenant, weight in weights.items():
            shares.give_back(tenant, 1)
            own[tenant] += 2 * shares.take(tenant, 2, weight=weight) - 1
            own[tenant] += shares.take(tenant, 1, weight=weight)
    assert own["light"] == pytest.approx(2100 * 4 / 21, rel=0.02)
    assert own["heavy"] == pytest.approx(2100 * 16 / 21, rel=0.02)
    assert most_of_one(2100, 0.25) == 1050
    assert most_of_one(2100, 1e-9) == 1050, "somebody whose turns hardly come may hold something"
    assert most_of_one(2100, 1e9) == 2100 * 16 // 17, "nobody may hold everything"


def test_what_is_never_refused_takes_no_room():
    """Many small bodies, which one client begins and never ends, are no reason to refuse those of others."""
    shares = Shares(1000, always=10)
    for _ in range(200):
        assert shares.take("a", 10)
    assert shares.take("b", 800)
    shares.give_back("a", 10)
    shares.give_back("b", 800)
    assert shares.held == 0


def test_a_cancelled_wait_takes_no_place():
    async def run() -> None:
        places = Places(1, 1)
        await places.take(host="a")
        waits = [asyncio.create_task(places.take(host="b")) for _ in range(3)]
        await asyncio.sleep(0)
        waits[0].cancel()
        places.leave("", "a")
        waits[1].cancel()  # it has its place, and has not run since
        await asyncio.gather(*waits[:2], return_exceptions=True)
        await asyncio.wait_for(waits[2], 5)
        assert places.hosts == ["b"]
        assert places.num_taken == 1

    asyncio.run(run())


@pytest.mark.parametrize("hosts", [["h"], [f"h{number}" for number in range(10)]], ids=["one", "many"])
async def test_a_tenant_leaves_places_for_others(hosts: list[str]):
    async def take(tenant: str, host: str) -> None:
        work_for(tenant)
        async with places.one("", host=host):
            await ends.wait()

    places, ends = Places(10, 10), asyncio.Event()
    tasks = [asyncio.create_task(take("a", hosts[number % len(hosts)])) for number in range(20)]
    await asyncio.sleep(0)
    assert places.num_taken == 8
    tasks.append(asyncio.create_task(take("b", hosts[0])))
    await asyncio.sleep(0)
    assert places.num_taken == 9
    ends.set()
    await asyncio.gather(*tasks)
    assert places.num_taken == 0
    assert not places.hosts


def kept(max_size: int, *values: tuple[str, str, int], max_items: int = 1000) -> Kept[str, None]:
    """Of (key, tenant, size)."""
    made: Kept[str, None] = Kept(max_size, max_items)
    for key, tenant, size in values:
        made.put(key, None, size, tenant)
    return made


def keys(found: Kept[str, None]) -> str:
    return "".join(sorted(key for key, _ in found.items()))


def test_a_tenant_that_is_alone_keeps_all_and_then_its_oldest_goes():
    found = kept(10, ("a", "me", 4), ("b", "me", 4))
    assert found.put("c", None, 11, "me") == 11, "larger than all that may be kept"
    assert (keys(found), found.size) == ("ab", 8)
    found.use("a")
    assert found.put("d", None, 6, "me") == 4
    assert (keys(found), found.size) == ("ad", 10)
    assert found.put("d", None, 5, "me") == 6, "it is replaced"
    assert (found.drop("a"), found.drop("a"), found.size, len(found)) == (4, 0, 5, 1)
    assert keys(kept(10, ("a", "me", 0), max_items=0)) == ""


def test_the_tenant_that_keeps_the_most_makes_room():
    many = [(str(number), "many", 1) for number in range(9)]
    assert keys(kept(10, ("a", "few", 1), *many, ("x", "few", 3))) == "345678ax"
    assert keys(kept(100, ("a", "few", 60), *many, max_items=5)) == "5678a"
    assert keys(kept(12, ("a", "one", 6), ("b", "two", 5), ("c", "two", 2))) == "ac", "with what is new"


async def test_alone_a_request_begins_at_once_and_hundreds_in_their_order():
    beginnings, begun = Beginnings(lambda: 0.0, lambda: 0.0), []
    for number in range(300):
        beginnings.add(lambda number=number: begun.append(number), lambda: "a")
    assert begun == [*range(MOST_BEGUN)]
    while len(begun) < 300:
        before = len(begun)
        await asyncio.sleep(0)
        assert len(begun) - before == min(MOST_BEGUN, 300 - before)
    assert begun == [*range(300)]
    beginnings.add(lambda: begun.append("later"), lambda: "a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert begun[300:] == ["later"]


async def test_a_request_of_another_does_not_wait_for_the_hundreds_of_one():
    beginnings, begun = Beginnings(lambda: 0.0, lambda: 0.0), []
    for _ in range(300):
        beginnings.add(lambda: begun.append("a"), lambda: "a")
    beginnings.add(lambda: begun.append("b"), lambda: "b")
    await asyncio.sleep(0)
    assert begun.index("b") == MOST_BEGUN + 1


async def test_the_longer_requests_take_the_fewer_begin_in_a_round():
    """As many as take `ROUND_S` together; the next rounds are judged by those before."""
    clock = Clock()
    beginnings = Beginnings(clock, lambda: 0.0)

    async def counts(each_s, num_rounds):
        begun = []

        def begin():
            clock.now_s += each_s
            begun.append(clock.now_s)

        for _ in range(MOST_BEGUN * num_rounds):
            beginnings.add(begin, lambda: "a")
        found = []
        for _ in range(num_rounds):
            before = len(begun)
            await asyncio.sleep(0)
            found.append(len(begun) - before)
        for _ in range(MOST_BEGUN * num_rounds):
            await asyncio.sleep(0)
        assert len(begun) == MOST_BEGUN * num_rounds
        return found

    some = await counts(ROUND_S / 4.5, 40)
    assert some == sorted(some, reverse=True)
    assert some[-1] == 4
    assert (await counts(1.0, 20))[-1] == LEAST_BEGUN


async def test_a_request_that_cannot_begin_holds_up_no_other():
    loop, failed = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: failed.append(context["exception"]))
    beginnings, begun = Beginnings(lambda: 0.0, lambda: 0.0), []
    for number in range(3 * MOST_BEGUN):
        beginnings.add(lambda number=number: begun.append(number) if number != MOST_BEGUN else 1 / 0, lambda: "a")
    for _ in range(5):
        await asyncio.sleep(0)
    assert begun == [number for number in range(3 * MOST_BEGUN) if number != MOST_BEGUN]
    assert [type(error) for error in failed] == [ZeroDivisionError]


async def test_without_requests_there_are_no_rounds():
    beginnings, rounds = Beginnings(lambda: rounds.append(1) or 0.0, lambda: 0.0), []
    for _ in range(2 * MOST_BEGUN):
        beginnings.add(lambda: None, lambda: "a")
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(rounds) <= 4


async def test_what_failed_work_has_read_is_freed_with_it(one):
    """And does not wait for the garbage collection: it may be megabytes."""

    class Body:
        pass

    async def fail():
        body = Body()
        freed.append(weakref.ref(body))

        def work():
            raise ValueError(type(body))

        with suppress(ValueError):
            await one.run(work)

    freed = []
    gc.collect()
    gc.disable()
    try:
        await fail()
        await one.run(lambda: None)
        assert freed[0]() is None
    finally:
        gc.enable()
