"""The listening socket, the certificate of its connections, and the addresses of clients. Apart from the server, which is slow to import, so that
the port is bound and a wrong file is found before anything is loaded.
"""

import functools
import ipaddress
import socket
import ssl
from collections.abc import Mapping
from typing import Any

from headrace.config.server_args import ServerArgs
from headrace.config.web import Networks, address_of, split_authority
from headrace.errors import ConfigError

_NETWORK_BITS, _SITE_BITS = 64, 48
"""What one client of IPv6 has for itself, and the most that a network's owner is usually given."""
_NETWORKS_OF_SITE = 16
"""So many networks of a site count for themselves, those that came first; the others are one client together."""
_MOST_SITES = 4096
_sites: dict[int, set[int]] = {}
"""The networks of each site that count for themselves, the site that was seen last at the end."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to (host, port); port 0 = any free port. Raises ConfigError, which says what to change."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as exc:
        raise ConfigError(f"--host {host}: not an address of this machine ({exc.strerror})") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Listen now and not later, so that a second server on the same port fails at once.
        sock.listen(2048)
    except OSError as exc:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}; choose another --port or --host") from None
    sock.setblocking(False)
    sock.set_inheritable(False)
    return sock


def local_url(args: ServerArgs, port: int) -> str:
    """URL for clients on this machine of a server bound to --host and `port`."""
    scheme = "https" if args.ssl_certfile is not None else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(args.host, args.host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_certificate(args: ServerArgs) -> None:
    """Raises ConfigError, naming the option, for files that cannot be read or do not belong together."""
    if args.ssl_certfile is None:
        if args.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return
    given = {"--ssl-certfile": args.ssl_certfile, "--ssl-keyfile": args.ssl_keyfile}
    files = {option: path for option, path in given.items() if path is not None}
    for option, path in files.items():
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{option} {path}: cannot be read ({error.strerror})") from None
    key_option = [*files][-1]

    def no_password() -> str:
        raise ConfigError(
            f"{key_option}: the key is encrypted, and the server cannot ask for its password; decrypt the file"
        )

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(args.ssl_certfile, args.ssl_keyfile, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError("--ssl-keyfile: this is not the key of the certificate in --ssl-certfile") from None
        shown = " and ".join(files)
        raise ConfigError(
            f"{shown}: not a certificate in PEM and its private key ({error.reason or 'unreadable'})"
        ) from None


def turn_address(scope: Mapping[str, Any], proxies: Networks) -> str:
    """Whose turn a request without a name takes: `@` and the client's address, or its network for IPv6. Not for what anybody owns.

    scope: of ASGI. proxies: of these, the last entry of X-Forwarded-For that is none of theirs is the client's, since anybody may have written what
    stands before it. If that is no address, the proxy's own counts.
    """
    client = scope.get("client")
    host = client[0] if client else ""
    if proxies and _is_in(host, proxies):
        sent = b",".join(value for name, value in scope["headers"] if name == b"x-forwarded-for").decode("latin-1")
        hosts = map(_host_of, reversed(sent.split(",")))
        found = next((item for item in hosts if not _is_in(item, proxies)), host)
        host = found if address_of(found) else host
    return turn_of_host(host)


@functools.lru_cache(4096)
def turn_of_host(host: str) -> str:
    """See `turn_address`."""
    address = address_of(host)
    address = getattr(address, "ipv4_mapped", None) or address
    if isinstance(address, ipaddress.IPv6Address):
        return f"@{ipaddress.ip_network((address, _bits_of_client(int(address))), strict=False)}"
    return f"@{address or ''}"


def _bits_of_client(address: int) -> int:
    network, site = address >> (128 - _NETWORK_BITS), address >> (128 - _SITE_BITS)
    known = _sites[site] = _sites.pop(site, set())
    if len(_sites) > _MOST_SITES:
        del _sites[next(iter(_sites))]
    if len(known) < _NETWORKS_OF_SITE:
        known.add(network)
    return _NETWORK_BITS if network in known else _SITE_BITS


def _host_of(item: str) -> str:
    """Without brackets and port."""
    split = None if address_of(item.strip()) else split_authority(item)
    return split[0] if split is not None else item.strip()


def _is_in(host: str, networks: Networks) -> bool:
    address = address_of(host)
    address = getattr(address, "ipv4_mapped", None) or address
    return address is not None and any(address in network for network in networks)
