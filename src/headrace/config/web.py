"""`--allow-origins` and `--allowed-hosts`, taken apart: whose pages may call a server, and by what names it may be called.

Pure text: no sockets and no names are looked up. Used when the options are checked and by `server.origin_gate`.
"""

import re
from dataclasses import dataclass

from headrace.errors import ConfigError

ANY = "*"
OPAQUE = "null"
"""The origin of a sandboxed frame or a local file, as browsers send it."""

_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_ANY_PORT = re.compile(r"(https?)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+):\*")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://\*")
_APP_AUTHORITY = re.compile(r"[a-z0-9._~-]*(:[0-9]{1,5})?")

LOCAL_APPS = "local-apps"
_LOCAL_APPS = (
    *(f"{scheme}://{host}:*" for scheme in _DEFAULT_PORTS for host in ("localhost", "127.0.0.1", "0.0.0.0", "[::1]", "tauri.localhost")),
    *(f"{scheme}://*" for scheme in ("app", "chrome-extension", "moz-extension", "safari-web-extension", "tauri", "vscode-webview")),
    "file://",
    "vscode-file://vscode-app",
)  # fmt: skip
"""Who runs on this machine and not on a web site: pages of any port of it, desktop applications (Tauri's on Windows are tauri.localhost), editors,
extensions of browsers."""


def split_authority(text: str) -> tuple[str, int | None] | None:
    """Host (lower case, without brackets and the root's dot) and port of `host[:port]`; None for anything else."""
    found = _AUTHORITY.fullmatch(text.strip().lower())
    if found is None:
        return None
    host = found[1].strip("[]").removesuffix(".")
    return (host, int(found[2]) if found[2] else None) if host else None


def is_origin(text: str) -> bool:
    """Whether `text` is `scheme://host[:port]`."""
    scheme, _, authority = text.partition("://")
    return _SCHEME.fullmatch(f"{scheme}://*") is not None and split_authority(authority) is not None


def is_same_origin(origin: str, host: str) -> bool:
    """Whether `origin` is that of pages served under the Host header `host`. A proxy may have taken TLS off: schemes are not compared."""
    scheme, _, authority = origin.strip().lower().partition("://")
    page, own = split_authority(authority), split_authority(host)
    if page is None or own is None:
        return False
    implied = _DEFAULT_PORTS.get(scheme)
    return (page[0], page[1] or implied) == (own[0], own[1] or implied)


def normal_origin(origin: str) -> str:
    """`origin` in lower case and without the port that its scheme implies, as browsers write it."""
    text = origin.strip().lower()
    scheme, found, _ = text.partition("://")
    return text.removesuffix(f":{_DEFAULT_PORTS[scheme]}") if found and scheme in _DEFAULT_PORTS else text


@dataclass(frozen=True, slots=True)
class Origins:
    """Those of `--allow-origins`. listed: as `normal_origin` writes them. hosts: (scheme, host) with any port. schemes: with any host."""

    is_any: bool = False
    listed: frozenset[str] = frozenset()
    hosts: frozenset[tuple[str, str]] = frozenset()
    schemes: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return self.is_any or bool(self.listed or self.hosts or self.schemes)

    def allows(self, origin: str) -> bool:
        """Whether pages of `origin`, an Origin header, may use the server. Nothing that is no whole origin matches a pattern."""
        text = normal_origin(origin)
        if self.is_any or text in self.listed:
            return True
        scheme, found, authority = text.partition("://")
        if scheme in self.schemes:
            return bool(found) and _APP_AUTHORITY.fullmatch(authority) is not None
        split = _AUTHORITY.fullmatch(authority) if found else None
        return split is not None and (scheme, split[1]) in self.hosts


def parse_origins(text: str) -> Origins:
    """`--allow-origins`. Raises ConfigError."""
    items = {normal_origin(item) for item in text.split(",") if item.strip()}
    if ANY in items:
        return Origins(is_any=True)
    if LOCAL_APPS in items:
        items = {*items, *_LOCAL_APPS} - {LOCAL_APPS}
    listed, hosts, schemes = set(), set(), set()
    for item in items:
        if (port := _ANY_PORT.fullmatch(item)) is not None:
            hosts.add((port[1], port[2]))
        elif (scheme := _SCHEME.fullmatch(item)) is not None and scheme[1] not in _DEFAULT_PORTS:
            schemes.add(scheme[1])
        elif item in (OPAQUE, "file://") or is_origin(item):
            listed.add(item)
        else:
            raise ConfigError(
                f"--allow-origins takes origins such as https://chat.example (no path, no slash at the end), http://localhost:* (any port), "
                f"app://* (any, but not of http and https), file://, {LOCAL_APPS}, comma-separated, or *; got {item!r:.80}"
            )
    return Origins(listed=frozenset(listed), hosts=frozenset(hosts), schemes=frozenset(schemes))


def parse_hosts(text: str) -> frozenset[str]:
    """The names of `--allowed-hosts`; {"*"} = any. Raises ConfigError."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    if ANY in items:
        return frozenset({ANY})
    hosts = set()
    for item in items:
        # An IPv6 address may come without the brackets that a Host header needs.
        split = split_authority(f"[{item}]" if item.count(":") > 1 and not item.startswith("[") else item)
        if split is None or split[1] is not None:
            raise ConfigError(
                f"--allowed-hosts takes names and addresses without a port, comma-separated, or *; got {item!r:.80}"
            )
        hosts.add(split[0])
    return frozenset(hosts)
