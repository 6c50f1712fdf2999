"""LoRA adapters by name: which exist, which are in memory, and how many samples use them.

Owns names, numbers and use counts, and the choice of the adapter to evict when memory is full: the least recently used one that is neither
pinned nor in use. It stays known and is read again when a request names it. The engine reads the files.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence

from headrace.errors import CapacityError, ExecutionError, NotFoundError, RequestError
from headrace.frontend.engine_link import EngineLink, EngineLoop
from headrace.frontend.request_state import Adapter
from headrace.log import get_logger
from headrace.messages.channel import Sender
from headrace.messages.weights import RESTORED, LoadLoraReq, LoraReply, UnloadLoraReq

logger = get_logger(__name__)

MAX_NAME_LENGTH = 256
LORA_TIMEOUT_S = 120.0


class Adapters:
    """loaded: (name, path) of those that the engine loaded at start, with the numbers 1, 2, ...

    fingerprints: of their files.
    """

    def __init__(
        self,
        max_loras: int,
        loaded: Sequence[tuple[str, str]],
        engine_loop: EngineLoop,
        link: EngineLink,
        fingerprints: Sequence[str] = (),
    ) -> None:
        self._max_loras = max_loras
        self._engine_loop = engine_loop
        self._link = link
        self._by_name = {
            name: Adapter(name, path, lora_id=number) for number, (name, path) in enumerate(loaded, start=1)
        }
        for adapter, fingerprint in zip(self._by_name.values(), fingerprints, strict=False):
            adapter.fingerprint = fingerprint
        self._ids = itertools.count(len(loaded) + 1)
        self._uses = itertools.count(1)
        # One operation at a time changes what is in memory.
        self._lock = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        """Names of all adapters that requests may use, in the order in which they were added."""
        return [name for name, adapter in self._by_name.items() if not adapter.leaving]

    def check_number(self, names: Iterable[str]) -> None:
        """Raises RequestError if one call uses more adapters than fit in memory."""
        number = len(set(filter(None, names)))
        if number > self._max_loras:
            raise RequestError(
                f"{number} adapters in one request; this server holds at most {self._max_loras} (--max-loras)",
                "lora_path",
            )

    async def load(self, name: str, path: str, pinned: bool = False) -> None:
        """Read an adapter into memory and let requests name it.

        pinned: it stays in memory until it is unloaded. Raises RequestError when it is refused, CapacityError when memory is full and no
        adapter can be evicted.
        """
        self._engine_loop.check_serving()
        if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
            raise RequestError(f"lora_name must be 1 to {MAX_NAME_LENGTH} printable characters", "lora_name")
        if not path:
            raise RequestError("lora_path is empty", "lora_path")
        if self._max_loras == 0:
            raise RequestError("this server does not load adapters (--max-loras 0)", "lora_name")
        async with self._lock:
            if name in self._by_name:
                raise RequestError(f"the adapter {name!r} is already loaded; unload it first", "lora_name")
            adapter = Adapter(name, path, pinned=pinned, last_used=next(self._uses))
            await self._bring_in(adapter)
            self._by_name[name] = adapter

    async def unload(self, name: str) -> None:
        """Unload an adapter. New requests for it are refused at once; running ones are waited for. Raises NotFoundError, RequestError."""
        self._engine_loop.check_serving()
        adapter = self._find(name, "lora_name")
        adapter.leaving = True
        try:
            while adapter.num_users:
                adapter.unused.clear()
                await adapter.unused.wait()
            async with self._lock:
                await self._take_out(adapter)
                del self._by_name[name]
        finally:
            # If the caller has given up waiting, the adapter stays.
            adapter.leaving = False

    async def acquire(self, name: str, num_users: int = 1) -> Adapter:
        """The adapter, loaded if needed, and kept in memory until `release` has been called `num_users` times.

        Raises NotFoundError for an unknown name, CapacityError when every adapter in memory is in use or pinned, RequestError when it
        can no longer be read.
        """
        adapter = self._find(name, "lora_path")
        adapter.num_users += num_users
        adapter.last_used = next(self._uses)
        try:
            if not adapter.lora_id:
                async with self._lock:
                    if not adapter.lora_id:
                        await self._bring_in(adapter)
        except BaseException:
            adapter.release(num_users)
            raise
        return adapter

    def tell_scheduler(self, sender: Sender) -> None:
        """Send the adapters in memory to a restarted scheduler, before the requests that use them."""
        for adapter in self._by_name.values():
            if adapter.lora_id:
                sender.send(LoadLoraReq(RESTORED, adapter.lora_id, adapter.path, True, adapter.fingerprint))

    def handle(self, reply: LoraReply) -> None:
        """After `tell_scheduler`, an adapter that could not be read leaves the other replicas, too.

        Requests that need it there fail; the next request loads it again.
        """
        if reply.id != RESTORED:
            self._link.replies.handle(reply)
        elif reply.status_code >= 400:
            for adapter in self._by_name.values():
                if adapter.lora_id == reply.lora_id:
                    logger.error("the adapter %r could not be loaded again: %s", adapter.name, reply.message)
                    adapter.lora_id = 0
                    self._link.send(UnloadLoraReq(RESTORED, reply.lora_id))

    def _find(self, name: str, param: str) -> Adapter:
        adapter = self._by_name.get(name)
        if adapter is None:
            raise NotFoundError(f"there is no adapter {name!r:.100}", param, "adapter_not_found")
        if adapter.leaving:
            raise RequestError(f"the adapter {name!r:.100} is being unloaded", param)
        return adapter

    async def _bring_in(self, adapter: Adapter) -> None:
        """With the lock held: make room, and load it under a new number."""
        resident = [other for other in self._by_name.values() if other.lora_id]
        if len(resident) >= self._max_loras:
            idle = [other for other in resident if not (other.pinned or other.num_users)]
            if not idle:
                raise CapacityError(
                    f"there is no room for {adapter.name!r}: every adapter in memory is in use or pinned (--max-loras {self._max_loras})"
                )
            await self._take_out(min(idle, key=lambda other: other.last_used))
        lora_id = next(self._ids)
        try:
            replies = await self._call(lambda i: LoadLoraReq(i, lora_id, adapter.path, False, adapter.fingerprint))
            _raise_failure(replies, f"the adapter {adapter.name!r} cannot be loaded: ")
            if len({reply.fingerprint for reply in replies}) > 1:
                raise RequestError(
                    f"the adapter {adapter.name!r} changed while it was being loaded; load it again", "lora_path"
                )
        except BaseException:
            # Some replicas may have loaded it: it must not stay.
            await asyncio.shield(self._call(lambda i: UnloadLoraReq(i, lora_id)))
            raise
        adapter.lora_id, adapter.fingerprint = lora_id, replies[0].fingerprint

    async def _take_out(self, adapter: Adapter) -> None:
        """With the lock held. No later request finds its KV, since the number is never reused."""
        if adapter.lora_id:
            lora_id, adapter.lora_id = adapter.lora_id, 0
            _raise_failure(await self._call(lambda i: UnloadLoraReq(i, lora_id)), "")

    async def _call(self, make: Callable[[int], LoadLoraReq | UnloadLoraReq]) -> list[LoraReply]:
        """Send the request made for an id to every live replica, including one that comes back meanwhile.

        Returns the replies of those that are still alive. Raises ExecutionError when not all replies come, CapacityError when no replica is
        alive.
        """
        self._engine_loop.check()
        # The detokenizer has no part in it.
        replies = await self._link.replies.call_every(self._link.replicas_up, make, LORA_TIMEOUT_S, "adapters")
        return list(replies.values())


def _raise_failure(replies: Sequence[LoraReply], prefix: str) -> None:
    reply = max(replies, key=lambda reply: reply.status_code)
    if reply.status_code >= 500:
        raise ExecutionError(prefix + reply.message)
    if reply.status_code >= 400:
        raise RequestError(prefix + reply.message, "lora_path")
