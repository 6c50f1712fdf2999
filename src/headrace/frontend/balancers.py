"""Load balancing: which of several replicas gets a request (--dp-size, --load-balance-method).

Owns the policies and their view of each replica's load and cache. It is a layer within the main process, not a process of its own:
every request and output passes through the tokenizer manager anyway, which knows all live samples and their lengths; a separate process
would add two hops to every message and a second copy of that state. Not used with one replica. Does not send: `engine_link` does, which also
moves the samples of a replica that has died. Event loop only.
"""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, Protocol

from headrace.messages.requests import TokenizedGenerateReqInput

Method = Literal["round_robin", "shortest_queue", "total_tokens", "cache_aware"]

BLOCK_TOKENS = 32
MAX_BLOCKS = 65536
"""Prefix blocks to remember per replica: 2M tokens, about 10 MB."""
MIN_SHARED = 0.5
"""A shared prefix that is shorter than this fraction of the prompt is ignored."""
MAX_LEAD_REQUESTS = 32
MAX_LEAD_FACTOR = 1.5
"""A replica gets no more requests for its cache when it has MAX_LEAD_REQUESTS more and MAX_LEAD_FACTOR times as many as the least loaded one."""


class Balancer(Protocol):
    """Chooses a replica by index. Owns its own view of their load."""

    def choose(self, request: TokenizedGenerateReqInput, replicas: Sequence[int]) -> int:
        """One of `replicas`, which is not empty, for `request`."""

    def sent(self, replica: int, request: TokenizedGenerateReqInput) -> None:
        """`replica` has been given `request`."""

    def left(self, replica: int, request: TokenizedGenerateReqInput) -> None:
        """`request`, as it was given to `replica`, has ended or was moved away."""

    def forget(self, replica: int) -> None:
        """`replica` was restarted: its cache is empty."""


class RoundRobin:
    """The replicas take turns."""

    def __init__(self) -> None:
        self._turn = itertools.count()

    def choose(self, request: TokenizedGenerateReqInput, replicas: Sequence[int]) -> int:
        """See `Balancer`."""
        return replicas[next(self._turn) % len(replicas)]

    def sent(self, replica: int, request: TokenizedGenerateReqInput) -> None:
        """See `Balancer`."""

    def left(self, replica: int, request: TokenizedGenerateReqInput) -> None:
        """See `Balancer`."""

    def forget(self, replica: int) -> None:
        """See `Balancer`."""


class LeastLoaded:
    """The replica with the fewest live samples, or (by_tokens) the fewest tokens that these may grow to. Equal ones take turns."""

    def __init__(self, num_replicas: int, by_tokens: bool) -> None:
        self.load = [0] * num_replicas
        self._by_tokens = by_tokens
        self._turn = itertools.count()

    def choose(self, request: TokenizedGenerateReqInput, replicas: Sequence[int]) -> int:
        """See `Balancer`."""
        first = next(self._turn) % len(replicas)
        return min((*replicas[first:], *replicas[:first]), key=self.load.__getitem__)

    def sent(self, replica: int, request: TokenizedGenerateReqInput) -> None:
        """See `Balancer`."""
        self.load[replica] += self._weight(request)

    def left(self, replica: int, request: TokenizedGenerateReqInput) -> None:
        """See `Balancer`."""
        self.load[replica] -= self._weight(request)

    def forget(self, replica: int) -> None:
        """See `Balancer`."""

    def _weight(self, request: TokenizedGenerateReqInput) -> int:
        return request.content.num_tokens + request.task.max_new_tokens if self._by_tokens else 1


class CacheAware:
    """The replica that probably has the longest prefix of the prompt in its cache, unless it has far more load than others.

    The idea is that of the SGLang router's cache-aware policy (Zheng et al., "SGLang: Efficient Execution of Structured Language
    Model Programs", 2024, and its router's documentation): an approximation of each replica's cache, derived from the requests it was sent,
    and a switch to the shortest queue when the loads are unbalanced. Here the approximation is a bounded LRU set of hashes of the prompts'
    first 1, 2, 3, ... blocks. Evictions in the replica itself are ignored.
    """

    def __init__(self, num_replicas: int) -> None:
        self._blocks: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._shortest = LeastLoaded(num_replicas, by_tokens=False)

    def choose(self, request: TokenizedGenerateReqInput, replicas: Sequence[int]) -> int:
        """See `Balancer`."""
        least = self._shortest.choose(request, replicas)
        hashes = _prefix_hashes(request)
        if not hashes:
            return least
        shared = {replica: self._num_shared(replica, hashes) for replica in replicas}
        best = max(replicas, key=lambda replica: (shared[replica], replica == least))
        load = self._shortest.load
        is_overloaded = load[best] > load[least] + MAX_LEAD_REQUESTS and load[best] > load[least] * MAX_LEAD_FACTOR
        return least if is_overloaded or shared[best] < MIN_SHARED * len(hashes) else best

    def sent(self, replica: int, request: TokenizedGenerateReqInput) -> None:
        """See `Balancer`."""
        self._shortest.sent(replica, request)
        blocks = self._blocks[replica]
        for value in reversed(_prefix_hashes(request)):
            # The first block last, so that it is dropped last.
            blocks[value] = None
            blocks.move_to_end(value)
        while len(blocks) > MAX_BLOCKS:
            blocks.popitem(last=False)

    def left(self, replica: int, request: TokenizedGenerateReqInput) -> None:
        """See `Balancer`."""
        self._shortest.left(replica, request)

    def forget(self, replica: int) -> None:
        """See `Balancer`."""
        self._blocks[replica].clear()

    def _num_shared(self, replica: int, hashes: Sequence[int]) -> int:
        blocks = self._blocks[replica]
        return next((n for n, value in enumerate(hashes) if value not in blocks), len(hashes))


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


def make_balancer(method: Method, num_replicas: int) -> Balancer:
    """The policy of --load-balance-method."""
    match method:
        case "round_robin":
            return RoundRobin()
        case "shortest_queue":
            return LeastLoaded(num_replicas, by_tokens=False)
        case "total_tokens":
            return LeastLoaded(num_replicas, by_tokens=True)
        case "cache_aware":
            return CacheAware(num_replicas)
