"""The composition root: makes the parts of an engine and connects them.

`launch_engine` starts the scheduler and the detokenizer (child processes, or threads with --single-process) and gives the
TokenizerManager that talks to them; `launch_server` puts the HTTP app in front. `run_scheduler` and `run_detokenizer` are the
bodies of the children. What takes long to import is imported where it is used: the children start before the main process imports
its own parts, and each process imports only what it runs. torch is needed in `run_scheduler` alone.
"""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import log
from headrace.checkpoint.names import resolve_model
from headrace.config.open_files import check_open_files
from headrace.config.resolve import MEM_FRACTION, sampling_defaults
from headrace.config.server_args import ServerArgs
from headrace.errors import ExecutionError, RequestError
from headrace.frontend.data_parallel_controller import FanOutSender, of_all_replicas
from headrace.messages.channel import Channels, IpcDir, LocalChannels, Ports, Sender, ZmqChannels
from headrace.messages.control import Heartbeat, ReadyInfo, ShutdownReq
from headrace.messages.front import HttpWorkerStart
from headrace.messages.packing import unpack_int32
from headrace.messages.requests import TokenizedGenerateReqInput
from headrace.metrics.watchdog import Watchdog
from headrace.processes import lifeline
from headrace.processes.child import ChildProcess, process_name
from headrace.processes.http_workers import HttpWorkers
from headrace.processes.recovery import Recovery, RestartBudget
from headrace.processes.supervisor import Supervisor

if TYPE_CHECKING:
    from headrace.cache.base import PrefixCache
    from headrace.checkpoint.model_config import ModelConfig
    from headrace.frontend.spans import Spans
    from headrace.frontend.tokenizer_manager import TokenizerManager
    from headrace.metrics.catalog import Metrics
    from headrace.scheduler.state import SchedulerConfig
    from headrace.server.context import ServedModel
    from headrace.text.chat_templates import ChatTemplate
    from headrace.text.stop import StopMatcher
    from headrace.text.tokenizers import Tokenizer

logger = log.get_logger(__name__)

HEARTBEAT_S = 0.5
STOP_CHILD_S = 3.0
START_POLL_S = 0.2
OWNER_GONE_S = (0.25, 0.75)
"""A server whose owner has died drains for so long, then ends its requests for so long, then is gone."""

OnReady = Callable[[ReadyInfo | None], None]
OnProgress = Callable[[int, int], None]


# -- the model's files


def read_model_config(args: ServerArgs) -> "ModelConfig":
    """What the checkpoint says of itself, with the user's overrides; reads no weights."""
    from headrace.checkpoint.model_config import load_model_config
    from headrace.checkpoint.source import open_checkpoint
    from headrace.config.resolve import override_model

    path = resolve_model(args.model_path)
    is_gguf = path.is_file() and path.suffix == ".gguf"
    config = open_checkpoint(path).config if is_gguf else load_model_config(path)
    return override_model(config, args.json_model_override_args)


def open_tokenizer(args: ServerArgs) -> "Tokenizer":
    """The tokenizer of the model, or the one of --tokenizer-path."""
    from headrace.frontend.no_tokenizer import NoTokenizer
    from headrace.text.tokenizers import load_tokenizer

    if args.skip_tokenizer_init:
        return NoTokenizer()
    return load_tokenizer(Path(args.tokenizer_path) if args.tokenizer_path else resolve_model(args.model_path))


def open_chat_template(args: ServerArgs, tokenizer: "Tokenizer") -> "ChatTemplate | None":
    """The template of --chat-template or the model's own; None when there is none."""
    from headrace.text.chat_templates import chat_template_of, read_template_argument

    override = read_template_argument(args.chat_template) if args.chat_template else None
    try:
        return chat_template_of(tokenizer, override)
    except RequestError:
        return None


def served_model(
    args: ServerArgs, ready: ReadyInfo, tokenizer: "Tokenizer", template: "ChatTemplate | None", model: "ModelConfig"
) -> "ServedModel":
    """The model as clients see it."""
    from headrace.server.context import ServedModel

    return ServedModel(
        name=args.served_name,
        context_length=ready.context_length,
        tokenizer=tokenizer,
        chat_template=template,
        ready=ready,
        model_type=model.model_type,
        sampling_defaults=sampling_defaults(args, model),
    )


# -- the bodies of the children


def _die_of_watchdog() -> None:
    """A step that never ends cannot be interrupted: the process goes, and its parent answers every waiter."""
    os._exit(3)


def run_scheduler(
    args: ServerArgs,
    channels: Channels,
    on_ready: OnReady,
    on_progress: OnProgress,
    on_stall: Callable[[], None] = _die_of_watchdog,
    replica: int = 0,
    source: int = 0,
) -> None:
    """Load the model and schedule until a ShutdownReq. Raises ConfigError or ModelError before `on_ready`.

    on_stall: called from a thread when a step takes longer than --watchdog-timeout-s. replica: its index, below --dp-size. source: signs the outputs
    of this life, see `BatchTokenIDOut`.
    """
    from headrace.cache.allocator import PageAllocator
    from headrace.cache.chunk_cache import ChunkCache
    from headrace.cache.radix_cache import RadixCache
    from headrace.execution.build import build_worker  # torch: first, for it takes longest
    from headrace.scheduler.kv_manager import KVManager
    from headrace.scheduler.scheduler import Scheduler

    receiver = channels.receiver("to_scheduler", replica)
    args = share_of_machine(args)
    to_tokenizer = channels.sender("to_tokenizer")
    model = read_model_config(args)
    tokenizer = _SoonTokenizer(args)
    worker, ready = build_worker(args, on_progress)
    cache: PrefixCache = ChunkCache() if args.disable_radix_cache else RadixCache(ready.page_size)
    allocator = PageAllocator(ready.max_total_tokens // ready.page_size, ready.page_size)
    watchdog = Watchdog("scheduler", args.watchdog_timeout_s, on_timeout=on_stall)
    scheduler = Scheduler(
        scheduler_config(args, model, ready, replica),
        KVManager(allocator, cache, ready.max_running_requests),
        worker,
        receiver,
        channels.sender("to_detokenizer"),
        to_tokenizer,
        lambda request: _stop_checker(tokenizer.get(), request),
        on_turn=watchdog.feed,
        source=source,
    )
    watchdog.start()
    on_ready(ready)
    tokenizer.start()
    with _heartbeats(to_tokenizer, process_name("scheduler", args, replica), enabled=not args.single_process):
        scheduler.run()
    watchdog.stop()


def share_of_machine(args: ServerArgs) -> ServerArgs:
    """A replica's part: cores and host memory are divided by --dp-size. A GPU, which each has one of, is not."""
    if args.dp_size == 1:
        return args
    import torch

    from headrace.kernels.cpu.threads import default_num_threads

    num_threads = max(1, (args.num_threads or default_num_threads()) // args.dp_size)
    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    fraction = args.mem_fraction_static
    if not on_gpu:
        fraction = (fraction or MEM_FRACTION["cpu"]) / args.dp_size
    return dataclasses.replace(args, num_threads=num_threads, mem_fraction_static=fraction)


def scheduler_config(args: ServerArgs, model: "ModelConfig", ready: ReadyInfo, replica: int = 0) -> "SchedulerConfig":
    """The scheduler's limits."""
    from headrace.scheduler.state import SchedulerConfig

    return SchedulerConfig(
        policy=args.schedule_policy,
        chunk_tokens=ready.chunked_prefill_size,
        step_tokens=max(args.max_prefill_tokens, ready.max_running_requests),
        max_running=ready.max_running_requests,
        # The front end refuses what may not wait. This bound is for what it sends all the same: whatever it takes may come to one replica.
        max_queued=ready.max_running_requests * args.dp_size + args.max_queued_requests,
        max_steps_in_flight=1 if args.disable_overlap_schedule else 2,
        eos_token_ids=frozenset(model.eos_token_ids),
        vocab_size=ready.vocab_size,
        stream_interval=args.stream_interval,
        priority_ageing_s=args.priority_ageing_s,
        preemption_threshold=args.priority_scheduling_preemption_threshold if args.enable_priority_preemption else 0,
        conservativeness=args.schedule_conservativeness,
        clip_estimate_tokens=args.clip_max_new_tokens_estimate,
        weight_update_timeout_s=args.weight_update_timeout_s,
        decode_log_interval=args.decode_log_interval,
        accept_faults=args.enable_fault_injection,
        replica=replica,
    )


def run_http_worker(args: ServerArgs, channels: Channels, on_ready: OnReady, start: HttpWorkerStart) -> None:
    """The HTTP application over the front end of the main process, until a ShutdownReq."""
    from headrace.processes.http_workers import serve_http

    tokenizer = open_tokenizer(args)
    model = served_model(args, start.ready, tokenizer, open_chat_template(args, tokenizer), read_model_config(args))
    serve_http(args, channels, on_ready, start, model)


def run_detokenizer(args: ServerArgs, channels: Channels, on_ready: OnReady, on_progress: OnProgress) -> None:
    """Turn ids into text until a ShutdownReq."""
    from headrace.text.detokenizer_manager import DetokenizerManager

    receiver = channels.receiver("to_detokenizer")
    watchdog = Watchdog("detokenizer", args.soft_watchdog_timeout_s)
    manager = DetokenizerManager(
        open_tokenizer(args),
        channels.sender("to_tokenizer"),
        FanOutSender([channels.sender("to_scheduler", replica) for replica in range(args.dp_size)]),
        enable_faults=args.enable_fault_injection,
        watchdog=watchdog,
    )
    watchdog.start()
    on_ready(None)
    manager.run(receiver, heartbeats=not args.single_process)
    watchdog.stop()


class _SoonTokenizer:
    """The scheduler's tokenizer, which only stop strings need: opened in a thread once the server is ready, or when first asked for.

    The main process has opened the same one before, so it can be.
    """

    def __init__(self, args: ServerArgs) -> None:
        self._open = functools.cache(functools.partial(open_tokenizer, args))
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to open it."""
        threading.Thread(target=self.get, name="tokenizer", daemon=True).start()

    def get(self) -> "Tokenizer":
        """The tokenizer, once it is open."""
        with self._lock:
            return self._open()


def _stop_checker(tokenizer: "Tokenizer", request: TokenizedGenerateReqInput) -> "StopMatcher":
    from headrace.text.incremental import IncrementalDecoder
    from headrace.text.stop import StopMatcher

    sampling = request.task.params
    decoder = IncrementalDecoder(
        tokenizer,
        skip_special_tokens=sampling.skip_special_tokens,
        spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        context_ids=unpack_int32(request.input_ids[-32:]) if not request.input_embeds else (),
    )
    return StopMatcher(sampling.stop, sampling.stop_regex, decoder)


@contextlib.contextmanager
def _heartbeats(to_tokenizer: Sender, process: str, enabled: bool) -> Iterator[None]:
    """Signs of life from a thread, while the loop may be deep in a step."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(HEARTBEAT_S):
            to_tokenizer.send(Heartbeat(process))

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    if enabled:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if enabled:
            thread.join()


# -- the engine


class Parts:
    """The scheduler and the detokenizer of a running engine, as children or as threads."""

    def __init__(self, channels: Channels, num_schedulers: int = 1) -> None:
        self.channels = channels
        self._to_schedulers = FanOutSender(
            [channels.sender("to_scheduler", replica) for replica in range(num_schedulers)]
        )
        self._to_detokenizer = channels.sender("to_detokenizer")

    def ask_to_leave(self) -> None:
        """The loops end after the message they are at."""
        self._to_schedulers.send(ShutdownReq())
        self._to_detokenizer.send(ShutdownReq())


class ChildParts(Parts):
    """Child processes, watched by a thread, and started again when they die. spawn: starts one."""

    def __init__(self, args: ServerArgs, ports: Ports, spawn: type[ChildProcess] = ChildProcess) -> None:
        super().__init__(ZmqChannels(ports), args.dp_size)
        self._args = args
        self.ports = ports
        self._spawn = spawn
        # The schedulers import torch and load the weights: they go first.
        self.children = [
            *(spawn("scheduler", args, ports, replica, source=replica) for replica in range(args.dp_size)),
            spawn("detokenizer", args, ports),
        ]
        self._supervisor: Supervisor[ChildProcess] | None = None
        self._recovery: Recovery[ChildProcess] | None = None
        self._stopped = False

    def wait_ready(self, on_progress: OnProgress, should_stop: Callable[[], bool]) -> ReadyInfo:
        """Until all can serve. Raises why one cannot; then none is left."""
        try:
            infos = [child.wait_ready(on_progress, should_stop) for child in self.children]
            return of_all_replicas([info for info in infos if info is not None])
        except BaseException:
            self.kill()
            raise

    def watch(self, manager: "TokenizerManager", on_death: Callable[[str], None]) -> None:
        """Start children that die again and tell `manager`; call `on_death(message)` from a thread when that is not to be."""
        # What fitted into memory when all was new is what clients have been told of. Adapters are sent: others may have come since.
        args = dataclasses.replace(self._args, max_total_tokens=manager.ready.max_total_tokens, lora_paths="")

        def respawn(dead: ChildProcess) -> ChildProcess:
            return self._spawn(dead.kind, args, self.ports, dead.index, manager.link.new_source())

        def on_down(dead: ChildProcess) -> None:
            manager.part_down(dead.name, dead.index if dead.kind == "scheduler" else None)

        def on_up(child: ChildProcess) -> None:
            if child.kind == "scheduler":
                assert child.info is not None, child.name
                sender = self.channels.sender("to_scheduler", child.index)
                try:
                    manager.rejoin(child.name, child.index, child.source, sender, child.info.fingerprint)
                except BaseException:
                    sender.close()  # what is unread is not for the life after this one
                    raise
            else:
                manager.part_up(child.name)

        def recover(dead: ChildProcess) -> bool:
            if dead.kind != "scheduler" or manager.weights.can_restore:
                return recovery.recover(dead)
            logger.error(
                "the weights were pushed, and only the schedulers that got them have them: it is not started again"
            )
            if not self._others_serve(dead):
                return False
            recovery.retire(dead)
            manager.part_gone(dead.name, dead.index)
            return True

        def on_refused(dead: ChildProcess, message: str) -> None:
            if self._others_serve(dead):
                manager.part_gone(dead.name, dead.index)
            else:
                on_death(message)

        manager.link.on_dismissed = self._kill_scheduler
        budget = RestartBudget(0 if self._args.disable_recovery else self._args.max_restarts)
        self._recovery = recovery = Recovery(
            self.children,
            budget,
            respawn,
            on_down,
            on_up,
            lambda _, message: on_death(message),
            on_refused,
            self._args.watchdog_timeout_s,
        )
        self._supervisor = Supervisor(self.children, on_death, manager.heartbeat_age_s, recover)
        self._supervisor.start()

    def _others_serve(self, dead: ChildProcess) -> bool:
        """Whether the requests of a scheduler that does not come back can go to another one."""
        return dead.kind == "scheduler" and any(
            child.kind == "scheduler" and child is not dead and child.exit_code is None
            for child in tuple(self.children)
        )

    def _kill_scheduler(self, replica: int) -> None:
        for child in tuple(self.children):
            if child.kind == "scheduler" and child.index == replica:
                child.end()

    def stop(self) -> None:
        """End the children: asked first, killed after a few seconds. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self._supervisor is not None:
            self._supervisor.stop()
        if self._recovery is not None:
            self._recovery.stop()
        self.ask_to_leave()
        deadline = time.monotonic() + STOP_CHILD_S
        for child in self.children:
            child.stop(max(0.0, deadline - time.monotonic()))
        self.channels.close()

    def kill(self) -> None:
        """End the children now."""
        self._stopped = True
        for child in self.children:
            child.kill()
        self.channels.close()


class ThreadParts(Parts):
    """Threads of this process (--single-process)."""

    def __init__(self, args: ServerArgs) -> None:
        super().__init__(LocalChannels())
        self._args = args
        self._threads: list[threading.Thread] = []
        self._stopped = False
        self._ready: ReadyInfo | None = None
        self._started = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._on_death: Callable[[str], None] = lambda message: None

    def wait_ready(self, on_progress: OnProgress, should_stop: Callable[[], bool]) -> ReadyInfo:
        """Start both threads and wait until they can serve. Raises why one cannot."""
        scheduler = functools.partial(run_scheduler, on_stall=self._stalled)
        for name, run in (("scheduler", scheduler), ("detokenizer", run_detokenizer)):
            thread = threading.Thread(target=self._guard, args=(name, run, on_progress), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        num_missing = len(self._threads)
        while num_missing and self._error is None and not should_stop():
            num_missing -= self._started.acquire(timeout=START_POLL_S)
        if num_missing or self._error is not None:
            self.stop()
            raise self._error or ExecutionError("stopped while starting")
        assert self._ready is not None
        return self._ready

    def _guard(
        self, name: str, run: Callable[[ServerArgs, Channels, OnReady, OnProgress], None], on_progress: OnProgress
    ) -> None:
        started = False

        def progress(done: int, total: int) -> None:
            if self._stopped:
                raise ExecutionError("stopped while starting")
            on_progress(done, total)

        def on_ready(info: ReadyInfo | None) -> None:
            nonlocal started
            self._ready = info or self._ready
            started = True
            self._started.release()

        try:
            run(self._args, self.channels, on_ready, progress)
        except BaseException as error:
            if not started:
                self._error = self._error or error
                self._started.release()
            elif not self._stopped:
                logger.exception("the %s thread died", name)
                self._on_death(f"the {name} died; the request was lost")

    def _stalled(self) -> None:
        """The process is the user's: it is told, and not ended."""
        limit_s = self._args.watchdog_timeout_s
        self._on_death(f"a step took longer than {limit_s:g} s (--watchdog-timeout-s); the request was lost")

    def watch(self, manager: "TokenizerManager", on_death: Callable[[str], None]) -> None:
        """Call `on_death(message)` when a thread dies."""
        self._on_death = on_death

    def stop(self) -> None:
        """End both threads. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self.ask_to_leave()
        for thread in self._threads:
            thread.join(STOP_CHILD_S)
        self.channels.close()

    kill = stop


@dataclass(slots=True)
class RunningEngine:
    """A started engine. The TokenizerManager belongs to the event loop that first uses it.

    on_death: set by the owner; called from a thread, after every waiter has been answered, when a part died.
    """

    args: ServerArgs
    tokenizer_manager: "TokenizerManager"
    ready: ReadyInfo
    tokenizer: "Tokenizer"
    chat_template: "ChatTemplate | None"
    model: "ModelConfig"
    metrics: "Metrics"
    parts: ChildParts | ThreadParts
    resources: contextlib.ExitStack
    on_death: Callable[[], None] = lambda: None

    def shutdown(self) -> None:
        """End the parts. Close the TokenizerManager on its loop before. Idempotent."""
        self.parts.stop()
        self.resources.close()


def launch_engine(
    args: ServerArgs,
    on_progress: OnProgress = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
    meanwhile: Callable[[], None] = lambda: None,
) -> RunningEngine:
    """Start an engine and wait until it can serve. Raises ConfigError, ModelError, or ExecutionError.

    on_progress: bytes of the checkpoint loaded so far and in all. should_stop: asked while waiting; True gives up.
    meanwhile: called once while the children load.
    """
    check_open_files(args)
    spans = _open_spans(args)
    with contextlib.ExitStack() as resources:
        parts: ChildParts | ThreadParts
        if args.single_process:
            parts = ThreadParts(args)
        else:
            resolve_model(args.model_path)  # joins or refuses before two children would
            parts = ChildParts(args, Ports.in_directory(resources.enter_context(IpcDir())))
        try:
            from_engine = parts.channels.receiver("to_tokenizer")
            tokenizer = open_tokenizer(args)
            template = open_chat_template(args, tokenizer)
            model = read_model_config(args)
            meanwhile()
            ready = parts.wait_ready(on_progress, should_stop)
        except BaseException:
            parts.kill()
            raise
        from headrace.frontend.tokenizer_manager import TokenizerManager
        from headrace.metrics.catalog import Metrics
        from headrace.sampling.params import GenerationDefaults

        defaults = sampling_defaults(args, model)
        if defaults.not_followed:
            logger.warning(
                "the model's sampling settings ask for what is not done here: %s", ", ".join(defaults.not_followed)
            )
        metrics = Metrics(args.served_name)
        watchdog = Watchdog("tokenizer manager", args.soft_watchdog_timeout_s)
        if spans is not None:
            resources.callback(spans.close)
        manager = TokenizerManager(
            args,
            ready,
            tokenizer,
            parts.channels.sender("to_scheduler"),
            from_engine,
            defaults=GenerationDefaults(
                temperature=defaults.temperature,
                top_p=defaults.top_p,
                top_k=defaults.top_k,
                min_p=defaults.min_p,
                repetition_penalty=defaults.repetition_penalty,
            ),
            metrics=metrics,
            to_detokenizer=parts.channels.sender("to_detokenizer"),
            more_schedulers=[parts.channels.sender("to_scheduler", replica) for replica in range(1, args.dp_size)],
            watchdog=watchdog,
            spans=spans,
        )
        engine = RunningEngine(args, manager, ready, tokenizer, template, model, metrics, parts, resources.pop_all())

        def died(message: str) -> None:
            manager.fail_all(message)
            engine.on_death()

        manager.on_broken = lambda: engine.on_death()
        parts.watch(manager, died)
        return engine


def _open_spans(args: ServerArgs) -> "Spans | None":
    """Where traces go. Raises ConfigError before anything is loaded."""
    if args.otlp_traces_endpoint is None:
        return None
    from headrace.frontend.spans import Spans, otlp_exporter

    return Spans(args.served_name, otlp_exporter(args.otlp_traces_endpoint))


# -- the server


def launch_server(args: ServerArgs, on_started: Callable[[str], None] | None = None) -> int:
    """Serve over HTTP until told to stop. Returns the exit code: 0 after a drain, 1 when a part of the engine died.

    on_started: called with the URL once requests are accepted; default: the start-up summary on stderr.
    """
    from headrace.server.address import bind

    log.configure(args.log_level, "main")
    check_open_files(args, with_server=True)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    lifeline.follow_owner(_leave_with_owner)
    started_s = time.monotonic()
    # Bound first: a port in use is found before the model is loaded, and clients that come early wait.
    listening = bind(args.host, args.port)
    with _loading_bar() as on_progress:
        try:
            engine = launch_engine(args, on_progress, stopping.is_set, _import_server)
        except ExecutionError:
            if stopping.is_set():
                return 0
            raise
    import uvloop

    try:
        announce = on_started or (lambda url: _print_summary(engine, url, time.monotonic() - started_s))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(engine, listening, announce, stopping))
    finally:
        engine.shutdown()


def _import_server() -> None:
    """What serving needs takes a second to import: while the children load."""
    import uvloop  # noqa: F401

    import headrace.frontend.tokenizer_manager
    import headrace.server.app
    import headrace.server.listener  # noqa: F401


def _leave_with_owner() -> None:
    """In a thread: stop as for signals, and go in any case."""
    for wait_s in OWNER_GONE_S:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(wait_s)
    os._exit(1)


async def _serve(
    engine: RunningEngine, listening: socket.socket, on_started: Callable[[str], None], stopping: threading.Event
) -> int:
    from headrace.server.app import create_app
    from headrace.server.context import ServerStatus
    from headrace.server.keys import open_keys
    from headrace.server.listener import Server

    args, manager = engine.args, engine.tokenizer_manager
    status = ServerStatus()
    server: Server | HttpWorkers
    if isinstance(engine.parts, ChildParts) and args.tokenizer_worker_num > 1:
        keys = open_keys(args)
        server = HttpWorkers(args, manager, engine.parts.channels, engine.parts.ports, listening, keys, status)
        server.on_death = lambda message: engine.on_death()
    else:
        model = served_model(args, engine.ready, engine.tokenizer, engine.chat_template, engine.model)
        app = create_app(manager, args, model, status)
        keys = app.state.keys
        server = Server(app, args, listening=listening)
    loop = asyncio.get_running_loop()
    exit_code = 0
    num_signals = 0
    tasks: set[asyncio.Task[None]] = set()

    async def drain() -> None:
        await manager.drain(args.drain_timeout_s)
        server.shutdown()

    def on_signal() -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1:
            logger.info("stopping: running requests have %.0f s; a second signal ends them now", args.drain_timeout_s)
            status.draining = True
            tasks.add(loop.create_task(drain()))
        else:
            server.shutdown(force=True)

    def on_death() -> None:
        nonlocal exit_code
        exit_code = 1
        status.draining = True
        # Waiters have been answered; their replies are written before the server goes.
        loop.call_soon_threadsafe(server.shutdown)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if keys is not None:
        loop.add_signal_handler(signal.SIGHUP, keys.reload)
    engine.on_death = on_death
    manager.start()
    gc.collect()
    gc.freeze()  # as the children do, see `child.main`
    if stopping.is_set():
        return 0
    await server.serve(lambda: on_started(server.url))
    for task in tasks:
        task.cancel()
    await manager.close()
    return exit_code


@contextlib.contextmanager
def _loading_bar() -> Iterator[OnProgress]:
    """A progress bar on stderr while the weights load; nothing when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("weights", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_summary(engine: RunningEngine, url: str, seconds: float) -> None:
    ready = engine.ready
    gib = 2**30
    rows = (
        ("model", f"{engine.args.served_name} ({ready.model_class}, {ready.weight_bytes / gib:.2f} GiB)"),
        ("precision", f"{ready.weights} weights, {ready.kv_cache_dtype} KV, on {ready.device}"),
        ("KV cache", f"{ready.max_total_tokens} tokens in pages of {ready.page_size} ({ready.kv_bytes / gib:.2f} GiB)"),
        ("context", f"{ready.context_length} tokens, up to {ready.max_running_requests} requests at once"),
        ("attention", ready.attention_backend),
        ("sampling", sampling_defaults(engine.args, engine.model).summary()),
        ("URL", url),
    )
    lines = [f"Headrace is ready after {seconds:.1f} s", *(f"  {name:<10} {value}" for name, value in rows)]
    print("\n".join(lines), file=sys.stderr, flush=True)
