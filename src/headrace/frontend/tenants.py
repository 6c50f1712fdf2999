"""Who calls, what belongs to each caller, and what each may use: the limits of a key, and what it uses now.

Owns the counting and the prefix by which rids of one key differ from those of all others; which key a request carries is
`server.keys`'. Used by the tokenizer manager, in its event loop only.

Rates are token buckets: a bucket holds a minute's worth and fills evenly, so a key that was idle may use one minute's worth at once.
Tokens are charged as they are computed: a request may take the bucket below zero, and the key then waits until it is filled again.
"""

import json
import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from headrace.errors import CapacityError

MINUTE_S = 60.0
RATE_WINDOW_S = 30.0
"""The pace of the queue is that of the samples that left it within so long."""
UNKNOWN_WAIT_S = 1.0
"""Retry-After before anything has left the queue."""
LONGEST_RETRY_S = 120.0
DURATION_WEIGHT = 0.1
"""Of the newest request in the moving average of how long a tenant's requests take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What a key may use. weight: its share of the machine beside other keys that wait. None = no limit.

    max_concurrent: requests at once. max_queued: samples without a token. The rates are per minute; tokens are those of prompts
    and outputs. max_sessions, max_session_tokens: None = `share` of what the server keeps, so that no key leaves the others without.
    shared_cache: its prompts may be found in the prefix cache by other keys that say so, and theirs by it.
    """

    name: str
    weight: float = 1.0
    max_concurrent: int | None = None
    max_queued: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_sessions: int | None = None
    max_session_tokens: int | None = None
    shared_cache: bool = False
    share: float = 1.0


class Bucket:
    """A token bucket of a minute's worth, full at first. per_minute None: never empty."""

    def __init__(self, per_minute: float | None, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute or 0.0
        self._at_s = now_s

    def wait_s(self, needed: float, now_s: float) -> float:
        """Seconds until it holds `needed`; 0.0 when it does."""
        if self.per_minute is None:
            return 0.0
        filled = (now_s - self._at_s) * self.per_minute / MINUTE_S
        self._level, self._at_s = min(self.per_minute, self._level + filled), now_s
        return max(0.0, min(needed, self.per_minute) - self._level) * MINUTE_S / self.per_minute

    def take(self, amount: float) -> None:
        """May leave it below zero."""
        if self.per_minute is not None:
            self._level -= amount

    def limit(self, per_minute: float | None) -> None:
        """Another rate; what has been used stays used."""
        if per_minute is not None and self.per_minute is None:
            self._level = per_minute
        self.per_minute = per_minute


class Tenant:
    """A key's limits and what it uses now.

    scope: begins the rids that the engine knows this key's requests by, so that keys may use the same rids. Nobody can guess it, and
    so nobody can take another's rid. Empty for callers without a key of the file.
    """

    def __init__(self, limits: TenantLimits, now_s: float = 0.0) -> None:
        self.limits = limits
        self.scope = f"{limits.name}/{secrets.token_hex(8)}/" if limits.name else ""
        self.num_live = 0
        self.num_queued = 0
        self._requests = Bucket(limits.requests_per_minute, now_s)
        self._tokens = Bucket(limits.tokens_per_minute, now_s)
        self._duration_s = UNKNOWN_WAIT_S

    @property
    def name(self) -> str:
        """Of the key; empty when requests need none."""
        return self.limits.name

    def namespace(self, asked: str) -> str:
        """Where in the prefix cache its prompts are, of what the request asked for: shared with nobody, unless the key says so."""
        if not self.scope or self.limits.shared_cache:
            return asked
        # Three parts: what requests ask for has two, and adapters make two of it.
        return json.dumps(["key", self.name, asked])

    def change(self, limits: TenantLimits) -> None:
        """New limits for the same key; what it uses goes on."""
        self.limits = limits
        self._requests.limit(limits.requests_per_minute)
        self._tokens.limit(limits.tokens_per_minute)

    def enter(self, num_samples: int, now_s: float) -> None:
        """A request of `num_samples` samples begins. Raises CapacityError (429) when a limit of the key forbids it."""
        limits = self.limits
        if limits.max_concurrent is not None and self.num_live >= limits.max_concurrent:
            raise self._refusal(f"{limits.max_concurrent} requests at once", self._duration_s / max(1, self.num_live))
        if limits.max_queued is not None and self.num_queued + num_samples > limits.max_queued:
            raise self._refusal(f"{limits.max_queued} samples that wait", self._duration_s / max(1, self.num_live))
        if wait_s := self._requests.wait_s(1.0, now_s):
            raise self._refusal(f"{limits.requests_per_minute:g} requests per minute", wait_s)
        if wait_s := self._tokens.wait_s(1.0, now_s):
            raise self._refusal(f"{limits.tokens_per_minute:g} tokens per minute", wait_s, "tokens")
        self._requests.take(1.0)
        self.num_live += 1
        self.num_queued += num_samples

    def leave_queue(self) -> None:
        """One of its samples has a token, or has ended."""
        self.num_queued -= 1

    def use_tokens(self, count: int) -> None:
        """Prompt or output tokens that were computed for it."""
        self._tokens.take(count)

    def leave(self, duration_s: float) -> None:
        """A request has ended after so long."""
        self.num_live -= 1
        self._duration_s += DURATION_WEIGHT * (duration_s - self._duration_s)

    def _refusal(self, limit: str, wait_s: float, limited: Literal["requests", "tokens"] = "requests") -> CapacityError:
        message = f"the limit of this key is reached: {limit}"
        retry_after_s = min(LONGEST_RETRY_S, max(UNKNOWN_WAIT_S, wait_s))
        return CapacityError(message, retry_after_s, status_code=429, limited=limited)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. tenant None: no key of the key file. traceparent: W3C trace context of the caller's span, as sent.

    is_admin: sees, aborts and closes what belongs to others. is_server: the server itself, to see whether it works; limits on a request's
    time are for clients.
    """

    tenant: Tenant | None = None
    traceparent: str = ""
    is_admin: bool = False
    is_server: bool = False

    @property
    def scope(self) -> str:
        """What its rids begin with in the engine."""
        return self.tenant.scope if self.tenant is not None else ""

    def may_see(self, scope: str) -> bool:
        """Whether what belongs to the key of this scope is its business."""
        return self.is_admin or scope == self.scope


NOBODY = Caller()
"""A call from within, or one without a key of its own."""

SERVER = Caller(is_server=True)
"""Warm-up and health probes."""


@dataclass(slots=True)
class QueuePace:
    """How fast samples leave the queue, for Retry-After."""

    _left: deque[float] = field(default_factory=lambda: deque(maxlen=256))

    def note(self, now_s: float) -> None:
        """A sample has left the queue."""
        self._left.append(now_s)

    def wait_s(self, num_samples: int, now_s: float) -> float:
        """Seconds that `num_samples` need to leave at the pace of late."""
        while self._left and self._left[0] < now_s - RATE_WINDOW_S:
            self._left.popleft()
        if not self._left:
            return UNKNOWN_WAIT_S
        seconds_each = (now_s - self._left[0]) / len(self._left)
        return min(LONGEST_RETRY_S, max(UNKNOWN_WAIT_S, num_samples * seconds_each))
