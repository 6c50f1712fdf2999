"""A client of the native HTTP API: JSON in, JSON or a stream of server-sent events out, and errors as exceptions.

Owns no connection: every call opens one. Its methods may be called from any thread.
"""

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from typing import Any

import aiohttp

from headrace.errors import AuthError, CapacityError, ExecutionError, HeadraceError, NotFoundError, RequestError

MAX_LINE_BYTES = 16 << 20
"""Longest line of a stream that aiohttp may buffer: chunks carry the whole text so far."""
ENDED_EARLY = "the server's answer ended before it was complete"


class NativeClient:
    """Calls of one server. key: sent as a bearer key, if any.

    Every method raises the error that a refusal means, and ExecutionError if the server cannot be reached or its reply is cut off.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def get(self, path: str) -> Any:
        return self.fetch(path)

    def ask(self, path: str, **fields: object) -> Any:
        """The reply to a POST of these fields."""
        return self.fetch(path, json.dumps(fields).encode())

    def tell(self, path: str, **fields: object) -> None:
        """Like `ask`, for replies without content."""
        with self.open(path, json.dumps(fields).encode()) as reply, _faults_mapped():
            reply.read()

    def fetch(self, path: str, body: bytes | None = None) -> Any:
        """The reply to a POST of `body`, or to a GET without one."""
        with self.open(path, body) as reply, _faults_mapped():
            return json.load(reply)

    def text(self, path: str) -> str:
        """The plain text reply to a GET."""
        with self.open(path) as reply, _faults_mapped():
            return str(reply.read().decode())

    def operate(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> Any:
        """The reply to an operation on weights, including one that reports a failure."""
        request = urllib.request.Request(self.url + path, body, self._headers | (headers or {}))
        try:
            with urllib.request.urlopen(request) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read()
                if error.code == 400 and text.startswith(b'{"success"'):
                    return json.loads(text)
                raise _error(error.code, text, error.headers.get("Retry-After")) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ExecutionError(f"the server cannot be reached: {error}") from error

    def open(self, path: str, body: bytes | None = None) -> Any:
        """The open reply to a POST of `body`, or to a GET without one."""
        request = urllib.request.Request(self.url + path, body, self._headers)  # a POST if there is a body
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            with error:
                raise _error(error.code, error.read(), error.headers.get("Retry-After")) from None
        except (OSError, http.client.HTTPException) as error:
            raise ExecutionError(f"the server cannot be reached: {error}") from error

    def stream(self, path: str, body: bytes) -> Generator[dict[str, Any], None, None]:
        """The events of a streamed reply. Closing the iterator closes the connection."""
        with self.open(path, body) as reply, _faults_mapped():
            lines: Iterable[bytes] = reply
            for line in lines:
                if _is_done(line):
                    return
                if (item := _event(line)) is not None:
                    yield item
        raise ExecutionError(ENDED_EARLY)

    async def astream(self, path: str, body: bytes) -> AsyncGenerator[dict[str, Any], None]:
        """Like `stream`, in any event loop."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        with _faults_mapped():
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=self._headers, read_bufsize=MAX_LINE_BYTES) as session,
                session.post(f"{self.url}{path}", data=body) as reply,
            ):
                if reply.status != 200:
                    raise _error(reply.status, await reply.read(), reply.headers.get("Retry-After"))
                async for line in reply.content:
                    if _is_done(line):
                        return
                    if (item := _event(line)) is not None:
                        yield item
        raise ExecutionError(ENDED_EARLY)


@contextlib.contextmanager
def _faults_mapped() -> Iterator[None]:
    """Turns a reply that is cut off or cannot be read into an ExecutionError."""
    try:
        yield
    except (OSError, http.client.HTTPException, aiohttp.ClientError, ValueError) as error:
        raise ExecutionError(f"{ENDED_EARLY} ({type(error).__name__})") from error


def _is_done(line: bytes) -> bool:
    return line.strip() == b"data: [DONE]"


def _event(line: bytes) -> dict[str, Any] | None:
    """The object of an SSE line; None for other lines. Raises ExecutionError for an error frame."""
    if not line.startswith(b"data: "):
        return None
    item: dict[str, Any] = json.loads(line[len(b"data: ") :])
    if "error" in item:
        raise ExecutionError(item["error"]["message"])
    return item


def _error(status: int, body: bytes, retry_after: str | None) -> HeadraceError:
    try:
        error = json.loads(body)["error"]
        message, param, code = error["message"], error.get("param"), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, param, code = f"the server answered {status}", None, None
    if status in (429, 503):
        return CapacityError(message, float(retry_after or 1.0), status)
    if status == 401:
        return AuthError(message, param, code)
    if status == 404:
        return NotFoundError(message, param, code)
    return RequestError(message, param, code) if status < 500 else ExecutionError(message)
