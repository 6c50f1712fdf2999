"""Server-sent events: writes a generator of outputs as an event stream.

Runs in the event loop that serves HTTP. Frames are bytes made by the caller; nothing here knows a protocol.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from headrace.frontend.failures import failure_of
from headrace.messages.outputs import FinishReason
from headrace.server.error_forms import ApiError, openai_error
from headrace.server.http import Exchange, Headers, describe_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
_HEADERS: Headers = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


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


async def stream_reply(
    exchange: Exchange,
    items: AsyncGenerator[T, None],
    render: Callable[[T], bytes],
    tail: Callable[[], bytes],
    *,
    done: bytes = DONE,
    failed: Callable[[ApiError], bytes] = error_frame,
    headers: Sequence[tuple[bytes, bytes]] = (),
    content_type: bytes = EVENT_STREAM,
) -> None:
    """Stream `items`: `render` makes the frames of each (may be empty), `tail` those after the last. headers: more of the reply's.

    A failure before the first item raises, so that the reply has an error status; a later one becomes the frames that `failed` makes.
    `done` ends the stream exactly once in both cases. The generator is closed before this returns or raises.
    """
    async with exchange.until_client_leaves(), aclosing(items):
        first = await anext(items, None)
        begins = [(b"content-type", content_type), *_HEADERS, *headers]
        await exchange.send({"type": "http.response.start", "status": 200, "headers": begins})
        try:
            if first is not None and (frames := render(first)):
                await exchange.write(frames)
            async for item in items:
                if frames := render(item):
                    await exchange.write(frames)
            end = tail()
        except Exception as exc:
            end = failed(describe_error(exc)[2])
        await exchange.send({"type": "http.response.body", "body": end + done})
