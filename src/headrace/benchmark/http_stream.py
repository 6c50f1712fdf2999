"""One POST whose reply is timed piece by piece, at less cost than a general client's.

The client of a benchmark often shares the machine with the server, so its work per token slows the server down. Owns one
connection per request. HTTP is read by httptools, the parser of uvicorn. Runs in an event loop.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

CONNECT_S = 10.0


@dataclass(slots=True)
class StreamReply:
    """What was received: pieces of the body, each with its time of arrival (perf_counter). error: why the reply is not complete."""

    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: Exception | None = None

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class _Connection(asyncio.Protocol):
    """Sends `request` once it is connected; `done` is the reply, or why there is none."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[StreamReply] = asyncio.get_running_loop().create_future()
        self._request = request
        self._reply = StreamReply()
        self._parser = httptools.HttpResponseParser(self)
        self._now_s = 0.0
        self._has_length = False
        self._in_body = False

    # What the transport calls.

    def connection_made(self, transport: asyncio.WriteTransport) -> None:  # type: ignore[override]
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail(ConnectionError("the reply is not HTTP"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended. Without Content-Length or chunks, this is how a body ends."""
        if exc is None and self._in_body and not self._has_length:
            self.on_message_complete()
        self._fail(exc or ConnectionResetError("the reply ended early"))

    # What the parser calls.

    def on_header(self, name: bytes, _value: bytes) -> None:
        self._has_length = self._has_length or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()
        self._in_body = True

    def on_body(self, piece: bytes) -> None:
        self._reply.pieces.append((self._now_s, piece))

    def on_message_complete(self) -> None:
        """The message is complete. A status below 200 only announces the real reply, which follows."""
        if not self.done.done() and self._reply.status >= 200:
            self.done.set_result(self._reply)

    def _fail(self, error: Exception) -> None:
        if self.done.done():
            return
        if self._in_body:
            self._reply.error = error
            self.done.set_result(self._reply)
        else:
            self.done.set_exception(error)


async def post(url: str, payload: bytes, headers: Mapping[str, str], timeout_s: float | None) -> StreamReply:
    """Send `payload` as JSON over a connection of its own and read the reply until it ends or breaks.

    Raises OSError when there is no connection or no reply, TimeoutError after `timeout_s` seconds in all (None = never), or CONNECT_S without
    a connection.
    """
    parts = urlsplit(url)
    fields = {
        "Host": parts.netloc.rpartition("@")[2],
        "Content-Type": "application/json",
        "Content-Length": str(len(payload)),
        "Connection": "close",
        **headers,
    }
    target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    head = "".join([f"POST {target} HTTP/1.1\r\n", *(f"{name}: {value}\r\n" for name, value in fields.items()), "\r\n"])
    is_tls = parts.scheme == "https"
    async with asyncio.timeout(timeout_s):
        async with asyncio.timeout(CONNECT_S):
            transport, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(head.encode("latin-1") + payload),
                parts.hostname or "",
                parts.port or (443 if is_tls else 80),
                ssl=is_tls or None,
            )
        try:
            return await connection.done
        finally:
            transport.close()
