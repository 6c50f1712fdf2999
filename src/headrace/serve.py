"""`headrace serve`: an engine behind HTTP, from the first signal handler to the exit code.

Reads on in `launch.py` (how the engine is put together) and `processes/` (what its parts run). Runs in the main process.
"""

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace import garbage, log
from headrace.config.machine import check_open_files, with_nodes
from headrace.config.server_args import ServerArgs
from headrace.errors import ExecutionError
from headrace.execution.model_source import sampling_defaults
from headrace.launch import RunningEngine, launch_engine
from headrace.processes import lifeline
from headrace.processes.handshake import loading_bar
from headrace.processes.http_workers import HttpWorkers
from headrace.processes.model_files import reply_limit
from headrace.processes.parts import ChildParts

if TYPE_CHECKING:
    from headrace.frontend.tokenizer_manager import TokenizerManager
    from headrace.server.auth import ApiKeys
    from headrace.server.context import ServerStatus
    from headrace.server.listener import Server

logger = log.get_logger(__name__)

_EXPLAINED = ("activations", "quantization", "kv_cache_dtype", "output projection")
"""Choices that the start-up summary explains."""

OWNER_GONE_S = (0.25, 0.75)
"""After its owner has died, a server drains for the first time, ends its requests for the second, and then exits."""


def launch_server(args: ServerArgs, on_started: Callable[[str], None] | None = None) -> int:
    """Serve over HTTP until told to stop. Returns the exit code: 0 after a drain, 1 when a part of the engine died.

    on_started: called with the URL once requests are accepted; default: the start-up summary on stderr.
    """
    from headrace.server.address import bind, check_certificate

    log.configure(args.log_level, "main", args.log_format)
    args = with_nodes(args, os.environ)
    check_open_files(args, with_server=True)
    check_certificate(args)
    if args.node_rank:
        from headrace.processes.node_process import run_node

        lifeline.follow_owner(_leave_with_owner)
        return run_node(args)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    lifeline.follow_owner(_leave_with_owner)
    started_s = time.monotonic()
    garbage.pause()
    # Bound first: a port in use is found before the model is loaded, and clients that come early wait.
    listening = bind(args.host, args.port)
    with loading_bar() as on_progress:
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
    """Import what serving needs, which takes a second, while the children load."""
    import uvloop  # noqa: F401

    import headrace.server.app
    import headrace.server.listener  # noqa: F401

    garbage.settle()


def _leave_with_owner() -> None:
    """Stop as on two signals, then exit in any case. Runs in a thread."""
    for wait_s in OWNER_GONE_S:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(wait_s)
    os._exit(1)


async def _serve(
    engine: RunningEngine, listening: socket.socket, on_started: Callable[[str], None], stopping: threading.Event
) -> int:
    """Serve until a signal or the death of a part. Returns the exit code. stopping: a signal came while the engine started."""
    from headrace.server.context import ServerStatus

    manager = engine.tokenizer_manager
    status = ServerStatus()
    server, keys = _http_front(engine, listening, status)
    ending = Ending(manager, server, status, engine.args.drain_timeout_s)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.on_signal)
    if keys is not None:
        loop.add_signal_handler(signal.SIGHUP, keys.reload)
    engine.on_death = ending.on_death
    manager.start()
    garbage.settle()  # little: most was there when `_import_server` did so
    if stopping.is_set():
        return 0
    collecting = loop.create_task(garbage.keep_collecting())
    await server.serve(lambda: on_started(server.url))
    collecting.cancel()
    ending.cancel()
    await manager.close()
    return ending.exit_code


def _http_front(
    engine: RunningEngine, listening: socket.socket, status: "ServerStatus"
) -> "tuple[Server | HttpWorkers, ApiKeys | None]":
    """What answers HTTP, in this process or in HTTP workers, and the API keys that it checks."""
    from headrace.server.app import create_app
    from headrace.server.auth import open_keys
    from headrace.server.listener import Server

    args, manager, parts = engine.args, engine.tokenizer_manager, engine.parts
    if isinstance(parts, ChildParts) and args.tokenizer_worker_num > 1:
        keys = open_keys(args)
        workers = HttpWorkers(args, manager, parts.channels, parts.ports, listening, keys, status)
        workers.on_death = lambda message: engine.on_death()
        return workers, keys
    app = create_app(manager, args, engine.files.served(engine.ready), status)
    return Server(app, args, listening=listening), app.state.keys


class Ending:
    """How a server ends. The first signal lets running requests finish, the second one ends them; a dead part leaves none to wait for.

    Made in the event loop. drain_timeout_s: how long running requests may take.
    """

    def __init__(
        self,
        manager: "TokenizerManager",
        server: "Server | HttpWorkers",
        status: "ServerStatus",
        drain_timeout_s: float,
    ) -> None:
        self.exit_code = 0
        self._manager = manager
        self._server = server
        self._status = status
        self._drain_timeout_s = drain_timeout_s
        self._loop = asyncio.get_running_loop()
        self._drain: asyncio.Task[None] | None = None

    def on_signal(self) -> None:
        """SIGTERM or SIGINT, in the loop."""
        if self._drain is not None:
            self._server.shutdown(force=True)
            return
        logger.info(
            "stopping: running requests have %.0f s to finish; a second signal ends them at once", self._drain_timeout_s
        )
        self._status.draining = True
        self._drain = self._loop.create_task(self._drain_and_stop())

    def on_death(self) -> None:
        """A part has died for good. From any thread."""
        self.exit_code = 1
        self._status.draining = True
        # Waiters have been answered; their replies are written before the server goes.
        self._loop.call_soon_threadsafe(self._server.shutdown)

    def cancel(self) -> None:
        if self._drain is not None:
            self._drain.cancel()

    async def _drain_and_stop(self) -> None:
        await self._manager.drain(self._drain_timeout_s)
        self._server.shutdown()


def _print_summary(engine: RunningEngine, url: str, seconds: float) -> None:
    ready = engine.ready
    gib = 2**30
    ranks = f" on {engine.args.num_ranks} ranks" if engine.args.num_ranks > 1 else ""
    if engine.args.num_nodes > 1:
        ranks += f" of {engine.args.num_nodes} nodes"
    limit = reply_limit(engine.args)
    pooling, has_kv = engine.files.pooling, engine.files.config.encoder is None
    cache = f"{ready.max_total_tokens} tokens in pages of {ready.page_size} ({ready.kv_bytes / gib:.2f} GiB)"
    rows = [
        ("model", f"{engine.args.served_name} ({ready.model_class}, {ready.weight_bytes / gib:.2f} GiB{ranks})"),
        ("precision", f"{ready.precision}, {f'{ready.kv_cache_dtype} KV, ' if has_kv else ''}on {ready.device}"),
    ]
    for choice in ready.decisions:
        if choice.startswith(_EXPLAINED) and (has_kv or not choice.startswith("kv_cache")):
            rows.append(("because", choice))
        for name, begin in (("tensors", "tensors of the file: "), ("vision", "vision encoder: ")):
            if choice.startswith(begin):
                rows.append((name, choice.removeprefix(begin)))
    if has_kv:
        rows.append(("KV cache", cache))
    rows.append(("context", f"{ready.context_length} tokens, up to {ready.max_running_requests} requests at once"))
    rows.append(("attention", ready.attention))
    if ready.speculation != "off":
        rows.append(("drafts", ready.speculation))
    if pooling is not None:
        rows.append(("makes", pooling.summary()))
    else:
        rows.append(("sampling", sampling_defaults(engine.args, engine.files.config).summary()))
        if limit:
            rows.append(("replies", f"end at {limit} tokens where a request gives no limit (--default-max-tokens)"))
    rows.append(("URL", url))
    if engine.args.log_format == "json":
        told = "; ".join(f"{name}: {value}" for name, value in rows)
        logger.info("Headrace is ready after %.1f s; %s", seconds, told, extra=log.with_fields({"url": url}))
        return
    lines = [f"Headrace is ready after {seconds:.1f} s", *(f"  {name:<10} {value}" for name, value in rows)]
    print("\n".join(lines), file=sys.stderr, flush=True)
