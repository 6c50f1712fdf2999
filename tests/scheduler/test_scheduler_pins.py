"""Pinned prefixes: they stay as long as they may, no longer, within their share, and never in the way of a request that is alone."""

import msgspec
import numpy as np
import pytest
from fake_worker import Rig, expected_outputs
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.messages.namespaces import of_api_key
from headrace.messages.operations import (
    CACHE_TREE,
    CACHE_USE,
    FLUSH_CACHE,
    PIN,
    UNPIN,
    CacheTreeQuery,
    CacheUseReq,
    Nothing,
    OperationReply,
    PinReq,
    UnpinReq,
)

PAGE = 4


def make(**options: object) -> Rig:
    return Rig(**{"num_pages": 32, "page_size": PAGE, "eos_every": 10**9, "pin_share": 0.5, **options})


def prompt(n: int, seed: int) -> list[int]:
    """Of different seeds below 16 they differ in the first page."""
    return [(seed >> bit) % 2 for bit in range(4)] + np.random.default_rng(seed).integers(0, 2, n - 4).tolist()


def ask(rig: Rig, rid: str, ids: list[int], num_new: int = 4, **fields: object) -> int:
    """The number of cached tokens of a prompt."""
    rig.add(rid, ids, num_new, ignore_eos=True, **fields)
    rig.drain()
    rig.turn()
    if rig.finish[rid].type != "abort":
        assert rig.ids[rid] == expected_outputs(ids, num_new, 10**9, ignore_eos=True)
    return rig.rows[rid][0].stats.cached_tokens


def operate(rig: Rig, operation: object, request: msgspec.Struct) -> object:
    """The reply, or the fault."""
    rig.inbox.send(operation.message(7, request))
    rig.turn()
    [reply] = [one for one in rig.back.messages if isinstance(one, OperationReply)][-1:]
    return reply.fault or msgspec.msgpack.decode(reply.reply, type=operation.reply)


def pin(rig: Rig, name: str, ids: list[int], ttl_s: float = 1e9, owner: str = "me", **fields: object) -> object:
    """The tokens that are held, or why none are."""
    tokens = np.array(ids, np.int32).tobytes()
    asked = {"tenant": "", "namespace": "", **fields}
    return operate(rig, PIN, PinReq(id=name, owner=owner, tokens=tokens, until_s=rig.now + ttl_s, **asked))


def fill(rig: Rig, first: int, count: int = 6) -> None:
    """Requests that take the whole pool, one after the other."""
    for i in range(count):
        ask(rig, f"filler {first + i}", prompt(40, 8 + (first + i) % 8) + [i % 2] * (first + i))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pinned_prefix_outlives_others_until_it_is_let_go(overlap):
    rig, ids = make(overlap=overlap), prompt(40, 1)
    assert pin(rig, "p", ids) == 0, "nothing of it is cached"
    ask(rig, "first", ids, 0)
    assert pin(rig, "p", ids) == 40
    fill(rig, 0)
    assert ask(rig, "second", [*ids, 1]) == 40
    assert operate(rig, UNPIN, UnpinReq("p")) is True
    assert operate(rig, UNPIN, UnpinReq("p")) is False
    fill(rig, 8)
    assert ask(rig, "third", [*ids, 1]) == 0
    rig.check_idle()


def test_a_pin_ends_with_its_time_and_a_second_one_sets_it_anew():
    rig, ids = make(), prompt(40, 1)
    ask(rig, "first", ids)
    pin(rig, "p", ids, ttl_s=5)
    rig.now += 4
    assert pin(rig, "p", ids, ttl_s=5) == 40
    rig.now += 4
    rig.turn()
    assert rig.state.pins.stats().count == 1
    rig.now += 1.1
    rig.turn()
    assert rig.state.pins.stats() == type(rig.state.pins.stats())()
    rig.check_idle()


def test_pins_have_a_share_in_all_and_for_each_owner_and_pages_count_once():
    rig = make()  # 128 tokens, of which pins hold at most 64
    first, longer, other = prompt(40, 1), prompt(40, 1) + prompt(20, 1), prompt(24, 2)
    for i, ids in enumerate((first, longer, other)):
        ask(rig, f"r{i}", ids, 0)
    assert pin(rig, "a", longer, tenant="me").message.startswith("your pins would hold 60 tokens, more than your share")
    assert pin(rig, "a", first) == 40
    assert pin(rig, "b", longer) == 60, "of which 40 are held already"
    assert rig.state.pins.stats().tokens == 60
    refused = pin(rig, "c", other)
    assert (refused.kind, refused.status_code) == ("CapacityError", 429)
    refused = pin(rig, "c", other, owner="another")
    assert "60" not in refused.message, "how much others hold is not told"
    assert rig.state.pins.held("me") == {"a": 40, "b": 60}, "what was refused has changed nothing"
    assert operate(rig, CACHE_USE, CacheUseReq("me")).pinned_tokens == 60
    assert pin(rig, "b", longer, tenant="me").status_code == 429, "the old one stays"
    assert rig.state.pins.held("me") == {"a": 40, "b": 60}
    operate(rig, UNPIN, UnpinReq("b"))
    assert pin(rig, "c", other, owner="another") == 24
    rig.check_idle()


def test_one_tenant_has_most_of_what_pins_may_hold_and_leaves_room_for_another():
    rig = make()  # 128 tokens, of which pins hold at most 64
    ids = [prompt(16, seed) for seed in range(5)]
    for i, one in enumerate(ids):
        ask(rig, f"r{i}", one, 0)
    assert [pin(rig, f"a{i}", ids[i], tenant="a") for i in range(3)] == [16, 16, 16]
    assert pin(rig, "a3", ids[3], tenant="a").status_code == 429
    assert pin(rig, "b", ids[4][:12], tenant="b") == 12, "of the same owner: clients without a key"
    assert pin(rig, "c", ids[4], tenant="c").status_code == 429, "now nothing is left for so much"
    operate(rig, UNPIN, UnpinReq("b"))
    assert pin(rig, "a0", ids[0], tenant="a") == 16, "known, so it takes no more"
    rig.check_idle()


def test_pins_give_way_to_a_request_that_is_alone_oldest_first():
    rig = make()
    ids = [prompt(20, seed) for seed in range(3)]
    for i, one in enumerate(ids):
        ask(rig, f"r{i}", one, 0)
        assert pin(rig, f"p{i}", one) == 20
    assert ask(rig, "large", prompt(80, 9), 8) == 0  # 128 tokens: it needs 88, and 68 are not pinned
    assert rig.finish["large"].type == "length"
    assert list(rig.state.pins.held(None)) == ["p1", "p2"]
    assert rig.state.pins.stats().released == 1
    ask(rig, "whole", prompt(100, 10), 27)
    assert rig.finish["whole"].type == "length"
    assert not rig.state.pins.held(None)
    assert ask(rig, "too long", prompt(100, 10), 100) > 0
    assert "alone needs more" in rig.finish["too long"].message
    rig.check_idle()


def test_pins_do_not_give_way_while_others_can():
    rig, ids = make(), prompt(40, 1)
    ask(rig, "first", ids, 0)
    pin(rig, "p", ids)
    for i in range(4):
        rig.add(f"r{i}", prompt(20, 2 + i), 30, ignore_eos=True)
    rig.drain()
    assert all(rig.finish[f"r{i}"].type == "length" for i in range(4))
    assert rig.state.counters.num_retracted
    assert rig.state.pins.held(None) == {"p": 40}
    rig.check_idle()


def test_a_flush_forgets_pins():
    rig, ids = make(), prompt(40, 1)
    ask(rig, "first", ids, 0)
    pin(rig, "p", ids)
    assert operate(rig, FLUSH_CACHE, Nothing()).success
    assert not rig.state.pins.held(None)
    assert rig.kv.state().free_tokens == rig.kv.total_tokens


def test_what_is_cached_is_told_by_owner_and_agrees_with_the_tree():
    rig = make()
    mine, theirs = of_api_key("me", ""), of_api_key("them", "")
    ask(rig, "a", prompt(40, 1), 0, namespace=mine)
    ask(rig, "b", prompt(24, 1), 0, namespace=theirs)
    ask(rig, "c", prompt(8, 1), 0)
    assert pin(rig, "p", prompt(40, 1)) == 8, "another namespace shares nothing"
    assert pin(rig, "p", prompt(40, 1), namespace=mine) == 40
    use = {key: operate(rig, CACHE_USE, CacheUseReq("me", key)) for key in ("me", "them", None)}
    assert {key: one.tokens for key, one in use.items()} == {"me": 40, "them": 24, None: 8}
    assert operate(rig, CACHE_USE, CacheUseReq("them")).pinned == {}
    everything = operate(rig, CACHE_USE, CacheUseReq(everything=True))
    assert everything.pinned == {"p": 40}
    assert everything.tokens == operate(rig, CACHE_TREE, CacheTreeQuery()).num_tokens == 72
    fill(rig, 0)
    assert operate(rig, CACHE_USE, CacheUseReq("me", "me")).tokens == 40
    assert operate(rig, CACHE_USE, CacheUseReq("them", "them")).tokens == 24, "below their share"
    rig.check_idle()


def test_a_pin_holds_the_part_that_has_it_and_requests_go_there():
    rig = make(num_parts=2, pin_share=0.9)
    for i in range(3):
        ask(rig, f"r{i}", prompt(40, i), 0)
        assert pin(rig, f"p{i}", prompt(40, i)) == 40
    assert {rig.state.pins.tokens_in(part) for part in range(2)} == {40, 80} or rig.state.pins.num_tokens == 120
    for i in range(3):
        assert ask(rig, f"again {i}", [*prompt(40, i), 1]) == 40
    rig.check_idle()


PIN_ACTION = st.one_of(
    st.tuples(st.just("pin"), st.integers(0, 3), st.integers(4, 40), st.sampled_from([0.05, 0.5, 1e9])),
    st.tuples(st.just("unpin"), st.integers(0, 3)),
    st.tuples(st.just("ask"), st.integers(0, 3), st.integers(4, 60), st.integers(0, 12)),
    st.tuples(st.just("turns"), st.integers(1, 9)),
    st.just(("flush",)),
)


@settings(max_examples=200, deadline=None)
@given(
    actions=st.lists(PIN_ACTION, min_size=1, max_size=30),
    overlap=st.booleans(),
    num_parts=st.sampled_from([1, 2]),
    num_pages=st.integers(20, 40),
    pin_share=st.sampled_from([0.0, 0.25, 0.9]),
)
def test_whatever_is_pinned_pages_add_up_and_every_request_ends(actions, overlap, num_parts, num_pages, pin_share):
    rig = make(overlap=overlap, num_parts=num_parts, num_pages=num_pages, pin_share=pin_share)
    asked = {}
    for action in actions:
        match action:
            case ("pin", seed, n, ttl_s):
                pin(rig, f"p{seed}", prompt(60, seed)[:n], ttl_s)
            case ("unpin", seed):
                operate(rig, UNPIN, UnpinReq(f"p{seed}"))
            case ("ask", seed, n, num_new):
                rid = f"r{len(asked)}"
                asked[rid] = prompt(60, seed)[:n], num_new
                rig.add(rid, *asked[rid], ignore_eos=True)
            case ("turns", count):
                for _ in range(count):
                    rig.turn()  # which checks that pages add up
            case ("flush",):
                operate(rig, FLUSH_CACHE, Nothing())
        for part in range(num_parts):
            assert rig.state.pins.tokens_in(part) <= pin_share * rig.kv.part_tokens
            assert rig.state.pins.tokens_in(part) <= rig.kv.leased_tokens(part)
    rig.drain()
    for rid, (ids, num_new) in asked.items():
        assert rig.finish[rid].type == "length"
        assert rig.ids[rid] == expected_outputs(ids, num_new, 10**9, ignore_eos=True)
    rig.now += 1e10
    rig.turn()
    assert not rig.state.pins.held(None)
    assert rig.kv.state().leased_tokens == 0
    rig.check_idle()
