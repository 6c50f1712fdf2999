"""Load balancing: which of several replicas gets a request (--dp-size, --load-balance-method).

Owns the policies and their view of each replica's load and cache. It is a layer within the main process: every request and output passes
through the tokenizer manager anyway, and another process would add two hops to every message and a second copy of that state.
`engine_link` sends, and moves the samples of a replica that has died.
"""

import itertools
import sys
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Literal

from headrace.messages.requests import TokenizedGenerateReqInput

Method = Literal["round_robin", "shortest_queue", "total_tokens", "cache_aware"]

BLOCK_TOKENS = 32
MAX_BLOCKS = 65536
"""Prefix blocks to remember per replica: 2M tokens, about 10 MB."""
MIN_SHARED = 0.5
"""A shared prefix that is shorter than this fraction of the prompt is ignored."""
MAX_LEAD_REQUESTS = 8
MAX_LEAD_FACTOR = 1.5
"""A replica gets no more requests for its cache when it has MAX_LEAD_REQUESTS more and MAX_LEAD_FACTOR times as many as the least loaded one.

With a lead of 32 the hit rate is hardly higher, and a few replicas do most of the work: bench/notes/balancing.md."""
MAX_HOLDERS = 64
"""Of the replicas that have a prefix, the load of so many is looked at: of all that --dp-size allows, of some in a simulated fleet."""


class Balancer:
    """Chooses a replica by index. Owns its own view of their load."""

    def choose(self, request: TokenizedGenerateReqInput, replicas: Sequence[int]) -> int:
        """One of `replicas`, which is not empty, for `request`. Whether one is in `replicas` is asked often."""
        raise NotImplementedError

    def sent(self, replica: int, request: TokenizedGenerateReqInput) -> None:
        """`replica` has been given `request`."""

    def left(self, replica: int, request: TokenizedGenerateReqInput) -> None:
        """`request`, as it was given to `replica`, has ended or was moved away."""

    def forget(self, replica: int) -> None:
        """`replica` was restarted: its cache is empty."""


class RoundRobin(Balancer):
    """The replicas take turns."""

    def __init__(self) -> None:
        self._turn = itertools.count()

    def choose(self, request: TokenizedGenerateReqInput, replicas: Sequence[int]) -> int:
        return replicas[next(self._turn) % len(replicas)]


class LeastLoaded(Balancer):
    """The replica with the fewest live samples, or (by_tokens) the fewest tokens that these may grow to. Equal ones take turns.

    A heap of (load, when it was last given a request, replica), in which entries that are out of date stay until they come up. So a choice
    takes the same time among four replicas and among thousands.
    """

    def __init__(self, num_replicas: int, by_tokens: bool) -> None:
        self.load = [0] * num_replicas
        self._by_tokens = by_tokens
        self._turn = itertools.count(1)
        self._last_given = [0] * num_replicas
        self._heap = [(0, 0, replica) for replica in range(num_replicas)]

    def choose(self, request: TokenizedGenerateReqInput, replicas: Sequence[int]) -> int:
        return self.least(replicas)

    def least(self, replicas: Sequence[int]) -> int:
        heap = self._heap
        passed = []
        while True:
            load, last_given, replica = heap[0]
            is_current = load == self.load[replica] and last_given == self._last_given[replica]
            if is_current and replica in replicas:
                break
            entry = heappop(heap)
            if is_current:
                passed.append(entry)
        for entry in passed:
            heappush(heap, entry)
        return replica

    def sent(self, replica: int, request: TokenizedGenerateReqInput) -> None:
        self._last_given[replica] = next(self._turn)
        self._add(replica, self._weight(request))

    def left(self, replica: int, request: TokenizedGenerateReqInput) -> None:
        self._add(replica, -self._weight(request))

    def _weight(self, request: TokenizedGenerateReqInput) -> int:
        return request.content.num_tokens + request.task.max_new_tokens if self._by_tokens else 1

    def _add(self, replica: int, weight: int) -> None:
        self.load[replica] += weight
        heappush(self._heap, (self.load[replica], self._last_given[replica], replica))
        if len(self._heap) > 4 * len(self.load) + _LEAST_COMPACTED:
            self._heap = list(zip(self.load, self._last_given, range(len(self.load)), strict=True))
            heapify(self._heap)


_LEAST_COMPACTED = 64


class CacheAware(Balancer):
    """The replica that probably has the longest prefix of the prompt in its cache, unless it has far more load than others.

    The idea is that of the SGLang router's cache-aware policy (Zheng et al., "SGLang: Efficient Execution of Structured Language
    Model Programs", 2024, and its router's documentation): an approximation of each replica's cache, derived from the requests it was sent,
    and a switch to the shortest queue when the loads are unbalanced. Here the approximation is a bounded LRU set of hashes of the prompts'
    first 1, 2, 3, ... blocks, for each replica, and a table of who has which block. A block is dropped after those that continue it, so who
    has a block has all before it. Of several replicas with the longest prefix the least loaded one is taken.

    cache_tokens: size of a replica's KV cache, beyond which the replica itself evicts.
    """

    def __init__(self, num_replicas: int, cache_tokens: int = sys.maxsize) -> None:
        self._max_blocks = max(1, min(MAX_BLOCKS, cache_tokens // BLOCK_TOKENS))
        self._blocks: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._holders: dict[
            int, dict[int, None]
        ] = {}  # block -> replicas, first the one that it was sent to longest ago
        self._shortest = LeastLoaded(num_replicas, by_tokens=False)
        self._hashed: tuple[TokenizedGenerateReqInput, list[int]] | None = None

    def choose(self, request: TokenizedGenerateReqInput, replicas: Sequence[int]) -> int:
        least = self._shortest.least(replicas)
        best = self._with_longest_prefix(self._hashes(request), least, replicas)
        load = self._shortest.load
        is_overloaded = load[best] > load[least] + MAX_LEAD_REQUESTS and load[best] > load[least] * MAX_LEAD_FACTOR
        return least if is_overloaded else best

    def sent(self, replica: int, request: TokenizedGenerateReqInput) -> None:
        self._shortest.sent(replica, request)
        blocks = self._blocks[replica]
        for value in reversed(self._hashes(request)):
            # The first block last, so that it is dropped last.
            blocks[value] = None
            blocks.move_to_end(value)
            holders = self._holders.setdefault(value, {})
            holders.pop(replica, None)
            holders[replica] = None
        while len(blocks) > self._max_blocks:
            value, _ = blocks.popitem(last=False)
            self._drop(value, replica)

    def left(self, replica: int, request: TokenizedGenerateReqInput) -> None:
        self._shortest.left(replica, request)

    def forget(self, replica: int) -> None:
        for value in self._blocks[replica]:
            self._drop(value, replica)
        self._blocks[replica].clear()

    def _with_longest_prefix(self, hashes: Sequence[int], least: int, replicas: Sequence[int]) -> int:
        """The least loaded of `replicas` with the longest prefix, or `least` if all have less than MIN_SHARED of the prompt."""
        num_known = bisect_left(hashes, True, key=lambda value: value not in self._holders)
        for num_shared in range(num_known, 0, -1):
            if num_shared < MIN_SHARED * len(hashes):
                break
            holders = self._holders[hashes[num_shared - 1]]
            if least in holders:
                break
            if found := [replica for replica in islice(holders, MAX_HOLDERS) if replica in replicas]:
                return min(found, key=self._shortest.load.__getitem__)
        return least

    def _drop(self, value: int, replica: int) -> None:
        holders = self._holders[value]
        del holders[replica]
        if not holders:
            del self._holders[value]

    def _hashes(self, request: TokenizedGenerateReqInput) -> list[int]:
        """Those of the prompt. A request is usually sent just after a replica was chosen for it, so the last one's are kept."""
        if self._hashed is None or self._hashed[0] is not request:
            self._hashed = request, _prefix_hashes(request)
        return self._hashed[1]


def _prefix_hashes(request: TokenizedGenerateReqInput) -> list[int]:
    """One hash per whole block of the prompt, over the namespace and all tokens up to its end. Empty for embeddings."""
    if not request.content.has_tokens:
        return []
    key = request.content.cache_key(request.content.token_ids)
    size, value, hashes = BLOCK_TOKENS * 4, hash(request.namespace), []
    for end in range(size, len(key) + 1, size):
        value = hash((value, key[end - size : end]))
        hashes.append(value)
    return hashes


def make_balancer(method: Method, num_replicas: int, cache_tokens: int = sys.maxsize) -> Balancer:
    """The policy of --load-balance-method. cache_tokens: size of each replica's KV cache."""
    match method:
        case "round_robin":
            return RoundRobin()
        case "shortest_queue":
            return LeastLoaded(num_replicas, by_tokens=False)
        case "total_tokens":
            return LeastLoaded(num_replicas, by_tokens=True)
        case "cache_aware":
            return CacheAware(num_replicas, cache_tokens)
