"""The HTTP server: runs the application in uvicorn on a bound socket, until it is told to stop.

The caller handles signals: uvicorn's own handlers are off. Runs in the thread that calls `Server.run`; `shutdown` may
be called from any thread.
"""

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

import uvicorn
from fastapi import FastAPI

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, HeadraceError
from headrace.log import get_logger
from headrace.server.address import bind, local_url
from headrace.server.connection import LimitedProtocol
from headrace.server.tls import check_certificate, uses_tls

log = get_logger(__name__)

CLOSE_TIMEOUT_S = 3.0
"""After `shutdown`, replies may still be written for this long. The caller drains running requests before it."""

SWITCH_INTERVAL_S = 0.0005
"""How long another thread may keep the GIL while the event loop waits for it (a setting of the whole process).

The loop needs the GIL again after every system call. With Python's default of 5 ms, a small request would wait dozens of times 5 ms
beside a thread that decodes or tokenizes a large one.
"""


TICK_S = 1.0
"""How often uvicorn renews the date that replies carry."""


class Server:
    """Serves one application on one socket. The port is bound when this is made, so `port` is the real one.

    started: set once requests are accepted.
    listening: the socket from `bind`, if the port was bound before the model was loaded; clients then wait instead of being refused.
    """

    def __init__(
        self,
        app: FastAPI,
        args: ServerArgs,
        listening: socket.socket | None = None,
    ) -> None:
        """Bind. Raises ConfigError when the address or the certificate cannot be used."""
        check_certificate(args)
        self.app = app
        self.started = threading.Event()
        self._socket = listening if listening is not None else bind(args.host, args.port)
        self.host = args.host
        self._scheme = "https" if uses_tls(args) else "http"
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=LimitedProtocol,
            ws="none",
            loop="uvloop",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ssl_certfile=args.ssl_certfile,
            ssl_keyfile=args.ssl_keyfile,
            timeout_keep_alive=args.keep_alive_timeout_s,
            timeout_graceful_shutdown=int(CLOSE_TIMEOUT_S),
            backlog=2048,
        )
        self._uvicorn = _Uvicorn(config, self._on_started)
        self._on_started_callback: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        """URL for clients on this machine."""
        return local_url(self.host, self.port, self._scheme)

    def run(self, on_started: Callable[[], None] = lambda: None) -> None:
        """Serve in an event loop of its own until stopped. `on_started` is called in the loop once requests are accepted.

        Raises any error of the application's start.
        """
        self._on_started_callback = on_started
        with self._own_errors():
            self._uvicorn.run(sockets=[self._socket])

    async def serve(self, on_started: Callable[[], None] = lambda: None) -> None:
        """Like `run`, in the running event loop."""
        self._on_started_callback = on_started
        with self._own_errors():
            await self._uvicorn.serve(sockets=[self._socket])

    def shutdown(self, force: bool = False) -> None:
        """Stop: refuse new connections, close idle ones, give replies in progress `CLOSE_TIMEOUT_S`; with `force`, do not wait."""
        self._uvicorn.force_exit = self._uvicorn.force_exit or force
        self._uvicorn.leave()

    def _on_started(self) -> None:
        self.started.set()
        self._on_started_callback()

    @contextmanager
    def _own_errors(self) -> Generator[None, None, None]:
        """uvicorn ends the process when the application cannot start; here its error is raised instead."""
        _adopt_uvicorn_log()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            yield
        except SystemExit:
            error = self.app.state.startup_error
            raise (error if isinstance(error, HeadraceError) else ConfigError("the server did not start")) from error
        finally:
            self._socket.close()


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers, with a callback at the start. It is told to leave; uvicorn's own loop asks ten times a second."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """Stop serving. From any thread; idempotent."""
        self.should_exit = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._leaving.set)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn does not do this, and the application's task would then end with a traceback.
            await self.lifespan.shutdown()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # uvicorn renews the date at tick 0
            with suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), TICK_S)


class _Forward(logging.Handler):
    """Passes uvicorn's warnings and errors to our logger."""

    def emit(self, record: logging.LogRecord) -> None:
        if log.isEnabledFor(record.levelno):
            log.handle(record)


def _adopt_uvicorn_log() -> None:
    logger = logging.getLogger("uvicorn")
    logger.handlers[:] = [_Forward()]
    logger.setLevel(logging.WARNING)
    logger.propagate = False
