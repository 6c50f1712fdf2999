"""`--allow-origins` and `--allowed-hosts`, taken apart: whose pages may call a server, and by what names it may be called.

Pure text: no sockets and no names are looked up. Used when the options are checked and by `server.origin_gate`.
"""

import re

from headrace.errors import ConfigError

ANY = "*"
OPAQUE = "null"
"""The origin of a sandboxed frame or a local file, as browsers send it."""

_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


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
    return bool(scheme) and split_authority(authority) is not None


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


def parse_origins(text: str) -> frozenset[str]:
    """The origins of `--allow-origins`; {"*"} = any. Raises ConfigError."""
    origins = {normal_origin(item) for item in text.split(",") if item.strip()}
    for origin in origins - {ANY, OPAQUE}:
        if not is_origin(origin):
            raise ConfigError(
                f"--allow-origins takes origins such as https://chat.example or http://localhost:3000 (no path, no slash at "
                f"the end), comma-separated, or *; got {origin!r:.80}"
            )
    return frozenset({ANY} if ANY in origins else origins)


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
