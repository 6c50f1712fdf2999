"""One HTTP exchange over raw ASGI: reads the body up to a limit, writes JSON, turns errors into replies, notices disconnects.

Owns what every route shares. Does not own routes, keys (auth.py) or the socket (connection.py).
Runs in the event loop that serves HTTP.
"""

import asyncio
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from headrace.errors import CapacityError, ExecutionError, HeadraceError, RequestError, TooLargeError
from headrace.frontend.tenants import Caller, Tenant
from headrace.log import get_logger
from headrace.messages.bodies import field_error, with_whole_numbers, without_neutral
from headrace.messages.requests import GenerateReqInput
from headrace.sampling.grammar_fields import GRAMMAR_KINDS
from headrace.server.body import Bodies, half_character, has_long_number
from headrace.server.error_forms import ApiError, form_of

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

T = TypeVar("T")

log = get_logger(__name__)
encode_json = msgspec.json.Encoder().encode

_RID_IN_HEADER = re.compile(r"[\x21-\x7e]{1,256}")


class ClientGone(Exception):
    """The client closed the connection, so there is nobody to answer."""


@dataclass(slots=True)
class RequestId:
    """Value of the reply's `x-request-id`. is_clients: the client chose it, so it is not replaced."""

    value: str
    is_clients: bool = False


def describe_error(exc: BaseException) -> tuple[int, Headers, ApiError]:
    """The status, extra headers and body that answer `exc`.

    Messages of RequestError, CapacityError and ExecutionError are meant for clients. Anything else is a bug: it is
    logged here, once, and the client gets only "internal error".
    """
    if isinstance(exc, RequestError):
        # OpenAI's clients retry after a 408 unless told not to.
        special: dict[int, Headers] = {
            401: [(b"www-authenticate", b"Bearer")],
            405: [(b"allow", b"POST")],
            408: [(b"x-should-retry", b"false")],
        }
        return (
            exc.status_code,
            special.get(exc.status_code, []),
            ApiError(exc.message, exc.error_type, exc.param, exc.code),
        )
    if isinstance(exc, CapacityError):
        seconds = max(1, math.ceil(min(exc.retry_after_s, 3600.0)))
        error = ApiError(exc.message, exc.error_type, None, exc.code)
        return exc.status_code, [(b"retry-after", str(seconds).encode())], error
    if isinstance(exc, ExecutionError):
        return exc.status_code, [], ApiError(exc.message, exc.error_type, None, None)
    log.error("unhandled exception while answering a request", exc_info=exc)
    return 500, [], ApiError("internal error", HeadraceError.error_type, None, None)


async def send_response(
    send: Send, status: int, body: bytes, content_type: bytes, headers: Headers | None = None
) -> None:
    """One complete reply."""
    fields = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: object, status: int = 200, headers: Headers | None = None) -> None:
    """One complete JSON reply; not-a-number and infinities become null."""
    await send_response(send, status, encode_json(value), b"application/json", headers)


async def send_error(send: Send, scope: Scope, exc: BaseException) -> None:
    """The reply for `exc`, see `describe_error`, in the form of the API that the request's path belongs to."""
    status, headers, error = describe_error(exc)
    body = form_of(scope["path"])(status, error)
    await send_response(send, status, body, b"application/json", headers)


Prepare = Callable[[object], object]
"""What an API makes of a body that does not decode as it is, before it is decoded again: given and returned as JSON types."""


def decode_json(body: bytes, decoder: "msgspec.json.Decoder[T]", prepare: Prepare | None = None) -> T:
    """`body` as the decoder's type; strict: no coercion but of `8.0` to 8, no NaN, integers of fields within 64 bits, no unknown fields that ask for
    something.

    Raises RequestError naming the field at fault.
    """
    try:
        try:
            value = decoder.decode(body)
        except msgspec.ValidationError:
            # Only a body that does not decode as it is pays for looking at each of its fields.
            value = _decode_what_asks(body, decoder, prepare)
        if has_long_number(body):
            _refuse_wide_integers(value, decoder.type)
    except msgspec.ValidationError as exc:
        raise field_error(str(exc), decoder.type) from None
    except msgspec.DecodeError as exc:
        raise RequestError(f"the body is not valid JSON: {_fault(body, str(exc))}", code="invalid_json") from None
    except UnicodeDecodeError as exc:
        raise RequestError(f"the body is not valid UTF-8: {exc.reason}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None
    return value


def _fault(body: bytes, text: str) -> str:
    """What is wrong with a body that is no JSON. text: what the decoder says, which takes half a character for the end."""
    if half := half_character(body):
        return f"{half} is half a character (a lone surrogate); the other half must follow it"
    return "it ends too early (the input data was truncated)" if text == "Input data was truncated" else text


def _decode_what_asks(body: bytes, decoder: "msgspec.json.Decoder[T]", prepare: Prepare | None) -> T:
    """Like `decode_json`, with integers for whole numbers and without the fields that ask for nothing."""
    try:
        given = msgspec.json.decode(body)
    except msgspec.ValidationError:
        return decoder.decode(body)  # a number that no type can hold; the error says where it is
    given = with_whole_numbers(given if prepare is None else prepare(given), decoder.type)
    _refuse_wide_integers(given, decoder.type)
    return decoder.decode(encode_json(without_neutral(given, decoder.type)))


def _refuse_wide_integers(body: object, kind: object) -> None:
    """Raises RequestError for a field with an integer beyond 64 bits: no field needs one, and they cannot be sent to the other processes.

    body: decoded as `kind`, or as JSON.
    What may hold any JSON (tools, schemas, arguments) stays in this process, or is sent as text, but for that of a call of the engine.
    """
    is_sent = kind is GenerateReqInput
    pending: list[tuple[object, str]] = [(body, "")]
    while pending:
        item, field = pending.pop()
        match item:
            case int() if not -(2**63) <= item < 2**63:
                raise RequestError(f"{field}: the integer does not fit in 64 bits", field, "invalid_json")
            case list():
                pending += [(inner, field) for inner in item]
            case dict() if is_sent:
                pending += [
                    (inner, f"{field}.{name}".strip(".")) for name, inner in item.items() if name not in GRAMMAR_KINDS
                ]
            case msgspec.Struct():
                names = zip(item.__struct_fields__, item.__struct_encode_fields__, strict=True)
                pending += [
                    (getattr(item, name), f"{field}.{written}".strip("."))
                    for name, written in names
                    if name not in GRAMMAR_KINDS
                ]


class _NoFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a route that has no fields."""


_NO_FIELDS = msgspec.json.Decoder(_NoFields)


class Exchange:
    """One request and its reply. ping_interval_s: a stream that has said nothing for so long sends a keep-alive; 0 = never. first_ping_s: the same
    until it has said something."""

    __slots__ = ("_num_held", "bodies", "first_ping_s", "max_body_bytes", "ping_interval_s", "receive", "scope", "send")

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        bodies: Bodies,
        ping_interval_s: float = 0.0,
        first_ping_s: float = 0.0,
    ) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.bodies = bodies
        self.max_body_bytes = bodies.max_body_bytes
        self.ping_interval_s = ping_interval_s
        self.first_ping_s = first_ping_s
        self._num_held = 0

    @property
    def is_admin(self) -> bool:
        """The caller may use the control routes (set by auth.py)."""
        return bool(self.scope["headrace.is_admin"])

    @property
    def tenant(self) -> Tenant | None:
        """The owner of the key in the key file that this request carries (set by auth.py); None = another key, or none."""
        found: Tenant | None = self.scope["headrace.tenant"]
        return found

    def name_request(self, rid: str) -> None:
        """Let `x-request-id` be the rid, unless the client gave an id of its own or a header cannot hold this one."""
        request_id: RequestId = self.scope["headrace.request_id"]
        if not request_id.is_clients and _RID_IN_HEADER.fullmatch(rid):
            request_id.value = rid

    @property
    def caller(self) -> Caller:
        """Who sent this request."""
        return Caller(self.tenant, (self.header(b"traceparent") or b"").decode("latin-1"), self.is_admin)

    def path_param(self, name: str) -> str:
        """A parameter of the route's path."""
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
        decoder: "msgspec.json.Decoder[T]",
        shorten: Callable[[bytes], bytes] | None = None,
        *,
        any_content_type: bool = False,
        prepare: Prepare | None = None,
    ) -> T:
        """The body decoded, see `decode_json` and `Bodies.decode`. Raises RequestError, TooLargeError, CapacityError, ClientGone.

        any_content_type: the header is not looked at. Web pages of other origins are refused in any case (`origin_gate`). prepare: see `Prepare`.
        """
        content_type = (self.header(b"content-type") or b"").split(b";")[0].strip().lower()
        if content_type != b"application/json" and not any_content_type:
            raise RequestError("send the body as JSON with the header Content-Type: application/json")
        body = await self.read_body()
        try:
            return await self.bodies.decode(body, lambda text: decode_json(text, decoder, prepare), shorten)
        finally:
            del body
            self.forget_body()

    async def read_no_fields(self) -> None:
        """For a route without fields: a body is optional, and its fields are refused by name. Raises the errors of `read_json`."""
        body = await self.read_body()
        if body.strip():
            await self.bodies.decode(body, lambda text: decode_json(text, _NO_FIELDS), None)
        del body
        self.forget_body()

    async def read_body(self) -> bytes:
        """The whole body, at most `max_body_bytes`; a larger one is refused before or while it arrives.

        Its bytes count as held until `forget_body`, unless the route has a limit of its own.
        Raises RequestError, TooLargeError, CapacityError, ClientGone.
        """
        encoding = (self.header(b"content-encoding") or b"identity").strip().lower()
        if encoding != b"identity":
            raise RequestError("compressed bodies are not supported: send the body without Content-Encoding")
        limit = self.max_body_bytes
        is_usual = limit <= self.bodies.max_body_bytes
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
                self.bodies.take(len(part))
                self._num_held += len(part)
            parts.append(part)
            if not message.get("more_body", False):
                return await self.bodies.join(parts)

    def forget_body(self) -> None:
        """The body is no longer in use. Idempotent."""
        self.bodies.give_back(self._num_held)
        self._num_held = 0

    def write(self, part: bytes) -> Awaitable[None]:
        """Send a part of the body of a reply that has begun. Middleware looks only at how a reply begins, so none is passed."""
        send: Send = self.scope["headrace.write"]
        return send({"type": "http.response.body", "body": part, "more_body": True})

    async def reply_json(self, value: object, status: int = 200, headers: Headers | None = None) -> None:
        """One complete JSON reply."""
        await send_json(self.send, value, status, headers)

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


class Endpoint:
    """A handler as an ASGI application, for use in a route."""

    def __init__(
        self, handler: Handler, bodies: Bodies, ping_interval_s: float = 0.0, first_ping_s: float = 0.0
    ) -> None:
        self.handler = handler
        self.bodies = bodies
        self.ping_interval_s = ping_interval_s
        self.first_ping_s = first_ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = Exchange(scope, receive, send, self.bodies, self.ping_interval_s, self.first_ping_s)
        try:
            await self.handler(exchange)
        finally:
            exchange.forget_body()


class ErrorBoundary:
    """The one place where an exception becomes a reply. A reply that has already begun can only be cut off."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; answer what it raises."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, noting_send)
        except ClientGone:
            return
        except Exception as exc:
            if started:
                log.error("a reply failed after it had begun", exc_info=exc)
            else:
                await send_error(send, scope, exc)
