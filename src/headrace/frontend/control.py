"""Control operations: the way of all of them to the schedulers (`ask`), those that need more, and those of the main process itself.

Owns the requests to the replicas, and what a restarted one is told again. Operations on weights are in `weight_control`, lasting settings in
`runtime_settings`.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from headrace.errors import HeadraceError, NotFoundError, RequestError
from headrace.frontend.communicator import Replica
from headrace.frontend.engine_link import EngineLink, EngineLoop
from headrace.frontend.inputs import check_text
from headrace.frontend.records import Records
from headrace.frontend.runtime_settings import RuntimeSettings
from headrace.frontend.server_info import sum_of_states
from headrace.messages.channel import Sender
from headrace.messages.control import (
    ExpertCountsReply,
    ExpertCountsReq,
    FaultReq,
    InternalState,
    Outcome,
)
from headrace.messages.operations import (
    CHECK_HEALTH,
    COUNT_EXPERTS,
    FLUSH_CACHE,
    INTERNAL_STATE,
    OPERATIONS,
    Asks,
    ConfigureLoggingBody,
    Nothing,
    OperationReply,
    OperationReq,
    SetInternalStateBody,
    answered,
    error_of_fault,
)

MAX_WAIT_S = 600.0
"""Longest timeout of a flush."""

RETRY_S = 0.02
"""Time between attempts: about one step, since an aborted request blocks the flush until its last step has ended."""


class Control:
    """to_detokenizer: for test faults in it. faults_allowed: whether `inject_fault` works.

    own: set by the owner; the operations of this process. on_flushed: called after the cache of a replica was emptied.
    """

    def __init__(
        self, engine_loop: EngineLoop, link: EngineLink, to_detokenizer: Sender | None, faults_allowed: bool
    ) -> None:
        self._engine_loop = engine_loop
        self._link = link
        self._to_detokenizer = to_detokenizer
        self._faults_allowed = faults_allowed
        self.own: MainOperations
        self.on_flushed: Callable[[], None] = lambda: None
        self._lasting: dict[str, bytes] = {}
        self._states: asyncio.Task[list[InternalState]] | None = None  # that is asked, or was
        self._next_states: asyncio.Task[list[InternalState]] | None = None

    async def ask(self, name: str, request: bytes) -> dict[int, bytes]:
        """See `Asks`; `Operation.ask` is the typed form. Raises RequestError, CapacityError, ExecutionError."""
        operation = OPERATIONS.get(name)
        if operation is None:
            raise RequestError(f"there is no operation {name!r:.40}")
        asked = operation.request_of(OperationReq(0, name, request))
        if operation.at == "main":
            return {0: answered(0, await getattr(self.own, name)(asked)).reply}
        self._engine_loop.check_serving()
        if operation.lasts:
            # Kept before the call, so that a replica that comes back meanwhile gets it too.
            self._lasting[name] = request
        replies: dict[Replica, OperationReply] = await self._link.replies.call(
            self._link.replicas_up(), lambda i: OperationReq(i, name, request), operation.timeout_s, name
        )
        in_order = sorted(replies.items(), key=lambda one: one[0].index)
        for _, reply in in_order:
            if reply.fault is not None:
                raise error_of_fault(reply.fault)
        return {replica.index: reply.reply for replica, reply in in_order}

    def tell_scheduler(self, sender: Sender) -> None:
        """Repeat what lasts to a restarted scheduler. Its replies are not waited for."""
        for name, request in self._lasting.items():
            sender.send(OperationReq(0, name, request))

    async def flush_cache(self, timeout_s: float = 0.0) -> Outcome:
        """Empty the prefix cache of every replica. The reply is a failure if one replica failed. See `flush_when_idle`.

        Raises RequestError, CapacityError, ExecutionError.
        """
        return await flush_when_idle(self._flush_now, timeout_s)

    async def internal_states(self) -> list[InternalState]:
        """Counters and pool accounting of each live replica. Who comes while they are asked shares the next answer with all others who do.

        Raises CapacityError, ExecutionError.
        """
        if self._next_states is None:
            self._next_states = asyncio.create_task(self._ask_states(self._states))
        return list(await asyncio.shield(self._next_states))

    async def _ask_states(self, before: "asyncio.Task[list[InternalState]] | None") -> list[InternalState]:
        if before is not None and not before.done():
            await asyncio.wait([before])
        self._states, self._next_states = self._next_states, None
        return list((await INTERNAL_STATE.ask(self, Nothing())).values())

    async def internal_state(self) -> InternalState:
        return sum_of_states(await self.internal_states())

    async def inject_fault(self, fault: FaultReq) -> None:
        """Cause a fault, for tests. Raises NotFoundError unless the server was started with --enable-fault-injection."""
        if not self._faults_allowed:
            raise NotFoundError("fault injection is not enabled")
        check_text("rid", fault.rid)
        if fault.stage != "detokenize":
            self._link.send(fault)
        elif self._to_detokenizer is not None:
            self._to_detokenizer.send(fault)
        else:
            raise RequestError("the detokenizer cannot be reached", "stage")

    async def is_busy(self) -> bool:
        """Every replica is making tokens, or is paused and answers. Raises CapacityError, ExecutionError."""
        replies = await CHECK_HEALTH.ask(self, Nothing())
        return all(reply.busy or reply.held for reply in replies.values())

    async def _flush_now(self) -> Outcome:
        replies = list((await FLUSH_CACHE.ask(self, Nothing())).values())
        if any(reply.success for reply in replies):
            self.on_flushed()
        return next((reply for reply in replies if not reply.success), replies[0])


async def flush_when_idle(flush: Callable[[], Awaitable[Outcome]], timeout_s: float) -> Outcome:
    """Call `flush` until it succeeds, for at most `timeout_s` seconds. Returns the last reply.

    timeout_s: 0 = one attempt. Raises RequestError if it is negative, not a number or longer than `MAX_WAIT_S`.
    """
    if not (math.isfinite(timeout_s) and 0.0 <= timeout_s <= MAX_WAIT_S):
        raise RequestError(f"timeout must be between 0 and {MAX_WAIT_S:g} seconds, got {timeout_s}", "timeout")
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + timeout_s
    while True:
        reply = await flush()
        if reply.success or clock() >= deadline_s:
            return reply
        await asyncio.sleep(RETRY_S)


class ExpertRecording:
    """Records which experts are chosen, on every replica, and sums the counts.

    A restarted replica records too if the others do; its earlier counts are lost, and the reply says so.
    """

    def __init__(self, control: Asks) -> None:
        self._control = control
        self._is_recording = False
        self._num_begun_again = 0

    async def start(self) -> None:
        if self._is_recording:
            raise RequestError("the choice of experts is being recorded: stop it first")
        # Set before the call, so that a replica that comes back meanwhile records too.
        self._is_recording, self._num_begun_again = True, 0
        try:
            await self._ask("start")
        except HeadraceError:
            self._is_recording = False
            raise

    async def stop(self) -> None:
        """Stop recording; `dump` still returns the counts. Raises RequestError, ExecutionError."""
        if not self._is_recording:
            raise RequestError("the choice of experts is not being recorded")
        await self._ask("stop")
        self._is_recording = False

    async def dump(self) -> dict[str, Any]:
        """Tokens per layer and expert of all replicas, since the last dump or the start. Raises RequestError, ExecutionError."""
        replies = await self._ask("dump")
        layers: dict[int, list[int]] = {}
        for reply in replies:
            for layer, counts in reply.layers.items():
                before = layers.get(layer, [0] * len(counts))
                layers[layer] = [a + b for a, b in zip(before, counts, strict=True)]
        begun_again, self._num_begun_again = self._num_begun_again, 0
        return {
            "is_recording": self._is_recording,
            "num_replicas": len(replies),
            "num_replicas_begun_again": begun_again,
            "layers": {str(layer): layers[layer] for layer in sorted(layers)},
        }

    def tell_scheduler(self, sender: Sender) -> None:
        if self._is_recording:
            self._num_begun_again += 1
            sender.send(COUNT_EXPERTS.message(0, ExpertCountsReq("start")))

    async def _ask(self, action: Literal["start", "stop", "dump"]) -> list[ExpertCountsReply]:
        return list((await COUNT_EXPERTS.ask(self._control, ExpertCountsReq(action))).values())


@dataclass(eq=False)
class MainOperations:
    """Control operations that the main process carries out itself (`at="main"` in `messages.operations`), a method of the row's name each.

    They go through the parts that own the state, and return what their routes reply.
    """

    experts: ExpertRecording
    settings: RuntimeSettings
    records: Records

    async def start_expert_distribution_record(self, request: Nothing) -> dict[str, Any]:
        await self.experts.start()
        return {"success": True, "message": "the choice of experts is being recorded"}

    async def stop_expert_distribution_record(self, request: Nothing) -> dict[str, Any]:
        await self.experts.stop()
        return {"success": True, "message": "the choice of experts is not recorded any more"}

    async def dump_expert_distribution_record(self, request: Nothing) -> dict[str, Any]:
        return {"success": True, **await self.experts.dump()}

    async def configure_logging(self, request: ConfigureLoggingBody) -> dict[str, Any]:
        now = self.settings.configure_logging(request.level, request.log_requests, request.log_requests_level)
        return {"success": True, **now}

    async def freeze_gc(self, request: Nothing) -> dict[str, Any]:
        self.settings.freeze_gc()
        message = "the objects that exist now are left out of garbage collection, in every process"
        return {"success": True, "message": message}

    async def set_internal_state(self, request: SetInternalStateBody) -> dict[str, Any]:
        return {"success": True, "updated": True, "server_args": self.settings.change_limits(request.server_args)}

    async def dump_requests(self, request: Nothing) -> dict[str, Any]:
        name, count = await self.records.dump()
        message = f"wrote {name}; number of requests: {count}"
        return {"success": True, "message": message, "file": name, "num_requests": count}
