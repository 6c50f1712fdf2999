"""Whatever requests do, a subscriber that replays from 0 knows exactly the cached blocks."""

import random

import msgspec
from fake_worker import VOCAB, Rig

from headrace.cache.events import BlockEvents
from headrace.messages import namespaces
from headrace.messages.control import AbortReq
from headrace.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from headrace.messages.operations import FLUSH_CACHE, Nothing
from headrace.processes.kv_event_publisher import KVEventHistory
from kv_event_mirror import Mirror, cached

KINDS = (BlockStored, BlockRemoved, AllBlocksCleared)
NAMESPACES = ["", namespaces.of_request("", "salt")]


def after_random_requests(num_requests: int, seed: int, max_batches: int) -> tuple[Rig, KVEventHistory, list[KVEvent]]:
    """The history of the events of a scheduler in which some requests are aborted and the cache is flushed at times."""
    rng = random.Random(seed)
    events = BlockEvents(2)
    rig = Rig(num_pages=48, page_size=2, observer=events)
    history, num_batches, added = KVEventHistory(max_batches), 0, 0
    all_events: list[KVEvent] = []
    beginnings = [[rng.randrange(VOCAB) for _ in range(12)] for _ in range(4)]
    resting = False
    while added < num_requests or rig.state.by_rid:
        if resting and not rig.state.by_rid:
            resting = False
            rig.inbox.send(FLUSH_CACHE.message(0, Nothing()))
        resting = resting or rng.random() < 0.03
        for _ in range(0 if resting else min(num_requests - added, 6 - len(rig.state.by_rid))):
            prompt = rng.choice(beginnings)[: rng.randrange(1, 13)] + [
                rng.randrange(VOCAB) for _ in range(rng.randrange(8))
            ]
            rig.add(str(added), prompt, max_new_tokens=rng.randrange(1, 9), namespace=rng.choice(NAMESPACES))
            added += 1
        if rng.random() < 0.02 and rig.state.by_rid:
            rig.inbox.send(AbortReq((rng.choice(sorted(rig.state.by_rid)),)))
        rig.turn()
        if taken := events.take():
            history.add(num_batches, KVEventBatch(0.0, taken, 0))
            num_batches += 1
            all_events += taken
    return rig, history, all_events


def test_a_replay_from_0_tells_exactly_the_cached_blocks():
    rig, history, events = after_random_requests(300, seed=1, max_batches=50)

    mirror = Mirror()
    for _, payload in history.since(0):
        mirror.apply(msgspec.msgpack.decode(payload)[1])

    assert [sum(isinstance(event, kind) for event in events) > 3 for kind in KINDS] == [True] * 3
    assert len(mirror.known()) > 10
    assert mirror.known() == cached(rig.kv.parts[0].cache)
