"""The HTTP server: the listening socket, uvicorn's loop around the application, start and stop.

Signals are the caller's: uvicorn's own handlers are off. Runs in the thread that calls `Server.run`; `shutdown` may
be called from any thread.
"""

import logging
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, HeadraceError
from headrace.log import get_logger
from headrace.server.address import bind, local_url
from headrace.server.connection import LimitedProtocol

log = get_logger(__name__)

CLOSE_TIMEOUT_S = 3.0
"""After `shutdown`, replies that are still being written have so long. Draining running requests is the caller's, before it."""

SWITCH_INTERVAL_S = 0.0005
"""How long another thread keeps Python's lock while the event loop waits for it, in the whole process.

The loop asks for the lock again after every call of the system. At Python's 5 ms a small request waits dozens of times 5 ms
beside a thread that decodes or tokenizes a large one.
"""


class Server:
    """Serves one application on one socket. The port is bound when this is made, so `port` is the real one.

    should_exit: asked about ten times a second; True stops the server. started: set once requests are accepted.
    listening: what `bind` gave, when the port was taken before the model was loaded; clients then wait instead of being refused.
    """

    def __init__(
        self,
        app: FastAPI,
        args: ServerArgs,
        should_exit: Callable[[], bool] = lambda: False,
        listening: socket.socket | None = None,
    ) -> None:
        """Bind. Raises ConfigError when the address cannot be used."""
        self.app = app
        self.started = threading.Event()
        self._socket = listening if listening is not None else bind(args.host, args.port)
        self.host = args.host
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
            timeout_keep_alive=args.keep_alive_timeout_s,
            timeout_graceful_shutdown=int(CLOSE_TIMEOUT_S),
            backlog=2048,
        )
        self._uvicorn = _Uvicorn(config, self._on_started, should_exit)
        self._on_started_callback: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        """Where clients on this machine reach it."""
        return local_url(self.host, self.port)

    def run(self, on_started: Callable[[], None] = lambda: None) -> None:
        """Serve in an event loop of its own until stopped. `on_started` is called in the loop once requests are accepted.

        Raises what the start of the application raised.
        """
        self._on_started_callback = on_started
        with self._own_errors():
            self._uvicorn.run(sockets=[self._socket])

    async def serve(self, on_started: Callable[[], None] = lambda: None) -> None:
        """As `run`, in the running event loop."""
        self._on_started_callback = on_started
        with self._own_errors():
            await self._uvicorn.serve(sockets=[self._socket])

    def shutdown(self, force: bool = False) -> None:
        """Stop: no new connections, idle ones closed, replies under way get `CLOSE_TIMEOUT_S`; `force` does not wait."""
        self._uvicorn.force_exit = self._uvicorn.force_exit or force
        self._uvicorn.should_exit = True

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
    """uvicorn without signal handlers, with a callback at the start and a question at every tick."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None], ask_exit: Callable[[], bool]) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._ask_exit = ask_exit

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn leaves this out, and the application's task then ends with a traceback.
            await self.lifespan.shutdown()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._ask_exit()


class _Forward(logging.Handler):
    """Hands uvicorn's warnings and errors to our logger."""

    def emit(self, record: logging.LogRecord) -> None:
        if log.isEnabledFor(record.levelno):
            log.handle(record)


def _adopt_uvicorn_log() -> None:
    logger = logging.getLogger("uvicorn")
    logger.handlers[:] = [_Forward()]
    logger.setLevel(logging.WARNING)
    logger.propagate = False
