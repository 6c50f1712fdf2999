"""Handlers of control messages: abort, flush, state, health. One function each; `Scheduler` dispatches."""

from collections.abc import Callable
from dataclasses import replace

from headrace.errors import HeadraceError
from headrace.messages.cache_tree import CacheTree, CacheTreeReply, CacheTreeReq
from headrace.messages.control import (
    AbortReq,
    FlushCacheReply,
    FlushCacheReq,
    HealthCheckReply,
    HealthCheckReq,
    InternalState,
    Profiler,
    ProfileReply,
    ProfileReq,
    SetLimitsReq,
)
from headrace.messages.experts import ExpertCounter, ExpertCountsReply, ExpertCountsReq
from headrace.messages.outputs import WAITED_TOO_LONG, FinishReason, TokenIDOut
from headrace.scheduler.commit import end
from headrace.scheduler.request import Req
from headrace.scheduler.state import SchedulerState


def abort(state: SchedulerState, request: AbortReq) -> list[TokenIDOut]:
    """End the named requests (exact rids) or all; unknown rids are ignored. Partial output is kept."""
    if request.abort_all:
        found = list(state.by_rid.values())
    else:
        found = [state.by_rid[rid] for rid in request.rids if rid in state.by_rid]
    return [abort_one(state, req, request.message, status_code=0) for req in found]


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


def flush_cache(state: SchedulerState, request: FlushCacheReq) -> FlushCacheReply:
    """Empty the prefix cache, or reply why not. While generation is paused, only requests that hold KV prevent it."""
    if state.running or (state.waiting and not state.gate.holds):
        busy = f"requests running: {len(state.running)}, waiting: {len(state.waiting)}"
        return FlushCacheReply(request.id, False, f"the cache cannot be flushed now ({busy})")
    state.kv.flush()
    state.encodings.clear()
    return FlushCacheReply(request.id, True, "the cache has been flushed")


def cache_tree(state: SchedulerState, request: CacheTreeReq) -> CacheTreeReply:
    """The outline of the prefix cache."""
    kv = state.kv
    nodes = kv.outline(request.max_depth, request.max_nodes)
    return CacheTreeReply(request.id, CacheTree(state.config.replica, kv.num_nodes, kv.num_cached_tokens, nodes))


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


def health(state: SchedulerState, request: HealthCheckReq) -> HealthCheckReply:
    """Answer a health check: the loop is running."""
    return HealthCheckReply(request.id, bool(state.running), state.gate.holds or state.gate.draining)


def profile(profiler: Profiler, request: ProfileReq) -> ProfileReply:
    """Start or stop a profile, or reply why not."""
    try:
        return ProfileReply(request.id, True, profiler.handle(request))
    except HeadraceError as error:
        return ProfileReply(request.id, False, error.message)


def count_experts(counter: ExpertCounter, request: ExpertCountsReq) -> ExpertCountsReply:
    """Start, stop or return the count of chosen experts, or reply why not."""
    try:
        return counter.handle(request)
    except HeadraceError as error:
        return ExpertCountsReply(request.id, False, error.message)


def internal_state(state: SchedulerState, gen_throughput: float, dropped_frames: int) -> InternalState:
    """Current counters and pool accounting."""
    counters = state.counters
    return InternalState(
        pool=state.kv.state(),
        num_running=len(state.running),
        num_waiting=len(state.waiting),
        num_in_flight_steps=len(state.in_flight),
        num_steps=counters.num_steps,
        num_retracted=counters.num_retracted,
        num_aborted=counters.num_aborted,
        num_finished=counters.num_finished,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        cached_tokens=counters.cached_tokens,
        computed_prefill_tokens=counters.computed_prefill_tokens,
        prefix_query_tokens=counters.prefix_query_tokens,
        memory_repairs=counters.memory_repairs,
        dropped_frames=dropped_frames,
        gen_throughput=gen_throughput,
        new_token_ratio=state.ratio.value,
        forward_s=counters.forward_s,
        host_s=counters.host_s,
        prompt_steps=counters.prompt_steps,
        prompt_steps_s=counters.prompt_steps_s,
        prompt_steps_expected_s=counters.expected_s,
        num_grammar_queue=len(state.compiling),
        num_sat_out=counters.num_sat_out,
        masks_s=counters.masks_s,
        speculation=counters.speculation,
        grammars=state.compiling.stats(),
        encodings=state.encodings.stats,
        waiting_tokens=sum(req.num_tokens for req in state.waiting),
        paused=state.gate.pause or "",
        released=tuple(sorted(state.gate.released)),
        weight_version=state.weight_version,
        replica=state.config.replica,
    )


def self_check(state: SchedulerState, log: Callable[[str], None]) -> None:
    """At idle every page must be free or evictable. If not, log it, count it, and reset the pool."""
    pool = state.kv.state()
    if pool.consistent and pool.leased_tokens == 0 and pool.request_slots_free == pool.request_slots_total:
        return
    log(f"memory accounting is inconsistent at idle, resetting the pool: {pool}")
    state.counters.memory_repairs += 1
    state.kv.repair()
