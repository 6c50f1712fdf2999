"""The composition root: makes the parts of an engine and connects them.

`launch_engine` starts the scheduler and the detokenizer (child processes, or threads with --single-process, see `processes`) and gives
the TokenizerManager that talks to them. What takes long to import is imported where it is used: the children start before the main
process imports its own parts.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from headrace import log
from headrace.checkpoint.names import resolve_model
from headrace.config.kv_events import check_pyzmq, read_kv_events
from headrace.config.machine import check_open_files, cuda_is_there, dist_secret, host_memory_bytes, with_nodes
from headrace.config.resolve import refuse_early
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, ExecutionError
from headrace.execution.model_source import args_of_update, sampling_defaults, with_encoder
from headrace.messages.channel import FanOutSender, IpcDir, Ports, Receiver
from headrace.messages.control import ReadyInfo
from headrace.metrics.watchdog import Watchdog
from headrace.processes import early
from headrace.processes.handshake import OnProgress
from headrace.processes.model_files import ModelFiles
from headrace.processes.parts import ChildParts, Parts
from headrace.processes.threads import ThreadParts

if TYPE_CHECKING:
    from headrace.frontend.media import PromptMedia
    from headrace.frontend.tokenizer_manager import TokenizerManager
    from headrace.metrics.spans import Spans

logger = log.get_logger(__name__)


@dataclass(slots=True)
class RunningEngine:
    """A started engine. The TokenizerManager belongs to the event loop that first uses it.

    on_death: set by the owner; called from a thread, after every waiter has been answered, when a part died.
    """

    args: ServerArgs
    tokenizer_manager: "TokenizerManager"
    ready: ReadyInfo
    files: ModelFiles
    parts: Parts
    resources: contextlib.ExitStack
    on_death: Callable[[], None] = lambda: None

    def died(self, message: str) -> None:
        """Answer every waiter with `message` and tell the owner. From any thread."""
        self.tokenizer_manager.fail_all(message)
        self.on_death()

    def shutdown(self) -> None:
        """End the parts. The TokenizerManager must have been closed, on its own loop. Idempotent."""
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
    if args.ray:
        raise ConfigError("--ray is for `headrace serve`; an engine runs in the process that starts it")
    args = with_nodes(args, os.environ)
    _check_node(args)
    check_open_files(args)
    args = with_encoder(args)
    _check_kv_events(args)
    with contextlib.ExitStack() as resources:
        spans = None
        if args.otlp_traces_endpoint is not None:
            from headrace.metrics.spans import Spans, otlp_exporter

            spans = Spans(args.served_name, otlp_exporter(args.otlp_traces_endpoint))
            resources.callback(spans.close)
        parts = _start_parts(args, resources)
        try:
            # First what may be refused: the children would say so only when they have imported torch.
            files = resources.enter_context(contextlib.closing(ModelFiles(args)))
            refuse_early(args, files.config, cuda_is_there(), host_memory_bytes())
            from_engine = parts.channels.receiver("to_tokenizer")
            files.check()
            _check_not_stopped(should_stop)
            media = files.open_media()
            import headrace.frontend.tokenizer_manager  # noqa: F401 needed next, and the children still load

            _check_not_stopped(should_stop)
            meanwhile()
            ready = parts.wait_ready(on_progress, should_stop)
            manager = _tokenizer_manager(ready, files, media, parts, from_engine, spans)
        except BaseException:
            parts.kill()
            raise
        engine = RunningEngine(args, manager, ready, files, parts, resources.pop_all())
        manager.on_broken = lambda: engine.on_death()
        parts.watch(manager, engine.died)
        return engine


def _check_node(args: ServerArgs) -> None:
    if args.num_nodes > 1 and args.node_rank:
        raise ConfigError(f"--node-rank {args.node_rank}: only node 0 serves; start the others with `headrace serve`")
    if args.num_nodes > 1 or args.disaggregation_mode != "null":
        dist_secret(args, os.environ)


def _check_kv_events(args: ServerArgs) -> None:
    config = read_kv_events(args.kv_events_config, args.num_replicas)
    if config is None:
        return
    check_pyzmq()
    if not config.is_local:
        logger.warning("KV events hold the tokens of all prompts: whoever reaches %s can read them", config.endpoint)


def _check_not_stopped(should_stop: Callable[[], bool]) -> None:
    if should_stop():
        raise ExecutionError("stopped during start-up")


def _start_parts(args: ServerArgs, resources: contextlib.ExitStack) -> Parts:
    """The engine's parts: processes, which begin to load the model, or threads, which do so in `wait_ready`.

    resources: owns the folder of the sockets.
    """
    if args.single_process:
        return ThreadParts(args)
    resolve_model(args.model_path)  # once, before the children do: it may have to join the files of a model
    ports = Ports.in_directory(resources.enter_context(IpcDir()), args.detokenize_in)
    parts = ChildParts(args, ports, args_of_update=args_of_update)
    early.end()
    return parts


def _tokenizer_manager(
    ready: ReadyInfo,
    files: ModelFiles,
    media: "PromptMedia",
    parts: Parts,
    from_engine: Receiver,
    spans: "Spans | None",
) -> "TokenizerManager":
    from headrace.frontend.tokenizer_manager import TokenizerManager
    from headrace.metrics.catalog import Metrics
    from headrace.sampling.params import GenerationDefaults
    from headrace.text.detokenizer_manager import DetokenizerManager

    args, tokenizer = files.args, files.tokenizer
    defaults = sampling_defaults(args, files.config)
    if defaults.not_followed:
        logger.warning("the model has sampling settings that are not supported: %s", ", ".join(defaults.not_followed))
    schedulers = [parts.channels.sender("to_scheduler", replica) for replica in range(args.num_replicas)]
    to_detokenizer = parts.channels.sender("to_detokenizer")
    manager = TokenizerManager(
        args,
        ready,
        tokenizer,
        schedulers[0],
        from_engine,
        # Of requests that do not give their own.
        defaults=msgspec.convert(defaults, GenerationDefaults, from_attributes=True),
        pooling=files.pooling,
        media=media.as_loaded(ready),
        metrics=Metrics(args.served_name),
        to_detokenizer=to_detokenizer,
        more_schedulers=schedulers[1:],
        watchdog=Watchdog("tokenizer manager", args.soft_watchdog_timeout_s),
        spans=spans,
    )
    manager.metrics.processes.watch(parts.processes)
    files.watch_templates(manager.count_template_kill)
    if args.detokenize_in == "main":
        faults = args.enable_fault_injection
        manager.detokenize_with(
            DetokenizerManager(tokenizer, to_detokenizer, FanOutSender(schedulers), enable_faults=faults)
        )
    return manager
