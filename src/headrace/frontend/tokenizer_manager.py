"""The one way into the engine: a call is checked, entered, encoded and sent, and updates of its samples are returned.

Owns the course of a call (`generate_request`), and composes the parts that it needs. Each part owns its state and has its own file; the
server and `Engine` reach them as attributes (`control`, `settings`, `weights`, ...). Does not own HTTP, detokenizing
(`detokenizer_manager`) or scheduling. Lives in the main process; everything here runs in one event loop, except where a method says that
it may be called from any thread. No torch.

    generate_request ── PromptTokenizer ──> EngineLink ──> schedulers
          │  ▲                                        │
          ▼  │ wakes                                  ▼
       SampleTable <── Endings <── Outputs <── EngineLoop
"""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from headrace.checkpoint.copies import Copies
from headrace.checkpoint.pooling import PoolingConfig
from headrace.checkpoint.weight_cache import content_of
from headrace.config.checks import private_folder
from headrace.config.server_args import ServerArgs, lora_paths
from headrace.errors import CapacityError, ExecutionError, RequestError
from headrace.frontend.adapters import Adapters
from headrace.frontend.balancers import RoundRobin, make_balancer
from headrace.frontend.communicator import no_weights
from headrace.frontend.control import Control, ExpertRecording, MainOperations
from headrace.frontend.engine_link import NOWHERE, EngineLink, EngineLoop
from headrace.frontend.engine_parts import DETOKENIZER, EngineParts, Health, Heartbeats
from headrace.frontend.media import NO_MEDIA, PromptMedia
from headrace.frontend.outputs import Endings, Outputs
from headrace.frontend.pins import PinAsk, Pins
from headrace.frontend.prompts import refuse_text
from headrace.frontend.records import Records, RequestLog
from headrace.frontend.request_state import CallState, ReqState
from headrace.frontend.rooms import replica_of, with_rooms
from headrace.frontend.runtime_settings import RuntimeSettings
from headrace.frontend.sample_table import REPLIES_AT_ONCE, Aborts, SampleQueue, SampleTable
from headrace.frontend.sample_update import SampleUpdate, TokenText
from headrace.frontend.session_files import SessionFiles
from headrace.frontend.sessions import Sessions
from headrace.frontend.slots import Slots
from headrace.frontend.tenants import ANONYMOUS, SERVER, Caller, Tenant, TenantLimits
from headrace.frontend.tokenize import AnyCall, PromptTokenizer
from headrace.frontend.weight_control import WeightControl
from headrace.log import get_logger
from headrace.media_kinds import MediaRefs
from headrace.messages.channel import Receiver, Sender
from headrace.messages.control import AbortReq, FaultReq, Heartbeat, ReadyInfo, SchedulerStats, SourceGone
from headrace.messages.operations import OperationReply
from headrace.messages.outputs import BatchStrOut, BatchTokenIDOut, FinishReason, SamplesMoved
from headrace.messages.requests import CallInput, EmbeddingReqInput, GenerateReqInput, TokenizedGenerateReqInput
from headrace.messages.weights import LoraReply, WeightOperation, WeightOpReply
from headrace.metrics.catalog import Metrics
from headrace.metrics.export import render
from headrace.metrics.spans import Spans
from headrace.metrics.timeline import Timelines
from headrace.metrics.watchdog import Watchdog
from headrace.sampling.params import GenerationDefaults
from headrace.text.detokenizer_manager import DetokenizerManager
from headrace.text.tokenizers import Tokenizer

logger = get_logger(__name__)

IsDisconnected = Callable[[], Awaitable[bool]]

DEFAULT_MAX_NEW_TOKENS = 128
STOPPED = "the server has stopped"
DISCONNECT_POLL_S = 0.25
ABORT_WAIT_S = 2.0
"""How long a drain waits for aborted samples to return their partial text."""


class TokenizerManager:
    """ready: what the scheduler said of the model. pooling: what that makes of a text; None = it generates. media: makes those of prompts.
    more_schedulers: those of --dp-size after the first. to_detokenizer: for test faults in the detokenizer, and news of deaths. clock: seconds; the
    one of `TokenizedGenerateReqInput.created_s`. watchdog: of the loop that takes outputs. spans: gets the timeline of every sample that has ended.
    on_broken: set by the owner; called in the event loop when taking outputs has failed, after every waiter has been answered.
    """

    def __init__(
        self,
        args: ServerArgs,
        ready: ReadyInfo,
        tokenizer: Tokenizer,
        to_scheduler: Sender,
        from_engine: Receiver,
        *,
        defaults: GenerationDefaults | None = None,
        pooling: PoolingConfig | None = None,
        media: PromptMedia = NO_MEDIA,
        metrics: Metrics | None = None,
        to_detokenizer: Sender | None = None,
        more_schedulers: Sequence[Sender] = (),
        watchdog: Watchdog | None = None,
        spans: Spans | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.args = args
        self.ready = ready
        self.tokenizer = tokenizer
        self.media = media
        self.metrics = metrics or Metrics(args.served_name)
        self.on_broken: Callable[[], None] = lambda: None
        self._clock = clock
        self._accepting = True
        self._without_key = Tenant(TenantLimits(name=""))
        self._token_text = functools.lru_cache(maxsize=65536)(self._decode_token)

        # The live samples, and how they end.
        timelines = Timelines(args.timeline_requests)
        request_log = RequestLog(args.log_requests, args.log_requests_level)
        schedulers = [to_scheduler, *more_schedulers]
        balancer = (
            make_balancer(args.load_balance_method, len(schedulers), ready.max_total_tokens)
            if more_schedulers
            else RoundRobin()  # which asks nothing of the only one
        )
        num_slots, has_keys = ready.max_running_requests * args.num_replicas, args.api_key_file is not None
        self.table = SampleTable(
            SampleQueue(num_slots, args.max_queued_requests, has_keys=has_keys), REPLIES_AT_ONCE * args.max_reply_bytes
        )
        self.records = Records(args, self.table, timelines, clock, self._token_text)
        self.sessions = Sessions(
            args.max_sessions,
            args.max_session_tokens,
            args.session_timeout_s,
            tokenizer.decode,
            clock,
            _session_files(args, ready),
            ready.vocab_size,
        )
        self.endings = Endings(self.table, self.sessions, timelines, request_log, self.metrics, clock, balancer, spans)

        # The way to the schedulers, and the way back.
        samples, end = self.table.samples, self.endings.end
        self.link = EngineLink(schedulers, samples, end, self.metrics, clock, to_detokenizer, balancer)
        self.aborts = Aborts(self.table, self.link)
        self.outputs = Outputs(
            self.table,
            self.endings,
            self.link,
            self.metrics,
            clock,
            hidden_size=ready.hidden_size,
            max_unread_bytes=args.max_stream_buffer_bytes,
        )
        self.heartbeats = Heartbeats(clock)
        self.engine_loop = EngineLoop(from_engine, self.link, watchdog or Watchdog("tokenizer manager", 0.0))
        self.engine_loop.on_broken = self._broken

        # Operations of the engine other than requests.
        check = self.engine_loop.check_serving
        self.control = Control(self.engine_loop, self.link, to_detokenizer, args.enable_fault_injection)
        self.experts = ExpertRecording(self.control)
        self.settings = RuntimeSettings(
            args,
            ready,
            check,
            self.link.send,
            to_detokenizer.send if to_detokenizer is not None else lambda message: None,
            self.table.queue,
            request_log,
        )
        self.control.own = MainOperations(self.experts, self.settings, self.records)
        self.pins = Pins(
            args,
            ready,
            self.control,
            self.generate_request,
            self.link.replicas_to_ask,
            clock,
        )
        self.slots = Slots(
            ready.max_running_requests,
            ready.context_length,
            self.sessions,
            self.generate_request,
            self.link.replicas_to_ask,
        )
        self.control.on_flushed = self.pins.sync_soon
        self.weights = WeightControl(
            self.link,
            check,
            self.aborts.abort_all,
            ready.fingerprint,
            self._note_operation,
            drains=args.kv_on_update == "flush",
            # Nobody is restarted otherwise; nodes see other files.
            copies=Copies(
                args.keep_updates != "off"
                and not (args.disable_recovery or args.single_process)
                and args.num_nodes == 1
            ),
        )
        self.adapters = Adapters(args.max_loras, lora_paths(args), self.engine_loop, self.link, ready.lora_fingerprints)
        self.prompt_tokenizer = PromptTokenizer(
            args,
            ready,
            tokenizer,
            defaults if defaults and args.sampling_defaults == "model" else GenerationDefaults(),
            self.table,
            self.aborts,
            self.sessions,
            self.adapters,
            request_log,
            pooling,
            media,
        )
        generate = functools.partial(self.generate_request, caller=SERVER)
        self._health = Health(
            self.engine_loop, self.link, self.heartbeats, self.control, generate, clock, pools=pooling is not None
        )

        self.metrics.set_cache_config(ready.page_size, ready.max_total_tokens // ready.page_size, args.num_replicas)
        self.metrics.lora_requests.watch(args.max_loras, self.table.adapters_in_use)
        if media.loader is not None:
            self.metrics.media.watch(media.loader.stats)
        self.parts = EngineParts(
            self.engine_loop,
            self.link,
            self.weights,
            self.settings,
            self.heartbeats,
            self.records,
            self.metrics,
            [
                self.settings.tell_scheduler,
                self.control.tell_scheduler,
                self.experts.tell_scheduler,
                self.adapters.tell_scheduler,
                self.pins.tell_scheduler,
            ],
        )
        self._register_handlers()

    def _register_handlers(self) -> None:
        handlers = self.engine_loop.handlers
        handlers.register(BatchStrOut, self.outputs.handle)
        handlers.register(SamplesMoved, self.outputs.note_moved)
        handlers.register(Heartbeat, self.heartbeats.handle)
        handlers.register(SchedulerStats, lambda message: self.metrics.set_scheduler_state(message.state))
        handlers.register(LoraReply, self.adapters.handle)
        handlers.register(WeightOpReply, self.link.replies.handle)
        handlers.register(OperationReply, self.link.replies.handle)

    def detokenize_with(self, detokenizer: DetokenizerManager) -> None:
        """Take the outputs of schedulers as token ids: `detokenizer` makes text of them here. Before `start`."""
        handlers = self.engine_loop.handlers
        handlers.register(BatchTokenIDOut, lambda batch: self.outputs.handle(detokenizer.handle(batch)))
        handlers.register(SourceGone, lambda message: detokenizer.forget(message.source))
        handlers.register(FaultReq, detokenizer.add_fault)

    def start(self) -> None:
        self.engine_loop.start()

    # -- one call

    async def generate_request(
        self,
        obj: CallInput,
        is_disconnected: IsDisconnected | None = None,
        *,
        default_max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        in_chat: bool = False,
        caller: Caller = ANONYMOUS,
        pins: Sequence[PinAsk] = (),
        slot: int = 0,
    ) -> AsyncGenerator[SampleUpdate, None]:
        """Carry out one call. Yields updates of its samples; each input of an `EmbeddingReqInput` is a sample with one update.

        With `stream`: an update whenever a sample has new output; the last update of each sample has its finish reason. Without: one update of
        each sample in prompt-major order, once all have ended. Closing the generator early, or `is_disconnected` becoming true, aborts the
        unfinished samples.

        default_max_new_tokens: for prompts that give no limit; never more than the context has room for. in_chat: see `SampleTask`.
        caller: whose limits apply. pins: of its prompt, which is one. slot: whose last request it is, see `Slots`.
        Raises, before any output: RequestError, CapacityError (queue full, a limit of the key, stopping), ExecutionError (engine gone, or the
        sample failed before its first token). A sample of a list that fails ends with its own finish reason.
        """
        self.engine_loop.start()
        self._check_accepting()
        if not caller.is_server:
            obj = with_rooms(obj, self.args.disaggregation_mode)
        call = await self.prompt_tokenizer.split(obj)
        # A large call is split in a thread: the server may have stopped meanwhile.
        self._check_accepting()
        state = self._register(call, obj, caller)
        try:
            self.records.begin(state, caller.traceparent)
            requests = await self.prompt_tokenizer.tokenize(call, obj, state, default_max_new_tokens, in_chat)
            self.pins.check(requests[0].content, pins, caller)
            self._send(state, requests)
            if not obj.stream:
                await self._wait_for_all(state, is_disconnected)
                await self._keep(obj, state, pins, slot, caller)
                for sample in state.samples:
                    yield sample.update()
                return
            left = len(state.samples)
            while left:
                sample = await self._next(state, is_disconnected)
                if sample.finish is not None:
                    left -= 1
                    if not state.is_list and sample.failed is not None and not sample.output_ids:
                        raise sample.failed
                    if not left:
                        await self._keep(obj, state, pins, slot, caller)
                yield sample.update()
        finally:
            self._release(state)

    def encode_request(
        self, obj: EmbeddingReqInput, is_disconnected: IsDisconnected | None = None, *, caller: Caller = ANONYMOUS
    ) -> AsyncGenerator[SampleUpdate, None]:
        return self.generate_request(obj, is_disconnected, caller=caller)

    async def ids_with_media(self, input_ids: list[int], media: MediaRefs, caller: Caller = ANONYMOUS) -> list[int]:
        """The tokens of a prompt with those of media in place of their tokens. caller: whose media they are. Raises RequestError."""
        self.media.check([media])
        owner = (caller.tenant or self._without_key).namespace("")
        return list((await self.media.add(input_ids, media, owner)).ids())

    def _check_accepting(self) -> None:
        self.engine_loop.check()
        if not self._accepting:
            raise CapacityError("the server is stopping and takes no new requests", retry_after_s=5.0)

    def _register(self, call: AnyCall, obj: CallInput, caller: Caller) -> CallState:
        """Add every sample to the table before anything is awaited or sent: no output can be missed, no rid used twice.

        Raises RequestError for a rid in use, CapacityError when the queue is full or a limit of the caller's key is reached.
        """
        token_text: TokenText | None = self._token_text if obj.return_text_in_logprobs else None
        has_limits = not caller.is_server
        state = CallState(
            stream=obj.stream,
            is_list=call.is_list,
            token_text=token_text,
            wants_progress=obj.return_progress,
            tenant=caller.tenant or self._without_key,
            owner=caller.owner,
            turn=caller.turn,
            timeout_s=self.args.request_timeout_s if has_limits else 0.0,
            queue_timeout_s=self.args.queue_timeout_s if has_limits else 0.0,
        )
        now = self._clock()
        for prompt in call.prompts:
            state.add_prompt(prompt.rid, prompt.num_samples, now, replica_of(obj, prompt.room, self.args))
        name = state.tenant.scope + call.rid
        if call.is_list and name not in state.names:
            state.name(name, state.samples)
        try:
            self.table.enter(state, call.rid, now)
        except CapacityError as error:
            self.metrics.count_rejected("key_limit" if error.status_code == 429 else "queue_full")
            raise
        return state

    def _send(self, state: CallState, requests: list[TokenizedGenerateReqInput]) -> None:
        """Send the samples to the schedulers; those aborted meanwhile end here."""
        if state.error is not None:
            raise state.error
        now = self._clock()
        wanted = []
        for sample, request in zip(state.samples, requests, strict=True):
            if sample.abort_asked:
                self.endings.end(sample, FinishReason("abort", message="aborted"))
            else:
                sample.sent_s = now
                sample.request = request
                wanted.append(sample)
        try:
            self.link.submit(wanted)
        except BaseException:
            # Samples that no replica has will not be sent later, and have no end to wait for.
            for sample in wanted:
                if sample.replica == NOWHERE:
                    sample.request, sample.sent_s = None, 0.0
            raise

    async def _keep(self, obj: CallInput, state: CallState, pins: Sequence[PinAsk], slot: int, caller: Caller) -> None:
        self.slots.keep(slot, obj, state, caller)
        request = state.samples[0].request
        if pins and request is not None and isinstance(obj, GenerateReqInput):
            await self.pins.hold(obj, request, pins, caller)

    def _note_operation(self, operation: WeightOperation) -> None:
        self.records.note_operation(operation)
        self.pins.sync_soon()

    async def _wait_for_all(self, state: CallState, is_disconnected: IsDisconnected | None) -> None:
        """Wait until every sample has ended. Raises the first failure if all have failed."""
        for _ in state.samples:
            await self._next(state, is_disconnected)
        # A list in which everything failed is answered with one error. A fault of the engine is a failure even after some tokens:
        # no part of this answer has been sent yet.
        failures = [
            sample.failed
            for sample in state.samples
            if sample.failed is not None and (not sample.output_ids or isinstance(sample.failed, ExecutionError))
        ]
        if len(failures) == len(state.samples):
            raise failures[0]

    async def _next(self, state: CallState, is_disconnected: IsDisconnected | None) -> ReqState:
        """The next sample with new output. Raises RequestError when the client has disconnected."""
        while True:
            sample = await state.next_news(None if is_disconnected is None else DISCONNECT_POLL_S)
            if sample is not None:
                return sample
            if is_disconnected is not None and await is_disconnected():
                raise RequestError("the client closed the connection", code="client_disconnected")

    def _release(self, state: CallState) -> None:
        """The client has its answer or has left: abort unfinished samples. One that was sent keeps its rid until its last output."""
        self.table.leave(state, self._clock())
        sent = []
        for sample in state.unfinished:
            if self.engine_loop.failure is None and sample.sent_s:
                sent.append(sample.rid)
            else:
                self.endings.forget(sample)
        if sent:
            self.link.send(AbortReq(tuple(sent), message="the client went away"))
        state.let_go()

    def abort_request(self, rid: str = "", abort_all: bool = False, caller: Caller = ANONYMOUS) -> None:
        """Abort the sample `rid`, all samples of the call or prompt named `rid`, or everything. An unknown rid is harmless.

        caller: can abort its own requests only, an admin those of all keys; `abort_all` aborts all requests in any case. Waiting clients get
        the output so far, with finish reason abort.
        """
        if abort_all:
            self.aborts.abort_all()
        else:
            self.aborts.abort(rid, caller)

    async def open_session(
        self,
        capacity_of_str_len: int = 0,
        session_id: str | None = None,
        timeout_s: float | None = None,
        caller: Caller = ANONYMOUS,
    ) -> str:
        """Open a session of the caller. Returns its id. See `Sessions.open`. Raises RequestError, CapacityError."""
        self._check_accepting()
        if capacity_of_str_len and self.args.skip_tokenizer_init:
            refuse_text("capacity_of_str_len")
        return self.sessions.open(session_id, capacity_of_str_len, timeout_s, caller.tenant or self._without_key)

    async def close_session(self, session_id: str, caller: Caller = ANONYMOUS) -> None:
        """Close a session of the caller; an admin can close any. Its running requests continue. Raises NotFoundError."""
        self.sessions.close(session_id, caller)

    # -- the state of the engine

    async def health(self, generate: bool = False) -> bool:
        """Whether the engine is alive. With `generate`: whether it makes a token, or did within the last second; see `Health`.

        Raises CapacityError when it awaits weights.
        """
        if self.link.awaits_weights and self.engine_loop.failure is None:
            raise no_weights()
        return await self._health.makes_tokens() if generate else self._health.is_alive()

    async def counters(self) -> dict[str, int]:
        """Counters of survived faults outside the scheduler: malformed frames, unknown outputs, stalls, restarts, replays."""
        return {
            "num_unknown_outputs": self.outputs.num_unknown,
            "dropped_frames": self.engine_loop.receiver.dropped_frames,
            "detokenizer_dropped_frames": self.heartbeats.dropped_frames.get(DETOKENIZER, 0),
            "num_stalls": self.engine_loop.watchdog.num_stalls,
            "num_restarts": self.parts.num_restarts,
            "num_replayed": self.link.num_replayed,
            "num_given_up": self.link.num_given_up,
            "num_held": self.link.num_held,
            "num_sessions": len(self.sessions),
        }

    async def metrics_text(self) -> bytes:
        return render(self.metrics, self.args.metrics_compat)

    def count_reply(self, route: str, status: int) -> None:
        self.metrics.count_reply(route, status)

    def count_template_kill(self) -> None:
        self.metrics.template_kills.inc()

    # -- the end

    def stop_accepting(self) -> None:
        self._accepting = False

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for running ones; abort those left after `timeout_s` seconds. True when none was aborted."""
        self.stop_accepting()
        try:
            await asyncio.wait_for(self.table.wait_until_empty(), timeout_s)
        except TimeoutError:
            self.aborts.abort_all()
        else:
            return True
        try:
            await asyncio.wait_for(self.table.wait_until_empty(), ABORT_WAIT_S)
        except TimeoutError:
            logger.warning("number of samples that did not end after they were aborted: %d", len(self.table.samples))
        return False

    def fail_all(self, message: str) -> None:
        """The engine has failed: end every waiting call and every later one with an ExecutionError. From any thread; idempotent."""
        if not self.engine_loop.is_here(self.fail_all, message):
            return
        if self.engine_loop.failure is not None:
            return
        self.engine_loop.failure = message
        if message != STOPPED:
            self.records.crash_dump(message)
        self.link.close()
        error = ExecutionError(message)
        self.table.fail(error)
        self.link.replies.fail_all(error)
        for sample in list(self.table.samples.values()):
            if sample.call.abandoned:
                self.endings.forget(sample)

    async def close(self) -> None:
        """Stop the loop and the threads and close the receiver; waiting calls end with an error. Idempotent."""
        self.fail_all(STOPPED)
        self.engine_loop.close()
        self.prompt_tokenizer.close()
        self.weights.copies.close()

    def _broken(self) -> None:
        self.fail_all("internal error")
        self.on_broken()

    def _decode_token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.ready.vocab_size:  # stands for media
            return None
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


def _session_files(args: ServerArgs, ready: ReadyInfo) -> SessionFiles | None:
    """Those of --session-dir; None without. Raises ConfigError."""
    if args.session_dir is None:
        return None
    folder, model = private_folder("--session-dir", args.session_dir), content_of(ready.fingerprint)
    return SessionFiles(folder, model, args.max_sessions, args.max_session_tokens, args.session_timeout_s)
