"""Events tell exactly what the tree of prefixes holds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cache.events import BlockEvents
from headrace.cache.radix_cache import RadixCache
from headrace.messages import namespaces
from headrace.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from headrace.messages.packing import pack_int32
from kv_event_mirror import Mirror, cached

SALTED = namespaces.of_request(None, "salt")
NAMESPACES = ["", SALTED, namespaces.of_adapter(namespaces.of_api_key("team", SALTED), 3, "poet")]


def watched(page_size: int) -> tuple[RadixCache, BlockEvents]:
    events = BlockEvents(page_size)
    return RadixCache(page_size, events), events


def test_an_insertion_an_eviction_and_a_flush_are_told():
    cache, events = watched(2)

    assert events.take() == [AllBlocksCleared()]
    lease = cache.insert(pack_int32([1, 2, 3, 4, 5]), [7, 8], "").lease
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    assert (stored.parent_block_hash, stored.token_ids, stored.block_size) == (None, [1, 2, 3, 4], 2)

    more = cache.insert(pack_int32([1, 2, 9, 9]), [3, 4], "").lease
    (branch,) = events.take()
    assert branch.parent_block_hash == stored.block_hashes[0]
    assert branch.token_ids == [9, 9]

    cache.release(lease)
    assert cache.evict(1) == [8]
    assert events.take() == [BlockRemoved([stored.block_hashes[1]])]

    cache.release(more)
    cache.flush()
    assert events.take() == [AllBlocksCleared()]
    assert events.take() == []


def test_what_is_cached_already_is_not_told_again():
    cache, events = watched(1)
    cache.insert(pack_int32([1, 2]), [0, 1], "")
    events.take()

    cache.insert(pack_int32([1, 2]), [2, 3], "")

    assert events.take() == []


def test_hashes_depend_on_nothing_but_namespace_and_tokens():
    got = []
    for first_page in (0, 5):
        cache, events = watched(1)
        for number, namespace in enumerate(NAMESPACES):
            page = first_page + 2 * number
            cache.insert(pack_int32([1, 2]), [page, page + 1], namespace)
        got.append([event.block_hashes for event in events.take()[1:]])

    assert got[0] == got[1]
    assert len({block for blocks in got[0] for block in blocks}) == 2 * len(NAMESPACES)
    # Routers keep them over restarts: they never change.
    assert got[0][0] == [HASH_OF_1, HASH_OF_1_2]


HASH_OF_1 = 6704159272770107086
HASH_OF_1_2 = 2337746215073477441


def test_the_parts_of_a_namespace_are_told():
    cache, events = watched(1)
    cache.insert(pack_int32([1]), [0], NAMESPACES[2])

    stored = events.take()[-1]

    assert (stored.lora_id, stored.lora_name, stored.key_name, stored.cache_salt) == (3, "poet", "team", "salt")
    assert stored.extra_key is None


@settings(max_examples=300, deadline=None)
@given(
    page_size=st.sampled_from([1, 2]),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["insert", "insert", "match", "evict", "release", "flush"]),
            st.lists(st.integers(0, 1), max_size=10),
            st.sampled_from(NAMESPACES),
        ),
        max_size=60,
    ),
)
def test_a_mirror_of_the_events_has_the_blocks_of_the_tree(page_size, actions):
    cache, events = watched(page_size)
    mirror, leases, free = Mirror(), [], list(range(1000))
    for kind, ids, namespace in actions:
        tokens = pack_int32(ids)
        if kind == "insert":
            pages = free[: len(ids) // page_size]
            done = cache.insert(tokens, pages, namespace)
            taken = pages[done.num_existing // page_size : done.num_kept // page_size]
            free = [page for page in free if page not in taken]
            leases.append(done.lease)
        elif kind == "match":
            leases.append(cache.match(tokens, namespace, len(ids)).lease)
        elif kind == "release" and leases:
            cache.release(leases.pop(len(ids) % len(leases)))
        elif kind == "evict":
            free = cache.evict(len(ids)) + free  # pages are used again at once
        elif kind == "flush" and cache.num_leased_pages == 0:
            free = cache.flush() + free
        mirror.apply(events.take())
        assert mirror.known() == cached(cache)
