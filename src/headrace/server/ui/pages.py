"""The routes of the web pages. The files are public; what they show needs the same keys as for any other client.

Runs in the event loop that serves HTTP.
"""

from functools import partial

from headrace.errors import NotFoundError
from headrace.server.http import Exchange, Headers, send_response
from headrace.server.routes import RouteSpec
from headrace.server.ui.files import read_files

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


class UiPages:
    """Handlers of /ui, the files below it, and /docs. The files are read when this is made."""

    def __init__(self) -> None:
        self._files = read_files()

    def routes(self, has_docs: bool) -> list[RouteSpec]:
        """Their rows of the route table. has_docs: there is an /openapi.json to show."""
        get, row = ("GET",), partial(RouteSpec, in_schema=False, with_replicas=True)
        routes = [
            row("/ui", get, "public", redirect_to_ui, "Web pages: chat, dashboard and API"),
            row("/ui/{path:path}", get, "public", self.file, "A file of the web pages"),
        ]
        if has_docs:
            routes.append(row("/docs", get, "public", redirect_to_docs, "The API, to try it"))
        return routes

    async def file(self, exchange: Exchange) -> None:
        """A file; 304 if the client has it already."""
        found = self._files.get(exchange.path_param("path") or "index.html")
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


async def redirect_to_ui(exchange: Exchange) -> None:
    """To the pages."""
    await _redirect(exchange, b"ui/")


async def redirect_to_docs(exchange: Exchange) -> None:
    """To the page that shows the routes and tries them."""
    await _redirect(exchange, b"ui/#api")


async def _redirect(exchange: Exchange, location: bytes) -> None:
    """location: relative, so that it also holds behind a proxy that adds a prefix."""
    headers = [(b"location", location), (b"cache-control", b"no-store")]
    await send_response(exchange.send, 307, b"", b"text/plain", headers)
