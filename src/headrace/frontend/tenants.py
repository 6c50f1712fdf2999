"""Callers and their API keys: what belongs to each, its limits, and its current use.

Owns the counting, and the prefix that separates the rids of one key from those of others. `server.keys` finds which key a request carries.

Rates are token buckets: a bucket holds a minute's worth and fills evenly, so a key that was idle may use one minute's worth at once.
Tokens are charged as they are computed: a request may take the bucket below zero, and the key then waits until it is filled again.
"""

import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from headrace.errors import CapacityError
from headrace.messages.namespaces import of_api_key

MINUTE_S = 60.0
RATE_WINDOW_S = 30.0
"""Period over which the pace of the queue is measured."""
UNKNOWN_WAIT_S = 1.0
"""Retry-After before anything has left the queue."""
LONGEST_RETRY_S = 120.0
DURATION_WEIGHT = 0.1
"""Weight of the newest request in the moving average of a tenant's request duration."""


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a key, as its file gives them. weight: its share of the machine beside other keys. None = no limit.

    max_concurrent: requests at once. max_queued: samples without a token. The rates are per minute; tokens are those of prompts
    and outputs. max_sessions, max_session_tokens: None = a share of the server's limit, so that every key gets some.
    shared_cache: shares the prefix cache with the other keys that have this set.
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


class TenantLimits(KeyLimits, frozen=True, kw_only=True):
    """share: of the server's limits that a key gets which has none of its own."""

    share: float = 1.0


class Bucket:
    """A token bucket with the size of one minute's worth, initially full. per_minute None: never empty."""

    def __init__(self, per_minute: float | None, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute or 0.0
        self._at_s = now_s

    def wait_s(self, needed: float, now_s: float) -> float:
        """Seconds until it holds `needed`, 0.0 if it already does."""
        if self.per_minute is None:
            return 0.0
        filled = (now_s - self._at_s) * self.per_minute / MINUTE_S
        self._level, self._at_s = min(self.per_minute, self._level + filled), now_s
        return max(0.0, min(needed, self.per_minute) - self._level) * MINUTE_S / self.per_minute

    def take(self, amount: float) -> None:
        if self.per_minute is not None:
            self._level -= amount

    def limit(self, per_minute: float | None) -> None:
        """Change the rate; what has been used stays used."""
        if per_minute is not None and self.per_minute is None:
            self._level = per_minute
        self.per_minute = per_minute


class Tenant:
    """A key's limits and current use.

    scope: prefix of this key's rids in the engine, so that different keys may use the same rids. It cannot be guessed, so nobody can
    use the rid of another key. Empty for callers without a key of the file.
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
        return self.limits.name

    def namespace(self, asked: str) -> str:
        """Namespace of its prompts in the prefix cache, within the one that the request asked for; shared only if the key says so."""
        if not self.scope or self.limits.shared_cache:
            return asked
        return of_api_key(self.name, asked)

    def change(self, limits: TenantLimits) -> None:
        """Change the limits; current use stays counted."""
        self.limits = limits
        self._requests.limit(limits.requests_per_minute)
        self._tokens.limit(limits.tokens_per_minute)

    def enter(self, num_samples: int, now_s: float) -> None:
        """A request of `num_samples` samples begins. Raises CapacityError (429) when a limit of the key forbids it."""
        limits = self.limits
        if limits.max_concurrent is not None and self.num_live >= limits.max_concurrent:
            raise self._refusal(f"requests at once ({limits.max_concurrent})", self._duration_s / max(1, self.num_live))
        if limits.max_queued is not None and self.num_queued + num_samples > limits.max_queued:
            raise self._refusal(f"waiting samples ({limits.max_queued})", self._duration_s / max(1, self.num_live))
        if wait_s := self._requests.wait_s(1.0, now_s):
            raise self._refusal(f"requests per minute ({limits.requests_per_minute:g})", wait_s)
        if wait_s := self._tokens.wait_s(1.0, now_s):
            raise self._refusal(f"tokens per minute ({limits.tokens_per_minute:g})", wait_s, "tokens")
        self._requests.take(1.0)
        self.num_live += 1
        self.num_queued += num_samples

    def leave_queue(self) -> None:
        self.num_queued -= 1

    def use_tokens(self, count: int) -> None:
        if self._tokens.per_minute is not None:
            self._tokens.take(count)

    def leave(self, duration_s: float) -> None:
        self.num_live -= 1
        self._duration_s += DURATION_WEIGHT * (duration_s - self._duration_s)

    def _refusal(self, limit: str, wait_s: float, limited: Literal["requests", "tokens"] = "requests") -> CapacityError:
        message = f"the limit of this key is reached: {limit}"
        retry_after_s = min(LONGEST_RETRY_S, max(UNKNOWN_WAIT_S, wait_s))
        return CapacityError(message, retry_after_s, status_code=429, limited=limited)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. tenant None: no key of the key file. traceparent: W3C trace context of the caller's span, as sent.

    is_admin: may see, abort and close what belongs to others. is_server: the server itself, for warm-up and probes; time limits of
    requests do not apply. address: of the client, as `server.address.turn_address` writes it, for turns alone.
    """

    tenant: Tenant | None = None
    traceparent: str = ""
    is_admin: bool = False
    is_server: bool = False
    address: str = ""

    @property
    def turn(self) -> str:
        """Whose turn its work takes: its key's, or else its address's; empty for the admin and the server itself, which are outside all shares."""
        return self.tenant.name if self.tenant is not None else self.address

    @property
    def weight(self) -> float:
        return self.tenant.limits.weight if self.tenant is not None else 1.0

    @property
    def scope(self) -> str:
        return self.tenant.scope if self.tenant is not None else ""

    @property
    def owner(self) -> str:
        """Whose its requests are: the admin's, the server's own, or those of a key. Callers with the same owner see each other's."""
        return "admin" if self.is_admin else "server" if self.is_server else f"user/{self.scope}"


ANONYMOUS = Caller()
"""An internal call, or one without a key of the file."""

SERVER = Caller(is_server=True)
"""Warm-up and health probes."""


@dataclass(slots=True)
class QueuePace:
    """How fast samples leave the queue, for Retry-After."""

    _left: deque[float] = field(default_factory=lambda: deque(maxlen=256))

    def note(self, now_s: float) -> None:
        self._left.append(now_s)

    def wait_s(self, num_samples: int, now_s: float) -> float:
        """Seconds until `num_samples` have left, at the recent pace."""
        while self._left and self._left[0] < now_s - RATE_WINDOW_S:
            self._left.popleft()
        if not self._left:
            return UNKNOWN_WAIT_S
        seconds_each = (now_s - self._left[0]) / len(self._left)
        return min(LONGEST_RETRY_S, max(UNKNOWN_WAIT_S, num_samples * seconds_each))
