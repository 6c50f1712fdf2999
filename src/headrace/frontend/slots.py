"""Slots, as llama.cpp's server has them, over a cache that all prompts share: `POST /slots/{id}?action=save|restore|erase`.

A slot is the last request of its number, of each key. A saved one is a session of one turn (`sessions`): its limits, owner and file. To restore it
is to load or compute its KV, and to look for it as the next request will. Lives in the main process; everything runs in its event loop.
"""

import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.errors import NotFoundError, RequestError
from headrace.frontend.request_state import CallState
from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.session_files import TOKEN_BYTES
from headrace.frontend.sessions import WITHOUT_KEY, Sessions
from headrace.frontend.tenants import ANONYMOUS, Caller
from headrace.messages.packing import pack_int32, unpack_int32
from headrace.messages.requests import CallInput, GenerateReqInput
from headrace.sampling.params import SamplingParams
from headrace.turns import Kept

NO_SLOT = -1
PROMPT_ONLY = SamplingParams(max_new_tokens=0)


@dataclass(frozen=True, slots=True)
class _Last:
    """The last request of a slot: int32 bytes. refusal: why it cannot be saved, or empty."""

    prompt: bytes
    outputs: bytes = b""
    refusal: str = ""

    @property
    def num_tokens(self) -> int:
        return (len(self.prompt) + len(self.outputs)) // TOKEN_BYTES


class Slots:
    """num_slots: those of each key. context_length: of the model. generate: carries out a call. replicas_to_ask: indices, at least one."""

    def __init__(
        self,
        num_slots: int,
        context_length: int,
        sessions: Sessions,
        generate: Callable[..., AsyncGenerator[SampleUpdate, None]],
        replicas_to_ask: Callable[[], Iterable[int]],
    ) -> None:
        self._num_slots = num_slots
        self._context_length = context_length
        self._sessions = sessions
        self._generate = generate
        self._replicas_to_ask = replicas_to_ask
        self._last: Kept[tuple[str, int], _Last] = Kept(sessions.max_tokens, sessions.max_sessions)

    async def save(self, slot: int, name: str, caller: Caller = ANONYMOUS) -> dict[str, Any]:
        """Keep the last request of a slot. Raises RequestError, CapacityError, ExecutionError."""
        last, begin_s = self._last.get(self._key(slot, caller)), time.perf_counter()
        if last is None:
            raise NotFoundError(f"slot {slot} has had no request of this key", "id", "slot_empty")
        if last.refusal:
            raise RequestError(f"the last request of slot {slot} {last.refusal}: it cannot be saved", "id")
        ids, outputs = unpack_int32(last.prompt), unpack_int32(last.outputs)
        self._sessions.put(_session(name), ids, outputs, caller.tenant or WITHOUT_KEY)
        counts = {"n_saved": last.num_tokens, "n_written": TOKEN_BYTES * last.num_tokens}
        return {"id_slot": slot, "filename": name, **counts, "timings": {"save_ms": _ms_since(begin_s)}}

    async def restore(self, slot: int, name: str, caller: Caller = ANONYMOUS) -> dict[str, Any]:
        """Load or compute the KV of a saved slot. n_restored: tokens that a request which goes on from there finds, on every replica. Raises as
        `generate_request` does."""
        key, begin_s = self._key(slot, caller), time.perf_counter()
        ids = self._sessions.get(_session(name), "filename", caller.tenant or WITHOUT_KEY)
        if not ids:
            raise NotFoundError("this session is no saved slot", "filename")
        prompt, found = ids[: self._context_length - 1], []
        for replica in self._replicas_to_ask():
            call = GenerateReqInput(input_ids=[*prompt], sampling_params=PROMPT_ONLY, routed_dp_rank=replica)
            await self._num_cached(call, caller)
            longer = msgspec.structs.replace(call, input_ids=[*prompt, prompt[-1]])
            found.append(await self._num_cached(longer, caller))
        self._last.put(key, _Last(pack_int32(ids)), len(ids), caller.turn)
        counts = {"n_restored": min(found), "n_read": TOKEN_BYTES * len(ids)}
        return {"id_slot": slot, "filename": name, **counts, "timings": {"restore_ms": _ms_since(begin_s)}}

    async def erase(self, slot: int, caller: Caller = ANONYMOUS) -> dict[str, Any]:
        """Forget the last request of a slot; what is saved stays. Raises RequestError."""
        return {"id_slot": slot, "n_erased": self._last.drop(self._key(slot, caller))}

    def keep(self, slot: int, obj: CallInput, state: CallState, caller: Caller) -> None:
        """A call has ended, which is now the last one of its slot; a slot that does not exist is the first one."""
        sample = state.samples[0]
        is_one = isinstance(obj, GenerateReqInput) and sample.request is not None and sample.failed is None
        if self._sessions.files is None or slot == NO_SLOT or caller.is_server or not is_one:
            return
        assert isinstance(obj, GenerateReqInput), obj
        assert sample.request is not None, sample.rid
        content, refusal = sample.request.content, ""
        if state.is_list:
            refusal = "has several prompts or samples"
        elif content.media or not content.has_tokens:
            refusal = "has more than tokens"
        elif obj.cache_salt or obj.extra_key or obj.lora_path:
            refusal = "has a cache_salt, an extra_key or an adapter"
        last = _Last(b"", refusal=refusal) if refusal else _Last(content.token_ids, pack_int32(sample.output_ids))
        key = caller.scope, slot if slot < self._num_slots else 0
        self._last.put(key, last, last.num_tokens, caller.turn)

    def _key(self, slot: int, caller: Caller) -> tuple[str, int]:
        if not 0 <= slot < self._num_slots:
            raise RequestError(f"the slots are numbered 0 to {self._num_slots - 1} (--max-running-requests)", "id")
        return caller.scope, slot

    async def _num_cached(self, call: GenerateReqInput, caller: Caller) -> int:
        num_cached = 0
        async with aclosing(self._generate(call, caller=caller, slot=NO_SLOT)) as updates:
            async for update in updates:
                num_cached = update.usage.cached_tokens
        return num_cached


def slot_of(id_slot: object) -> int:
    """The slot of a request that names one, or any (-1)."""
    return id_slot if isinstance(id_slot, int) and id_slot > 0 else 0


def _session(name: str) -> str:
    return f"slot/{name}"


def _ms_since(begin_s: float) -> float:
    return round(1000 * (time.perf_counter() - begin_s), 3)
