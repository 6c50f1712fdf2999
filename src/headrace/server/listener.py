"""The HTTP server: runs the application in uvicorn on a bound socket, until it is told to stop, with limits on each connection.

The caller handles signals: uvicorn's own handlers are off. Runs in the thread that calls `Server.run`; `shutdown` may
be called from any thread. Owns the limits on the time that a request takes to arrive, the size of its headers, the connections of each tenant, and
clients that do not read. Does not look at bodies or routes.

```
 connected ──first byte──> headers ──> body ──> response ──> idle (keep-alive, timed by uvicorn) ──first byte──> headers
     └────── HEADER_TIMEOUT_S ──┘       └ BODY_TIMEOUT_S,         └ WRITE_STALL_S while the send buffer stays full
                                          BODY_WINDOW_S
```
"""

import asyncio
import logging
import resource
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.config.server_args import ServerArgs
from headrace.errors import CapacityError, ConfigError, HeadraceError
from headrace.log import get_logger
from headrace.server.address import bind, check_certificate, local_url, turn_of_host
from headrace.server.body import SMALL_BODY_BYTES
from headrace.server.error_forms import ApiError, openai_error
from headrace.server.http import Scope
from headrace.turns import Beginnings, Shares, asking

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

HEADER_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 30.0
BODY_WINDOW_S = 5.0
LEAST_BODY_RATE = 4 << 10
MAX_SLOW_WINDOWS = 2
"""A body of which more than `SMALL_BODY_BYTES` have arrived, which then stand in memory, is refused when fewer bytes a second come in so many windows
after each other."""

WRITE_STALL_S = 20.0
"""A client that leaves the send buffer full for this long is disconnected, and its request aborted."""

LINGER_S = 1.0
"""After a refusal, discard what the client still sends for this long before closing the connection."""

MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 128
MAX_URL_BYTES = 16 << 10
MAX_CONNECTIONS = 10_000
OWN_CONNECTIONS_PER_FREE = 16
"""One client may have 94 % of the connections: many are behind one address."""
MAX_LINGERING = 64
"""Most refused connections that may linger."""
MAX_PIPELINED = 16
"""Most pipelined requests behind the one being answered; beyond this, the connection is not read."""

PROBES = frozenset({"/health", "/ping", "/ready"})
"""Routes that answer at once, by which others see that the server lives."""

_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    414: b"URI Too Long",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


def max_connections() -> int:
    """Most open connections; leaves file descriptors for everything else."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = min(256, files // 4)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files - spare)


_TOO_MANY = "too many connections, try again later"


class _Refused(Exception): ...


class LimitedProtocol(HttpToolsProtocol):
    """A connection with limits on slow, large and unread traffic.

    It counts as one of its client's address until a request says whose it is (`belong_to`). shares, beginnings: of all connections of the server.
    turn_of: whose turn a request takes.
    """

    def __init__(
        self, *args: Any, shares: Shares, beginnings: Beginnings, turn_of: Callable[[Any], str], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._shares = shares
        self._beginnings = beginnings
        self._turn_of = turn_of
        self._tenant: str | None = None  # whose connection it is; None = refused, or gone
        self._timers: dict[Literal["deadline", "stall", "rate"], asyncio.TimerHandle] = {}
        self._body_bytes = 0
        self._window_bytes = 0  # of the body, in the window of its rate
        self._num_slow = 0  # windows after each other
        self._cycles: list[RequestResponseCycle] = []
        self._receiving = False  # between the first byte of a request and its last
        self._lingering = False
        self._in_headers = True
        self._header_bytes = 0
        self._num_headers = 0
        self._refusal = (400, "the request is not valid HTTP")

    # Called by the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; beyond the share of its address it is refused and closed."""
        super().connection_made(transport)
        tenant = turn_of_host(self.client[0] if self.client else "")
        if not self._shares.take(tenant, 1):
            self._refuse(503, _TOO_MANY, b"retry-after: 1\r\n")
            return
        self._tenant = tenant
        self._expect(HEADER_TIMEOUT_S)

    def belong_to(self, tenant: str, scope: Scope) -> None:
        """The request of this ASGI scope is a tenant's, and so is the connection from now on. Raises CapacityError when it has too many."""
        if tenant == self._tenant or self._tenant is None:
            return
        self._shares.give_back(self._tenant, 1)
        if self._shares.take(tenant, 1, weight=asking().weight):
            self._tenant = tenant
            return
        self._shares.take("", 1)
        self._tenant = ""
        for cycle in self._cycles:
            if cycle.scope is scope:
                cycle.keep_alive = False
        raise CapacityError(_TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: cancel all timers."""
        for name in list(self._timers):
            self._cancel(name)
        if self._tenant is not None:
            self._shares.give_back(self._tenant, 1)
            self._tenant = None  # a request that begins only now would take another place for it
        super().connection_lost(exc)
        # uvicorn notifies only the newest request, but an earlier one may be the one being answered.
        for cycle in self._cycles:
            cycle.disconnected = cycle.disconnected or not cycle.response_complete
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse bytes of requests. The time limit of the headers starts with their first byte."""
        if self.parser is None or self._lingering or self.transport.is_closing():
            return
        if not self._receiving and "deadline" not in self._timers:
            self._expect(HEADER_TIMEOUT_S)
        super().data_received(data)
        if not self._receiving or self._lingering or self.transport.is_closing():
            return
        if self._in_headers:
            # The parser reports only complete headers, so incomplete ones are counted by the bytes read.
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes")
        elif "rate" not in self._timers and self._body_bytes > SMALL_BODY_BYTES:
            self._expect_more()

    def pause_writing(self) -> None:
        """The send buffer is full: the client reads slower than tokens come."""
        super().pause_writing()
        if "stall" not in self._timers:
            self._timers["stall"] = self.loop.call_later(WRITE_STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel("stall")
        super().resume_writing()

    # Called by the parser.

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self.scope["headrace.belong_to"] = self.belong_to  # type: ignore[typeddict-unknown-key]
        self._receiving = True
        self._in_headers = True
        self._header_bytes = 0
        self._num_headers = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._refusal = (414, f"the URL is longer than {MAX_URL_BYTES} bytes")
            raise _Refused

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._header_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS or self._header_bytes > MAX_HEADER_BYTES:
            limit = f"{MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes"
            self._refusal = (431, f"more headers than the limit of {limit}")
            raise _Refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._body_bytes = self._window_bytes = self._num_slow = 0
        self._expect(BODY_TIMEOUT_S)
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            # uvicorn stops reading after a pipelined request and would then not notice a disconnect.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._window_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._receiving = False
        self._cancel("deadline")
        self._cancel("rate")
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP, or a request that exceeds a limit, and close."""
        self._refuse(*self._refusal)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """A request may begin: at once, or when it is its turn. Probes have a turn of their own."""
        begin = super()._start_asgi_task

        def begin_unless_gone() -> None:
            if not cycle.disconnected:
                begin(cycle, app)

        self._beginnings.add(begin_unless_gone, lambda: (self._turn_of(cycle.scope), cycle.scope["path"] in PROBES))

    @property
    def _before_body(self) -> bool:
        """Whether `cycle` does not belong to the arriving request yet."""
        return self._in_headers or not self._receiving

    # Timers.

    def _expect(self, seconds: float) -> None:
        self._cancel("deadline")
        self._timers["deadline"] = self.loop.call_later(seconds, self._late, seconds)

    def _late(self, seconds: float) -> None:
        self._cancel("deadline")
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.flow.read_paused or self.pipeline or (self._before_body and answering):
            # An earlier request of this connection is still being answered: this one is not late until that is done.
            self._expect(seconds)
            return
        self._refuse(408, f"the request did not arrive within {seconds:g} s")

    def _expect_more(self) -> None:
        self._cancel("rate")
        self._window_bytes = 0
        self._timers["rate"] = self.loop.call_later(BODY_WINDOW_S, self._check_rate)

    def _check_rate(self) -> None:
        self._cancel("rate")
        if self.transport.is_closing():
            return
        # What is not read, because the application has not taken what is there, is not late.
        is_slow = not self.flow.read_paused and self._window_bytes < LEAST_BODY_RATE * BODY_WINDOW_S
        self._num_slow = self._num_slow + 1 if is_slow else 0
        if self._num_slow < MAX_SLOW_WINDOWS:
            self._expect_more()
            return
        self._refuse(408, f"the body came slower than {LEAST_BODY_RATE >> 10} KiB a second")

    def _cancel(self, name: Literal["deadline", "stall", "rate"]) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _refuse(self, status: int, message: str, headers: bytes = b"") -> None:
        """Send an error unless a reply is in progress, and close."""
        self._cancel("deadline")
        self._cancel("rate")
        self._unset_keepalive_if_required()
        if self.cycle is None or (
            self.cycle.response_complete if self._before_body else not self.cycle.response_started
        ):
            kind = "overloaded_error" if status == 503 else "invalid_request_error"
            body = openai_error(int(status), ApiError(message, kind, None, None))
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\n"
                b"%bconnection: close\r\n\r\n%b"
                % (status, _PHRASES[status], len(body), uuid.uuid4().hex.encode(), headers, body)
            )
            if len(self.connections) < self._shares.held + MAX_LINGERING:
                self._linger()
                return
        self.transport.close()

    def _linger(self) -> None:
        """Close in two steps: closing while the client still sends would make it lose the reply."""
        self._lingering = True
        if self.cycle is not None and not self.cycle.response_complete:
            # The application waits for the rest of the body, which will not be read.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof():  # TLS has no half-closed connections
            self.transport.write_eof()
        self.flow.resume_reading()
        self._timers["deadline"] = self.loop.call_later(LINGER_S, self.transport.close)


class Server:
    """Serves one application on one socket. The port is bound when this is made, so `port` is the real one.

    started: set once requests are accepted. url: for clients on this machine.
    listening: the socket from `bind`, if the port was bound before the model was loaded; clients then wait instead of being refused.
    """

    def __init__(self, app: FastAPI, args: ServerArgs, listening: socket.socket | None = None) -> None:
        """Bind. Raises ConfigError when the address or the certificate cannot be used."""
        check_certificate(args)
        self.app = app
        self.started = threading.Event()
        self._socket = listening if listening is not None else bind(args.host, args.port)
        self.host = args.host
        self.port: int = self._socket.getsockname()[1]
        self.url = local_url(args, self.port)
        shares = Shares(max_connections(), own_per_free=OWN_CONNECTIONS_PER_FREE)
        config = uvicorn.Config(
            app,
            http=partial(LimitedProtocol, shares=shares, beginnings=Beginnings(), turn_of=app.state.turn_of),  # type: ignore[arg-type]
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
        self._uvicorn = _Uvicorn(config, self.started)

    def run(self, on_started: Callable[[], None] = lambda: None) -> None:
        """Serve in an event loop of its own until stopped. `on_started` is called in the loop once requests are accepted.

        Raises any error of the application's start.
        """
        self._uvicorn.on_started = on_started
        with self._own_errors():
            self._uvicorn.run(sockets=[self._socket])

    async def serve(self, on_started: Callable[[], None] = lambda: None) -> None:
        """Like `run`, in the running event loop."""
        self._uvicorn.on_started = on_started
        with self._own_errors():
            await self._uvicorn.serve(sockets=[self._socket])

    def shutdown(self, force: bool = False) -> None:
        """Stop: refuse new connections, close idle ones, give replies in progress `CLOSE_TIMEOUT_S`; with `force`, do not wait."""
        self._uvicorn.force_exit = self._uvicorn.force_exit or force
        self._uvicorn.leave()

    @contextmanager
    def _own_errors(self) -> Generator[None, None, None]:
        """uvicorn ends the process when the application cannot start; here its error is raised instead. Its log becomes ours."""
        logger = logging.getLogger("uvicorn")
        logger.handlers[:] = [_Forward()]
        logger.setLevel(logging.WARNING)
        logger.propagate = False
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

    def __init__(self, config: uvicorn.Config, accepting: threading.Event) -> None:
        super().__init__(config)
        self.on_started: Callable[[], None] = lambda: None
        self._accepting = accepting
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
            self._accepting.set()
            self.on_started()

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
