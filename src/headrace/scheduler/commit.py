"""Applies the result of a step: tokens, finished requests, the cache, and outputs for the detokenizer."""

from headrace.cache.radix_cache import TOKEN_BYTES
from headrace.log import get_logger
from headrace.messages.outputs import (
    BatchTokenIDOut,
    DecodeOptions,
    FinishReason,
    LogprobBlock,
    SampleStats,
    TokenIDOut,
)
from headrace.messages.step import StepResult
from headrace.scheduler.batch import Row, ScheduleBatch
from headrace.scheduler.request import Req
from headrace.scheduler.state import SchedulerState

logger = get_logger(__name__)

CONTEXT_TOKENS = 8
"""Number of prompt tokens sent to the detokenizer with the first output."""

FORCED_INTERVAL = 50
"""Requests that do not stream still report every N tokens, so that their partial text is available when they are aborted."""


def commit(state: SchedulerState, batch: ScheduleBatch, result: StepResult) -> BatchTokenIDOut | None:
    """Apply `result` to the requests of `batch`. Rows of requests that have ended meanwhile are ignored."""
    rows: list[TokenIDOut] = []
    for index, row in enumerate(batch.rows):
        req = row.req
        req.num_in_flight -= 1
        req.num_sampling -= row.num_logits
        if req.finish is not None:
            _settle(state, req)
            continue
        prompt_part = max(0, min(row.start + row.count, req.num_prompt_tokens) - row.start)
        state.counters.computed_prefill_tokens += prompt_part
        was_prefilling = req.is_prefilling
        req.num_computed = row.start + row.count
        if index in result.errors:
            # Its KV may contain NaN, so it must not enter the cache.
            req.keep_kv = False
            req.finish = FinishReason("abort", message=result.errors[index], status_code=500)
        else:
            try:
                _take_row(state, req, row, index, result)
            except Exception:
                # An error here, for example in decoding stop strings, ends only this request.
                logger.exception("request %r failed while its output was processed", req.rid)
                req.finish = FinishReason("abort", message="internal error", status_code=500)
        if was_prefilling and not req.is_prefilling and req.finish is None:
            state.kv.share(req)
        out = end(state, req) if req.finish is not None else report(state, req)
        if out is not None:
            rows.append(out)
    return BatchTokenIDOut(tuple(rows), state.source) if rows else None


def fail(state: SchedulerState, batch: ScheduleBatch, message: str) -> BatchTokenIDOut | None:
    """End the requests of a step that failed as a whole. Other requests continue."""
    rows: list[TokenIDOut] = []
    for row in batch.rows:
        req = row.req
        req.num_in_flight -= 1
        req.num_sampling -= row.num_logits
        req.keep_kv = False
        if req.finish is None:
            req.finish = FinishReason("abort", message=message, status_code=500)
            rows.append(end(state, req))
        else:
            _settle(state, req)
    return BatchTokenIDOut(tuple(rows), state.source) if rows else None


def end(state: SchedulerState, req: Req) -> TokenIDOut:
    """The last output of a request that has a finish reason. Its pages are freed once no step in flight uses them."""
    assert req.finish is not None
    state.counters.num_finished += 1
    state.counters.num_aborted += req.finish.type == "abort"
    state.ratio.usual.learn(req, req.finish)
    _forget(state, req)
    return _output(state, req)


def reset(state: SchedulerState) -> None:
    """Drop every request and send no output; the front end sends again those that it still waits for."""
    for req in [*state.by_rid.values(), *state.ended]:
        req.finish = FinishReason("abort", message="begun again")
        _forget(state, req)
    state.ended.clear()


def _forget(state: SchedulerState, req: Req) -> None:
    state.by_rid.pop(req.rid, None)
    if req in state.waiting:
        state.waiting.remove(req)
    _settle(state, req)
    group = req.asked.group
    if group and not any(other.asked.group == group for other in state.by_rid.values()):
        state.group_cached.pop(group, None)


def report(state: SchedulerState, req: Req) -> TokenIDOut | None:
    """The request's next chunk, if one is due."""
    new = req.num_outputs - req.num_sent_outputs
    if new == 0:
        return None
    if req.task.stream:
        interval = req.task.params.stream_interval or state.config.stream_interval
    else:
        interval = FORCED_INTERVAL
    # The first token is sent at once, for a short time to first token.
    if new >= interval or not req.emitted:
        return _output(state, req)
    return None


def _settle(state: SchedulerState, req: Req) -> None:
    """Free the resources of an ended request, unless a step in flight still uses them."""
    if req.num_in_flight == 0 and req.seq >= 0:
        state.kv.release(req)
        state.running.remove(req)


def _take_row(state: SchedulerState, req: Req, row: Row, index: int, result: StepResult) -> None:
    if index in result.prompt_logprobs:
        block = result.prompt_logprobs[index]
        req.prompt_logprobs.append(block)
        req.num_prompt_logprobs += len(block.values) // 4
    if index in result.hidden_states:
        _take_hidden(req, row.start, result.hidden_states[index])
    if row.num_logits:
        begin, end = result.id_starts[index], result.id_starts[index + 1]
        _take_ids(state, req, result.ids[begin:end].tolist(), result.logprobs.get(index))
    elif req.task.params.max_new_tokens == 0 and not req.is_prefilling:
        req.finish = FinishReason("length", length=0)


def _take_ids(state: SchedulerState, req: Req, ids: list[int], logprobs: LogprobBlock | None) -> None:
    """Commit the tokens that a row sampled, up to the end of the request, with their logprobs."""
    assert ids, req.rid
    assert all(0 <= token_id < state.config.vocab_size for token_id in ids), (req.rid, ids)
    num_before = req.num_outputs
    try:
        req.finish = req.accept(ids)
    finally:
        num_accepted = req.num_outputs - num_before
        state.counters.generation_tokens += num_accepted
        state.fair_share.charge_output(req, num_accepted)
        if logprobs is not None:
            req.pending_logprobs.append(logprobs.first(num_accepted))


def _take_hidden(req: Req, start: int, rows: bytes) -> None:
    """Keep the rows that were not already delivered before a retraction."""
    count = req.num_computed - start
    stale = max(0, req.num_hidden_rows - start)
    if stale < count:
        req.pending_hidden.append(rows[stale * (len(rows) // count) :])
        req.num_hidden_rows = req.num_computed


def _output(state: SchedulerState, req: Req) -> TokenIDOut:
    """All output of the request that has not been sent yet."""
    asked = req.asked
    first, last = not req.emitted, req.finish is not None
    options = stats = None
    if first:
        sampling = req.task.params
        prompt = asked.input_ids[: req.num_prompt_tokens * TOKEN_BYTES]
        options = DecodeOptions(
            sampling.skip_special_tokens,
            sampling.spaces_between_special_tokens,
            sampling.no_stop_trim,
            sampling.stop,
            sampling.stop_regex,
            b"" if asked.input_embeds else prompt[-CONTEXT_TOKENS * TOKEN_BYTES :],
            asked.output_ids,
            asked.attempt,
        )
    if first or last:
        stats = SampleStats(
            prompt_tokens=req.num_prompt_tokens,
            cached_tokens=max(0, req.cached_tokens),
            num_retractions=req.num_retractions,
            queue_time_s=max(0.0, req.first_scheduled_s - req.arrived_s),
            events=tuple(req.events) if last else (),
            weight_version=state.weight_version,
        )
    out = TokenIDOut(
        rid=req.rid,
        ids=req.output_bytes(req.num_sent_outputs),
        num_output_tokens=req.num_outputs,
        finish=req.finish,
        options=options,
        stats=stats,
        logprobs=LogprobBlock.joined(req.pending_logprobs),
        prompt_logprobs=LogprobBlock.joined(req.prompt_logprobs),
        hidden_states=b"".join(req.pending_hidden),
    )
    req.emitted = True
    req.num_sent_outputs = req.num_outputs
    req.pending_logprobs.clear()
    req.prompt_logprobs.clear()
    req.pending_hidden.clear()
    return out
