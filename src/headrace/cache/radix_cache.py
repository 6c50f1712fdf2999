"""Prefix cache: a radix tree over token pages (after RadixAttention, Zheng et al. 2024, arXiv:2312.07104).

Owns the pages of every cached prefix. Runs in the scheduler's thread; no torch.
Keys are compared page by page: an edge always holds whole pages, and two edges of a node differ within their first page.
Every namespace (adapter, cache salt, extra key) has its own root, so nothing is shared between namespaces.

Of those who used the cache lately each has an equal share of it. What was used least lately goes first, of those above their share: so the prompts
of one do not evict what another goes on using. A share that its owner does not fill is everybody's.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from itertools import islice

from headrace.cache.base import CacheObserver, Insertion, Lease, Parted, PrefixMatch
from headrace.messages import namespaces
from headrace.messages.control import CacheNode
from headrace.messages.outputs import CacheMiss, MissReason

TOKEN_BYTES = 4


class _Node(Lease):
    """A node with the tokens and pages of the edge that leads to it. As a `Lease` it pins itself and its ancestors. owner: of its namespace.
    released_at: the number of its last release, over all nodes."""

    __slots__ = ("children", "is_taken", "key", "leases", "newer", "older", "owner", "pages", "parent", "released_at")

    def __init__(self, key: bytes, pages: list[int], parent: "_Node | None") -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.owner: str | None = None if parent is None else parent.owner
        self.children: Parted[bytes, _Node] = Parted()
        self.leases = 0
        self.is_taken = False  # by `take_oldest`
        self.released_at = 0
        self.older: _Node | None = None  # neighbours in `_Released`
        self.newer: _Node | None = None


class _Root(_Node):
    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(b"", [], None)
        self.namespace = namespace
        self.owner = namespaces.owner_of(namespace)


class _Released:
    """Nodes of one owner without leases, by when the last one was released.

    Whoever releases a node releases its ancestors after it, so the oldest is a leaf: it is evicted first. A linked list: an `OrderedDict` takes
    milliseconds when it grows.
    """

    def __init__(self) -> None:
        self.oldest: _Node | None = None
        self._newest: _Node | None = None

    def add(self, node: _Node) -> None:
        node.older, self._newest = self._newest, node
        if node.older is None:
            self.oldest = node
        else:
            node.older.newer = node

    def discard(self, node: _Node) -> None:
        older, newer = node.older, node.newer
        node.older = node.newer = None
        if older is not None:
            older.newer = newer
        elif self.oldest is node:
            self.oldest = newer
        if newer is not None:
            newer.older = older
        elif self._newest is node:
            self._newest = older


class _Memory:
    """Which prefixes the tree has had lately: of each of its nodes all up to the end of its first page, and why it is gone if it is."""

    def __init__(self) -> None:
        self._ages: deque[dict[int, MissReason]] = deque([{}], maxlen=_AGES)

    def add(self, namespace: str, tokens: bytes) -> None:
        newest = self._ages[-1]
        newest[hash((namespace, tokens))] = "evicted"
        if len(newest) == _REMEMBERED // _AGES:
            self._ages.append({})

    def flushed(self, why: MissReason) -> None:
        for age in self._ages:
            age.update({key: why for key, before in age.items() if before == "evicted"})

    def why_gone(self, namespace: str, tokens: bytes) -> MissReason | None:
        """Of a prefix that is not in the tree; None = it never was, as far as is remembered."""
        key = hash((namespace, tokens))
        return next((age[key] for age in reversed(self._ages) if key in age), None)


LATELY = 16
"""Who used the cache before all its pages were replaced so many times has no share of it any more."""

_REMEMBERED, _AGES = 1 << 14, 1 << 3
_MOST_COMPARED = 64
"""Children of a node whose text is compared, and namespaces that are looked into, to explain a miss."""


class RadixCache:
    """A `PrefixCache`, which documents the methods. page_size: tokens per page (1, 16, ...). observer: is told what changes."""

    shares = True

    def __init__(self, page_size: int, observer: CacheObserver | None = None) -> None:
        self.page_size = page_size
        self._observer = observer
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: Parted[str, _Root] = Parted()
        self._released: defaultdict[str | None, _Released] = defaultdict(_Released)
        self._num_released = 0
        self._memory = _Memory()
        self._num_nodes = 0
        self._evictable = 0
        self._leased = 0
        self._pages_of: Counter[str | None] = Counter()
        self._num_inserted = 0  # pages, ever
        self._used_at: dict[
            str | None, int
        ] = {}  # of each owner with pages: `_num_inserted` when it used the cache last

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
            leaf = _Node(tokens[pos:end], taken, node)
            self._memory.add(namespace, tokens[: pos + self._page_bytes])
            node.children[leaf.key[: self._page_bytes]] = leaf
            self._evictable += len(taken)
            self._pages_of[leaf.owner] += len(taken)
            self._num_inserted += len(taken)
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
                if node.parent is not None:
                    self._num_released += 1
                    node.released_at = self._num_released
                    self._released[node.owner].add(node)
            node = node.parent

    def evict(self, num_pages: int) -> list[int]:
        freed: list[int] = []
        for node in self._by_turns() if num_pages > 0 else ():
            self._released[node.owner].discard(node)
            parent = node.parent
            assert parent is not None, "it is in the tree"
            assert not node.children, "children are released before it"
            del parent.children[node.key[: self._page_bytes]]
            node.parent = None
            self._num_nodes -= 1
            freed += node.pages
            self._evictable -= len(node.pages)
            self._pages_of[node.owner] -= len(node.pages)
            if isinstance(parent, _Root) and not parent.children:
                del self._roots[parent.namespace]
                if not self._pages_of[node.owner]:
                    for by_owner in (self._pages_of, self._used_at, self._released):
                        del by_owner[node.owner]
            if len(freed) >= num_pages:
                break
        if self._observer is not None and freed:
            self._observer.removed(freed)
        return freed

    def take_oldest(self, num_pages: int) -> list[tuple[bytes, str]]:
        taken: list[tuple[bytes, str]] = []
        num_seen = 0
        for node in self._by_turns() if num_pages > 0 else ():
            num_seen += len(node.pages)
            if not node.is_taken:
                taken.append(self._take(node))
            if num_seen >= num_pages:
                break
        if num_pages >= self._evictable + self._leased:
            taken += [self._take(node) for node in self._nodes() if not (node.children or node.is_taken)]
        return taken

    def flush(self, why: MissReason = "flushed") -> list[int]:
        assert self._leased == 0, f"{self._leased} pages are still leased"
        nodes = self._nodes()
        freed = [page for node in nodes for page in node.pages]
        for node in nodes:  # else they would wait for a collection of cycles
            node.parent = node.older = node.newer = None
        self._roots.clear()
        self._num_nodes = 0
        self._evictable = 0
        for by_owner in (self._pages_of, self._used_at, self._released):
            by_owner.clear()
        self._memory.flushed(why)
        if self._observer is not None:
            self._observer.cleared()
        return freed

    def num_pages_of(self, owner: str | None) -> int:
        return self._pages_of[owner]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    def outline(self, max_depth: int, max_nodes: int) -> list[CacheNode]:
        found: list[CacheNode] = []
        level: list[tuple[int, _Node]] = [(-1, root) for root in islice(self._roots.latest(), max_nodes)]
        for _ in range(max_depth):
            below: list[tuple[int, _Node]] = []
            for parent, node in level:
                for child in islice(node.children.latest(), max_nodes - len(found)):
                    below.append((len(found), child))
                    num_tokens = len(child.key) // TOKEN_BYTES
                    found.append(CacheNode(parent, num_tokens, len(child.children), child.leases))
            level = below
        return found

    def explain(self, tokens: bytes, namespace: str, limit: int) -> CacheMiss | None:
        end = self._whole_pages(min(limit * TOKEN_BYTES, len(tokens)))
        place = self.peek(tokens, namespace, limit) * TOKEN_BYTES
        if place >= end:
            return None
        wanted = tokens[place : place + self._page_bytes]
        nearest = max(self._going_on(tokens, namespace, place), key=lambda page: _common(page, wanted), default=b"")
        common = _common(nearest, wanted)
        why: MissReason | None = self._memory.why_gone(namespace, tokens[: place + self._page_bytes])
        if why is None and self._is_elsewhere(tokens[: place + self._page_bytes], namespace):
            why = "other_namespace"
        if why is not None:
            common, nearest = 0, b""
        at = place + common * TOKEN_BYTES
        cached_id = _token(nearest, common) if nearest else -1
        return CacheMiss(
            at // TOKEN_BYTES,
            why or ("other_text" if nearest else "not_cached"),
            _token(tokens, at // TOKEN_BYTES),
            cached_id,
        )

    # -- inside

    def _by_turns(self) -> Iterator[_Node]:
        """Those without leases in the order in which they are evicted. The last one that it gave may be taken out of the tree."""
        num_pages = self._evictable + self._leased
        lately = {owner for owner, at in self._used_at.items() if self._num_inserted - at < LATELY * num_pages}
        share = num_pages / max(1, len(lately))
        left = dict(self._pages_of)
        above: list[tuple[int, _Node]] = []
        others: list[tuple[int, _Node]] = []
        node: _Node | None
        for released in self._released.values():
            if (node := released.oldest) is not None:
                is_above = node.owner not in lately or left[node.owner] > share
                heapq.heappush(above if is_above else others, (node.released_at, node))
        while above or others:
            _, first = heapq.heappop(above or others)
            node = first.newer
            left[first.owner] -= len(first.pages)
            yield first
            if node is not None:
                is_above = node.owner not in lately or left[node.owner] > share
                heapq.heappush(above if is_above else others, (node.released_at, node))

    def _going_on(self, tokens: bytes, namespace: str, place: int) -> list[bytes]:
        """The pages with which the tree goes on after tokens[:place], some of them."""
        node: _Node | None = self._roots.get(namespace)
        pos = 0
        while node is not None and pos < place:
            node = node.children[tokens[pos : pos + self._page_bytes]]
            if pos + len(node.key) > place:
                return [node.key[place - pos : place - pos + self._page_bytes]]
            pos += len(node.key)
        return [] if node is None else list(islice(node.children, _MOST_COMPARED))

    def _is_elsewhere(self, tokens: bytes, namespace: str) -> bool:
        """Whether another namespace of the same key has a prefix."""
        owner = namespaces.owner_of(namespace)
        return any(
            other != namespace
            and namespaces.owner_of(other) == owner
            and self.peek(tokens, other, len(tokens)) * TOKEN_BYTES == len(tokens)
            for other in islice(self._roots, _MOST_COMPARED)
        )

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

    def _descend(self, root: _Root, tokens: bytes, end: int) -> tuple[_Node, int, list[int]]:
        """Walk down from a root along tokens[:end], splitting an edge that matches only in part. Returns (last node, matched bytes, pages)."""
        node: _Node = root
        pages: list[int] = []
        pos = 0
        while pos < end:
            child = node.children.get(tokens[pos : pos + self._page_bytes])
            if child is None:
                break
            shared = self._shared(child.key, tokens, pos, end)
            if shared < len(child.key):
                rest = child.key[shared : shared + self._page_bytes]
                child = self._split(child, shared)
                self._memory.add(root.namespace, tokens[: pos + shared] + rest)
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
        upper = _Node(node.key[:at], node.pages[:cut], parent)
        upper.leases, upper.is_taken = node.leases, node.is_taken
        self._num_nodes += 1
        parent.children[upper.key[: self._page_bytes]] = upper
        node.key, node.pages, node.parent = node.key[at:], node.pages[cut:], upper
        upper.children[node.key[: self._page_bytes]] = node
        return upper

    def _pin(self, lease: _Node) -> None:
        node: _Node | None = lease
        self._used_at[lease.owner] = self._num_inserted
        while node is not None:
            if node.leases == 0:
                self._leased += len(node.pages)
                self._evictable -= len(node.pages)
                self._released[node.owner].discard(node)
            node.leases += 1
            node = node.parent

    def _take(self, last: _Node) -> tuple[bytes, str]:
        """The tokens up to the end of a node, and its namespace."""
        node, keys = last, [last.key]
        while not isinstance(node, _Root):
            node.is_taken = True
            assert node.parent is not None, "it is in the tree"
            node = node.parent
            keys.append(node.key)
        return b"".join(reversed(keys)), node.namespace

    def _nodes(self) -> list[_Node]:
        """Every node below the roots."""
        found: list[_Node] = []
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found


def _common(page: bytes, other: bytes) -> int:
    """Number of tokens with which both begin."""
    return next(
        (i for i in range(len(page) // TOKEN_BYTES) if _token(page, i) != _token(other, i)), len(page) // TOKEN_BYTES
    )


def _token(tokens: bytes, place: int) -> int:
    return int.from_bytes(tokens[place * TOKEN_BYTES : (place + 1) * TOKEN_BYTES], "little", signed=True)
