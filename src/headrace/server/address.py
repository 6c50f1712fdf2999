"""Binds the listening socket. Apart from the server, which is slow to import, so that the port is bound before anything is loaded."""

import socket

from headrace.errors import ConfigError


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


def local_url(host: str, port: int, scheme: str = "http") -> str:
    """URL for clients on this machine of a server bound to `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
