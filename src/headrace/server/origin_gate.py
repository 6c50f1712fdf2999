"""Keeps web pages out that have no business here: what a browser sends for a page of another origin, or to a name that is not ours.

A page may make any browser send requests to any address, this machine's loopback included. Two checks, before keys and routes:

- Host: a page whose name was pointed at our address (DNS rebinding) still says its own name. On a loopback bind only loopback names
  and those of --allowed-hosts are served.
- Origin: a page of another origin is served only when --allow-origins names it, whether or not it could read the reply, because a
  form or a `no-cors` request acts without reading.

Clients that are no browsers send neither Origin nor Sec-Fetch-Site and are not concerned. Owns no CORS headers: those of origins that are
listed come from Starlette's middleware, behind this one. Runs in the event loop of the main process.
"""

import ipaddress
import socket

from headrace.config.web import ANY, is_same_origin, normal_origin, parse_hosts, split_authority
from headrace.errors import ForbiddenError
from headrace.log import get_logger
from headrace.server.http import ASGIApp, Receive, Scope, Send, send_error

log = get_logger(__name__)

MAX_LOGGED = 20
"""So many different refusals are logged: clients choose what they send."""


class HostList:
    """Which Host headers are answered."""

    def __init__(self, bound_host: str, allowed: str | None) -> None:
        """bound_host: --host. allowed: --allowed-hosts; None = any on an address that others reach, else none but loopback names."""
        self._hosts = parse_hosts(allowed) if allowed is not None else frozenset()
        if allowed is None and not is_loopback(bound_host):
            self._hosts = frozenset({ANY})
        self._bound_host = bound_host.lower()

    def allows(self, values: list[bytes]) -> bool:
        """Whether a request with these Host headers is answered. None at all is what HTTP/1.0 clients send, and no browser."""
        if ANY in self._hosts or not values:
            return True
        split = split_authority(values[0].decode("latin-1")) if len(values) == 1 else None
        return split is not None and (
            split[0] == "localhost" or split[0] == self._bound_host or split[0] in self._hosts or _is_loopback(split[0])
        )


class OriginGate:
    """See the module's text. origins: those of --allow-origins."""

    def __init__(self, app: ASGIApp, origins: frozenset[str], hosts: HostList) -> None:
        self.app = app
        self._origins = origins
        self._hosts = hosts
        self._logged: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer 403."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self.app(scope, receive, send)
            return
        if refusal.message not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(refusal.message)
            log.warning("refused a request: %s", refusal.message)
        await send_error(send, refusal)

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
        return ForbiddenError(message, code="origin_not_allowed")

    def _allows_page(self, method: str, hosts: list[bytes], origins: list[bytes], fetch: dict[bytes, bytes]) -> bool:
        site = fetch.get(b"sec-fetch-site")
        # A page cannot set Sec-Fetch headers, and the browser knows the origin also where a proxy has changed the Host.
        if ANY in self._origins or site == b"same-origin":
            return True
        if origins:
            return all(self._is_ours(origin.decode("latin-1"), hosts) for origin in origins)
        if site in (None, b"none"):
            return True
        # Somebody followed a link to us: the page that held it sees nothing of the reply, and GET changes nothing.
        is_visit = fetch.get(b"sec-fetch-mode") == b"navigate" and fetch.get(b"sec-fetch-dest") == b"document"
        return is_visit and method in ("GET", "HEAD")

    def _is_ours(self, origin: str, hosts: list[bytes]) -> bool:
        """The origin is listed, or is that of our own pages."""
        if normal_origin(origin) in self._origins:
            return True
        return len(hosts) == 1 and is_same_origin(origin, hosts[0].decode("latin-1"))


def is_loopback(host: str) -> bool:
    """Whether a server bound to `host`, a name or an address, is reached from this machine only."""
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
