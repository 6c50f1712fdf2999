"""What clients are told when a replica dies under their requests, in the proxies of Ray Serve.

Ray Serve's proxy ends a request without an answer when the actor that answered has gone: a reply that has not begun becomes the server's plain
"Internal Server Error", a stream just ends. Here the first becomes an error in the form of the path's API, the second has one as its last event.
Runs in the event loop of each proxy, around its application; Ray Serve takes it from `middlewares`.
"""

import re
from typing import Any, Final

import msgspec

from headrace.errors import ExecutionError
from headrace.log import get_logger
from headrace.server.anthropic.messages import error_event
from headrace.server.error_forms import ApiError, form_of
from headrace.server.http import ASGIApp, Message, Receive, Scope, Send, describe_error, send_response
from headrace.server.ollama.generation import error_line
from headrace.server.sse import DONE, error_frame

MIDDLEWARES: Final = "headrace.cluster.ray_proxy:middlewares"
"""Where Ray Serve finds them."""

LOST: Final = "the replica that answered this request has died: send the request again"

_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":(\d+)')
_MAX_FIRST_EVENT_BYTES = 1 << 20

log = get_logger(__name__)


def middlewares() -> list[Any]:
    """For Ray Serve: what is put around the application of a proxy."""
    from starlette.middleware import Middleware  # Ray Serve's own dependency

    return [Middleware(LostReplicas)]


class LostReplicas:
    """Answers in the place of a replica that has died. app: the proxy's application."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        reply = _Reply(send)
        try:
            await self.app(scope, receive, reply.send)
        except Exception as exc:
            log.error("a request failed in the proxy", exc_info=exc)
        error = describe_error(ExecutionError(LOST))[2]
        if not reply.has_begun:
            error = (
                error
                if not reply.told
                else msgspec.structs.replace(error, message=reply.told.decode("utf-8", "replace"))
            )
            body = form_of(scope["path"])(reply.status, error)
            await send_response(send, reply.status, body, b"application/json", reply.retry_after)
        elif not reply.has_ended and (end := _last_event(scope["path"], reply, error)):
            await send({"type": "http.response.body", "body": end})


class _Reply:
    """What a proxy sends for one request. Failures of the proxy itself, which are plain text, are kept: status, told, retry_after."""

    def __init__(self, send: Send) -> None:
        self.has_begun = False
        self.has_ended = False
        self.is_stream = False
        self.status = 500
        self.told = b""
        self.retry_after: list[tuple[bytes, bytes]] = []
        self.first = b""
        self.last = b""
        self._send = send
        self._is_own = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message["headers"]}
            kind = headers.get(b"content-type", b"")
            self._is_own = message["status"] >= 400 and kind.startswith(b"text/plain")
            if self._is_own:
                self.status = message["status"]
                self.retry_after = [(name, value) for name, value in headers.items() if name == b"retry-after"]
            else:
                self.has_begun = True
                self.is_stream = kind.startswith((b"text/event-stream", b"application/x-ndjson"))
        elif self._is_own:
            self.told += message.get("body", b"")
        elif message["type"] == "http.response.body":
            self.has_ended = not message.get("more_body", False)
            if self.is_stream and (body := message.get("body", b"")):
                if len(self.first) < _MAX_FIRST_EVENT_BYTES and b"\n\n" not in self.first:
                    self.first += body
                self.last = body
        if not self._is_own:
            await self._send(message)


def _last_event(path: str, reply: _Reply, error: ApiError) -> bytes:
    """The end of a stream that was cut off, in the form of the path's API; empty for a reply that is no stream."""
    if not reply.is_stream:
        return b""
    if path.startswith("/api/"):
        return error_line(error)
    if path.startswith(("/v1/messages", "/messages")):
        return error_event(error)
    if path.startswith(("/v1/responses", "/responses")):
        return _failed_response(reply, error)
    return error_frame(error) + DONE


def _failed_response(reply: _Reply, error: ApiError) -> bytes:
    """`response.failed`, made of the response that the first event has told; without one, the event `error`."""
    numbers = _SEQUENCE_NUMBER.findall(reply.last)
    number = int(numbers[-1]) + 1 if numbers else 0
    told = {"code": "server_error", "message": error.message}
    event: dict[str, Any] = {"type": "error", **told, "param": None, "sequence_number": number}
    found = re.search(rb"^data: (.*)$", reply.first, re.MULTILINE)
    if found is not None:
        try:
            response = msgspec.json.decode(found[1]).get("response")
        except (msgspec.DecodeError, AttributeError):
            response = None
        if isinstance(response, dict):
            failed = response | {"status": "failed", "error": told}
            event = {"type": "response.failed", "sequence_number": number, "response": failed}
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))
