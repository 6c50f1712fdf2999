"""Fetches media files over HTTP, from the hosts that the operator allows and from no other address. Runs in the main process's event loop.

What a client names may be meant to reach what only the server can reach, so: a host has to be allowed by name; all of its addresses have to be
public; the connection goes to exactly the addresses that were checked; a redirect stays at the host; nothing is decompressed; and there are no
proxies, cookies or credentials. Of a refused URL no request leaves. Errors never tell an address.
"""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.config.web import MediaArgs, address_of
from headrace.multimodal.limits import FETCH_LIMIT_S, MediaRefusedError
from headrace.multimodal.sources import FileLimit, too_large
from headrace.turns import Places
from headrace.version import VERSION

if TYPE_CHECKING:
    from yarl import URL

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> its addresses. Raises OSError if there are none."""

MAX_REDIRECTS = 3
AT_A_TIME = 40
"""Files that are fetched, or have been and are yet to be prepared, at a time; 32 of one tenant."""

AT_A_TIME_OF_HOST = 10  # those of them that are of one host: a slow one leaves room for others; 8 of one tenant
_DNS_THREADS = 4
_CHUNK_BYTES = 1 << 16
_MOST_URL = 8192
_USUAL_PORTS = {"http": 80, "https": 443}
_HEADERS = {
    "User-Agent": f"headrace/{VERSION}",
    "Accept": "image/*, audio/*",
    "Accept-Encoding": "identity",
}

_UNICAST = ipaddress.ip_network("2000::/3")
_WRAPPED = tuple(map(ipaddress.ip_network, ("2001::/32", "2002::/16")))
"""Global IPv6 addresses, and those of them that stand for IPv4 addresses."""


class Fetcher:
    """See the module docstring. resolve: looks up names; by default as the system does."""

    def __init__(self, args: MediaArgs, resolve: Resolve | None = None, limit_s: float = FETCH_LIMIT_S) -> None:
        self._domains = args.domains
        self._limit_s = limit_s
        self._resolve = resolve or self._look_up
        self._dns_threads = ThreadPoolExecutor(_DNS_THREADS, "media-hosts")
        self._places = Places(AT_A_TIME, AT_A_TIME_OF_HOST)

    @asynccontextmanager
    async def fetched(self, url: str, limit: FileLimit) -> AsyncIterator[bytes]:
        """The bytes of a file, for which there is a place as long as they are needed. Raises MediaRefusedError, or CapacityError if too many others
        have one."""
        target = self._checked(url)
        async with self._places.one("too many files are being fetched from this host", self._limit_s, _host(target)):
            yield await self._in_time(target, limit)

    async def _in_time(self, target: "URL", limit: FileLimit) -> bytes:
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._fetched(target, limit)
        except TimeoutError:
            raise MediaRefusedError(f"fetching the file takes longer than {self._limit_s:g} s", "time") from None

    def close(self) -> None:
        self._dns_threads.shutdown(wait=False, cancel_futures=True)

    def _checked(self, url: str) -> "URL":
        """The URL, taken apart as it is asked. Raises MediaRefusedError if its host is not allowed."""
        from yarl import URL

        if not self._domains.names and not self._domains.addresses:
            raise MediaRefusedError(
                "this server fetches no files (--allowed-media-domains): send the file itself, in base64", "url"
            )
        if len(url) > _MOST_URL or any(letter <= " " or letter in "\\\x7f" for letter in url):
            raise MediaRefusedError("the URL is too long, or has characters that a URL cannot have", "url")
        try:
            # What a signature of the URL covers must be asked for as it is written.
            target = URL(url, encoded=url.isascii()).with_fragment(None)
            host, port = _host(target), target.port
        except ValueError:
            raise MediaRefusedError("the URL cannot be read", "url") from None
        if target.scheme not in _USUAL_PORTS or not host or not port:
            raise MediaRefusedError("the URL has no host", "url")
        if target.user is not None or target.password is not None:
            raise MediaRefusedError("the URL has a user name or a password", "url")
        if not self._allows(host, port, _USUAL_PORTS[target.scheme]):
            raise MediaRefusedError(
                f"files of {target.raw_authority!r:.200} are not fetched; the server's operator allows hosts (--allowed-media-domains)",
                "url",
            )
        return target

    def _allows(self, host: str, port: int, usual_port: int) -> bool:
        address = address_of(host)
        if address is not None:
            return (str(address), port) in self._domains.addresses
        return self._domains.allows_name(host.removesuffix("."), port, usual_port)

    async def _addresses(self, target: "URL") -> list[str]:
        """Where to connect to: what is checked, and nothing else. Raises MediaRefusedError."""
        host, port = _host(target), target.port
        assert port is not None, "_checked has refused it"
        if address_of(host) is not None:
            return [host]  # the operator's own word
        try:
            addresses = list(dict.fromkeys(await self._resolve(host, port)))
        except OSError:
            addresses = []
        if not addresses:
            raise MediaRefusedError(f"the host {host!r:.200} is not known", "fetch")
        if not all(map(is_public, addresses)):
            raise MediaRefusedError(f"the host {host!r:.200} is not a public one", "url")
        return addresses

    async def _fetched(self, target: "URL", limit: FileLimit) -> bytes:
        import aiohttp

        addresses = await self._addresses(target)
        known: Any = _Known(addresses)
        connector = aiohttp.TCPConnector(resolver=known, use_dns_cache=False, force_close=True, limit=1)
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            headers=_HEADERS,
            timeout=aiohttp.ClientTimeout(total=None),
        ) as session:
            for _ in range(MAX_REDIRECTS + 1):
                try:
                    async with session.get(target, allow_redirects=False) as response:
                        if response.status not in (301, 302, 303, 307, 308):
                            return await self._body(response, limit)
                        target = self._redirected(target, response.headers.get("Location", ""))
                except aiohttp.ClientSSLError:
                    raise MediaRefusedError("the host's certificate is not accepted", "fetch") from None
                except (aiohttp.ClientError, OSError, ValueError):
                    raise MediaRefusedError(
                        "the file could not be fetched: the host does not answer as it should", "fetch"
                    ) from None
        raise MediaRefusedError(f"the file could not be fetched: more than {MAX_REDIRECTS} redirects", "fetch")

    def _redirected(self, target: "URL", location: str) -> "URL":
        from yarl import URL

        try:
            there = target.join(URL(location, encoded=location.isascii()))
        except ValueError:
            raise MediaRefusedError("the host answers with a redirect that cannot be read", "fetch") from None
        if _host(there) != _host(target) or (target.scheme, there.scheme) == ("https", "http"):
            raise MediaRefusedError(
                "the host answers with a redirect to another one, or to http:, which is not followed", "url"
            )
        return self._checked(str(there))

    async def _body(self, response: Any, limit: FileLimit) -> bytes:
        if response.status != 200:
            raise MediaRefusedError(f"the file could not be fetched: the host answers {response.status}", "fetch")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise MediaRefusedError("the host answers with a compressed file, which was not asked for", "fetch")
        if (response.content_length or 0) > limit.num_bytes:
            raise too_large(limit)
        data = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            data += chunk
            if len(data) > limit.num_bytes:
                raise too_large(limit)
        return bytes(data)

    async def _look_up(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await loop.run_in_executor(self._dns_threads, look_up)
        return [str(address[0]) for _, _, _, _, address in found]


class _Known:
    """A resolver of aiohttp's that knows these addresses for every host, and asks nobody."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_INET) -> list[dict[str, Any]]:
        return [
            {
                "hostname": host,
                "host": address,
                "port": port,
                "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
                "proto": 0,
                "flags": socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            }
            for address in self._addresses
        ]

    async def close(self) -> None:
        """Nothing is open."""


def is_public(text: str) -> bool:
    """Whether an address is one of the public Internet: not private, loopback, link-local, multicast, reserved or unspecified, and not an IPv6
    address that stands for an IPv4 address."""
    address = address_of(text)
    if address is None:  # the text has a zone, for one
        return False
    if isinstance(address, ipaddress.IPv6Address) and (
        address not in _UNICAST or any(address in network for network in _WRAPPED)
    ):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _host(target: "URL") -> str:
    """In lower case and ASCII, without brackets."""
    return (target.raw_host or "").lower()
