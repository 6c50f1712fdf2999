"""One HTTP exchange over raw ASGI: reads the body up to a limit, writes JSON, turns errors into replies, notices disconnects.

Owns what every route shares. Does not own routes, keys (auth.py) or the socket (listener.py).
Runs in the event loop that serves HTTP.
"""

import asyncio
import functools
import math
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    MutableMapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from urllib.parse import parse_qs

import msgspec

from headrace.errors import CapacityError, ExecutionError, HeadraceError, RequestError, TooLargeError
from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.tenants import Caller, Tenant
from headrace.log import get_logger
from headrace.messages.bodies import field_error
from headrace.messages.operations import Nothing
from headrace.server.body import PLACE_WAIT_S, SMALL_BODY_BYTES, Prepare, decode_json
from headrace.server.context import INLINE_REPLY_BYTES, ServingContext
from headrace.server.error_forms import ApiError, form_of
from headrace.turns import asking, note_size

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

T = TypeVar("T")

log = get_logger(__name__)


class LongList:
    """A list in a JSON reply, whose items are made when they are written, once. `encode_json` writes all of it, `json_pieces` an item at a time."""

    def __init__(self, items: Iterable[object]) -> None:
        self.items = items


def _whole(value: object) -> object:
    if isinstance(value, LongList):
        return [*value.items]
    raise NotImplementedError(f"{type(value)} in a reply")


encode_json = msgspec.json.Encoder(enc_hook=_whole).encode


def json_pieces(value: object) -> Iterator[bytes]:
    """`encode_json(value)`, in pieces where there is a `LongList`."""
    lists: list[LongList] = []

    def left_out(found: object) -> msgspec.Raw:
        assert isinstance(found, LongList), type(found)
        lists.append(found)
        return msgspec.Raw(b"\0")  # which JSON writes in another way

    *heads, end = msgspec.json.Encoder(enc_hook=left_out).encode(value).split(b"\0")
    for head, found in zip(heads, lists, strict=True):
        before = head + b"["
        for item in found.items:
            yield before + encode_json(item)
            before = b","
        yield b"]" if before == b"," else before + b"]"
    yield end


JSON = b"application/json"
PIECE_BYTES = 64 << 10
"""How much of a long reply is made and written at a time: some milliseconds' work."""

_RID_IN_HEADER = re.compile(r"[\x21-\x7e]{1,256}")


class ClientGone(Exception):
    """The client closed the connection, so there is nobody to answer."""


@dataclass(slots=True)
class RequestId:
    """Value of the reply's `x-request-id`. is_clients: the client chose it, so it is not replaced."""

    value: str
    is_clients: bool = False


_STATUS_HEADERS: dict[int, Headers] = {
    401: [(b"www-authenticate", b"Bearer")],
    405: [(b"allow", b"POST")],
    # OpenAI's clients retry after a 408 unless told not to.
    408: [(b"x-should-retry", b"false")],
}


def describe_error(exc: BaseException) -> tuple[int, Headers, ApiError]:
    """The status, extra headers and body that answer `exc`.

    Messages of RequestError, CapacityError and ExecutionError are meant for clients. Anything else is a bug: it is
    logged here, once, and the client gets only "internal error".
    """
    match exc:
        case RequestError():
            headers = _STATUS_HEADERS.get(exc.status_code, [])
            return exc.status_code, headers, ApiError(exc.message, exc.error_type, exc.param, exc.code)
        case CapacityError():
            seconds = max(1, math.ceil(min(exc.retry_after_s, 3600.0)))
            error = ApiError(exc.message, exc.error_type, None, exc.code)
            return exc.status_code, [(b"retry-after", str(seconds).encode())], error
        case ExecutionError():
            return exc.status_code, [], ApiError(exc.message, exc.error_type, None, None)
    log.error("unhandled exception while answering a request", exc_info=exc)
    return 500, [], ApiError("internal error", HeadraceError.error_type, None, None)


async def send_response(
    send: Send, status: int, body: bytes, content_type: bytes, headers: Headers | None = None
) -> None:
    fields = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, scope: Scope, exc: BaseException) -> None:
    """The reply for `exc`, see `describe_error`, in the form of the API that the request's path belongs to."""
    status, headers, error = describe_error(exc)
    body = form_of(scope["path"])(status, error)
    await send_response(send, status, body, JSON, headers)


@functools.cache
def _decoder(kind: Hashable) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(cast(type, kind))


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and its reply."""

    scope: Scope
    receive: Receive
    send: Send
    context: ServingContext
    max_body_bytes: int = field(init=False)
    tenant: str = field(init=False)
    _num_held: int = 0
    _num_large: int = 0
    _has_place: bool = False

    def __post_init__(self) -> None:
        self.tenant = asking().tenant
        self.max_body_bytes = self.context.bodies.max_body_bytes

    @property
    def ping_interval_s(self) -> float:
        """A stream that has said nothing for so long sends a keep-alive; 0 = never."""
        return self.context.args.sse_ping_interval_s

    @property
    def first_ping_s(self) -> float:
        """The same until it has said something, which says 200: before, a request may still be refused with 503 when its queue's limit has passed."""
        return self.context.args.queue_timeout_s + self.ping_interval_s

    @property
    def is_admin(self) -> bool:
        """The caller may use the control routes (set by auth.py)."""
        return bool(self.scope["headrace.is_admin"])

    def name_request(self, rid: str) -> None:
        """Let `x-request-id` be the rid, unless the client gave an id of its own or a header cannot hold this one."""
        request_id: RequestId = self.scope["headrace.request_id"]
        if not request_id.is_clients and _RID_IN_HEADER.fullmatch(rid):
            request_id.value = rid

    @property
    def caller(self) -> Caller:
        """Who sent this request, with the owner of its key in the key file, and from where (set by auth.py)."""
        tenant: Tenant | None = self.scope["headrace.tenant"]
        traceparent = (self.header(b"traceparent") or b"").decode("latin-1")
        return Caller(tenant, traceparent, self.is_admin, address=self.scope["headrace.address"])

    @property
    def content_type(self) -> bytes:
        """The media type of the body, in lower case; empty if there is none."""
        return (self.header(b"content-type") or b"").split(b";")[0].strip().lower()

    def path_param(self, name: str) -> str:
        return str(self.scope["path_params"][name])

    def header(self, name: bytes) -> bytes | None:
        """The first header called `name` (lower case)."""
        return next((value for key, value in self.scope["headers"] if key == name), None)

    def read_query(self, kind: type[T]) -> T:
        """The query parameters decoded as `kind`. Raises RequestError."""
        given = parse_qs(self.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        try:
            return msgspec.convert({name: values[-1] for name, values in given.items()}, kind, strict=False)
        except msgspec.ValidationError as error:
            raise field_error(str(error), kind) from None

    async def read_json(
        self,
        kind: type[T],
        shorten: Callable[[bytes], bytes] | None = None,
        *,
        any_content_type: bool = False,
        prepare: Prepare | None = None,
    ) -> T:
        """The body as `kind`, see `decode_json` and `Bodies.decode`. Raises RequestError, TooLargeError, CapacityError, ClientGone.

        any_content_type: the header is not looked at. Web pages of other origins are refused in any case (`OriginGate`). prepare: see `Prepare`.
        """
        if self.content_type != b"application/json" and not any_content_type:
            raise RequestError("send the body as JSON with the header Content-Type: application/json")
        body = await self.read_body()
        return await self.context.bodies.decode(
            body, lambda text: decode_json(text, _decoder(cast(Hashable, kind)), prepare), shorten, self._take_place
        )

    async def read_no_fields(self) -> None:
        """For a route without fields: a body is optional, and its fields are refused by name. Raises the errors of `read_json`."""
        body = await self.read_body()
        if body.strip():
            await self.context.bodies.decode(
                body, lambda text: decode_json(text, _decoder(Nothing)), None, self._take_place
            )

    async def _take_place(self) -> None:
        """Of those whose large body is decoded and not yet with the engine."""
        async with self.until_client_leaves():
            await self.context.bodies.places.take("too many large requests are being read", PLACE_WAIT_S)
            self._has_place = True

    async def read_body(self) -> bytes:
        """The whole body, at most `max_body_bytes`; a larger one is refused before or while it arrives.

        Its bytes count as held until `forget_body`, unless the route has a limit of its own.
        Raises RequestError, TooLargeError, CapacityError, ClientGone.
        """
        encoding = (self.header(b"content-encoding") or b"identity").strip().lower()
        if encoding != b"identity":
            raise RequestError("compressed bodies are not supported: send the body without Content-Encoding")
        limit = self.max_body_bytes
        is_usual = limit <= self.context.bodies.max_body_bytes
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared[:19]) > limit:
            raise _too_large(limit, is_usual)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit, is_usual)
            if is_usual:
                self.context.bodies.take(self.tenant, len(part), self._num_held)
                self._num_held += len(part)
            parts.append(part)
            self._num_large += len(part) if size > SMALL_BODY_BYTES else 0
            if not message.get("more_body", False):
                note_size(size)
                return await self.context.bodies.join(parts)

    def forget_body(self) -> None:
        """What was asked is with the engine: the body counts no longer. Idempotent; a request that needs no engine counts until it is answered."""
        self.context.bodies.give_back(self.tenant, self._num_held)
        self._num_held = 0
        if self._has_place:
            self._has_place = False
            self.context.bodies.places.leave(self.tenant)

    def end(self) -> None:
        """The request has been answered, or its client has gone."""
        self.forget_body()
        self.context.bodies.note_end(self._num_large)

    def write(self, part: bytes) -> Awaitable[None]:
        """Send a part of the body of a reply that has begun. Middleware looks only at how a reply begins, so none is passed."""
        send: Send = self.scope["headrace.write"]
        return send({"type": "http.response.body", "body": part, "more_body": True})

    async def reply_json(self, value: object, status: int = 200, headers: Headers | None = None) -> None:
        """One complete JSON reply; not-a-number and infinities become null."""
        await self.reply(encode_json(value), status=status, headers=headers)

    async def reply(
        self, body: bytes, content_type: bytes = JSON, status: int = 200, headers: Headers | None = None
    ) -> None:
        """One complete reply. A long one counts among those that wait to be read. Raises CapacityError when its tenant has too many of them."""
        if len(body) <= PIECE_BYTES:
            await send_response(self.send, status, body, content_type, headers)
            return
        with self._holding(len(body)):
            await self._reply_whole(body, content_type, status, headers or [])

    async def reply_in_pieces(
        self,
        pieces: Iterator[bytes],
        headers: Sequence[tuple[bytes, bytes]] = (),
        made_of: Sequence[SampleUpdate] = (),
    ) -> None:
        """One JSON reply. pieces: each is made when the one before it has been written. made_of: what they show, which stays in memory until then;
        much of it is shown in a thread. Raises as `reply` does, and before it has begun what making the first pieces raises.
        """
        num_bytes = sum(update.num_bytes for update in made_of)

        def next_ones() -> bytes:
            parts, size = [], 0
            while size < PIECE_BYTES and (piece := next(pieces, None)) is not None:
                parts.append(piece)
                size += len(piece)
            return b"".join(parts)

        async def made() -> bytes:
            return await self.context.written(next_ones, min(num_bytes, INLINE_REPLY_BYTES + 1))

        with self._holding(num_bytes):
            first, second = await made(), await made()
            if self.scope.get("http_version") == "1.0":  # which knows no chunks
                rest = [second]
                while rest[-1]:
                    rest.append(await made())
                first, second = b"".join((first, *rest)), b""
            if second:
                fields = [(b"content-type", JSON), *headers]
                await self.send({"type": "http.response.start", "status": 200, "headers": fields})
                await self._write_slowly(first)
                while second:
                    await self._write_slowly(second)
                    second = await made()
                await self.send({"type": "http.response.body", "body": b""})
                return
        await self.reply(first, headers=[*headers])

    async def _reply_whole(
        self, body: bytes, content_type: bytes, status: int, headers: Sequence[tuple[bytes, bytes]]
    ) -> None:
        fields = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers]
        await self.send({"type": "http.response.start", "status": status, "headers": fields})
        await self._write_slowly(body)
        await self.send({"type": "http.response.body", "body": b""})

    async def _write_slowly(self, part: bytes) -> None:
        """Hardly more at a time than the client reads."""
        for at in range(0, len(part), PIECE_BYTES):
            await self.write(part[at : at + PIECE_BYTES])

    @contextmanager
    def _holding(self, num_bytes: int) -> Iterator[None]:
        replies = self.context.replies
        if not replies.take(self.tenant, num_bytes, weight=asking().weight):
            raise CapacityError(
                "too many long replies of this client wait to be read: read them first", retry_after_s=1.0
            )
        try:
            yield
        finally:
            replies.give_back(self.tenant, num_bytes)
            self._num_large += num_bytes if num_bytes > INLINE_REPLY_BYTES else 0

    async def all_of(self, updates: AsyncGenerator[T, None]) -> list[T]:
        """What the generator yields until it ends or the client leaves, with nothing left to read. Raises ClientGone."""
        self.forget_body()
        async with self.until_client_leaves(), aclosing(updates):
            return [update async for update in updates]

    @asynccontextmanager
    async def until_client_leaves(self) -> AsyncIterator[None]:
        """Cancel the body of this block when the client closes the connection, then raise ClientGone.

        Call it after the request body has been read: it takes over `receive`. Works as asyncio.timeout does: the one
        cancellation that it requested is undone, others pass through.
        """
        task = asyncio.current_task()
        assert task is not None, "an exchange runs in a task"
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await self.receive())["type"] != "http.disconnect":
                pass
            gone = True
            task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if gone and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            watcher.cancel()


def _too_large(limit: int, is_usual: bool) -> TooLargeError:
    option = " (--max-body-bytes)" if is_usual else ""
    return TooLargeError(f"the body is larger than the limit of {limit} bytes{option}", code="body_too_large")


Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A handler as an ASGI application, for use in a route."""

    handler: Handler
    context: ServingContext

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self.context)
        try:
            await self.handler(exchange)
        finally:
            exchange.end()
