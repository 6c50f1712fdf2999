"""The radix tree against a plain set of prefixes, and its rules on leases, recency and namespaces."""

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cache import base
from headrace.cache.base import ChunkCache
from headrace.cache.radix_cache import LATELY, RadixCache
from headrace.messages import namespaces
from headrace.messages.outputs import CacheMiss


def tokens(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


@pytest.fixture(autouse=True, scope="module", params=[base.MOST_TOGETHER, 1], ids=["together", "in parts"])
def most_together(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nodes with a few children, and as if they had thousands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "MOST_TOGETHER", request.param)
        yield


def fill(cache: RadixCache, ids: list[int], first_page: int, namespace: str = "") -> list[int]:
    """Insert and unpin; returns the pages offered."""
    pages = list(range(first_page, first_page + len(ids) // cache.page_size))
    cache.release(cache.insert(tokens(*ids), pages, namespace).lease)
    return pages


def test_a_prefix_is_found_up_to_the_last_whole_page():
    cache = RadixCache(page_size=4)
    pages = fill(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9], 10)

    match = cache.match(tokens(1, 2, 3, 4, 5, 6, 7, 8, 9, 9), "", limit=10)

    assert match.num_tokens == 8
    assert match.pages == pages[:2]
    assert cache.num_leased_pages == 2
    cache.release(match.lease)
    assert cache.num_leased_pages == 0


def test_the_limit_caps_a_match_and_splits_the_edge():
    cache = RadixCache(page_size=1)
    fill(cache, [1, 2, 3, 4], 0)

    match = cache.match(tokens(1, 2, 3, 4), "", limit=3)

    assert (match.num_tokens, match.pages) == (3, [0, 1, 2])
    assert cache.num_leased_pages == 3
    assert cache.num_evictable_pages == 1


def test_peek_changes_nothing():
    cache = RadixCache(page_size=1)
    fill(cache, [1, 2, 3, 4], 0)

    assert cache.peek(tokens(1, 2, 9), "", 3) == 2
    assert cache.peek(tokens(1, 2, 9), "other", 3) == 0
    assert cache.num_leased_pages == 0


def test_namespaces_never_share():
    cache = RadixCache(page_size=1)
    fill(cache, [1, 2, 3], 0, "a")

    assert cache.match(tokens(1, 2, 3), "b", 3).num_tokens == 0
    assert cache.match(tokens(1, 2, 3), "", 3).num_tokens == 0
    assert cache.match(tokens(1, 2, 3), "a", 3).num_tokens == 3


def test_inserting_what_is_known_keeps_the_first_pages():
    cache = RadixCache(page_size=2)
    fill(cache, [1, 2, 3, 4], 0)

    done = cache.insert(tokens(1, 2, 3, 4, 5, 6), [50, 51, 52], "")

    assert (done.num_existing, done.num_kept) == (4, 6)
    cache.release(done.lease)
    match = cache.match(tokens(1, 2, 3, 4, 5, 6), "", 6)
    assert match.pages == [0, 1, 52]


def test_a_leased_prefix_and_its_ancestors_survive_eviction():
    cache = RadixCache(page_size=1)
    fill(cache, [1, 2, 3, 4], 0)
    fill(cache, [1, 2, 8, 9], 10)
    lease = cache.match(tokens(1, 2, 3), "", 3).lease

    freed = cache.evict(100)

    assert sorted(freed) == [3, 12, 13]
    assert cache.match(tokens(1, 2, 3), "", 3).pages == [0, 1, 2]
    cache.release(lease)


def test_the_least_recently_used_goes_first():
    cache = RadixCache(page_size=1)
    fill(cache, [1, 1], 0)
    fill(cache, [2, 2], 10)
    cache.release(cache.match(tokens(1, 1), "", 2).lease)

    assert sorted(cache.evict(1)) == [10, 11]
    assert cache.peek(tokens(1, 1), "", 2) == 2


def test_a_lease_released_twice_is_caught():
    cache = RadixCache(page_size=1)
    fill(cache, [1], 0)
    lease = cache.match(tokens(1), "", 1).lease
    cache.release(lease)

    with pytest.raises(AssertionError, match="released twice"):
        cache.release(lease)


def test_flush_refuses_while_leased_and_forgets_everything_else():
    cache = RadixCache(page_size=1)
    fill(cache, [1, 2], 0)
    lease = cache.match(tokens(1), "", 1).lease

    with pytest.raises(AssertionError, match="still leased"):
        cache.flush()
    cache.release(lease)
    assert sorted(cache.flush()) == [0, 1]
    assert cache.peek(tokens(1, 2), "", 2) == 0


def test_what_a_flush_drops_is_gone_at_once():
    """An update drops the whole tree: thousands of nodes would wait ten minutes for a collection of everything."""
    cache = RadixCache(page_size=1)
    for last in range(3, 9):
        fill(cache, [1, 2, last], 10 * last)
    gc.collect()
    gc.disable()
    try:
        alive = sum(type(each).__name__ == "_Node" for each in gc.get_objects())
        cache.flush()
        assert sum(type(each).__name__ == "_Node" for each in gc.get_objects()) == alive - 7
    finally:
        gc.enable()


def test_the_chunk_cache_keeps_nothing():
    cache = ChunkCache()

    assert cache.insert(tokens(1, 2), [0, 1], "").num_kept == 0
    assert cache.match(tokens(1, 2), "", 2).num_tokens == 0
    assert cache.evict(3) == []


@settings(max_examples=300, deadline=None)
@given(
    page_size=st.sampled_from([1, 2, 3]),
    actions=st.lists(
        st.tuples(st.sampled_from(["insert", "match", "evict", "release"]), st.lists(st.integers(0, 1), max_size=12)),
        max_size=40,
    ),
)
def test_it_agrees_with_a_plain_set_of_prefixes(page_size, actions):
    cache = RadixCache(page_size)
    known: dict[tuple[int, ...], int] = {}  # prefix of whole pages -> page of its last part
    leases = []
    next_page = 0
    for kind, ids in actions:
        whole = len(ids) // page_size * page_size
        prefixes = [tuple(ids[:end]) for end in range(page_size, whole + 1, page_size)]
        longest = 0
        while longest < len(prefixes) and prefixes[longest] in known:
            longest += 1
        if kind == "insert":
            pages = list(range(next_page, next_page + len(prefixes)))
            next_page += len(prefixes)
            done = cache.insert(tokens(*ids), pages, "")
            assert done.num_existing == longest * page_size
            for prefix, page in list(zip(prefixes, pages, strict=True))[longest:]:
                known[prefix] = page
            leases.append((done.lease, prefixes))
        elif kind == "match":
            match = cache.match(tokens(*ids), "", len(ids))
            assert match.num_tokens == longest * page_size
            assert match.pages == [known[p] for p in prefixes[:longest]]
            leases.append((match.lease, prefixes[:longest]))
        elif kind == "release" and leases:
            cache.release(leases.pop(len(ids) % len(leases))[0])
        elif kind == "evict":
            pinned = {prefix for _, held in leases for prefix in held}
            freed = set(cache.evict(len(ids)))
            gone = {prefix for prefix, page in known.items() if page in freed}
            assert len(gone) == len(freed)
            assert not gone & pinned
            assert len(freed) >= min(len(ids), len(known) - len(pinned & set(known)))
            for prefix in gone:
                del known[prefix]
        pinned = {prefix for _, held in leases for prefix in held}
        assert cache.num_leased_pages + cache.num_evictable_pages == len(known)
        assert cache.num_leased_pages >= len(pinned)


def release_noted(cache: RadixCache, lease: Any, released: dict[Any, int]) -> None:
    """Release a lease. released: the nodes that nobody leases, by when that began; gets those of now."""
    path = []
    while lease is not None and lease.parent is not None:
        path.append(lease)
        lease = lease.parent
    cache.release(path[0] if path else None)
    now = len(released) + max(released.values(), default=0) + 1
    released.update({node: now for node in path if node.leases == 0})


def evicted_by_walking(cache: RadixCache, num_pages: int, released: dict[Any, int]) -> list[int]:
    """What `evict` should free: among the leaves of those above their share the least recently released, again and again; then among all."""
    nodes = cache._nodes()
    num_children = {node: len(node.children) for node in nodes}
    held = Counter(node.owner for node in nodes for _ in node.pages)
    share = sum(held.values()) / max(1, len(held))
    freed: list[int] = []
    while len(freed) < num_pages:
        leaves = [node for node, count in num_children.items() if count == 0 and node.leases == 0]
        if not leaves:
            break
        above = [node for node in leaves if held[node.owner] > share]
        oldest = min(above or leaves, key=lambda node: released[node])
        freed += oldest.pages
        held[oldest.owner] -= len(oldest.pages)
        del num_children[oldest]
        if oldest.parent in num_children:
            num_children[oldest.parent] -= 1
    return freed


@settings(max_examples=500, deadline=None)
@given(
    page_size=st.sampled_from([1, 2]),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["insert", "insert", "match", "evict", "release", "flush"]),
            st.lists(st.integers(0, 1), max_size=10),
            st.sampled_from(["", namespaces.of_request(None, "salt"), "a", "b"]),
        ),
        max_size=60,
    ),
)
def test_what_is_evicted_is_what_a_walk_through_the_tree_would_find(page_size, actions):
    """Nobody is away for so long that it has no share."""
    cache = RadixCache(page_size)
    leases = []
    released: dict[Any, int] = {}
    next_page = 0
    for kind, ids, namespace in actions:
        if kind == "insert":
            leases.append(cache.insert(tokens(*ids), list(range(next_page, next_page + len(ids))), namespace).lease)
            next_page += len(ids)
        elif kind == "match":
            leases.append(cache.match(tokens(*ids), namespace, len(ids)).lease)
        elif kind == "release" and leases:
            release_noted(cache, leases.pop(len(ids) % len(leases)), released)
        elif kind == "flush" and cache.num_leased_pages == 0:
            cache.flush()
        elif kind == "evict":
            want = evicted_by_walking(cache, len(ids), released)
            assert cache.evict(len(ids)) == want
        assert cache.num_nodes == len(cache._nodes())
    for lease in leases:
        release_noted(cache, lease, released)
    want = evicted_by_walking(cache, next_page, released)
    assert cache.evict(next_page) == want
    assert cache.num_evictable_pages == 0
    assert not cache._roots


def test_many_prompts_of_one_do_not_evict_what_another_uses():
    cache = RadixCache(page_size=1)
    fill(cache, [1, 2, 3], 0, "b")
    for i in range(50):
        fill(cache, [10 + i, 1], 3, "a")
        if cache.num_evictable_pages > 20:
            cache.evict(2)

    assert cache.peek(tokens(1, 2, 3), "b", 3) == 3
    assert cache.peek(tokens(10, 1), "a", 2) == 0
    assert cache.peek(tokens(59, 1), "a", 2) == 2


def test_above_equal_shares_the_oldest_of_all_goes_first():
    cache = RadixCache(page_size=1)
    fill(cache, [1, 2], 0, "a")
    fill(cache, [1, 2], 2, "b")
    fill(cache, [3, 4], 4, "a")

    assert cache.evict(1) == [0, 1], "a has more"
    assert cache.evict(1) == [2, 3], "both have as much"


def test_who_is_away_for_long_has_no_share():
    cache = RadixCache(page_size=1)
    fill(cache, [1, 2, 3], 0, "b")
    for i in range(LATELY * 12):
        fill(cache, [10 + i], 3, "a")
        if cache.num_evictable_pages > 10:
            cache.evict(1)

    assert cache.peek(tokens(1, 2, 3), "b", 3) == 0
    assert cache.num_pages_of("a") == 10


def test_the_oldest_goes_first_after_many_matches():
    cache = RadixCache(page_size=1)
    for i in range(10):
        fill(cache, [i, i], 2 * i)
    for i in range(1000):
        cache.release(cache.match(tokens(i % 10, i % 10), "", 2).lease)
    lease = cache.match(tokens(0), "", 1).lease

    assert cache.evict(2) == [1, 2, 3]
    cache.release(lease)


def test_why_a_prompt_missed():
    cache = RadixCache(page_size=2)
    fill(cache, [1, 2, 3, 4, 5, 6, 7, 8], 10)
    fill(cache, [1, 2, 3, 9, 9, 9], 20)
    fill(cache, [5, 5, 5, 5], 30, '["a", "b"]')
    fill(cache, [6, 6, 6, 6], 40, '["key", "k", ""]')

    def why(*ids: int, namespace: str = "", limit: int = 100) -> CacheMiss | None:
        return cache.explain(tokens(*ids), namespace, limit)

    assert why(1, 2, 3, 4, 5) is None, "what is missing is no whole page"
    assert why(1, 2, 3, 4, 5, 6, 7, 8, 9, limit=7) is None
    assert why(1, 2, 3, 4, 5, 6, 7, 0) == CacheMiss(7, "other_text", 0, 8)
    assert why(1, 2, 3, 7) == CacheMiss(3, "other_text", 7, 9) or why(1, 2, 3, 7) == CacheMiss(3, "other_text", 7, 4)
    assert why(1, 2, 3, 4, 5, 6, 7, 8, 9, 9) == CacheMiss(8, "not_cached", 9)
    assert why(7, 7) == CacheMiss(0, "other_text", 7, 1)
    assert why(5, 5, 5, 5) == CacheMiss(0, "other_namespace", 5)
    assert why(6, 6) == CacheMiss(0, "other_text", 6, 1), "nobody is told what another key has"
    assert why(5, 5, namespace='["key", "k", ""]') == CacheMiss(0, "other_text", 5, 6)

    cache.evict(1)  # what the first prompt has and the second has not
    assert why(1, 2, 3, 4, 5, 6) == CacheMiss(2, "evicted", 3)
    cache.flush("weights")
    assert why(1, 2) == CacheMiss(0, "weights", 1)
    fill(cache, [1, 2], 50)
    cache.flush("flushed")
    assert why(1, 2) == CacheMiss(0, "flushed", 1)
    assert why(5, 5, namespace='["a", "b"]') == CacheMiss(0, "weights", 5)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=12), st.integers(1, 30))
def test_an_outline_is_the_tree_from_the_top(prompts: list[list[int]], max_nodes: int):
    cache = RadixCache(page_size=1)
    for number, prompt in enumerate(prompts):
        fill(cache, prompt, 100 * number, "other" if number % 3 == 2 else "")
    whole = cache.outline(max_depth=8, max_nodes=1000)

    assert len(whole) == cache.num_nodes
    assert sum(node.num_tokens for node in whole) == cache.num_evictable_pages
    for index, node in enumerate(whole):
        assert node.parent < index
        assert node.num_children == sum(other.parent == index for other in whole)
        assert node.num_leases == 0
    assert cache.outline(max_depth=8, max_nodes=max_nodes) == whole[:max_nodes]
    assert cache.outline(max_depth=1, max_nodes=1000) == [node for node in whole if node.parent == -1]


def test_an_outline_tells_what_is_pinned():
    cache = RadixCache(page_size=1)
    fill(cache, [1, 2, 3], 0)
    fill(cache, [1, 2, 4, 5], 10)
    match = cache.match(tokens(1, 2, 3), "", limit=3)

    told = [(node.parent, node.num_tokens, node.num_leases) for node in cache.outline(9, 9)]
    assert sorted(told) == [(-1, 2, 1), (0, 1, 1), (0, 2, 0)]
    cache.release(match.lease)


def test_there_is_no_outline_without_a_tree():
    cache = ChunkCache()
    assert (cache.num_nodes, cache.outline(9, 9)) == (0, [])
