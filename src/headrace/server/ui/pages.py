"""The routes of the web pages. The files are public; what they show needs the same keys as for any other client.

Runs in the event loop that serves HTTP. The files are read once and compressed.
"""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.errors import NotFoundError
from headrace.server.http import Exchange, Headers, send_response
from headrace.server.routes import RouteSpec

STATIC = Path(__file__).parent / "static"

_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".json": b"application/json",
    ".LICENSE": b"text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file. etag: as in the header, with its quotes; the same for both forms of the body, hence weak."""

    content_type: bytes
    body: bytes
    compressed: bytes
    etag: bytes


def read_files() -> dict[str, PageFile]:
    """Every file below `STATIC` by its path there, with `/` between the parts. Raises KeyError for a type that is not known."""
    return {path.relative_to(STATIC).as_posix(): _read(path) for path in sorted(STATIC.rglob("*")) if path.is_file()}


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    etag = b'W/"' + hashlib.sha256(body).hexdigest()[:32].encode() + b'"'
    return PageFile(_TYPES[path.suffix], body, gzip.compress(body, 9, mtime=0), etag)


POLICY = (
    b"default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src data:; connect-src 'self'; object-src 'none'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
)
"""Content-Security-Policy of every file: nothing from other hosts, no inline scripts or styles, no HTML from strings but
DOMPurify's. data: is for the images and audio that a user sends."""

_HEADERS: Headers = [
    (b"cache-control", b"no-cache"),
    (b"content-security-policy", POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"vary", b"accept-encoding"),
    (b"x-content-type-options", b"nosniff"),
]


def ui_routes(has_docs: bool) -> list[RouteSpec]:
    """/ui, the files below it, which are read here, and /docs. has_docs: there is an /openapi.json to show."""
    get, row = ("GET",), partial(RouteSpec, in_schema=False, with_replicas=True)
    routes = [
        row("/ui", get, "public", partial(redirect, b"ui/"), "Web pages: chat, dashboard and API"),
        row("/ui/{path:path}", get, "public", partial(send_file, read_files()), "A file of the web pages"),
    ]
    if has_docs:
        routes.append(row("/docs", get, "public", partial(redirect, b"ui/#api"), "The API, to try it"))
    return routes


async def send_file(files: Mapping[str, PageFile], exchange: Exchange) -> None:
    """A file; 304 if the client has it already."""
    found = files.get(exchange.path_param("path") or "index.html")
    if found is None:
        raise NotFoundError("the web pages have no such file", code="route_not_found")
    headers = [*_HEADERS, (b"etag", found.etag)]
    if found.etag in (exchange.header(b"if-none-match") or b""):
        await send_response(exchange.send, 304, b"", found.content_type, headers)
        return
    body = found.body
    if b"gzip" in (exchange.header(b"accept-encoding") or b""):
        body = found.compressed
        headers.append((b"content-encoding", b"gzip"))
    await send_response(exchange.send, 200, body, found.content_type, headers)


async def redirect(location: bytes, exchange: Exchange) -> None:
    """location: relative, so that it also holds behind a proxy that adds a prefix."""
    headers = [(b"location", location), (b"cache-control", b"no-store")]
    await send_response(exchange.send, 307, b"", b"text/plain", headers)
