"""HTTP for every client of ours that is not a benchmark: one request by urllib, and the events of a stream.

Owns no connection: every call opens one. Which error a refusal means is its users' affair. May be called from any thread.
"""

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable, Iterator
from typing import Any

DONE = b"[DONE]"
FAULTS = (OSError, http.client.HTTPException, ValueError)
"""What is raised where nothing answers, or what answers is not HTTP, not what was asked for, or cut off."""


class Refusal(Exception):
    """A reply with the status of an error. error: the object of that name in its body, empty if there is none."""

    def __init__(self, status: int, body: bytes, retry_after: str | None = None) -> None:
        super().__init__(status)
        self.status = status
        self.body = body
        self.retry_after = retry_after
        self.error = error_of(body)


class HttpClient:
    """Calls of one server. url: with or without `/v1`. key: sent as a bearer key, if any."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def open(
        self,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """The open reply to a POST of `body`, or to a GET without one. headers: beside those of every request. Raises Refusal, or one of FAULTS."""
        request = urllib.request.Request(self.url + path, body, self.headers | (headers or {}))
        try:
            return urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            said = b""
            with error, contextlib.suppress(OSError, http.client.HTTPException):
                said = error.read()
            raise Refusal(error.code, said, error.headers.get("Retry-After")) from None


class EventParser:
    """Cuts a byte stream into events. Keeps what an unfinished line holds; a line may end in LF or CRLF.

    Only `data` matters here; comments, `event`, `id` and `retry` lines are passed over. Format:
    https://html.spec.whatwg.org/multipage/server-sent-events.html
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of every event that `piece` completes, several `data` lines of one event joined by LF."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                event, self._data = b"\n".join(self._data), []
                yield event


def events(pieces: Iterable[bytes]) -> Generator[bytes, None, None]:
    """The data of the events of a reply, until `[DONE]`. Raises EOFError if the reply ends before."""
    parser = EventParser()
    for piece in pieces:
        for event in parser.feed(piece):
            if event == DONE:
                return
            yield event
    raise EOFError("the server closed the stream early")


def error_of(body: bytes) -> dict[str, Any]:
    """The `error` object of a reply with a message; empty if there is none."""
    try:
        error = json.loads(body)["error"]
        return error if "message" in error and isinstance(error, dict) else {}
    except (ValueError, KeyError, TypeError):
        return {}
