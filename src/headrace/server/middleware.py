"""What a request passes before its handler, but for the keys: its id, the count of replies, and the gate for web pages.

Runs in the event loop that serves HTTP. The gate refuses requests from web pages of other origins, and requests to host names that are not the
server's. A page can make a browser send requests to any address, including this machine's loopback. Two checks, before keys and routes:

- Host: a page whose name was resolved to our address (DNS rebinding) still sends its own name. On a loopback address, only loopback
  names and those of --allowed-hosts are served.
- Origin: a page of another origin is served only if --allow-origins lists it. This applies even if it could not read the reply, because
  a form or a `no-cors` request takes effect without that.

Clients other than browsers send neither Origin nor Sec-Fetch-Site and are not affected. CORS headers for the listed origins are added by
Starlette's middleware, behind the gate.
"""

import ipaddress
import re
import socket
import uuid
from collections.abc import Callable, Iterable, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import compile_path

from headrace.config.web import ANY, LOCAL_APPS, Origins, is_same_origin, parse_hosts, parse_origins, split_authority
from headrace.errors import ForbiddenError
from headrace.log import get_logger
from headrace.server.http import ASGIApp, ClientGone, Headers, Message, Receive, RequestId, Scope, Send, send_error

log = get_logger(__name__)

UNKNOWN_ROUTE = "unknown"
"""Name of every path that no route declares."""

CLIENT_GONE = 499
"""Status of requests whose client left before the reply began: the number that nginx logs for them."""

MAX_LOGGED = 20
"""Most different refusals to log, since clients choose what they send."""

_LOCAL = parse_origins(LOCAL_APPS)
_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class HttpMiddleware:
    """Passes the start and the end of the application on, and refuses what is no HTTP; `handle` does the rest."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self.handle(scope, receive, send)
            case "lifespan":
                await self.app(scope, receive, send)
            case _:
                await send({"type": "websocket.close", "code": 1008})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class RequestIdMiddleware(HttpMiddleware):
    """Adds `x-request-id` to every reply: the client's own id, else the rid, else a new id. Anthropic's clients call it `request-id`.

    A client's id is only echoed and not used otherwise, so two requests may have the same.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(reversed(scope["headers"]))
        given = headers.get(b"x-request-id", b"")
        is_sane = _SANE_ID.fullmatch(given) is not None
        request_id = RequestId(given.decode() if is_sane else uuid.uuid4().hex, is_clients=is_sane)
        scope["headrace.request_id"] = request_id
        scope["headrace.write"] = send  # of the outermost middleware
        names = [b"x-request-id"]
        if scope["path"].startswith(("/v1/messages", "/messages")) or b"anthropic-version" in headers:
            names.append(b"request-id")

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name, request_id.value.encode()) for name in names]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            # It refers to the scope: all of the request would wait for the garbage collection.
            del scope["headrace.write"]


class RouteNames:
    """The declared paths: as in the route table, with their `{parameters}`. Clients cannot make more of them."""

    def __init__(self, paths: Iterable[str]) -> None:
        paths = list(paths)
        self._exact = {path for path in paths if "{" not in path}
        self._patterns = [(compile_path(path)[0], path) for path in paths if "{" in path]

    def of(self, path: str) -> str:
        """The declared path that a request's path belongs to, or UNKNOWN_ROUTE."""
        if path in self._exact:
            return path
        return next((name for pattern, name in self._patterns if pattern.match(path)), UNKNOWN_ROUTE)


class RequestCounter(HttpMiddleware):
    """Tells `count(route, status)` of every request when its reply begins, or when it ends without one: for `http_requests_total`."""

    def __init__(self, app: ASGIApp, names: RouteNames, count: Callable[[str, int], None]) -> None:
        super().__init__(app)
        self.names = names
        self.count = count

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self.names.of(scope["path"])
        is_counted = False

        async def counting_send(message: Message) -> None:
            nonlocal is_counted
            if message["type"] == "http.response.start":
                is_counted = True
                self.count(route, message["status"])
            await send(message)

        try:
            await self.app(scope, receive, counting_send)
        finally:
            if not is_counted:
                self.count(route, CLIENT_GONE)


class ErrorBoundary(HttpMiddleware):
    """The one place where an exception becomes a reply. A reply that has already begun can only be cut off."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
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


class PatternCors(CORSMiddleware):
    """CORS headers for the origins of --allow-origins. The gate in front has refused all others, also those of private networks."""

    def __init__(self, app: ASGIApp, origins: Origins, expose_headers: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=[ANY] if origins.is_any else [],
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=expose_headers,
            allow_private_network=True,
        )
        self._origins = origins

    def is_allowed_origin(self, origin: str) -> bool:
        return self._origins.allows(origin)


class HostList:
    """Which Host headers are answered."""

    def __init__(self, bound_host: str, allowed: str | None) -> None:
        """bound_host: --host. allowed: --allowed-hosts; None = any on an address that other machines reach, else only loopback names."""
        named = parse_hosts(allowed) if allowed is not None else () if is_loopback(bound_host) else (ANY,)
        self._hosts = {"localhost", bound_host.lower(), *named}

    def allows(self, values: list[bytes]) -> bool:
        """Whether a request with these Host headers is answered. HTTP/1.0 clients, but no browsers, send none."""
        if ANY in self._hosts or not values:
            return True
        split = split_authority(values[0].decode("latin-1")) if len(values) == 1 else None
        return split is not None and (split[0] in self._hosts or _is_loopback(split[0]))


class OriginGate(HttpMiddleware):
    """See the module docstring. origins: those of --allow-origins."""

    def __init__(self, app: ASGIApp, origins: Origins, hosts: HostList) -> None:
        super().__init__(app)
        self._origins = origins
        self._hosts = hosts
        self._logged: set[str] = set()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send)
            return
        if refusal.message not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(refusal.message)
            log.warning("refused a request: %s", refusal.message)
        await send_error(send, scope, refusal)

    def _refusal(self, scope: Scope) -> ForbiddenError | None:
        hosts: list[bytes] = []
        origins: list[bytes] = []
        fetch: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origins.append(value)
            elif name.startswith(b"sec-fetch-"):
                fetch[name] = value.strip().lower()
        if not self._hosts.allows(hosts):
            shown = _shown(hosts[0])
            message = (
                f"the host {shown!r} is not served here; --allowed-hosts names the hosts that are, besides localhost"
            )
            return ForbiddenError(message, code="host_not_allowed")
        if self._allows_page(scope["method"], hosts, origins, fetch):
            return None
        shown = repr(_shown(origins[0])) if origins else "another origin"
        message = f"web pages of {shown} may not use this server; --allow-origins names the origins that may"
        if origins and all(_LOCAL.allows(origin.decode("latin-1")) for origin in origins):
            message += f" ({LOCAL_APPS}: applications and extensions on this machine)"
        return ForbiddenError(message, code="origin_not_allowed")

    def _allows_page(self, method: str, hosts: list[bytes], origins: list[bytes], fetch: dict[bytes, bytes]) -> bool:
        site = fetch.get(b"sec-fetch-site")
        # Pages cannot set Sec-Fetch headers, and the browser knows the origin even if a proxy has changed the Host.
        if self._origins.is_any or site == b"same-origin":
            return True
        if origins:
            return all(self._is_ours(origin.decode("latin-1"), hosts) for origin in origins)
        if site in (None, b"none"):
            return True
        # A user followed a link to us: the page with the link cannot see the reply, and a browser's GET changes nothing.
        is_visit = fetch.get(b"sec-fetch-mode") == b"navigate" and fetch.get(b"sec-fetch-dest") == b"document"
        return is_visit and method in ("GET", "HEAD")

    def _is_ours(self, origin: str, hosts: list[bytes]) -> bool:
        """Whether the origin is listed, or is that of our own pages."""
        is_own = len(hosts) == 1 and is_same_origin(origin, hosts[0].decode("latin-1"))
        return is_own or self._origins.allows(origin)


def is_browsers(headers: Headers) -> bool:
    """Whether a request may come from a browser: from a page, a link or an image, even if what says from where was held back."""
    return any(
        name in (b"origin", b"referer")
        or name.startswith(b"sec-fetch-")
        or (name == b"user-agent" and value.strip().lower().startswith(b"mozilla/"))
        for name, value in headers
    )


def is_loopback(host: str) -> bool:
    """Whether a server bound to `host`, a name or an address, can be reached only from this machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except OSError:
        return host == "localhost"
    return bool(found) and all(_is_loopback(str(address[0])) for *_, address in found)


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return found.is_loopback or (mapped is not None and mapped.is_loopback)


def _shown(value: bytes) -> str:
    return value[:100].decode("latin-1")
