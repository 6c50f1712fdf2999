"""What a scheduler process runs, from loading the model to the last step: `run_scheduler`.

Also the body of the scheduler's thread with --single-process. No other process of an engine needs torch.
"""

import contextlib
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from headrace import garbage
from headrace.checkpoint.names import resolve_model
from headrace.checkpoint.weight_cache import ReadAhead
from headrace.config.checks import encoder_args, private_folder
from headrace.config.kv_events import read_kv_events
from headrace.config.machine import dist_secret
from headrace.config.server_args import ServerArgs
from headrace.config.web import parse_prefill_hosts
from headrace.errors import ConfigError
from headrace.messages.channel import Channels, Ports, Sender
from headrace.messages.control import Heartbeat, ReadyInfo
from headrace.messages.packing import unpack_int32
from headrace.messages.requests import TokenizedGenerateReqInput
from headrace.metrics.watchdog import Watchdog
from headrace.processes.handshake import OnProgress, OnReady, process_name
from headrace.processes.model_files import EndTokens, ModelFiles, open_tokenizer, tokens_of
from headrace.processes.numa import bind, bindings
from headrace.processes.share import share_of_machine

if TYPE_CHECKING:
    from headrace.cache.base import PrefixCache
    from headrace.cache.events import BlockEvents
    from headrace.cache.tier import DiskTier
    from headrace.checkpoint.model_config import ModelConfig
    from headrace.disaggregation.sink import PageSink
    from headrace.disaggregation.source import PageSource
    from headrace.messages.grammar import Grammars
    from headrace.messages.step import Worker
    from headrace.processes.kv_event_publisher import KVEventPublisher
    from headrace.scheduler.kv_manager import KVManager
    from headrace.scheduler.state import SchedulerConfig
    from headrace.text.stop import StopMatcher
    from headrace.text.tokenizers import Tokenizer

T = TypeVar("T")

HEARTBEAT_S = 0.5

_HASHED_PER_S = 1e9
"""Bytes of weights, by one core."""

_OPERATIONS_PER_S = {"cpu": 2e11, "cuda": 3e14}
"""Additions and multiplications of a core or of a GPU while it computes a prompt: what is taken for it before steps have been timed."""


def _die_of_watchdog() -> None:
    """A step that never ends cannot be interrupted, so the process exits; its parent answers the clients."""
    os._exit(3)


def run_scheduler(
    args: ServerArgs,
    channels: Channels,
    on_ready: OnReady,
    on_progress: OnProgress,
    on_stall: Callable[[], None] = _die_of_watchdog,
    replica: int = 0,
    source: int = 0,
    ports: Ports | None = None,
) -> None:
    """Load the model and schedule until a ShutdownReq. Raises ConfigError or ModelError before `on_ready`.

    on_stall: called from a thread when a step takes longer than --watchdog-timeout-s. replica: its index, below --dp-size.
    source: names this incarnation of the replica in its outputs, see `BatchTokenIDOut`. ports: of the engine, for the other ranks.
    """
    with contextlib.ExitStack() as resources:
        places = bindings(args, replica)
        if places:
            bind(places[0])
        publisher = _kv_event_publisher(args, replica, resources)
        ranks = None
        if args.num_ranks > 1:
            from headrace.processes.ranks import Ranks

            assert ports is not None, "ranks are processes"
            ranks = resources.enter_context(Ranks(args, ports, replica, places))
        ahead = resources.enter_context(contextlib.closing(_read_ahead(args)))
        from headrace.execution.build import build_worker
        from headrace.scheduler.scheduler import Scheduler

        receiver, to_detokenizer = channels.receiver("to_scheduler", replica), channels.sender("to_detokenizer")
        args = share_of_machine(args, places)
        to_tokenizer = channels.sender("to_tokenizer")
        files = ModelFiles(args, encodes=False)
        if files.config.encoder is not None:
            args = encoder_args(args, files.config.max_position_embeddings)
        tokenizer = run_in_lasting_thread(lambda: files.tokenizer).result  # beside the weights
        ends = run_in_lasting_thread(functools.partial(_end_tokens, files)).result
        grammars = _grammars(files, tokenizer)
        tokenize = functools.partial(tokens_of, args)
        if ranks is None:
            worker, ready = build_worker(args, on_progress, tokenize=tokenize, ahead=ahead)
        else:
            worker, ready = build_worker(args, ranks.checked(on_progress), ranks.rank, ranks, tokenize)
        ahead.close()
        tier, transfer = _tier(args, worker, ready), _transfer(args, worker, replica)
        hooks: dict[str, Any] = {}
        if args.enable_fault_injection:
            from headrace.scheduler.faults import InjectedFaults

            faults = InjectedFaults()
            receiver, worker = faults.receiver(receiver, to_detokenizer), faults.worker(worker)
            hooks["on_admission"] = faults.on_admission
        watchdog = Watchdog("scheduler", args.watchdog_timeout_s, on_timeout=on_stall)
        turns: list[Callable[[], None]] = [watchdog.feed]
        events = None
        if publisher is not None:
            from headrace.cache.events import BlockEvents

            events = BlockEvents(ready.page_size)
            turns.append(_telling(events, publisher))

        def on_turn() -> None:
            for call in turns:
                call()

        scheduler = Scheduler(
            scheduler_config(args, files.config, ready, ends(), replica),
            _kv_manager(args, ready, events),
            worker,
            receiver,
            to_detokenizer,
            to_tokenizer,
            lambda request: _stop_checker(tokenizer(), request),
            source=source,
            grammars=grammars,
            tier=tier,
            transfer=transfer,
            on_turn=on_turn,
            **hooks,
        )
        watchdog.start()
        on_ready(ready)
        if not args.single_process:
            turns.append(garbage.in_small_parts())
            resources.enter_context(_heartbeats(to_tokenizer, process_name("scheduler", args, replica)))
        scheduler.run()
        watchdog.stop()


def _read_ahead(args: ServerArgs) -> ReadAhead:
    """Of what a process of its own will read of the cache of packed weights, if its options are those of an earlier start."""
    if args.disable_weight_cache or args.single_process or args.num_ranks > 1:
        return ReadAhead(None)
    options = (str(resolve_model(args.model_path)), args.mmproj, args.quantization, args.dtype, args.activations)
    return ReadAhead("\0".join(map(str, options)))


def _end_tokens(files: ModelFiles) -> EndTokens:
    with contextlib.closing(files):  # nothing else renders here
        return files.end_tokens


def _grammars(files: ModelFiles, tokenizer: "Callable[[], Tokenizer]") -> "Grammars":
    """What compiles the grammars of requests. No process is started before the first of them. tokenizer: waits until that of the files is open."""
    from headrace.grammar.compiler import GrammarCompiler
    from headrace.grammar.vocabulary import Vocabulary
    from headrace.scheduler.grammar_queue import NO_GRAMMARS

    args = files.args
    if args.grammar_backend == "none" or args.skip_tokenizer_init:
        return NO_GRAMMARS
    encoder = functools.cache(functools.partial(open_tokenizer, args))
    return GrammarCompiler(
        lambda: Vocabulary.of(tokenizer(), files.config.vocab_size, files.end_tokens.eos | files.end_tokens.turn),
        tokenize=lambda text: encoder().encode(text, add_special_tokens=False),
        begin=run_in_lasting_thread,
    )


def _kv_event_publisher(args: ServerArgs, replica: int, resources: contextlib.ExitStack) -> "KVEventPublisher | None":
    """The publisher of --kv-events-config, which listens already; None without one. Raises ConfigError."""
    config = read_kv_events(args.kv_events_config, args.num_replicas)
    if config is None:
        return None
    from headrace.processes.kv_event_publisher import KVEventPublisher

    publisher = KVEventPublisher(config, replica)
    resources.callback(publisher.close)
    publisher.start()
    return publisher


def _telling(events: "BlockEvents", publisher: "KVEventPublisher") -> Callable[[], None]:
    """What is called once per turn: the events of the turn before are published."""

    def on_turn() -> None:
        if taken := events.take():
            publisher.publish(taken)

    return on_turn


def _tier(args: ServerArgs, worker: "Worker", ready: ReadyInfo) -> "DiskTier | None":
    """The tier of --kv-cache-dir and --kv-cache-host-size; None without. Raises ConfigError."""
    host_bytes, name = args.kv_cache_host_size, args.kv_cache_dir
    if name is None and not host_bytes:
        return None
    from headrace.cache.host_pages import HostPages
    from headrace.cache.page_files import PageFiles
    from headrace.cache.tier import DiskTier, pages_at_once

    if host_bytes and ready.device.startswith("cpu"):
        raise ConfigError(
            "--kv-cache-host-size: the KV cache of a CPU is in the host's memory already: raise --max-total-tokens"
        )
    folder, pages = None if name is None else private_folder("--kv-cache-dir", name), worker.pages
    if pages is None:
        raise ConfigError(f"{'--kv-cache-host-size' if name is None else '--kv-cache-dir'}: {worker.pages_refusal}")
    memory = pages.host_memory(host_bytes) if host_bytes else None

    def open_files(fingerprint: str) -> PageFiles | HostPages:
        about = fingerprint, ready.page_size, pages.page_bytes
        files = None if folder is None else PageFiles(folder, *about, args.kv_cache_disk_size)
        if memory is None:
            assert files is not None
            return files
        return HostPages(memory, *about, pages_at_once(pages.page_bytes), files)

    tier = DiskTier(pages, open_files, ready.weight_bytes / _HASHED_PER_S)
    tier.start()
    return tier


def _transfer(args: ServerArgs, worker: "Worker", replica: int) -> "PageSource | PageSink | None":
    """The way of --disaggregation-mode to other servers; None without. Raises ConfigError."""
    if args.disaggregation_mode == "null":
        return None
    from headrace.disaggregation.sink import PageSink
    from headrace.disaggregation.source import PageSource

    pages = worker.pages
    if pages is None:
        raise ConfigError(f"--disaggregation-mode: {worker.pages_refusal}")
    secret = dist_secret(args, os.environ)
    if args.disaggregation_mode == "decode":
        allows = parse_prefill_hosts(args.disaggregation_prefill_hosts).allows
        sink = PageSink(pages, secret, args.disaggregation_transfer_backend == "shm", allows)
        sink.facts.read()
        return sink
    address = args.host, args.disaggregation_bootstrap_port + replica
    source = PageSource(pages, address, secret, args.num_replicas)
    source.facts.read()
    source.start()
    return source


def _kv_manager(args: ServerArgs, ready: ReadyInfo, events: "BlockEvents | None" = None) -> "KVManager":
    from headrace.cache.base import ChunkCache, PageAllocator
    from headrace.cache.radix_cache import RadixCache
    from headrace.scheduler.kv_manager import KVManager, KvPart

    pages_each = ready.max_total_tokens // ready.page_size // args.num_kv_parts

    def part(index: int) -> KvPart:
        cache: PrefixCache = ChunkCache() if args.disable_radix_cache else RadixCache(ready.page_size, events)
        return KvPart(PageAllocator(pages_each, ready.page_size, first=index * pages_each), cache)

    unshared_from = args.ds_sparse_decode_threshold if args.enable_double_sparsity else None
    return KVManager([part(index) for index in range(args.num_kv_parts)], ready.max_running_requests, unshared_from)


def scheduler_config(
    args: ServerArgs, model: "ModelConfig", ready: ReadyInfo, ends: EndTokens, replica: int = 0
) -> "SchedulerConfig":
    from headrace.scheduler.state import SchedulerConfig

    return SchedulerConfig(
        policy=args.schedule_policy,
        chunk_tokens=ready.chunked_prefill_size,
        step_tokens=max(args.max_prefill_tokens, ready.max_running_requests),
        max_step_s=_seconds(ready.max_step_ms),
        default_step_s=_seconds(ready.max_step_ms) if args.max_step_ms is None else 0.0,
        max_running=ready.max_running_requests,
        # The front end refuses what exceeds the queue. All that it accepts may be sent to one replica.
        max_queued=ready.max_running_requests * args.num_replicas + args.max_queued_requests,
        max_steps_in_flight=1 if args.disable_overlap_schedule else max(2, args.pp_size),
        num_stages=args.pp_size,
        eos_token_ids=ends.eos,
        turn_end_ids=ends.turn,
        vocab_size=ready.vocab_size,
        stream_interval=args.stream_interval,
        priority_ageing_s=args.priority_ageing_s,
        preemption_threshold=args.priority_scheduling_preemption_threshold if args.enable_priority_preemption else 0,
        conservativeness=args.schedule_conservativeness,
        clip_estimate_tokens=args.clip_max_new_tokens_estimate,
        weight_update_timeout_s=args.weight_update_timeout_s,
        decode_log_interval=args.decode_log_interval,
        speculates=ready.speculative_algorithm != "off",
        whole_prompts=model.encoder is not None,
        encoder_rows=0 if ready.encoder is None else ready.encoder.num_rows,
        encoder_slices=1 if ready.encoder is None else ready.encoder.num_slices,
        whole_images=ready.encoder is not None and ready.encoder.whole_images,
        replica=replica,
        persists_tenants=args.kv_cache_persist_tenants,
        writes_back=args.kv_cache_write == "back",
        unknown_token_s=_token_s(args, ready),
        kv_on_update=args.kv_on_update,
        pin_share=args.kv_pin_share,
    )


def _token_s(args: ServerArgs, ready: ReadyInfo) -> float:
    """What computing a token of a prompt should take here."""
    kind = ready.device.split(":")[0]
    cores = (args.num_threads or len(os.sched_getaffinity(0))) if kind == "cpu" else 1
    return 2 * ready.num_parameters / (cores * _OPERATIONS_PER_S.get(kind, _OPERATIONS_PER_S["cuda"]))


def _seconds(milliseconds: int | None) -> float:
    """None: without a bound."""
    return math.inf if milliseconds is None else milliseconds / 1000


def _stop_checker(tokenizer: "Tokenizer", request: TokenizedGenerateReqInput) -> "StopMatcher":
    from headrace.text.incremental import IncrementalDecoder
    from headrace.text.stop import StopMatcher

    stop_text = request.task.stop_text
    assert stop_text is not None, request.rid
    decoder = IncrementalDecoder(
        tokenizer,
        skip_special_tokens=stop_text.skip_special_tokens,
        spaces_between_special_tokens=stop_text.spaces_between_special_tokens,
        context_ids=unpack_int32(request.content.context_ids),
    )
    return StopMatcher(stop_text.stop, stop_text.stop_regex, decoder)


@contextlib.contextmanager
def _heartbeats(to_tokenizer: Sender, process: str) -> Iterator[None]:
    """Send heartbeats from a thread, also while the loop is deep in a step."""
    stop = threading.Event()

    def beat() -> None:
        # The first at once: a process that was never heard is not known to be silent.
        to_tokenizer.send(Heartbeat(process))
        while not stop.wait(HEARTBEAT_S):
            to_tokenizer.send(Heartbeat(process))

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class _LastingThread:
    """One thread that stays, for work that makes much of many small pieces, such as a grammar library's vocabulary.

    malloc has a pool of memory (an arena) for each of a few threads, and keeps most of what is freed in it. A process that makes one engine after
    the other (--single-process) would otherwise do this work in another arena each time, until all have grown. A daemon, unlike the threads of an
    executor: a process that is told to end does not wait for it.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Be as new: the child of a fork has no thread, and perhaps a lock that nobody releases."""
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._begun = False
        self._lock = threading.Lock()

    def run(self, work: Callable[[], T]) -> "Future[T]":
        """Begin `work` when the thread is free. From any thread; the first call begins it."""
        future: Future[T] = Future()
        self._work.put(functools.partial(_do, work, future))
        with self._lock:
            if not self._begun:
                threading.Thread(target=self._run, name="lasting", daemon=True).start()
                self._begun = True
        return future

    def _run(self) -> None:
        while True:
            self._work.get()()


def _do(work: Callable[[], T], future: "Future[T]") -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # raised again by `result`
        future.set_exception(error)
        del work, future  # which the error's traceback would keep


_thread = _LastingThread()
run_in_lasting_thread = _thread.run
os.register_at_fork(after_in_child=_thread.forget)
