"""A client of the native HTTP API: JSON in, JSON or a stream of server-sent events out, and errors as exceptions.

Owns no connection: every call opens one. Its methods may be called from any thread.
"""

import contextlib
import json
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import Any

import aiohttp

from headrace.api.http_client import DONE, FAULTS, EventParser, HttpClient, Refusal, events
from headrace.errors import AuthError, CapacityError, ExecutionError, HeadraceError, NotFoundError, RequestError

ENDED_EARLY = "the server's answer ended before it was complete"


class NativeClient:
    """Calls of one server. key: sent as a bearer key, if any.

    Every method raises the error that a refusal means, and ExecutionError if the server cannot be reached or its reply is cut off.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self._http = HttpClient(url, key)

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
        with self.open(path) as reply, _faults_mapped():
            return str(reply.read().decode())

    def operate(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> Any:
        """The reply to an operation on weights, including one that reports a failure."""
        try:
            with self._http.open(path, body, headers) as reply:
                return json.load(reply)
        except Refusal as refusal:
            if refusal.status == 400 and refusal.body.startswith(b'{"success"'):
                return json.loads(refusal.body)
            raise _error(refusal) from None
        except FAULTS as error:
            raise _unreachable(error) from error

    def open(self, path: str, body: bytes | None = None) -> Any:
        """The open reply to a POST of `body`, or to a GET without one."""
        try:
            return self._http.open(path, body)
        except Refusal as refusal:
            raise _error(refusal) from None
        except FAULTS as error:
            raise _unreachable(error) from error

    def stream(self, path: str, body: bytes) -> Generator[dict[str, Any], None, None]:
        """The events of a streamed reply. Closing the iterator closes the connection."""
        with self.open(path, body) as reply, _faults_mapped():
            yield from map(_item, events(reply))

    async def astream(self, path: str, body: bytes) -> AsyncGenerator[dict[str, Any], None]:
        """Like `stream`, in any event loop."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        parser = EventParser()
        with _faults_mapped():
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=self._http.headers) as session,
                session.post(f"{self._http.url}{path}", data=body) as reply,
            ):
                if reply.status != 200:
                    raise _error(Refusal(reply.status, await reply.read(), reply.headers.get("Retry-After")))
                async for piece in reply.content.iter_any():
                    for event in parser.feed(piece):
                        if event == DONE:
                            return
                        yield _item(event)
        raise ExecutionError(ENDED_EARLY)


@contextlib.contextmanager
def _faults_mapped() -> Iterator[None]:
    """Turns a reply that is cut off or cannot be read into an ExecutionError."""
    try:
        yield
    except EOFError:
        raise ExecutionError(ENDED_EARLY) from None
    except (*FAULTS, aiohttp.ClientError) as error:
        raise ExecutionError(f"{ENDED_EARLY} ({type(error).__name__})") from error


def _unreachable(error: Exception) -> ExecutionError:
    return ExecutionError(f"the server cannot be reached: {error}")


def _item(event: bytes) -> dict[str, Any]:
    """The object of an event. Raises ExecutionError for an error frame."""
    item: dict[str, Any] = json.loads(event)
    if "error" in item:
        raise ExecutionError(item["error"]["message"])
    return item


def _error(refusal: Refusal) -> HeadraceError:
    status, error = refusal.status, refusal.error
    message, param, code = error.get("message", f"the server answered {status}"), error.get("param"), error.get("code")
    if status in (429, 503):
        return CapacityError(message, float(refusal.retry_after or 1.0), status)
    if status == 401:
        return AuthError(message, param, code)
    if status == 404:
        return NotFoundError(message, param, code)
    return RequestError(message, param, code) if status < 500 else ExecutionError(message)
