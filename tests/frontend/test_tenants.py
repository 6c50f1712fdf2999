"""What belongs to a key: two keys neither see, stop, continue nor find what the other has, and an admin sees both."""

import asyncio
import contextlib

import pytest
from frontend_fakes import answers_of, request, turns

from headrace.errors import CapacityError, NotFoundError, RequestError
from headrace.frontend.sessions import Sessions
from headrace.frontend.tenants import ANONYMOUS, SERVER, Caller, Tenant, TenantLimits
from headrace.messages.outputs import FinishReason
from headrace.messages.requests import SessionParams

STOP = FinishReason("stop", matched=256)
ADMIN = Caller(is_admin=True)


def caller(name, **limits):
    return Caller(Tenant(TenantLimits(name=name, **limits)))


def start(frontend, who, rid=None, text="pp", **fields):
    """A call in a task, by a caller; all its answers."""

    async def run():
        asked = request(text, rid=rid, **fields)
        async with contextlib.aclosing(answers_of(frontend.manager, asked, caller=who)) as answers:
            return [answer async for answer in answers]

    return asyncio.create_task(run())


async def sent(frontend, count):
    await frontend.engine.until(lambda: len(frontend.engine.requests) == count)
    return list(frontend.engine.order)


async def test_the_engine_gives_turns_to_keys_and_else_to_addresses(make_frontend):
    frontend = make_frontend()
    callers = (caller("a"), Caller(address="@192.0.2.1"), SERVER, ANONYMOUS)
    tasks = [start(frontend, who) for who in callers]
    rids = await sent(frontend, len(callers))
    assert [frontend.engine.requests[rid].tenant for rid in rids] == ["a", "@192.0.2.1", "", ""]
    for rid in rids:
        frontend.engine.emit(rid, "x", STOP)
    await asyncio.gather(*tasks)

    lines = (await frontend.manager.metrics_text()).decode()
    assert 'key_name="a"' in lines
    assert "192.0.2.1" not in lines


async def test_samples_and_tokens_are_counted_by_the_name_of_the_key(make_frontend):
    frontend = make_frontend()
    for who, text, made in (
        (caller("a"), "ppp", "xx"),
        (caller("b"), "p", "y"),
        (caller("a"), "pp", "z"),
        (ANONYMOUS, "pp", "x"),
    ):
        task = start(frontend, who, text=text)
        rid = (await sent(frontend, len(frontend.engine.requests) + 1))[-1]
        frontend.engine.emit(rid, made, STOP)
        await task

    lines = (await frontend.manager.metrics_text()).decode().splitlines()
    counted = {line.split("{")[0] + line.split("key_name=")[1][:4]: line for line in lines if "key_name=" in line}
    assert {name: float(line.split()[-1]) for name, line in counted.items()} == {
        'headrace:key_requests_total"a",': 2,
        'headrace:key_requests_total"b",': 1,
        'headrace:key_prompt_tokens_total"a",': 5,
        'headrace:key_prompt_tokens_total"b",': 1,
        'headrace:key_generation_tokens_total"a",': 3,
        'headrace:key_generation_tokens_total"b",': 1,
    }


async def test_keys_may_use_the_same_rids_and_see_their_own(make_frontend):
    frontend = make_frontend()
    callers = [ANONYMOUS, caller("a"), caller("b"), caller("x")]
    n_of = [1, 1, 2, 3]
    tasks = [start(frontend, who, "r", sampling_params={"n": n}) for who, n in zip(callers, n_of, strict=True)]
    rids = await sent(frontend, sum(n_of))
    assert len(set(rids)) == len(rids)
    groups = {frontend.engine.requests[rid].group for rid in rids if frontend.engine.requests[rid].group}
    assert len(groups) == 2

    for who, n in zip(callers, n_of, strict=True):
        with pytest.raises(RequestError, match="Duplicate request ID 'r'"):
            await start(frontend, who, "r")
        told = await frontend.manager.records.timelines("r", who)
        assert [each["rid"] for each in told] == (["r"] if n == 1 else [f"r/{j}" for j in range(n)])
    for rid in rids:
        frontend.engine.emit(rid, "x", STOP)
    for task in tasks:
        answers = await task
        flat = answers[0] if isinstance(answers[0], list) else answers
        assert {answer["meta_info"]["id"] for answer in flat} == {"r"}


async def test_no_rid_of_a_caller_without_a_key_is_one_of_a_keys(make_frontend):
    frontend = make_frontend()
    who = caller("a")
    tasks = [start(frontend, who, "r")]
    tasks += [start(frontend, ANONYMOUS, rid) for rid in ("r", "a/r", '["a", "r"]', "a\0r")]
    for rid in await sent(frontend, 5):
        frontend.engine.emit(rid, "x", STOP)
    await asyncio.gather(*tasks)


async def test_no_client_takes_the_rids_of_health_checks(make_frontend):
    frontend = make_frontend()
    rids = [f"headrace-health-{i}" for i in range(4)]
    tasks = [start(frontend, ANONYMOUS, rid) for rid in rids]
    await sent(frontend, 4)
    probe = asyncio.create_task(frontend.manager.health(generate=True))
    await frontend.engine.until(lambda: probe.done() or len(frontend.engine.requests) == 5)
    for rid in list(frontend.engine.num_tokens):
        frontend.engine.emit(rid, "x", STOP)
    assert await probe
    await asyncio.gather(*tasks)


async def test_an_abort_ends_the_requests_of_who_asked(make_frontend):
    frontend = make_frontend()
    a, b = caller("a"), caller("b")
    tasks = {who: start(frontend, who, "r") for who in (a, b, ANONYMOUS)}
    rids = dict(zip(tasks, await sent(frontend, 3), strict=True))
    for who in (a, caller("c"), ANONYMOUS):
        frontend.manager.abort_request("other", caller=who)
        frontend.manager.abort_request(rids[b], caller=who)
    frontend.manager.abort_request("r", caller=caller("c"))
    await turns()
    frontend.engine.pump()
    assert not frontend.engine.aborts

    frontend.manager.abort_request("r", caller=a)
    (answer,) = await asyncio.wait_for(pumped(frontend, tasks[a]), 20)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert [abort.rids for abort in frontend.engine.aborts] == [(rids[a],)]
    frontend.manager.abort_request("r", caller=ADMIN)
    for who in (b, ANONYMOUS):
        (answer,) = await asyncio.wait_for(pumped(frontend, tasks[who]), 20)
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"


async def pumped(frontend, task):
    await turns()
    frontend.engine.pump()
    return await task


async def test_a_timeline_is_told_to_its_key_and_to_an_admin(make_frontend):
    frontend = make_frontend()
    a, b = caller("a"), caller("b")
    tasks = [start(frontend, a, "r"), start(frontend, b, "r"), start(frontend, a, "only-a", sampling_params={"n": 2})]
    for ended in (False, True):
        rids = await sent(frontend, 4)
        if ended:
            for rid in rids:
                frontend.engine.emit(rid, "x", STOP)
            await asyncio.gather(*tasks)
        assert (
            len(await frontend.manager.records.timelines("r", a))
            == len(await frontend.manager.records.timelines("r", b))
            == 1
        )
        assert [each["rid"] for each in await frontend.manager.records.timelines("only-a", a)] == [
            "only-a/0",
            "only-a/1",
        ]
        assert [each["rid"] for each in await frontend.manager.records.timelines("r", ADMIN)] == ["r", "r"]
        assert [each["rid"] for each in await frontend.manager.records.timelines("only-a/1", ADMIN)] == ["only-a/1"]
        listed = {
            who: [each["rid"] for each in await frontend.manager.records.latest(9, who)]
            for who in (a, b, ANONYMOUS, ADMIN)
        }
        assert sorted(listed[a]) == ["only-a/0", "only-a/1", "r"]
        assert (listed[b], listed[ANONYMOUS], len(listed[ADMIN])) == (["r"], [], 4)
        for who in (b, ANONYMOUS):
            for rid in ("only-a", "only-a/0", *rids):
                with pytest.raises(NotFoundError):
                    await frontend.manager.records.timelines(rid, who)


async def test_what_the_admin_and_the_server_ask_is_not_the_users(make_frontend):
    frontend = make_frontend()
    users = caller("a"), ANONYMOUS
    tasks = [
        start(frontend, who, rid)
        for rid, who in zip(("own", "plain", "boss", "probe"), (*users, ADMIN, SERVER), strict=True)
    ]
    for ended in (False, True):
        rids = await sent(frontend, 4)
        if ended:
            for rid in rids:
                frontend.engine.emit(rid, "x", STOP)
            await asyncio.gather(*tasks)
        records = frontend.manager.records
        listed = [[each["rid"] for each in await records.latest(9, who)] for who in users]
        assert listed == [["own"], ["plain"]]
        assert {each["rid"] for each in await records.latest(9, ADMIN)} == {"own", "plain", "boss", "probe"}
        for who in users:
            for rid in ("boss", "probe"):
                with pytest.raises(NotFoundError):
                    await records.timelines(rid, who)
        assert [each["rid"] for each in await records.timelines("boss", ADMIN)] == ["boss"]
        if not ended:
            for who in users:
                frontend.manager.abort_request("boss", caller=who)
            await turns()
            frontend.engine.pump()
            assert not frontend.engine.aborts


async def test_prompts_of_a_key_are_found_in_the_cache_by_nobody_else(make_frontend):
    frontend = make_frontend()
    who = [
        ANONYMOUS,
        caller("a"),
        caller("b"),
        caller('a", "'),
        caller("c", shared_cache=True),
        caller("d", shared_cache=True),
    ]
    salts = [{}, {"extra_key": "a"}, {"extra_key": "key", "cache_salt": "a"}, {"cache_salt": "s"}]
    tasks = [start(frontend, each, **salt) for each in who for salt in salts]
    rids = await sent(frontend, len(tasks))
    spaces = [frontend.engine.requests[rid].namespace for rid in rids]
    by_caller = [spaces[i : i + len(salts)] for i in range(0, len(spaces), len(salts))]
    nobody, a, b, odd, c, d = by_caller
    assert nobody == c == d
    assert len({*nobody, *a, *b, *odd}) == 4 * len(salts)
    for rid in rids:
        frontend.engine.emit(rid, "x", STOP)
    await asyncio.gather(*tasks)


async def test_a_session_is_known_to_its_key_only(make_frontend):
    frontend = make_frontend()
    manager, a, b = frontend.manager, caller("a"), caller("b")
    assert await manager.open_session(session_id="s", caller=a) == "s"
    first = start(frontend, a, "t1", "secret", session_params={"id": "s"})
    (rid,) = await sent(frontend, 1)
    frontend.engine.emit(rid, "x", STOP)
    await first

    for who in (b, ANONYMOUS):
        unknown = [
            await failure(start(frontend, who, None, "?", session_params={"id": name})) for name in ("s", "none")
        ]
        assert unknown[0] == unknown[1] == (404, "there is no such session; it may have been closed")
        for name in ("s", "none"):
            with pytest.raises(NotFoundError):
                await manager.close_session(name, who)
    # The same id is another session for another key.
    assert await manager.open_session(session_id="s", caller=b) == "s"
    of_b = start(frontend, b, "t1", "mine", session_params={"id": "s"})
    rids = await sent(frontend, 2)
    assert frontend.engine.requests[rids[1]].content.token_ids == ids("mine")
    frontend.engine.emit(rids[1], "y", STOP)
    await of_b
    await manager.close_session("s", b)
    on = start(frontend, a, "t2", "more", session_params={"id": "s"})
    rids = await sent(frontend, 3)
    assert frontend.engine.requests[rids[2]].content.token_ids == ids("secretxmore")
    # Replacing a running turn ends it, and it is the key's own that ends.
    other = start(frontend, b, "t2")
    await sent(frontend, 4)
    again = start(frontend, a, "t3", "!", session_params={"id": "s", "rid": "t1", "replace": True})
    await frontend.engine.until(lambda: len(frontend.engine.requests) == 5 and frontend.engine.aborts)
    assert [abort.rids for abort in frontend.engine.aborts] == [(rids[2],)]
    for rid in frontend.engine.order[3:]:
        frontend.engine.emit(rid, "z", STOP)
    await asyncio.gather(on, other, again)

    await manager.close_session("s", ADMIN)
    with pytest.raises(NotFoundError):
        await manager.close_session("s", a)


def ids(text):
    return b"".join(byte.to_bytes(4, "little") for byte in text.encode())


async def failure(task):
    with pytest.raises(RequestError) as caught:
        await task
    return caught.value.status_code, caught.value.message


def make_sessions(max_sessions=4, max_tokens=40, now=lambda: 0.0):
    return Sessions(max_sessions, max_tokens, 60.0, lambda ids: "", now)


def test_a_key_takes_its_share_of_the_sessions_and_leaves_the_others_theirs():
    sessions = make_sessions()
    a, b = (caller(name, share=0.5).tenant for name in "ab")
    for _ in range(2):
        sessions.open(tenant=a)
    with pytest.raises(CapacityError, match=r"limit of open sessions \(2\)") as caught:
        sessions.open(tenant=a)
    assert caught.value.status_code == 429
    mine = [sessions.open(tenant=b) for _ in range(2)]
    sessions.close(mine[0], Caller(b))
    sessions.open(tenant=b)


def test_a_key_takes_its_share_of_the_tokens_and_leaves_the_others_theirs():
    sessions = make_sessions()
    a, b = (caller(name, share=0.5).tenant for name in "ab")
    first, second = sessions.open(tenant=a), sessions.open(tenant=b)
    sessions.begin(SessionParams(id=first), "r", list(range(20)), tenant=a)
    with pytest.raises(CapacityError, match="hold 20 tokens; the limit is 20") as caught:
        sessions.begin(SessionParams(id=sessions.open(tenant=a)), "s", [1], tenant=a)
    assert caught.value.status_code == 429
    sessions.begin(SessionParams(id=second), "r", list(range(20)), tenant=b)
    sessions.close(first, Caller(a))
    sessions.begin(SessionParams(id=sessions.open(tenant=a)), "r", list(range(20)), tenant=a)


def test_limits_of_a_key_take_the_place_of_its_share_and_the_servers_hold_beside_them():
    sessions = make_sessions()
    small = caller("small", share=0.5, max_sessions=1, max_session_tokens=3).tenant
    large = caller("large", share=0.5, max_sessions=100, max_session_tokens=1000).tenant
    session = sessions.open(tenant=small)
    with pytest.raises(CapacityError, match=r"limit of open sessions \(1\)"):
        sessions.open(tenant=small)
    with pytest.raises(CapacityError, match="limit is 3"):
        sessions.begin(SessionParams(id=session), "r", [1, 2, 3, 4], tenant=small)
    for _ in range(3):
        last = sessions.open(tenant=large)
    with pytest.raises(CapacityError, match="no room for another session") as caught:
        sessions.open(tenant=large)
    assert caught.value.status_code == 503
    with pytest.raises(CapacityError, match="no room for more session tokens"):
        sessions.begin(SessionParams(id=last), "r", list(range(41)), tenant=large)


def test_a_key_that_has_its_share_gets_the_place_of_its_stale_session_at_once():
    now = [0.0]
    sessions = make_sessions(now=lambda: now[0])
    a = caller("a", share=0.25).tenant
    sessions.open(tenant=a, timeout_s=0.5)
    now[0] = 0.75
    sessions.open(tenant=a)
    assert len(sessions) == 1


def test_many_keys_have_a_session_each():
    sessions = make_sessions(max_sessions=4)
    tenants = [caller(f"k{i}", share=1 / 100).tenant for i in range(100)]
    for tenant in tenants[:4]:
        sessions.open(tenant=tenant)
        with pytest.raises(CapacityError):
            sessions.open(tenant=tenant)
