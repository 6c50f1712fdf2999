"""Applies the result of a step: tokens, finished requests, the cache, and outputs for the detokenizer."""

import math
from collections.abc import Mapping

from headrace.log import get_logger
from headrace.messages.outputs import (
    FinishReason,
    LogprobBlock,
    SampleStats,
    TokenIDOut,
)
from headrace.messages.packing import unpack_int32
from headrace.messages.step import StepResult
from headrace.scheduler.request import Req
from headrace.scheduler.state import ScheduleBatch, SchedulerState

logger = get_logger(__name__)


def commit(state: SchedulerState, batch: ScheduleBatch, result: StepResult) -> list[TokenIDOut]:
    """Apply `result` to the requests of `batch`, and return what they say. Rows of requests that have ended meanwhile are ignored."""
    outs: list[TokenIDOut] = []
    ids, id_starts = result.ids.tolist(), result.id_starts.tolist()
    shares_ahead = state.tier is not None and not state.tier.writes_back
    for row, (req, start, count, num_logits) in enumerate(batch.rows):
        req.leave_step(start + count, num_logits)
        if req.finish is not None:
            _settle(state, req)
            continue
        if row in result.errors:
            # Its KV may contain NaN, so it must not enter the cache.
            req.keep_kv = False
            req.finish = FinishReason("abort", message=result.errors[row], status_code=500)
        else:
            try:
                if not req.is_plain:
                    _take_details(state, req, start, row, result)
                if num_logits:
                    made = ids[id_starts[row] : id_starts[row + 1]]
                    if made:
                        num_taken = _take_ids(state, req, made, None if req.is_plain else result.logprobs.get(row))
                        if num_logits > 1 or result.drafts or req.waits_for_drafts:
                            num_right = min(num_taken, len(made) - 1)
                            _take_drafts(state, req, num_right, num_logits - 1, result.drafts.get(row, 0))
                    else:
                        req.skip_step()
                        state.counters.num_sat_out += 1
                elif req.is_prefill_only and not req.is_prefilling:
                    req.finish = FinishReason("length", length=0)
            except Exception:
                # An error here, for example in decoding stop strings, ends only this request.
                logger.exception("request %r failed while its output was processed", req.rid)
                req.finish = FinishReason("abort", message="internal error", status_code=500)
        if start < req.num_prompt_tokens:
            _take_prefill(state, req, start)
        if shares_ahead and req.finish is None and not req.skips_step:
            state.kv.share_ahead(req)
        out = end(state, req) if req.finish is not None else report(state, req)
        if out is not None:
            outs.append(out)
    if batch.encode is not None:
        # Requests that wait for an item that could not be encoded end.
        outs += _end_all(state, state.encodings.take_result(batch.encode, result))
    return outs


def _end_all(state: SchedulerState, failed: Mapping[Req, str]) -> list[TokenIDOut]:
    ended = [req for req in failed if req.finish is None]
    for req in ended:
        req.finish = FinishReason("abort", message=failed[req], status_code=500)
    return [end(state, req) for req in ended]


def fail(state: SchedulerState, batch: ScheduleBatch, message: str) -> list[TokenIDOut]:
    """End the requests of a step that failed as a whole. Other requests continue."""
    outs: list[TokenIDOut] = []
    for req, _, _, num_logits in batch.rows:
        req.leave_step(req.num_computed, num_logits)
        req.keep_kv = False
        if req.finish is None:
            req.finish = FinishReason("abort", message=message, status_code=500)
            outs.append(end(state, req))
        else:
            _settle(state, req)
    if batch.encode is not None:
        outs += _end_all(state, dict.fromkeys(state.encodings.fail(), message))
    return outs


def count_step(state: SchedulerState, batch: ScheduleBatch, result: StepResult) -> None:
    """Count a step, and learn from its seconds how long steps take.

    Of the steps without prompt tokens only the last one before each step with them is learnt: hours of decoding shall not displace what is
    known about prompts.
    """
    counters = state.counters
    counters.num_steps += 1
    counters.masks_s += result.masks_s
    counters.forward_s += result.forward_s
    forward_s = result.forward_s - result.encode_s
    if state.config.max_step_s == math.inf or not batch.rows:
        return
    if not batch.num_prompt_tokens:
        state.last_decode = batch, forward_s
        return
    if state.last_decode is not None:
        decode, decode_s = state.last_decode
        state.cost.learn(decode.work(), decode_s)
        state.last_decode = None
    state.cost.learn(batch.work(), forward_s)
    if batch.expected_s:
        counters.prompt_steps += 1
        counters.prompt_steps_s += forward_s
        counters.prompt_steps_expected_s += batch.expected_s


def end(state: SchedulerState, req: Req) -> TokenIDOut:
    """The last output of a request that has a finish reason. Its pages are freed once no step in flight uses them."""
    assert req.finish is not None
    state.counters.num_finished += 1
    state.counters.num_aborted += req.finish.type == "abort"
    state.ratio.usual.learn(req, req.finish)
    if state.rooms is not None:
        state.rooms.leave(req)
    _forget(state, req)
    out = _output(state, req)
    if state.rooms is not None:
        state.rooms.ended(req, out)
    return out


def take_prefilled(state: SchedulerState, req: Req, made: TokenIDOut, now_s: float) -> TokenIDOut | None:
    """Apply what a prefill server has made of a request whose KV has come, as a step here would, and return what it says."""
    req.first_scheduled_s = now_s
    req.note("transferred", now_s, req.num_prompt_tokens)
    req.cached_tokens = made.stats.cached_tokens if made.stats is not None else 0
    state.counters.prompt_tokens += req.num_prompt_tokens
    if made.prompt_logprobs is not None:
        req.prompt_logprobs.append(made.prompt_logprobs)
        req.num_prompt_logprobs += len(made.prompt_logprobs.values) // 4
    if made.hidden_states:
        req.pending_hidden.append(made.hidden_states)
        req.num_hidden_rows = req.num_prompt_tokens
    if req.is_prefill_only:
        req.finish = FinishReason("length", length=0)
    else:
        _take_ids(state, req, unpack_int32(made.ids), made.logprobs)
    return end(state, req) if req.finish is not None else report(state, req)


def reset(state: SchedulerState) -> None:
    """Drop every request and send no output; the front end sends again those that it still waits for."""
    for req in [*state.by_rid.values(), *state.ended]:
        req.finish = FinishReason("abort", message="begun again")
        if state.rooms is not None:
            state.rooms.leave(req)
        _forget(state, req)
    state.ended.clear()
    state.prompts.clear()
    state.moved.clear()


def _forget(state: SchedulerState, req: Req) -> None:
    if state.by_rid.pop(req.rid, None) is not None:
        state.groups.leave(req)
    state.encodings.release(req)
    if req in state.waiting:
        state.waiting.remove(req)
    _settle(state, req)


def report(state: SchedulerState, req: Req) -> TokenIDOut | None:
    """The request's next chunk, if one is due."""
    num_new = len(req.token_ids) - req.num_sent_tokens
    # The first token is sent at once, for a short time to first token.
    if num_new >= req.report_interval or (num_new and not req.emitted):
        return _output(state, req)
    return None


def _settle(state: SchedulerState, req: Req) -> None:
    """Free the resources of an ended request, unless a step in flight still uses them."""
    if req.num_in_flight == 0 and req.seq >= 0:
        state.kv.release(req)
        state.running.remove(req)


def _take_prefill(state: SchedulerState, req: Req, start: int) -> None:
    """Count the prompt tokens computed since `start`. Once the prompt is complete, offer its pages to others."""
    state.counters.computed_prefill_tokens += min(req.num_computed, req.num_prompt_tokens) - start
    if not req.is_prefilling:
        state.encodings.release(req)
    elif req.finish is None:
        state.prompts[req.rid] = req.prompt_part()
    # The last token of one that sat out is computed again, and nobody writes to shared pages.
    if not req.is_prefilling and req.finish is None and not req.skips_step:
        state.kv.share(req)


def _take_details(state: SchedulerState, req: Req, start: int, row: int, result: StepResult) -> None:
    """Keep the prompt logprobs, the hidden states and the pooled result that its row gave."""
    if (logprobs := result.prompt_logprobs.get(row)) is not None:
        req.prompt_logprobs.append(logprobs)
        req.num_prompt_logprobs += len(logprobs.values) // 4
    if (hidden := result.hidden_states.get(row)) is not None:
        _take_hidden(req, start, hidden)
    req.pooled = result.pooled.get(row, b"")
    if req.pooled and state.config.kv_on_update != "flush":
        req.label(state.kv.weights, 0)


def _take_ids(state: SchedulerState, req: Req, ids: list[int], logprobs: LogprobBlock | None) -> int:
    """Commit the tokens that a row sampled, up to the end of the request, with their logprobs. Returns how many it took."""
    for token_id in ids:
        assert 0 <= token_id < state.config.vocab_size, (req.rid, ids)
    num_before = len(req.token_ids)
    if state.config.kv_on_update != "flush":
        req.label(state.kv.weights, req.num_outputs)
    try:
        req.finish = req.accept(ids)
    finally:
        num_accepted = len(req.token_ids) - num_before
        state.counters.generation_tokens += num_accepted
        state.fair_share.charge_output(req, num_accepted)
        if logprobs is not None:
            req.pending_logprobs.append(logprobs.first(num_accepted))
    return num_accepted


def _take_drafts(state: SchedulerState, req: Req, num_right: int, num_computed: int, num_drafts: int) -> None:
    """Count which of the drafts that the step computed were right, and note those that the worker has now."""
    req.take_drafts(num_right, num_computed, num_drafts)
    if num_computed:
        state.counters.speculation = state.counters.speculation.after_step(num_computed, num_right)


def _take_hidden(req: Req, start: int, rows: bytes) -> None:
    """Keep the rows that were not already delivered before a retraction."""
    count = req.num_computed - start
    stale = max(0, req.num_hidden_rows - start)
    if stale < count:
        req.pending_hidden.append(rows[stale * (len(rows) // count) :])
        req.num_hidden_rows = req.num_computed


def _output(state: SchedulerState, req: Req) -> TokenIDOut:
    """All output of the request that has not been sent yet."""
    first, last, asked = not req.emitted, req.finish is not None, req.asked
    num_tokens = len(req.token_ids)
    logprobs, prompt_logprobs, hidden_states = (None, None, b"") if req.is_plain else _take_pending(req)
    out = TokenIDOut(
        asked.rid,
        req.token_ids[req.num_sent_tokens :].tobytes(),
        num_tokens - req.num_prompt_tokens,
        req.finish,
        req.task.decode_options(asked.content.context_ids, asked.output_ids, asked.attempt) if first else None,
        _stats(state, req) if first or last else None,
        logprobs,
        prompt_logprobs,
        hidden_states,
        req.pooled,
        req.versions,
    )
    req.versions = ()
    req.emitted = True
    req.num_sent_tokens = num_tokens
    return out


def _take_pending(req: Req) -> tuple[LogprobBlock | None, LogprobBlock | None, bytes]:
    """Logprobs of outputs, logprobs of the prompt and hidden states to be sent now. Removes them from the request."""
    pending = (
        LogprobBlock.joined(req.pending_logprobs),
        LogprobBlock.joined(req.prompt_logprobs),
        b"".join(req.pending_hidden),
    )
    req.pending_logprobs.clear()
    req.prompt_logprobs.clear()
    req.pending_hidden.clear()
    return pending


def _stats(state: SchedulerState, req: Req) -> SampleStats:
    return SampleStats(
        prompt_tokens=req.num_prompt_tokens,
        cached_tokens=max(0, req.cached_tokens),
        num_retractions=req.num_retractions,
        queue_time_s=max(0.0, req.first_scheduled_s - req.arrived_s),
        events=tuple(req.events) if req.finish is not None else (),
        weight_version=state.weight_version,
        speculation=req.speculation if state.config.speculates else None,
        cache_miss=req.cache_miss if req.finish is not None else None,
    )
