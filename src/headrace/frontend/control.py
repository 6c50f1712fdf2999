"""Control operations on the schedulers: the way of all of them (`ask`), and those that need more than a question.

Owns the requests to the replicas, and what a restarted one is told again. Operations on weights are in `weight_control`, lasting settings in
`runtime_settings`. Runs in the tokenizer manager's event loop.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import HeadraceError, NotFoundError, RequestError
from headrace.frontend.all_replicas import sum_of_states
from headrace.frontend.communicator import Communicator
from headrace.frontend.engine_link import EngineLink
from headrace.frontend.engine_loop import EngineLoop
from headrace.frontend.flush import flush_when_idle
from headrace.frontend.inputs import check_text
from headrace.frontend.replica import Replica
from headrace.messages.channel import Sender
from headrace.messages.control import (
    FaultReq,
    FlushCacheReply,
    FlushCacheReq,
    HealthCheckReq,
    InternalState,
    InternalStateReq,
)
from headrace.messages.faults import error_of_fault
from headrace.messages.operations import (
    CHECK_HEALTH,
    FLUSH_CACHE,
    INTERNAL_STATE,
    OPERATIONS,
    OperationReply,
    OperationReq,
    answered,
)


class Control:
    """See the module docstring. to_detokenizer: for test faults in it. faults_allowed: whether `inject_fault` works.

    own: set by the owner; the operations of this process, by name, see `main_operations`.
    """

    def __init__(
        self, engine_loop: EngineLoop, link: EngineLink, to_detokenizer: Sender | None, faults_allowed: bool
    ) -> None:
        self._engine_loop = engine_loop
        self._link = link
        self._to_detokenizer = to_detokenizer
        self._faults_allowed = faults_allowed
        self.own: Mapping[str, Callable[[Any], Any]] = {}
        self._replies = Communicator[OperationReply]("control")
        self._lasting: dict[str, bytes] = {}
        engine_loop.handlers.register(OperationReply, self._replies.handle)

    async def ask(self, name: str, request: bytes) -> dict[int, bytes]:
        """See `Asks`; `Operation.ask` is the typed form. Raises RequestError, CapacityError, ExecutionError."""
        operation = OPERATIONS.get(name)
        if operation is None:
            raise RequestError(f"there is no operation {name!r:.40}")
        asked = operation.request_of(OperationReq(0, name, request))
        if operation.at == "main":
            reply = self.own[name](asked)
            return {0: answered(0, await reply if inspect.isawaitable(reply) else reply).reply}
        self._engine_loop.check_serving()
        if operation.lasts:
            # Kept before the call, so that a replica that comes back meanwhile gets it too.
            self._lasting[name] = request
        replies = await self._replies.call(
            self._link.replicas_up(), lambda i: OperationReq(i, name, request), operation.timeout_s, name
        )
        in_order = sorted(replies.items(), key=lambda one: one[0].index)
        for _, reply in in_order:
            if reply.fault is not None:
                raise error_of_fault(reply.fault)
        return {replica.index: reply.reply for replica, reply in in_order}

    def tell_scheduler(self, sender: Sender) -> None:
        """Repeat what lasts to a restarted scheduler. Nobody waits for its replies."""
        for name, request in self._lasting.items():
            sender.send(OperationReq(0, name, request))

    async def flush_cache(self, timeout_s: float = 0.0) -> FlushCacheReply:
        """Empty the prefix cache of every replica. The reply is a failure if one replica failed. See `flush_when_idle`.

        Raises RequestError, CapacityError, ExecutionError.
        """
        return await flush_when_idle(self._flush_now, timeout_s)

    async def internal_states(self) -> list[InternalState]:
        """Counters and pool accounting of each live replica. Raises CapacityError, ExecutionError."""
        return list((await INTERNAL_STATE.ask(self, InternalStateReq())).values())

    async def internal_state(self) -> InternalState:
        """The sum of `internal_states`."""
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
        replies = await CHECK_HEALTH.ask(self, HealthCheckReq())
        return all(reply.busy or reply.held for reply in replies.values())

    def lost(self, replica: Replica) -> None:
        """A replica has died: do not wait for its replies."""
        self._replies.lost(replica)

    def fail_all(self, error: HeadraceError) -> None:
        """End every waiting operation with `error`, and every later one."""
        self._replies.fail_all(error)

    async def _flush_now(self) -> FlushCacheReply:
        replies = list((await FLUSH_CACHE.ask(self, FlushCacheReq())).values())
        return next((reply for reply in replies if not reply.success), replies[0])
