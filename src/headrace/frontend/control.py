"""Control operations on the schedulers: flushing caches, reading counters, profiling, injecting test faults.

Owns the requests to the replicas, and how their replies are combined. Operations on weights are in `weight_control`, lasting settings in
`runtime_settings`. Runs in the tokenizer manager's event loop.
"""

from collections.abc import Callable
from typing import Literal

from headrace.errors import HeadraceError, NotFoundError, RequestError
from headrace.frontend.all_replicas import sum_of_states
from headrace.frontend.communicator import Communicator
from headrace.frontend.engine_link import EngineLink
from headrace.frontend.engine_loop import EngineLoop
from headrace.frontend.flush import flush_when_idle
from headrace.frontend.inputs import check_text
from headrace.frontend.replica import Replica
from headrace.messages.cache_tree import CacheTree, CacheTreeReply, CacheTreeReq
from headrace.messages.channel import Sender
from headrace.messages.control import (
    FaultReq,
    FlushCacheReply,
    FlushCacheReq,
    HealthCheckReply,
    HealthCheckReq,
    InternalState,
    InternalStateReply,
    InternalStateReq,
    ProfileReply,
    ProfileReq,
)

CONTROL_TIMEOUT_S = 10.0
PROFILE_TIMEOUT_S = 120.0
"""Writing a long trace may take this long; no step runs meanwhile."""


class Control:
    """See the module docstring. to_detokenizer: for test faults in it. faults_allowed: whether `inject_fault` works."""

    def __init__(
        self, engine_loop: EngineLoop, link: EngineLink, to_detokenizer: Sender | None, faults_allowed: bool
    ) -> None:
        self._engine_loop = engine_loop
        self._link = link
        self._to_detokenizer = to_detokenizer
        self._faults_allowed = faults_allowed
        self._flushes = Communicator[FlushCacheReply]("flush_cache")
        self._states = Communicator[InternalStateReply]("internal_state")
        self._trees = Communicator[CacheTreeReply]("cache_tree")
        self._healths = Communicator[HealthCheckReply]("health")
        self._profiles = Communicator[ProfileReply]("profile")
        engine_loop.handlers.register(FlushCacheReply, self._flushes.handle)
        engine_loop.handlers.register(InternalStateReply, self._states.handle)
        engine_loop.handlers.register(CacheTreeReply, self._trees.handle)
        engine_loop.handlers.register(HealthCheckReply, self._healths.handle)
        engine_loop.handlers.register(ProfileReply, self._profiles.handle)

    async def flush_cache(self, timeout_s: float = 0.0) -> FlushCacheReply:
        """Empty the prefix cache of every replica. The reply is a failure if one replica failed. See `flush_when_idle`.

        Raises RequestError, CapacityError, ExecutionError.
        """
        return await flush_when_idle(self._flush_now, timeout_s)

    async def internal_states(self) -> list[InternalState]:
        """Counters and pool accounting of each live replica. Raises CapacityError, ExecutionError."""
        self._engine_loop.check_serving()
        replies = await self._states.call(self._link.replicas_up(), InternalStateReq, CONTROL_TIMEOUT_S)
        return sorted((reply.state for reply in replies.values()), key=lambda state: state.replica)

    async def internal_state(self) -> InternalState:
        """The sum of `internal_states`."""
        return sum_of_states(await self.internal_states())

    async def cache_trees(self, max_depth: int, max_nodes: int) -> list[CacheTree]:
        """The outline of each live replica's prefix cache. Raises CapacityError, ExecutionError."""
        self._engine_loop.check_serving()
        replies = await self._trees.call(
            self._link.replicas_up(), lambda i: CacheTreeReq(i, max_depth, max_nodes), CONTROL_TIMEOUT_S
        )
        return sorted((reply.tree for reply in replies.values()), key=lambda tree: tree.replica)

    async def start_profile(
        self, output_name: str = "", num_steps: int = 0, activities: tuple[Literal["CPU", "GPU"], ...] = ("CPU",)
    ) -> str:
        """Record the worker's steps to a file below --profile-dir. Returns a message for the operator.

        num_steps: stop after this many steps; 0 = at `stop_profile`. Raises RequestError, ExecutionError.
        """
        return await self._profile(lambda i: ProfileReq(i, True, output_name, num_steps, activities))

    async def stop_profile(self) -> str:
        """Write the recorded steps. Returns a message with the file's name. Raises RequestError, ExecutionError."""
        return await self._profile(lambda i: ProfileReq(i, False))

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
        replies = await self._healths.call(self._link.replicas_up(), HealthCheckReq, CONTROL_TIMEOUT_S)
        return all(reply.busy or reply.held for reply in replies.values())

    def lost(self, replica: Replica) -> None:
        """A replica has died: do not wait for its replies."""
        for communicator in (self._flushes, self._states, self._trees, self._healths, self._profiles):
            communicator.lost(replica)

    def fail_all(self, error: HeadraceError) -> None:
        """End every waiting operation with `error`, and every later one."""
        for communicator in (self._flushes, self._states, self._trees, self._healths, self._profiles):
            communicator.fail_all(error)

    async def _flush_now(self) -> FlushCacheReply:
        self._engine_loop.check_serving()
        asked = await self._flushes.call(self._link.replicas_up(), FlushCacheReq, CONTROL_TIMEOUT_S)
        replies = list(asked.values())
        return next((reply for reply in replies if not reply.success), replies[0])

    async def _profile(self, make: Callable[[int], ProfileReq]) -> str:
        self._engine_loop.check_serving()
        replies = list((await self._profiles.call(self._link.replicas_up(), make, PROFILE_TIMEOUT_S)).values())
        if not any(reply.success for reply in replies):
            raise RequestError(replies[0].message)
        return "; ".join(dict.fromkeys(reply.message for reply in replies))
