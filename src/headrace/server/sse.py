"""Server-sent events: writes a generator of outputs as an event stream, with a keep-alive whenever it has said nothing for a while.

Runs in the event loop that serves HTTP. Frames are bytes made by the caller; nothing here knows a protocol.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import TypeVar

from headrace.errors import RequestError
from headrace.frontend.sample_update import failure_of
from headrace.messages.outputs import FinishReason
from headrace.server.context import INLINE_REPLY_BYTES
from headrace.server.error_forms import ApiError, openai_error
from headrace.server.http import Exchange, Headers, describe_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
COMMENT = b": keep-alive\n\n"
"""A line that clients pass over: proxies and clients with a time limit see that the reply lives."""

_HEADERS: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


def frame(payload: bytes) -> bytes:
    """One event. JSON contains no raw newlines, so one `data:` line is enough."""
    return b"data: " + payload + b"\n\n"


def error_frame(error: ApiError) -> bytes:
    """The event that reports a failure after the reply has begun."""
    return frame(openai_error(500, error))


def failure_frames(finish: FinishReason) -> bytes:
    """The event that reports why a sample failed; empty if it did not."""
    failure = failure_of(finish)
    return b"" if failure is None else error_frame(describe_error(failure)[2])


class _Reply:
    """A reply as it is written. It begins with what is written first, which may be a ping: `ping` is sent whenever nothing else has been for
    `exchange.ping_interval_s` seconds (0 = never), the first time after `exchange.first_ping_s`."""

    def __init__(self, exchange: Exchange, headers: Callable[[], Headers], ping: bytes) -> None:
        self.has_begun = False
        self._exchange = exchange
        self._headers = headers
        self._ping = ping
        self._loop = asyncio.get_running_loop()
        self._due_s = self._loop.time() + exchange.first_ping_s
        self._pinging: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if ping and exchange.ping_interval_s:
            self._wait(exchange.ping_interval_s)

    async def begin(self) -> None:
        """Send status and headers, unless that has been done."""
        if self._pinging is not None:
            await self._pinging
        if not self.has_begun:
            await self._start()

    async def _start(self) -> None:
        self.has_begun = True
        self._due_s = self._loop.time() + self._exchange.ping_interval_s
        await self._exchange.send({"type": "http.response.start", "status": 200, "headers": self._headers()})

    async def write(self, frames: bytes) -> None:
        """Send whole events."""
        await self.begin()
        self._due_s = self._loop.time() + self._exchange.ping_interval_s
        await self._exchange.write(frames)

    async def end(self, frames: bytes) -> None:
        """Send the last ones."""
        self._stop_timer()
        await self.begin()
        await self._exchange.send({"type": "http.response.body", "body": frames})

    def stop(self) -> None:
        """No more pings, not even the one that is being sent: nothing can be written after this. Idempotent."""
        self._stop_timer()
        if self._pinging is not None:
            self._pinging.cancel()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        interval_s = self._exchange.ping_interval_s
        left_s = self._due_s - self._loop.time()
        # A ping that is still being sent waits for a client that does not read.
        if left_s <= 0 and self._pinging is None:
            self._pinging = self._loop.create_task(self._send_ping())
        self._wait(min(left_s, interval_s) if left_s > 0 else interval_s)

    async def _send_ping(self) -> None:
        try:
            # A connection that fails does so for the next frames, too, and its end ends the reply.
            with suppress(OSError):
                self._due_s = self._loop.time() + self._exchange.ping_interval_s
                if not self.has_begun:
                    await self._start()
                await self._exchange.write(self._ping)
        finally:
            self._pinging = None


async def stream_reply(
    exchange: Exchange,
    items: AsyncGenerator[T, None],
    render: Callable[[T], bytes],
    tail: Callable[[], bytes],
    *,
    done: bytes = DONE,
    failed: Callable[[ApiError], bytes] = error_frame,
    renamed: Callable[[RequestError], RequestError] | None = None,
    headers: Callable[[], Headers] = list,
    content_type: bytes = EVENT_STREAM,
    ping: bytes = COMMENT,
    tail_repeats: bool = False,
) -> None:
    """Stream `items`: `render` makes the frames of each (may be empty), `tail` those after the last. headers: makes more of the reply's, when it
    begins. ping: the keep-alive; empty = none. tail_repeats: the last frames are about as long as all before them.

    A failure before the reply begins, with the first item or a ping, raises, so that it has an error status; a later one becomes the frames that
    `failed` makes of it. `renamed` puts the API's field names into such an error; one that raises is left to the caller. `done` ends the stream
    exactly once in both cases. The generator is closed before this returns or raises.
    """
    exchange.forget_body()
    async with exchange.until_client_leaves(), aclosing(items):
        reply = _Reply(exchange, lambda: [(b"content-type", content_type), *_HEADERS, *headers()], ping)
        try:
            try:
                first = await anext(items, None)
                await reply.begin()
                if first is not None and (frames := render(first)):
                    await reply.write(frames)
                size = total = 0
                async for item in items:
                    # One that repeats a long output is about as long as the last.
                    is_short = size <= INLINE_REPLY_BYTES
                    frames = render(item) if is_short else await exchange.context.written(partial(render, item), size)
                    if frames:
                        size = len(frames)
                        total += size
                        await reply.write(frames)
                end = await exchange.context.written(tail, total) if tail_repeats else tail()
            except Exception as exc:
                if not reply.has_begun:
                    raise
                if renamed is not None and isinstance(exc, RequestError):
                    exc = renamed(exc)
                end = failed(describe_error(exc)[2])
            await reply.end(end + done)
        finally:
            reply.stop()
