"""A KV cache in parts, one for each rank: where requests go, and that a full part is its own affair."""

import random

import msgspec
import pytest
from fake_worker import VOCAB, Rig, expected_outputs

from headrace.cache.events import BlockEvents
from headrace.messages.kv_events import BlockRemoved, KVEvent
from headrace.messages.operations import CACHE_TREE, CacheTreeQuery
from kv_event_mirror import Mirror, cached

ENDLESS = {"max_new_tokens": 400, "ignore_eos": True, "stream": True}


def prompt(seed: int, n: int = 12) -> list[int]:
    """Of different seeds they differ in the first four tokens."""
    return [(seed >> bit) % 2 for bit in range(4)] + [random.Random(seed).randrange(VOCAB) for _ in range(n - 4)]


def parts_of(rig: Rig) -> dict[str, int]:
    return {req.rid: req.part for req in rig.state.running}


def turns(rig: Rig, count: int) -> None:
    for _ in range(count):
        rig.turn()


@pytest.mark.parametrize("num_parts", [2, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_requests_are_spread_evenly(num_parts, overlap):
    rig = Rig(num_parts=num_parts, num_pages=200, max_running=12, chunk=64, step_tokens=64, overlap=overlap)
    for i in range(12):
        rig.add(f"r{i}", prompt(i), 20, ignore_eos=True)
    turns(rig, 6)

    parts = list(parts_of(rig).values())
    assert [parts.count(part) for part in range(num_parts)] == [12 // num_parts] * num_parts
    rig.drain()
    assert all(rig.ids[f"r{i}"] == expected_outputs(prompt(i), 20, 9, True) for i in range(12))
    rig.check_idle()


def test_a_prompt_goes_where_its_prefix_is_unless_that_part_has_more_to_do():
    rig = Rig(num_parts=2, num_pages=300, chunk=64, step_tokens=64)
    rig.add("first", prompt(1, 40), 2, ignore_eos=True)
    rig.drain()
    rig.add("again", prompt(1, 40) + [0], **ENDLESS)
    turns(rig, 3)
    where = parts_of(rig)["again"]
    assert rig.rows["again"][0].stats.cached_tokens == 40

    rig.add("other", prompt(1, 40) + [1], **ENDLESS)
    turns(rig, 3)
    assert parts_of(rig)["other"] == 1 - where


def test_requests_one_after_the_other_fill_all_parts_before_anything_is_evicted():
    rig = Rig(num_parts=2, num_pages=14, page_size=4, chunk=64, step_tokens=64)
    for i in range(4):
        rig.add(f"r{i}", prompt(i, 20), 4, ignore_eos=True)
        rig.drain()

    assert [part.cache.num_evictable_pages for part in rig.kv.parts] == [10, 10]


def test_samples_of_a_prompt_are_in_one_part_and_prefill_it_once():
    rig = Rig(num_parts=2, num_pages=200, chunk=64, step_tokens=64)
    for i in range(4):
        rig.add(f"r{i}", prompt(3, 30), 30, ignore_eos=True, group="g")
    turns(rig, 8)

    assert len(parts_of(rig)) == 4
    assert len(set(parts_of(rig).values())) == 1
    assert rig.state.counters.computed_prefill_tokens == 30 + 3
    rig.drain()
    rig.check_idle()


def test_a_full_part_does_not_keep_requests_from_another():
    rig = Rig(num_parts=2, num_pages=20, page_size=4, chunk=64, step_tokens=64)
    rig.state.ratio.scale(0.01)
    for rid, length, options in (("a", 12, ENDLESS), ("b", 30, {"ignore_eos": True}), ("c", 14, ENDLESS)):
        rig.add(rid, prompt(length, length), **options)
        rig.turn()
    full = parts_of(rig)["a"]
    assert parts_of(rig) == {"a": full, "b": 1 - full, "c": full}
    while rig.kv.available_tokens(full):
        rig.turn()
    admitted: dict[str, int] = {}
    for i in range(20):
        rig.add(f"d{i}", prompt(7, 5), 2, ignore_eos=True)
        rig.turn()
        if rig.state.counters.num_retracted:  # now one of the full part waits, too, and goes first
            break
        admitted[f"d{i}"] = parts_of(rig).get(f"d{i}", -1)

    assert rig.state.counters.num_retracted, "steps of the other part keep the full one waiting"
    assert len(admitted) > 3
    assert set(admitted.values()) == {1 - full}
    rig.drain()
    rig.check_idle()


def test_requests_that_are_set_back_in_full_parts_lose_no_token():
    rig = Rig(num_parts=2, num_pages=40, chunk=64, step_tokens=64, eos_every=50)
    rig.state.ratio.scale(0.01)
    for i in range(6):
        rig.add(f"r{i}", prompt(i), 24, ignore_eos=True)
    rig.drain()

    assert rig.state.counters.num_retracted > 0
    for i in range(6):
        assert rig.ids[f"r{i}"] == expected_outputs(prompt(i), 24, 50, True)
    rig.check_idle()


def test_one_that_outgrows_its_part_ends_while_the_others_run_on():
    """Steps of the other part are always in flight, which must not keep it waiting for ever."""
    rig = Rig(num_parts=2, num_pages=60, chunk=64, step_tokens=64)
    rig.state.ratio.scale(0.01)
    rig.add("large", prompt(1), **ENDLESS)
    turns(rig, 2)
    rig.add("small", prompt(2), 40, ignore_eos=True, stream=True)
    turns(rig, 2)
    assert parts_of(rig)["large"] != parts_of(rig)["small"]
    for i in range(40):  # the other part never rests
        rig.add(f"r{i}", prompt(i), 12, ignore_eos=True, stream=True)
    rig.drain()

    assert list(rig.finish).index("large") < 20
    assert rig.finish["large"].type == "abort"
    assert "60 tokens and this request alone needs more" in rig.finish["large"].message
    assert rig.ids["large"] == expected_outputs(prompt(1), 400, 9, True)[: len(rig.ids["large"])]
    assert rig.ids["small"] == expected_outputs(prompt(2), 40, 9, True)
    rig.check_idle()


def test_a_prompt_that_no_part_can_hold_is_refused():
    rig = Rig(num_parts=2, num_pages=20)
    rig.add("long", prompt(1, 25))
    rig.drain()

    assert rig.finish["long"].type == "abort"
    assert rig.finish["long"].status_code == 400


@pytest.mark.parametrize("overlap", [True, False])
def test_an_important_request_displaces_only_those_of_one_part(overlap):
    rig = Rig(num_parts=2, num_pages=60, policy="priority", preemption=5, chunk=64, step_tokens=64, overlap=overlap)
    rig.state.ratio.scale(1.4)
    for i in range(2):
        rig.add(f"r{i}", prompt(i), 40, ignore_eos=True, stream=True)
    turns(rig, 4)
    assert sorted(parts_of(rig).values()) == [0, 1]
    rig.add("urgent", prompt(9), 40, ignore_eos=True, stream=True, priority=6)
    turns(rig, 4)

    assert "urgent" in parts_of(rig)
    rig.drain()
    assert sorted(rig.rows[f"r{i}"][-1].stats.num_retractions for i in range(2)) == [0, 1]
    assert rig.ids["r0"] == expected_outputs(prompt(0), 40, 9, True)
    rig.check_idle()


def test_events_tell_what_any_part_has_cached():
    events = BlockEvents(2)
    rig = Rig(num_parts=2, num_pages=24, page_size=2, observer=events, chunk=16)
    rig.state.ratio.scale(0.1)
    dice, told, mirror = random.Random(5), [], Mirror()
    for i in range(200):
        rig.add(f"r{i}", prompt(dice.randrange(3), dice.randrange(5, 30)), dice.randrange(1, 12))
        turns(rig, dice.randrange(4))
        taken: list[KVEvent] = events.take()
        mirror.apply(msgspec.to_builtins(taken))
        told += taken
    rig.drain()
    mirror.apply(msgspec.to_builtins(events.take()))

    first, second = (cached(part.cache) for part in rig.kv.parts)
    assert first & second, "nothing that both have"
    assert mirror.known() == first | second
    assert any(isinstance(event, BlockRemoved) for event in told)


def test_the_outline_has_the_trees_of_all_parts():
    rig = Rig(num_parts=2, num_pages=100, chunk=64, step_tokens=64)
    for i in range(4):
        rig.add(f"r{i}", prompt(i), 8, ignore_eos=True)
    rig.drain()
    rig.inbox.send(CACHE_TREE.message(1, CacheTreeQuery(8, 100)))
    rig.turn()
    tree = rig.reply(CACHE_TREE, 1)

    nodes = tree.nodes
    assert len(nodes) == tree.num_nodes == sum(part.cache.num_nodes for part in rig.kv.parts)
    assert sum(node.num_tokens for node in nodes) == tree.num_tokens == rig.kv.state().evictable_tokens
    assert all(node.parent < index for index, node in enumerate(nodes))
    for index, node in enumerate(nodes):
        assert sum(other.parent == index for other in nodes) == node.num_children
