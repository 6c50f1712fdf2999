"""The main process of a node that does not serve: it holds followers of node 0's scheduler, answers /health, and ends with the others.

A thread watches the followers and the connection to node 0; the event loop serves HTTP.
"""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from headrace import log
from headrace.config.machine import dist_secret
from headrace.config.server_args import ServerArgs
from headrace.errors import ExecutionError, HeadraceError
from headrace.messages.channel import IpcDir, Ports
from headrace.processes.child import ChildProcess, stop_all
from headrace.processes.numa import bindings
from headrace.processes.rank_groups import connect, descriptors_of, ranks_here, starts_here
from headrace.processes.recovery import describe_exit

if TYPE_CHECKING:
    from fastapi import FastAPI

    from headrace.distributed.network_follower import FollowerGroup

logger = log.get_logger(__name__)

_CHECK_S = 0.1
_LAST_S = 3.0
"""How long followers may take to end after node 0 has, and how long after a signal node 0 may take beyond --drain-timeout-s."""


def run_node(args: ServerArgs) -> int:
    """Hold this node's ranks until node 0 ends. Returns the exit code: 0 if it ended well, 1 if a rank or a link was lost.

    Raises ConfigError or ModelError when a rank cannot start.
    """
    import uvloop

    from headrace.server.address import bind
    from headrace.server.listener import Server

    dist_secret(args, os.environ)  # refused before anything is started
    listening = bind(args.host, args.port)
    with contextlib.ExitStack() as resources:
        node = Node(args, Ports.in_directory(resources.enter_context(IpcDir())))
        resources.callback(node.kill)
        server = Server(_app(node), args, listening=listening)
        node.on_end = server.shutdown

        async def serve() -> None:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, node.on_signal)
            logger.info(
                "node %d of %d has ranks %s; it answers /health at %s, and node 0 at %s serves",
                args.node_rank,
                args.num_nodes,
                ", ".join(map(str, ranks_here(args))),
                server.url,
                args.dist_init_addr,
            )
            await server.serve(node.start)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())
    if isinstance(node.error, ExecutionError):
        logger.error("%s", node.error.message)
    elif node.error is not None:
        raise node.error
    return node.exit_code


class Node:
    """The followers of a node. on_end: called from a thread when they have ended. error: why, if it is to be raised."""

    def __init__(self, args: ServerArgs, ports: Ports) -> None:
        self.on_end: Callable[[], None] = lambda: None
        self.exit_code = 1
        self.error: HeadraceError | None = None
        self.is_whole = False
        self._args = args
        self._leave_s: float | None = None
        starts = starts_here(args, bindings(args))
        try:
            self._followers = [ChildProcess("follower", args, ports, rank=start) for start in starts]
        finally:
            for fd in descriptors_of(starts):
                os.close(fd)
        self._thread = threading.Thread(target=self._run, name="node", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def on_signal(self) -> None:
        """SIGTERM or SIGINT: stay until node 0 has drained, since its requests need us; the second one ends it, or the first while it starts."""
        now = time.monotonic()
        if self._leave_s is None and self.is_whole:
            logger.info("stopping when node 0 does; a second signal ends this node at once")
            self._leave_s = now + self._args.drain_timeout_s + _LAST_S
        else:
            self._leave_s = now

    def kill(self) -> None:
        for follower in self._followers:
            follower.kill()

    def _run(self) -> None:
        try:
            self._hold()
        except HeadraceError as error:
            self.error = error
        finally:
            self.is_whole = False
            self.kill()
            self.on_end()

    def _hold(self) -> None:
        """Until the end. Raises what a follower says that cannot start, ExecutionError if the group breaks."""
        connecting = _connecting(self._args)

        def has_failed() -> bool:
            return connecting.done() and connecting.exception() is not None

        try:
            for follower in self._followers:
                follower.wait_ready(should_stop=lambda: self._must_leave() or has_failed())
        except ExecutionError:
            if self._must_leave():
                self.exit_code = 0
                return
            if has_failed():
                connecting.result()  # raises the cause
            raise
        with connecting.result() as group:
            self.is_whole = True
            logger.info("all ranks are ready")
            self._watch(group)

    def _watch(self, group: "FollowerGroup") -> None:
        while not self._must_leave():
            reason = group.failure()
            if group.has_ended:
                stop_all(self._followers, _LAST_S)
                self.exit_code = 0
                return
            if reason is not None:
                raise ExecutionError(f"the group of ranks is broken: {reason}")
            for follower in self._followers:
                code = follower.exit_code
                if code:
                    raise ExecutionError(f"{follower.name} died ({describe_exit(code)})")
            time.sleep(_CHECK_S)

    def _must_leave(self) -> bool:
        return self._leave_s is not None and time.monotonic() >= self._leave_s


def _connecting(args: ServerArgs) -> "Future[FollowerGroup]":
    """Connects to node 0 in a thread, while the followers load."""
    future: Future[FollowerGroup] = Future()

    def run() -> None:
        try:
            future.set_result(connect(args, None, {}))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="node 0", daemon=True).start()
    return future


def _app(node: Node) -> "FastAPI":
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.turn_of = lambda scope: ""

    @app.get("/health")
    async def health() -> JSONResponse:
        if node.is_whole:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable"}, 503, {"retry-after": "1"})

    return app
