"""Pinned prefixes: each stays in the tree until its time ends, it is let go, the cache is flushed, or a request that is alone has no room beside it.

Owns their leases. A page that several pins hold counts once. Runs in the scheduler's thread.
"""

from collections import Counter
from dataclasses import dataclass

from headrace.cache.base import PrefixMatch
from headrace.cache.radix_cache import TOKEN_BYTES
from headrace.errors import CapacityError
from headrace.log import get_logger
from headrace.messages.control import PinStats
from headrace.messages.operations import PinReq
from headrace.scheduler.kv_manager import KVManager
from headrace.turns import is_within_share

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Pin:
    """part: of the KV cache."""

    asked: PinReq
    part: int
    match: PrefixMatch


class Pins:
    """share: of each part of the KV cache, which pins hold at most."""

    def __init__(self, kv: KVManager, share: float) -> None:
        self._kv = kv
        self._share = share
        self._pins: dict[str, _Pin] = {}  # the one that was set first comes first
        # How many pins hold a page, of those in each part, of those of each owner and of each tenant.
        self._in_part: list[Counter[int]] = [Counter() for _ in kv.parts]
        self._of_owner: dict[str, Counter[int]] = {}
        self._of_tenant: dict[str, Counter[int]] = {}
        self._num_released = 0
        kv.on_flush = self.forget

    @property
    def num_tokens(self) -> int:
        """Tokens of the tree that are held."""
        return sum(map(self.tokens_in, range(len(self._in_part))))

    def tokens_in(self, part: int) -> int:
        """The same of a part of the KV cache."""
        return len(self._in_part[part]) * self._kv.page_size

    def hold(self, asked: PinReq) -> int:
        """Hold what the tree has of a prefix, in the part that has most of it. Returns its tokens. Raises CapacityError beyond a share."""
        limit = len(asked.tokens) // TOKEN_BYTES
        known = [part.cache.peek(asked.tokens, asked.namespace, limit) for part in self._kv.parts]
        index = max(range(len(known)), key=known.__getitem__)
        match = self._kv.parts[index].cache.match(asked.tokens, asked.namespace, limit)
        before = self._pins.get(asked.id)
        self.let_go(asked.id)
        self._add(_Pin(asked, index, match))
        if excess := self._excess(asked, index):
            self.let_go(asked.id)
            if before is not None:
                part = self._kv.parts[before.part].cache
                again = part.match(before.asked.tokens, before.asked.namespace, before.match.num_tokens)
                self._add(_Pin(before.asked, before.part, again))
            raise CapacityError(excess, status_code=429)
        return match.num_tokens

    def let_go(self, pin_id: str) -> bool:
        """Release a pin. False: there is none with this id."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        self._kv.parts[pin.part].cache.release(pin.match.lease)
        kinds = (self._of_owner, pin.asked.owner), (self._of_tenant, pin.asked.tenant)
        for pages in (self._in_part[pin.part], *(of[name] for of, name in kinds)):
            pages.subtract(pin.match.pages)
            for page in pin.match.pages:
                if not pages[page]:
                    del pages[page]
        for of, name in kinds:
            if not of[name]:
                del of[name]
        return True

    def expire(self, now_s: float) -> None:
        """Release those whose time has ended."""
        for pin_id in [pin_id for pin_id, pin in self._pins.items() if pin.asked.until_s <= now_s]:
            self.let_go(pin_id)

    def give_way(self, part: int) -> bool:
        """Release the oldest pin in a part of the KV cache, for a request that is alone there. False: there is none."""
        oldest = next((pin_id for pin_id, pin in self._pins.items() if pin.part == part), None)
        if oldest is None:
            return False
        logger.warning("a pin of %d tokens gives way to a request", self._pins[oldest].match.num_tokens)
        self._num_released += 1
        return self.let_go(oldest)

    def forget(self) -> None:
        """Release all."""
        for pin_id in list(self._pins):
            self.let_go(pin_id)

    def held(self, owner: str | None) -> dict[str, int]:
        """The tokens that each pin of an owner holds, or each pin of all."""
        return {pin_id: pin.match.num_tokens for pin_id, pin in self._pins.items() if owner in (None, pin.asked.owner)}

    def tokens_of(self, owner: str | None) -> int:
        """Tokens that the pins of an owner hold, or all pins."""
        return self.num_tokens if owner is None else len(self._of_owner.get(owner, ())) * self._kv.page_size

    def stats(self) -> PinStats:
        return PinStats(len(self._pins), self.num_tokens, len(self._of_owner), self._num_released)

    def _add(self, pin: _Pin) -> None:
        if pin.match.pages:
            self._pins[pin.asked.id] = pin
            self._in_part[pin.part].update(pin.match.pages)
            self._of_owner.setdefault(pin.asked.owner, Counter()).update(pin.match.pages)
            self._of_tenant.setdefault(pin.asked.tenant, Counter()).update(pin.match.pages)

    def _excess(self, asked: PinReq, part: int) -> str:
        """Why a pin is more than there may be, or ""."""
        # Without telling how much others hold.
        if self.tokens_in(part) > int(self._share * self._kv.part_tokens):
            return "the server has no room for another pin of this size (--kv-pin-share): unpin another one"
        own = len(self._of_tenant.get(asked.tenant, ())) * self._kv.page_size
        most = int(self._share * self._kv.total_tokens)
        if not is_within_share(asked.tenant, own, self.num_tokens, most, weight=asked.weight):
            return f"your pins would hold {own} tokens, more than your share (--kv-pin-share): unpin another one"
        return ""
