"""Refuses requests from web pages of other origins, and requests to host names that are not the server's.

A page can make a browser send requests to any address, including this machine's loopback. Two checks, before keys and routes:

- Host: a page whose name was resolved to our address (DNS rebinding) still sends its own name. On a loopback address, only loopback
  names and those of --allowed-hosts are served.
- Origin: a page of another origin is served only if --allow-origins lists it. This applies even if it could not read the reply, because
  a form or a `no-cors` request takes effect without that.

Clients other than browsers send neither Origin nor Sec-Fetch-Site and are not affected. CORS headers for the listed origins are added by
Starlette's middleware, behind this one. Runs in the event loop that serves HTTP.
"""

import ipaddress
import socket
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware

from headrace.config.web import ANY, LOCAL_APPS, Origins, is_same_origin, parse_hosts, parse_origins, split_authority
from headrace.errors import ForbiddenError
from headrace.log import get_logger
from headrace.server.http import ASGIApp, Headers, Receive, Scope, Send, send_error

log = get_logger(__name__)

MAX_LOGGED = 20
"""Most different refusals to log, since clients choose what they send."""


_LOCAL = parse_origins(LOCAL_APPS)


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
        """See `Origins.allows`."""
        return self._origins.allows(origin)


class HostList:
    """Which Host headers are answered."""

    def __init__(self, bound_host: str, allowed: str | None) -> None:
        """bound_host: --host. allowed: --allowed-hosts; None = any on an address that other machines reach, else only loopback names."""
        self._hosts = parse_hosts(allowed) if allowed is not None else frozenset()
        if allowed is None and not is_loopback(bound_host):
            self._hosts = frozenset({ANY})
        self._bound_host = bound_host.lower()

    def allows(self, values: list[bytes]) -> bool:
        """Whether a request with these Host headers is answered. HTTP/1.0 clients, but no browsers, send none."""
        if ANY in self._hosts or not values:
            return True
        split = split_authority(values[0].decode("latin-1")) if len(values) == 1 else None
        return split is not None and (
            split[0] == "localhost" or split[0] == self._bound_host or split[0] in self._hosts or _is_loopback(split[0])
        )


class OriginGate:
    """See the module docstring. origins: those of --allow-origins."""

    def __init__(self, app: ASGIApp, origins: Origins, hosts: HostList) -> None:
        self.app = app
        self._origins = origins
        self._hosts = hosts
        self._logged: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
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
        if self._origins.allows(origin):
            return True
        return len(hosts) == 1 and is_same_origin(origin, hosts[0].decode("latin-1"))


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
    if _is_address(host):
        return _is_loopback(host)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except OSError:
        return host == "localhost"
    return bool(found) and all(_is_loopback(str(address[0])) for *_, address in found)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return found.is_loopback or (mapped is not None and mapped.is_loopback)


def _shown(value: bytes) -> str:
    return value[:100].decode("latin-1")
