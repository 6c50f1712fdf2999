"""The scheduler's one loop: receive, plan, submit, commit.

Runs in one thread of the scheduler process (or of the main process with --single-process). With two steps in flight (overlap), the worker
computes one while the other is planned or committed here; with one it is a plain loop. Both give the same tokens.
"""

import math
import time
from collections.abc import Callable

from headrace.cache.radix_cache import TOKEN_BYTES
from headrace.cache.tier import DiskTier
from headrace.disaggregation.sink import PageSink
from headrace.disaggregation.source import PageSource
from headrace.errors import CapacityError, ExecutionError, HeadraceError, RequestError
from headrace.garbage import freeze
from headrace.log import get_logger, set_level
from headrace.messages.channel import Receiver, Sender
from headrace.messages.control import (
    AbortReq,
    ConfigureLoggingReq,
    FreezeGCReq,
    InternalState,
    ResetReq,
    SchedulerStats,
    SetLimitsReq,
    ShutdownReq,
)
from headrace.messages.grammar import Grammars
from headrace.messages.operations import OperationReq
from headrace.messages.outputs import BatchTokenIDOut, FinishReason, SamplesMoved, TokenIDOut
from headrace.messages.requests import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
from headrace.messages.step import Worker
from headrace.messages.weights import LoadLoraReq, UnloadLoraReq, WeightOpReq
from headrace.scheduler import commit, control, planner
from headrace.scheduler.admission import NewTokenRatio
from headrace.scheduler.encodings import Encodings
from headrace.scheduler.grammar_queue import NO_GRAMMARS, GrammarQueue
from headrace.scheduler.kv_manager import KVManager
from headrace.scheduler.lora import LoraLoader
from headrace.scheduler.request import Req, StopCheckers
from headrace.scheduler.retract import expected_tokens
from headrace.scheduler.rooms import DecodeRooms, PrefillRooms
from headrace.scheduler.state import SchedulerConfig, SchedulerState
from headrace.scheduler.tier_queue import TierQueue
from headrace.scheduler.weights import WeightControl

logger = get_logger(__name__)

STATS_INTERVAL_S = 1.0
IDLE_WAIT_S = 0.5
JOB_WAIT_S = 0.005
"""How long the loop may sleep between checks while weights are prepared or a grammar is compiled."""
LOAD_WAIT_S = 0.0005
"""The same while a prefix is loaded, and nothing else is done."""
EXPIRE_INTERVAL_S = 0.1


class Scheduler:
    """Combines state, planner and commit around a worker; see the module docstring.

    stop_checkers: makes the checker of a request's stop strings. on_turn: called once per turn (watchdog).
    source: signs the outputs, see `BatchTokenIDOut`. grammars: compiles those of requests. on_admission: called with each rid; what it raises ends
    that request. tier: behind the tree; None = KV is nowhere but in the pool. transfer: the way to other servers (--disaggregation-mode).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        worker: Worker,
        receiver: Receiver,
        to_detokenizer: Sender,
        to_tokenizer: Sender,
        stop_checkers: StopCheckers,
        clock: Callable[[], float] = time.monotonic,
        on_turn: Callable[[], None] = lambda: None,
        source: int = 0,
        grammars: Grammars = NO_GRAMMARS,
        on_admission: Callable[[str], None] = lambda rid: None,
        tier: DiskTier | None = None,
        transfer: PageSource | PageSink | None = None,
    ) -> None:
        self.worker = worker
        self.state = SchedulerState(
            config,
            kv,
            NewTokenRatio(config.conservativeness, config.clip_estimate_tokens),
            GrammarQueue(grammars),
            Encodings(config.encoder_rows, config.encoder_slices),
            source=source,
        )
        if tier is not None:
            self.state.tier = TierQueue(
                tier,
                kv,
                self.state.cost.prompt_seconds,
                config.persists_tenants,
                config.unknown_token_s,
                config.writes_back,
            )
        if isinstance(transfer, PageSource):
            self.state.rooms = PrefillRooms(transfer, kv)
        elif transfer is not None:
            self.state.rooms = DecodeRooms(
                transfer,
                kv,
                self.state.cost.prompt_seconds,
                config.unknown_token_s,
                lambda: sum(expected_tokens(self.state, req) for req in self.state.running),
            )
        self._receiver = receiver
        self._to_detokenizer = to_detokenizer
        self._to_tokenizer = to_tokenizer
        self.stop_checkers = stop_checkers
        self._weights = WeightControl(self.state, lambda: worker.weights, to_tokenizer.send)
        self._operations = control.Operations(self.state, worker, receiver)
        self._clock = clock
        self._on_turn = on_turn
        self._on_admission = on_admission
        self.loras = LoraLoader(worker.loras, to_tokenizer, config.weight_update_timeout_s, clock)
        self._stopping = False
        self._idle = True
        self._num_left_at_rest = 0
        self._next_stats_s = 0.0
        self._next_expire_s = 0.0
        self._throughput_mark = (clock(), 0)

    # -- the loop

    def run(self) -> None:
        """Run until a ShutdownReq arrives."""
        while not self._stopping:
            self.run_once()
        self.loras.close()
        self.state.compiling.close()
        if self.state.tier is not None:
            self.state.tier.close()
        if self.state.rooms is not None:
            self.state.rooms.close()
        self.worker.close()

    @property
    def config(self) -> SchedulerConfig:
        return self.state.config

    def run_once(self) -> None:
        self._on_turn()
        self._receive()
        state = self.state
        while len(state.in_flight) < state.config.max_steps_in_flight:
            begin_s = self._clock()
            batch = planner.plan(state, begin_s)
            if state.ended:
                ended, state.ended = state.ended, []
                self._send([commit.end(state, req) for req in ended])
            if batch is None:
                break
            worker_batch = batch.worker_batch()
            state.counters.host_s += self._clock() - begin_s
            self.worker.submit(worker_batch)
            state.in_flight.append(batch)
        if state.moved or state.prompts:
            self._tell_moved()
        if state.in_flight:
            if self._idle:
                self._leave_idle()
            if self._ends_before_next():
                self._commit_oldest()
                if self._operations.sleep_s:
                    time.sleep(self._operations.sleep_s)
        now = self._clock()
        self.loras.advance(state, now)
        if now >= self._next_stats_s and not self._idle:
            self._report(now)

    def _ends_before_next(self) -> bool:
        """Wait for a step in flight until it has ended, or until the next one is to be planned. Whether it has, or is to be waited for."""
        state = self.state
        if len(state.in_flight) == state.config.max_steps_in_flight:
            return True
        wait_s = planner.seconds_until_next(state, self._clock())
        return wait_s <= 0 or self.worker.ends_within(wait_s)

    def _commit_oldest(self) -> None:
        state = self.state
        batch = state.in_flight[0]
        try:
            result = self.worker.collect()
        except ExecutionError as error:
            state.collected_s = self._clock()
            logger.error("step %d failed: %s", batch.step, error)
            state.in_flight.popleft()
            self._send(commit.fail(state, batch, error.message))
            return
        begin_s = state.collected_s = self._clock()
        state.in_flight.popleft()
        commit.count_step(state, batch, result)
        self._send(commit.commit(state, batch, result))
        state.counters.host_s += self._clock() - begin_s
        every = state.config.decode_log_interval
        if every and state.counters.num_steps % every == 0:
            self._log_statistics()

    # -- messages in

    def _receive(self) -> None:
        """Handle messages that have arrived; when there is nothing to do, wait for one."""
        state = self.state
        idle = not (state.in_flight or state.running or state.waiting)
        if idle and not self._idle:
            self._become_idle()
        if idle or (not state.in_flight and state.gate.holds):
            copies = [one for one in (state.tier, state.rooms) if one is not None and one.is_busy]
            soon = self._weights.has_job or len(state.compiling) or bool(copies)
            loads = any(True for one in copies for _ in one)
            wait_s = LOAD_WAIT_S if loads else JOB_WAIT_S if soon else IDLE_WAIT_S
            message = self._receiver.recv(wait_s)
            if message is None and idle and not soon:
                self._rest()
        else:
            message = self._receiver.recv_nowait()
        while message is not None:
            self._handle(message)
            message = self._receiver.recv_nowait()
        now = self._clock()
        for req, error in state.compiling.take_done(now):
            self._begin_to_wait(req, error)
        if state.tier is not None:
            for req in state.tier.take_ready(now):
                self._wait(req)
        if state.rooms is not None:
            self._take_from_rooms(now)
        if now >= self._next_expire_s:
            self._next_expire_s = now + EXPIRE_INTERVAL_S
            self._send(control.expire(state, now))
            state.pins.expire(now)
        if ended := self._weights.advance(now):
            self._send(ended)

    def _take_from_rooms(self, now_s: float) -> None:
        """Requests whose KV has come from a prefill server go on with it; others are computed here, or end."""
        state = self.state
        assert state.rooms is not None
        for req, made, wrong in state.rooms.take_ready(now_s, state.counters.computed_prefill_tokens):
            if wrong:
                self._begin_to_wait(req, RequestError(wrong, "bootstrap_room"))
                continue
            try:
                out = None if made is None else commit.take_prefilled(state, req, made, now_s)
            except Exception:
                logger.exception("what a prefill server made of %r cannot be used", req.rid)
                self._begin_to_wait(req, ExecutionError("internal error"))
                continue
            if out is not None:
                self._send([out])
            if req.finish is None:
                self._wait(req)

    def _handle(self, message: object) -> None:
        state = self.state
        match message:
            case TokenizedGenerateReqInput():
                self._add(message)
            case BatchTokenizedGenerateReqInput():
                for request in message.requests:
                    self._add(request)
            case AbortReq():
                self._send(control.abort(state, message))
            case WeightOpReq():
                self._send(self._weights.handle(message))
            case OperationReq():
                self._to_tokenizer.send(self._operations.answer(message))
            case LoadLoraReq():
                self.loras.load(message)
            case UnloadLoraReq():
                self.loras.unload(message)
            case ConfigureLoggingReq():
                set_level(message.level)
            case FreezeGCReq():
                freeze()
            case SetLimitsReq():
                control.set_limits(state, message)
            case ResetReq():
                commit.reset(state)
                state.source = message.source
            case ShutdownReq():
                self._stopping = True
            case _:
                logger.warning("dropped a message of unexpected type %s", type(message).__name__)

    def _add(self, request: TokenizedGenerateReqInput) -> None:
        """Queue a request. An error here ends only this request."""
        state = self.state
        if request.rid in state.by_rid:
            logger.error("dropped a request: rid %r is already in use", request.rid)
            return
        eos_token_ids = state.config.eos_of(request.task)
        req = Req.from_input(request, self._clock(), state.next_order, eos_token_ids, state.config.stream_interval)
        state.next_order += 1
        state.by_rid[req.rid] = req
        state.groups.arrive(req)
        try:
            self._check(req)
            self._on_admission(req.rid)
            if req.task.stop_text is not None:
                req.stop_checker = self.stop_checkers(request)
                for token_id in req.tokens()[req.num_prompt_tokens :].tolist():
                    req.stop_checker.push(token_id)
            if req.task.grammar is not None:
                state.compiling.add(req)
                return
            refusal = None
        except HeadraceError as error:
            refusal = error
        except Exception:
            logger.exception("admission of %r failed", request.rid)
            refusal = ExecutionError("internal error")
        self._begin_to_wait(req, refusal)

    def _begin_to_wait(self, req: Req, refusal: HeadraceError | None) -> None:
        """Queue a request that is ready to run, or end it with the error."""
        state = self.state
        if refusal is None:
            queues = () if state.gate.released else (state.rooms, state.tier)
            if not any(queue is not None and queue.add(req, self._clock()) for queue in queues):
                self._wait(req)
            return
        param = refusal.param or "" if isinstance(refusal, RequestError) else ""
        req.finish = FinishReason("abort", message=refusal.message, status_code=refusal.status_code, param=param)
        self._send([commit.end(state, req)])

    def _wait(self, req: Req) -> None:
        self.state.fair_share.arrive(req, self.state.waiting.tenants, self.state.running)
        self.state.waiting.add(req)

    def _check(self, req: Req) -> None:
        """Check bounds again, since a message from a socket is not trusted. Raises RequestError or CapacityError."""
        total = self.state.kv.part_tokens
        if req.num_prompt_tokens == 0:
            raise RequestError("the prompt is empty")
        if not 0 < req.asked.weight < math.inf:
            raise RequestError(f"the weight of a tenant must be above 0, got {req.asked.weight}")
        if req.num_prompt_tokens + 1 > total:
            raise RequestError(f"the prompt has {req.num_prompt_tokens} tokens but the KV cache holds only {total}")
        # A request that is sent again has been accepted before.
        if len(self.state.waiting) + len(self.state.not_ready) >= self.config.max_queued and not req.asked.attempt:
            raise CapacityError(f"the queue is full ({self.config.max_queued} requests)")
        whole = (len(req.asked.content.token_ids) | len(req.asked.output_ids)) % TOKEN_BYTES == 0
        if not whole or int(req.tokens().min()) < 0 or int(req.tokens().max()) >= self.config.vocab_size:
            raise RequestError(f"token ids must be between 0 and {self.config.vocab_size - 1}")
        try:
            req.asked.content.check_media()
        except ValueError as error:
            raise RequestError(f"the prompt's media do not fit its tokens: {error}") from None
        if req.asked.content.media and not self.config.encoder_rows:
            raise RequestError("this model does not support images")
        longest = max((span.length for span in req.asked.content.spans), default=0)
        if self.config.whole_images and longest > self.config.step_tokens - self.config.max_running:
            raise RequestError(
                f"an image takes {longest} tokens, which must be computed in one step; the limit is "
                f"{self.config.step_tokens - self.config.max_running} (--max-prefill-tokens less --max-running-requests)"
            )
        if req.asked.lora_id and req.asked.lora_id not in self.worker.loras:
            raise ExecutionError("the request's adapter is not loaded in the engine")
        if self.state.rooms is not None:
            self.state.rooms.check(req)
        req.task.check(self.config.eos_of(req.task))

    # -- messages out

    def _send(self, rows: list[TokenIDOut]) -> None:
        if rows:
            self._to_detokenizer.send(BatchTokenIDOut(tuple(rows), self.state.source))

    def _tell_moved(self) -> None:
        """Tell which samples run and which wait again, before the outputs of the steps that were planned just now, and how far prompts are."""
        moved, self.state.moved = self.state.moved, {}
        prompts, self.state.prompts = tuple(self.state.prompts.values()), {}
        running = tuple(rid for rid, runs in moved.items() if runs)
        waiting = tuple(rid for rid, runs in moved.items() if not runs)
        self._to_tokenizer.send(SamplesMoved(running, waiting, self.state.source, prompts))

    # -- state and statistics

    def internal_state(self) -> InternalState:
        return control.internal_state(self.state, self._receiver.dropped_frames)

    def _become_idle(self) -> None:
        self._idle = True
        control.self_check(self.state, logger.error)
        self.state.ratio.reset()
        self.state.gen_throughput = 0.0
        self._to_tokenizer.send(SchedulerStats(self.internal_state()))

    def _rest(self) -> None:
        """Nothing has come for a while: what the worker holds of requests that have ended goes now, not with the next step."""
        kv = self.state.kv
        if kv.num_left != self._num_left_at_rest:
            self._num_left_at_rest = kv.num_left
            self.worker.idle(kv.take_left())

    def _leave_idle(self) -> None:
        self._idle = False
        now = self._clock()
        self._throughput_mark = (now, self.state.counters.generation_tokens)
        self._next_stats_s = now + STATS_INTERVAL_S

    def _report(self, now: float) -> None:
        self._next_stats_s = now + STATS_INTERVAL_S
        since, made = self._throughput_mark
        total = self.state.counters.generation_tokens
        self.state.gen_throughput = (total - made) / max(1e-9, now - since)
        self._throughput_mark = (now, total)
        self._to_tokenizer.send(SchedulerStats(self.internal_state()))

    def _log_statistics(self) -> None:
        pool = self.state.kv.state()
        logger.info(
            "running %d, waiting %d, KV %d of %d tokens in use (%d cached), %.1f tok/s",
            len(self.state.running),
            len(self.state.waiting),
            pool.leased_tokens,
            pool.total_tokens,
            pool.evictable_tokens,
            self.state.gen_throughput,
        )
