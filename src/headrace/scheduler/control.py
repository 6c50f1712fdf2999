"""Handlers of control messages: one function each, which `Scheduler` calls; and of control operations (`Operations`)."""

from collections.abc import Callable
from dataclasses import fields, replace

import msgspec

from headrace.errors import HeadraceError, RequestError
from headrace.messages.channel import Receiver
from headrace.messages.control import (
    AbortReq,
    CacheTree,
    CacheUse,
    ExpertCountsReply,
    ExpertCountsReq,
    HealthCheckReply,
    InternalState,
    Outcome,
    SetLimitsReq,
    TierStats,
    TransferStats,
)
from headrace.messages.operations import (
    OPERATIONS,
    CacheTreeQuery,
    CacheUseReq,
    Nothing,
    OperationReply,
    OperationReq,
    PinReq,
    SlowDownBody,
    StartProfileBody,
    UnpinReq,
    answered,
    fault_of,
)
from headrace.messages.outputs import WAITED_TOO_LONG, FinishReason, TokenIDOut
from headrace.messages.step import Worker
from headrace.scheduler.commit import end
from headrace.scheduler.request import Req
from headrace.scheduler.state import SchedulerState


def abort(state: SchedulerState, request: AbortReq) -> list[TokenIDOut]:
    """End the named requests (exact rids) or all; unknown rids are ignored. Partial output is kept."""
    if request.abort_all:
        found = list(state.by_rid.values())
    else:
        found = [state.by_rid[rid] for rid in request.rids if rid in state.by_rid]
    return [abort_one(state, req, request.message, request.status_code) for req in found]


def abort_one(state: SchedulerState, req: Req, message: str, status_code: int) -> TokenIDOut:
    """End one request. status_code 0: the client requested it, so it is not an error."""
    req.finish = FinishReason("abort", message=message, status_code=status_code)
    return end(state, req)


def expire(state: SchedulerState, now_s: float) -> list[TokenIDOut]:
    """End requests whose deadline has passed, or whose queue deadline has passed before they ever ran."""
    late: list[Req] = []
    stuck: list[Req] = []
    for req in state.by_rid.values():
        if 0 < req.asked.deadline_s <= now_s:
            late.append(req)
        elif 0 < req.asked.queue_deadline_s <= now_s and req.cached_tokens < 0:
            stuck.append(req)
    return [
        *(abort_one(state, req, "the request took longer than the server allows", 408) for req in late),
        *(abort_one(state, req, WAITED_TOO_LONG, 503) for req in stuck),
    ]


def set_limits(state: SchedulerState, request: SetLimitsReq) -> None:
    """Change limits from the next step on. Running requests continue, even if they exceed a new limit."""
    state.config = replace(
        state.config,
        max_running=min(request.max_running, state.kv.max_seqs),
        max_queued=request.max_queued,
        chunk_tokens=request.chunk_tokens,
        conservativeness=request.conservativeness,
        max_step_s=request.max_step_s,
    )
    state.ratio.scale(request.conservativeness)


class Operations:
    """What a scheduler answers to control operations: a method for each row of `messages.operations`, of its name.

    receiver: of the scheduler's messages. sleep_s: how long it sleeps after each step.
    """

    def __init__(self, state: SchedulerState, worker: Worker, receiver: Receiver) -> None:
        self._state = state
        self._worker = worker
        self._receiver = receiver
        self.sleep_s = 0.0

    def answer(self, message: OperationReq) -> OperationReply:
        """The reply to a request, or why there is none."""
        try:
            operation = OPERATIONS.get(message.name)
            if operation is None:
                raise RequestError(f"the scheduler has no operation {message.name!r:.40}")
            if operation.at == "ranks":
                return self._of_ranks(message)
            method = getattr(self, operation.name)
            return answered(message.id, method(operation.request_of(message)))
        except HeadraceError as error:
            return OperationReply(message.id, fault=fault_of(error))

    def _of_ranks(self, message: OperationReq) -> OperationReply:
        """A list with what each rank replies, or why one of them does not."""
        replies = self._worker.weights.ask_ranks(message)
        fault = next((reply.fault for reply in replies if reply.fault is not None), None)
        if fault is not None:
            return OperationReply(message.id, fault=fault)
        return answered(message.id, [msgspec.Raw(reply.reply) for reply in replies])

    def flush_cache(self, request: Nothing) -> Outcome:
        """Empty the prefix cache, or reply why not. While generation is paused, only requests that hold KV prevent it."""
        state = self._state
        if state.running or (state.waiting and not state.gate.holds):
            busy = f"requests running: {len(state.running)}, waiting: {len(state.waiting)}"
            return Outcome(False, f"the cache cannot be flushed now ({busy})")
        state.kv.flush()
        state.encodings.clear()
        if state.tier is not None:
            state.tier.tier.forget()
        return Outcome(True, "the cache has been flushed")

    def internal_state(self, request: Nothing) -> InternalState:
        return internal_state(self._state, self._receiver.dropped_frames)

    def check_health(self, request: Nothing) -> HealthCheckReply:
        gate = self._state.gate
        return HealthCheckReply(bool(self._state.running), gate.holds or gate.draining)

    def cache_tree(self, request: CacheTreeQuery) -> CacheTree:
        kv = self._state.kv
        nodes = kv.outline(request.max_depth, request.max_nodes)
        return CacheTree(self._state.config.replica, kv.num_nodes, kv.num_cached_tokens, nodes)

    def cache_use(self, request: CacheUseReq) -> CacheUse:
        kv, tier = self._state.kv, self._state.tier
        return CacheUse(
            self._state.config.replica,
            kv.state(),
            kv.num_cached_tokens if request.everything else kv.tokens_of(request.key_name),
            self._state.pins.held(request.owner),
            self._state.pins.tokens_of(request.owner),
            None if tier is None else tier.stats(),
            0 if tier is None else tier.tier.num_bytes,
        )

    def pin(self, request: PinReq) -> int:
        return self._state.pins.hold(request)

    def unpin(self, request: UnpinReq) -> bool:
        return self._state.pins.let_go(request.id)

    def slow_down(self, request: SlowDownBody) -> str:
        self.sleep_s = request.forward_sleep_time or 0.0
        return f"the scheduler sleeps {self.sleep_s:g} s after each step" if self.sleep_s else "full speed"

    def start_profile(self, request: StartProfileBody) -> Outcome:
        """Begin to record steps, or reply why not."""
        once = tuple(dict.fromkeys(request.activities)) or ("CPU",)
        return self._profile(msgspec.structs.replace(request, activities=once))

    def stop_profile(self, request: Nothing) -> Outcome:
        return self._profile(None)

    def _profile(self, request: StartProfileBody | None) -> Outcome:
        try:
            return Outcome(True, self._worker.profile(request))
        except HeadraceError as error:
            return Outcome(False, error.message)

    def count_experts(self, request: ExpertCountsReq) -> ExpertCountsReply:
        return self._worker.count_experts(request)


def internal_state(state: SchedulerState, dropped_frames: int) -> InternalState:
    counters = {field.name: getattr(state.counters, field.name) for field in fields(state.counters)}
    return InternalState(
        pool=state.kv.state(),
        num_running=len(state.running),
        num_waiting=len(state.waiting) + len(state.tier or ()) + sum(1 for _ in state.rooms or ()),
        num_in_flight_steps=len(state.in_flight),
        dropped_frames=dropped_frames,
        gen_throughput=state.gen_throughput,
        new_token_ratio=state.ratio.value,
        num_grammar_queue=len(state.compiling),
        grammars=state.compiling.stats(),
        encodings=state.encodings.stats,
        tier=TierStats() if state.tier is None else state.tier.stats(),
        transfer=TransferStats() if state.rooms is None else state.rooms.stats(),
        pins=state.pins.stats(),
        waiting_tokens=sum(req.num_tokens for req in state.waiting),
        paused=state.gate.pause or "",
        released=tuple(sorted(state.gate.released)),
        weight_version=state.weight_version,
        replica=state.config.replica,
        **counters,
    )


def self_check(state: SchedulerState, log: Callable[[str], None]) -> None:
    """At idle every page must be free, evictable or pinned. If not, log it, count it, and reset the pool."""
    pool = state.kv.state()
    if pool.consistent and any(one is not None and one.is_busy for one in (state.tier, state.rooms)):
        return  # they still hold pages
    if (
        pool.consistent
        and pool.leased_tokens == state.pins.num_tokens
        and pool.request_slots_free == pool.request_slots_total
    ):
        return
    log(f"memory accounting is inconsistent at idle, resetting the pool: {pool}")
    state.counters.memory_repairs += 1
    state.kv.repair()
