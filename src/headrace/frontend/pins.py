"""Pinned prefixes, and what is cached: `POST /v1/cache/pin`, `POST /v1/cache/unpin`, `GET /v1/cache`.

Owns the record of the pins, from which a restarted scheduler gets its own again. The schedulers hold the pages and the limits (`scheduler.pins`).
Lives in the main process; everything runs in its event loop.
"""

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.config.server_args import ServerArgs
from headrace.errors import CapacityError, HeadraceError, NotFoundError, RequestError
from headrace.frontend.sample_update import SampleUpdate, SampleUsage
from headrace.frontend.slots import NO_SLOT, PROMPT_ONLY
from headrace.frontend.tenants import ANONYMOUS, Caller
from headrace.log import get_logger
from headrace.media_kinds import MediaFields
from headrace.messages.channel import Sender
from headrace.messages.control import CacheUse, ReadyInfo
from headrace.messages.operations import CACHE_USE, PIN, UNPIN, Asks, CacheUseReq, PinReq, UnpinReq
from headrace.messages.requests import GenerateReqInput, PromptContent, TokenizedGenerateReqInput
from headrace.turns import is_within_share, most_of_one

logger = get_logger(__name__)

MOST_PINS = 4096
"""More are not recorded."""

_TRIES = 3
"""So often a prompt is computed whose pages are gone before they are held."""


class PinAsk(msgspec.Struct, frozen=True):
    """Keep the first `num_tokens` tokens of a call's prompt for `ttl_s` seconds once it is computed; 0 = all of it. is_hint: if that is refused, the
    call goes on. remakes: id of the pin that is made again, unless somebody has let go of it."""

    ttl_s: float
    num_tokens: int = 0
    is_hint: bool = False
    remakes: str = ""


@dataclass(frozen=True, slots=True)
class _Record:
    """A pin. held: tokens, by replica. prompt: computes it again. expires_at: as `time.time` has it."""

    asked: PinReq
    held: dict[int, int]
    prompt: GenerateReqInput
    caller: Caller
    expires_at: int


class Pins:
    """generate: carries out a call with pins. replicas_to_ask: indices, at least one. clock: time.monotonic, and that of the schedulers."""

    def __init__(
        self,
        args: ServerArgs,
        ready: ReadyInfo,
        control: Asks,
        generate: Callable[..., AsyncGenerator[SampleUpdate, None]],
        replicas_to_ask: Callable[[], Iterable[int]],
        clock: Callable[[], float],
    ) -> None:
        self._args = args
        self._page_size = ready.page_size
        self._most_tokens = int(args.kv_pin_share * ready.max_total_tokens / args.num_kv_parts)
        self._limit = int(args.kv_pin_share * ready.max_total_tokens)
        self._control = control
        self._generate = generate
        self._replicas_to_ask = replicas_to_ask
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._made: dict[str, _Record] = {}  # by the rid of the call that made it
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_remaking = 0
        self._unpinned: set[str] = set()  # since the first of those that make pins again has begun

    async def pin(self, obj: GenerateReqInput, ttl_s: float, caller: Caller = ANONYMOUS) -> dict[str, Any]:
        """Compute a prompt, unless it is cached, and keep it: on the replica that the call names, or on all. Raises as `generate_request` does."""
        self._check_kept()
        replicas = list(self._replicas_to_ask()) if obj.replica is None else [obj.replica]
        cached = []
        for replica in replicas:
            record, usage = await self._compute(msgspec.structs.replace(obj, routed_dp_rank=replica), ttl_s, caller)
            cached.append(usage.cached_tokens)
        return {
            "id": record.asked.id,
            "object": "cache.pin",
            "tokens": len(record.asked.tokens) // 4,
            "cached_tokens": min(cached),
            "expires_at": record.expires_at,
        }

    async def unpin(self, pin_id: str, caller: Caller = ANONYMOUS) -> None:
        """Let go of a pin of the caller; an admin of any. Raises NotFoundError."""
        record = self._records.get(pin_id)
        if record is None or not (caller.is_admin or caller.owner == record.asked.owner):
            raise NotFoundError("there is no such pin; its time may have ended", "id", "pin_not_found")
        if self._num_remaking:
            self._unpinned.add(pin_id)
        await self._let_go(pin_id)

    async def cache(self, caller: Caller = ANONYMOUS) -> dict[str, Any]:
        """What is cached, by tier. caller: sees counts of its own; an admin those of all."""
        uses = await self._in_use(caller)
        pinned = sorted({pin_id for use in uses for pin_id in use.pinned} & self._records.keys())
        memory: dict[str, Any] = {
            "limit_tokens": sum(use.pool.total_tokens for use in uses),
            "tokens": sum(use.tokens for use in uses),
            "pinned_tokens": sum(use.pinned_tokens for use in uses),
            "pin_limit_tokens": len(uses) * _most(self._limit, caller),
        }
        disk: dict[str, Any] | None = None
        if self._args.kv_cache_dir is not None:
            disk = {
                "limit_bytes": self._args.kv_cache_disk_size,
                "keeps": self._args.kv_cache_persist_tenants or not caller.scope,
            }
        host = {"limit_bytes": self._args.kv_cache_host_size} if self._args.kv_cache_host_size else None
        if caller.is_admin:
            pools = [use.pool for use in uses]
            memory |= {name: sum(getattr(pool, name) for pool in pools) for name in _POOL}
            if disk is not None:
                disk["bytes"] = max(use.disk_bytes for use in uses)
        return {
            "object": "cache",
            "memory": memory,
            "host": host,
            "disk": disk,
            "pins": [self._described(pin_id, uses) for pin_id in pinned],
        }

    # -- for the front end

    def check(self, content: PromptContent, asks: Sequence[PinAsk], caller: Caller) -> None:
        """Raises RequestError for what cannot be pinned, before it is computed."""
        for ask in asks:
            if ask.is_hint:
                continue
            count = self._whole(ask.num_tokens or content.num_tokens)
            most = min(self._most_tokens, _most(self._limit, caller))
            if not content.has_tokens:
                raise RequestError("embeddings cannot be pinned")
            if not count:
                raise RequestError(f"only whole pages of {self._page_size} tokens are pinned; the prompt is shorter")
            if count > most:
                raise RequestError(f"{count} tokens cannot be pinned: the limit is {most} (--kv-pin-share)")

    async def hold(
        self, obj: GenerateReqInput, request: TokenizedGenerateReqInput, asks: Sequence[PinAsk], caller: Caller
    ) -> None:
        """Keep what was asked of the prompt of a call that has ended. Raises CapacityError, unless it was a hint."""
        for ask in asks:
            try:
                await self._hold(obj, request, ask, caller)
            except HeadraceError as error:
                if not ask.is_hint:
                    raise
                logger.debug("a prefix was not pinned: %s", error.message)

    def sync_soon(self) -> None:
        """Something may have released pins: forget those that no scheduler has."""
        if self._records:
            self._start(self._sync())

    def tell_scheduler(self, sender: Sender) -> None:
        """A scheduler has started: the pins are made again once it serves."""
        if self._records:
            self._start(self._make_again())

    # -- inside

    def _check_kept(self) -> None:
        if self._args.disable_radix_cache:
            raise RequestError("this server caches no prefixes (--disable-radix-cache)")
        if not self._args.kv_pin_share:
            raise RequestError("this server pins nothing (--kv-pin-share 0)")

    async def _compute(
        self, prompt: GenerateReqInput, ttl_s: float, caller: Caller, num_tokens: int = 0, remakes: str = ""
    ) -> tuple[_Record, SampleUsage]:
        """Pin a prompt, or its first tokens, on the replica that it names. remakes: see `PinAsk`."""
        usage: SampleUsage | None = None
        for _ in range(_TRIES):
            if self._is_let_go(remakes):
                break
            rid = f"pin-{uuid.uuid4().hex}"
            call = msgspec.structs.replace(prompt, rid=rid, sampling_params=PROMPT_ONLY)
            async for update in self._generate(
                call, caller=caller, pins=(PinAsk(ttl_s, num_tokens, remakes=remakes),), slot=NO_SLOT
            ):
                usage = usage or update.usage
            record = self._made.pop(rid, None)
            if record is not None and usage is not None and prompt.replica is not None:
                if record.held.get(prompt.replica, 0) * 4 == len(record.asked.tokens):
                    return record, usage
                await self._let_go(record.asked.id)
        raise CapacityError("the KV cache is too full for this pin")

    async def _hold(
        self, obj: GenerateReqInput, request: TokenizedGenerateReqInput, ask: PinAsk, caller: Caller
    ) -> None:
        content, now_s = request.content, self._clock()
        count = self._whole(min(ask.num_tokens or content.num_tokens, content.num_tokens))
        if not count or not content.has_tokens or self._is_let_go(ask.remakes):
            return
        tokens = content.cache_key(content.token_ids)[: 4 * count]
        named = hashlib.blake2b(f"{caller.owner} {request.namespace} ".encode() + tokens, digest_size=12)
        asked = PinReq(
            f"pin_{named.hexdigest()}",
            caller.owner,
            caller.turn,
            tokens,
            request.namespace,
            now_s + ask.ttl_s,
            caller.weight,
        )
        if not ask.remakes:
            self._unpinned.discard(asked.id)
        await self._check_room(asked)
        try:
            held = await PIN.ask(self._control, asked)
        except HeadraceError:
            await self._let_go(asked.id)
            raise
        if self._is_let_go(ask.remakes):
            await self._let_go(asked.id)
            return
        prompt = _prompt_of(obj, content, count)
        record = _Record(asked, held, prompt, caller, int(time.time() + ask.ttl_s))
        if any(held.values()):
            self._records[asked.id] = record
        if isinstance(obj.rid, str):
            self._made[obj.rid] = record

    async def _check_room(self, asked: PinReq) -> None:
        if not self._has_room(asked):
            await self._sync()
        if not self._has_room(asked):
            raise CapacityError("you have as many pins as you may have beside those of others", status_code=429)

    def _has_room(self, asked: PinReq) -> bool:
        others = [record.asked.tenant for pin_id, record in self._records.items() if pin_id != asked.id]
        return is_within_share(
            asked.tenant, others.count(asked.tenant) + 1, len(others) + 1, MOST_PINS, weight=asked.weight
        )

    def _is_let_go(self, remakes: str) -> bool:
        return remakes in self._unpinned

    async def _let_go(self, pin_id: str) -> None:
        self._records.pop(pin_id, None)
        await UNPIN.ask(self._control, UnpinReq(pin_id))

    async def _in_use(self, caller: Caller) -> list[CacheUse]:
        tenant = caller.tenant
        key_name = tenant.name if tenant is not None and not tenant.limits.shared_cache else None
        owner = None if caller.is_admin else caller.owner
        return list((await CACHE_USE.ask(self._control, CacheUseReq(owner, key_name, caller.is_admin))).values())

    async def _sync(self) -> None:
        known = list(self._records)
        uses = await self._in_use(Caller(is_admin=True))
        if len(uses) == self._args.num_replicas:
            held = {pin_id for use in uses for pin_id in use.pinned}
            for pin_id in known:
                if pin_id not in held:
                    self._records.pop(pin_id, None)

    async def _make_again(self) -> None:
        self._num_remaking += 1
        try:
            await self._make_all_again()
        finally:
            self._num_remaking -= 1
            if not self._num_remaking:
                self._unpinned.clear()

    async def _make_all_again(self) -> None:
        for pin_id, record in list(self._records.items()):
            left_s, num_tokens = record.asked.until_s - self._clock(), len(record.asked.tokens) // 4
            if left_s <= 0:
                self._records.pop(pin_id, None)
                continue
            for replica in [replica for replica in self._replicas_to_ask() if record.held.get(replica)]:
                try:
                    again = msgspec.structs.replace(record.prompt, routed_dp_rank=replica)
                    await self._compute(again, left_s, record.caller, num_tokens, pin_id)
                except HeadraceError as error:
                    if not self._is_let_go(pin_id):
                        logger.warning("a pin of %d tokens is lost: %s", num_tokens, error.message)

    def _start(self, work: Any) -> None:
        async def run() -> None:
            try:
                await work
            except HeadraceError as error:
                logger.warning("pins: %s", error.message)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _described(self, pin_id: str, uses: Sequence[CacheUse]) -> dict[str, Any]:
        record = self._records[pin_id]
        return {
            "id": pin_id,
            "tokens": len(record.asked.tokens) // 4,
            "held": [{"dp_rank": use.replica, "tokens": use.pinned[pin_id]} for use in uses if pin_id in use.pinned],
            "expires_at": record.expires_at,
        }

    def _whole(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._page_size


_POOL = ("free_tokens", "evictable_tokens", "leased_tokens")


def _most(limit: int, caller: Caller) -> int:
    """Of the tokens that pins may hold, the most for those of a caller."""
    return most_of_one(limit, caller.weight) if caller.turn else limit


def _prompt_of(obj: GenerateReqInput, content: PromptContent, count: int) -> GenerateReqInput:
    """A call with the first tokens of a prompt; of one with media, with all of it."""
    shared = {name: getattr(obj, name) for name in ("extra_key", "cache_salt", "lora_path")}
    if not content.media:
        return GenerateReqInput(input_ids=list(content.ids(0, count)), **shared)
    media = {name: getattr(obj, name) for name in MediaFields.__struct_fields__}
    return GenerateReqInput(text=obj.text, input_ids=obj.input_ids, **media, **shared)
