"""Prefix cache: a radix tree over token pages (after RadixAttention, Zheng et al. 2024, arXiv:2312.07104).

Owns the pages of every cached prefix. Runs in the scheduler's thread; no torch.
Keys are compared page by page: an edge always holds whole pages, and two edges of a node differ within their first page.
Every namespace (adapter, cache salt, extra key) has its own root, so nothing is shared between namespaces.
"""

import heapq
from itertools import count, islice
from typing import NamedTuple

from headrace.cache.base import CacheObserver, Insertion, Lease, PrefixMatch
from headrace.messages.control import CacheNode

TOKEN_BYTES = 4


class _Node(Lease):
    """A node with the tokens and pages of the edge that leads to it. As a `Lease` it pins itself and its ancestors."""

    __slots__ = ("children", "key", "leases", "pages", "parent", "used")

    def __init__(self, key: bytes, pages: list[int], parent: "_Node | None", used: int) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        self.leases = 0
        self.used = used

    @property
    def is_evictable_leaf(self) -> bool:
        """Whether it is in the tree, has no children and is not leased."""
        return self.parent is not None and not self.children and self.leases == 0


class _Root(_Node):
    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(b"", [], None, 0)
        self.namespace = namespace


class _Candidate(NamedTuple):
    """A leaf at the time it became evictable. It may have been used or got children since, so it is checked again when taken."""

    used: int
    entry: int
    leaf: _Node


class _EvictionOrder:
    """Evictable leaves, least recently used first, without walking the tree.

    Leaves are added when they become evictable and not removed when they cease to be: stale candidates are dropped when their turn comes, or
    all at once when there are many. The cost is that of a heap, whatever the size of the tree.
    """

    def __init__(self) -> None:
        self._heap: list[_Candidate] = []
        self._entries = count()

    def add(self, leaf: _Node, num_nodes: int) -> None:
        """Add a leaf that has become evictable. num_nodes: current size of the tree."""
        heapq.heappush(self._heap, _Candidate(leaf.used, next(self._entries), leaf))
        if len(self._heap) > 2 * num_nodes + _LEAST_COMPACTED:
            found = {id(c.leaf): c for c in self._heap if _is_current(c)}
            self._heap = sorted(found.values())

    def pop(self) -> _Node | None:
        """Remove and return the least recently used evictable leaf; None when there is none."""
        while self._heap:
            candidate = heapq.heappop(self._heap)
            if _is_current(candidate):
                return candidate.leaf
        return None

    def clear(self) -> None:
        self._heap.clear()


_LEAST_COMPACTED = 64


def _is_current(candidate: _Candidate) -> bool:
    return candidate.leaf.is_evictable_leaf and candidate.leaf.used == candidate.used


class RadixCache:
    """A `PrefixCache`, which documents the methods. page_size: tokens per page (1, 16, ...). observer: is told what changes."""

    shares = True

    def __init__(self, page_size: int, observer: CacheObserver | None = None) -> None:
        self.page_size = page_size
        self._observer = observer
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, _Root] = {}
        self._eviction_order = _EvictionOrder()
        self._num_nodes = 0
        self._clock = count(1)
        self._evictable = 0
        self._leased = 0

    @property
    def num_evictable_pages(self) -> int:
        return self._evictable

    @property
    def num_leased_pages(self) -> int:
        return self._leased

    def peek(self, tokens: bytes, namespace: str, limit: int) -> int:
        node: _Node | None = self._roots.get(namespace)
        end = self._whole_pages(min(limit * TOKEN_BYTES, len(tokens)))
        pos = 0
        while node is not None and pos < end:
            node = node.children.get(tokens[pos : pos + self._page_bytes])
            if node is not None:
                shared = self._shared(node.key, tokens, pos, end)
                pos += shared
                if shared < len(node.key):
                    break
        return pos // TOKEN_BYTES

    def match(self, tokens: bytes, namespace: str, limit: int) -> PrefixMatch:
        root = self._roots.get(namespace)
        if root is None:
            return PrefixMatch(0)
        node, pos, pages = self._descend(root, tokens, self._whole_pages(min(limit * TOKEN_BYTES, len(tokens))))
        if pos == 0:
            return PrefixMatch(0)
        self._pin(node)
        return PrefixMatch(pos // TOKEN_BYTES, pages, node)

    def insert(self, tokens: bytes, pages: list[int], namespace: str) -> Insertion:
        """Add the whole pages of the KV of `tokens`, pinned until `release(insertion.lease)`.

        pages: at least one per whole page of tokens, in order. Where the tree already has the tokens, it keeps its own pages.
        """
        end = self._whole_pages(len(tokens))
        if end == 0:
            return Insertion(0, 0)
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Root(namespace)
        node, pos, _ = self._descend(root, tokens, end)
        if pos < end:
            taken = pages[pos // self._page_bytes : end // self._page_bytes]
            assert len(taken) * self._page_bytes == end - pos, (len(pages), pos, end)
            leaf = _Node(tokens[pos:end], taken, node, next(self._clock))
            node.children[leaf.key[: self._page_bytes]] = leaf
            self._evictable += len(taken)
            self._num_nodes += 1
            if self._observer is not None:
                self._observer.stored(leaf.key, taken, node.pages[-1] if node.pages else None, namespace)
            node = leaf
        self._pin(node)
        return Insertion(pos // TOKEN_BYTES, end // TOKEN_BYTES, node)

    def release(self, lease: Lease | None) -> None:
        if lease is None:
            return
        assert isinstance(lease, _Node)
        node: _Node | None = lease
        while node is not None:
            node.leases -= 1
            assert node.leases >= 0, "a lease was released twice"
            if node.leases == 0:
                self._leased -= len(node.pages)
                self._evictable += len(node.pages)
                self._offer(node)
            node = node.parent

    def evict(self, num_pages: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < num_pages and (node := self._eviction_order.pop()) is not None:
            parent = node.parent
            assert parent is not None
            del parent.children[node.key[: self._page_bytes]]
            node.parent = None
            self._num_nodes -= 1
            freed += node.pages
            self._evictable -= len(node.pages)
            if isinstance(parent, _Root):
                if not parent.children:
                    del self._roots[parent.namespace]
            else:
                self._offer(parent)
        if self._observer is not None and freed:
            self._observer.removed(freed)
        return freed

    def flush(self) -> list[int]:
        assert self._leased == 0, f"{self._leased} pages are still leased"
        freed = [page for node in self._nodes() for page in node.pages]
        self._roots.clear()
        self._eviction_order.clear()
        self._num_nodes = 0
        self._evictable = 0
        if self._observer is not None:
            self._observer.cleared()
        return freed

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    def outline(self, max_depth: int, max_nodes: int) -> list[CacheNode]:
        found: list[CacheNode] = []
        level: list[tuple[int, _Node]] = [(-1, root) for root in islice(reversed(self._roots.values()), max_nodes)]
        for _ in range(max_depth):
            below: list[tuple[int, _Node]] = []
            for parent, node in level:
                for child in islice(reversed(node.children.values()), max_nodes - len(found)):
                    below.append((len(found), child))
                    num_tokens = len(child.key) // TOKEN_BYTES
                    found.append(CacheNode(parent, num_tokens, len(child.children), child.leases))
            level = below
        return found

    # -- inside

    def _whole_pages(self, num_bytes: int) -> int:
        return num_bytes - num_bytes % self._page_bytes

    def _shared(self, key: bytes, tokens: bytes, pos: int, end: int) -> int:
        """Length in bytes of the common prefix of `key` and tokens[pos:end], a whole number of pages."""
        length = min(len(key), end - pos)
        if key[:length] == tokens[pos : pos + length]:
            return length
        low, high = 0, length // self._page_bytes  # pages: [0, low) equal, the first difference lies in [low, high)
        while high - low > 1:
            middle = (low + high) // 2 * self._page_bytes
            if key[low * self._page_bytes : middle] == tokens[pos + low * self._page_bytes : pos + middle]:
                low = middle // self._page_bytes
            else:
                high = middle // self._page_bytes
        return low * self._page_bytes

    def _descend(self, node: _Node, tokens: bytes, end: int) -> tuple[_Node, int, list[int]]:
        """Walk down from a root along tokens[:end], splitting an edge that matches only in part. Returns (last node, matched bytes, pages)."""
        now = next(self._clock)
        pages: list[int] = []
        pos = 0
        while pos < end:
            child = node.children.get(tokens[pos : pos + self._page_bytes])
            if child is None:
                break
            shared = self._shared(child.key, tokens, pos, end)
            if shared < len(child.key):
                child = self._split(child, shared)
            child.used = now
            pages += child.pages
            pos += shared
            node = child
        return node, pos, pages

    def _split(self, node: _Node, at: int) -> _Node:
        """Split the edge to `node` after `at` bytes. Returns the new upper node; leases on `node` pin both halves."""
        assert 0 < at < len(node.key), (at, len(node.key))
        parent = node.parent
        assert parent is not None
        cut = at // self._page_bytes
        upper = _Node(node.key[:at], node.pages[:cut], parent, node.used)
        upper.leases = node.leases
        self._num_nodes += 1
        parent.children[upper.key[: self._page_bytes]] = upper
        node.key, node.pages, node.parent = node.key[at:], node.pages[cut:], upper
        upper.children[node.key[: self._page_bytes]] = node
        return upper

    def _pin(self, lease: _Node) -> None:
        node: _Node | None = lease
        while node is not None:
            if node.leases == 0:
                self._leased += len(node.pages)
                self._evictable -= len(node.pages)
            node.leases += 1
            node = node.parent

    def _offer(self, node: _Node) -> None:
        """Called when `node` may have become evictable."""
        if node.is_evictable_leaf:
            self._eviction_order.add(node, self._num_nodes)

    def _nodes(self) -> list[_Node]:
        """Every node below the roots."""
        found: list[_Node] = []
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found
