"""Counts replies by route and status, for the metric `http_requests_total`.

Owns the names of routes as labels: the declared path, never the path that was sent, so that clients cannot make new series. Runs in the event
loop that serves HTTP.
"""

from collections.abc import Callable, Iterable

from starlette.routing import compile_path

from headrace.server.http import ASGIApp, Message, Receive, Scope, Send

UNKNOWN_ROUTE = "unknown"
"""Label of every path that no route declares."""

CLIENT_GONE = 499
"""Status of requests whose client left before the reply began: the number that nginx logs for them."""


class RouteNames:
    """The declared paths. paths: as in the route table, with their `{parameters}`."""

    def __init__(self, paths: Iterable[str]) -> None:
        paths = list(paths)
        self._exact = {path for path in paths if "{" not in path}
        self._patterns = [(compile_path(path)[0], path) for path in paths if "{" in path]

    def of(self, path: str) -> str:
        """The declared path that a request's path belongs to, or UNKNOWN_ROUTE."""
        if path in self._exact:
            return path
        return next((name for pattern, name in self._patterns if pattern.match(path)), UNKNOWN_ROUTE)


class RequestCounter:
    """Middleware that tells `count(route, status)` of every request when its reply begins, or when it ends without one."""

    def __init__(self, app: ASGIApp, names: RouteNames, count: Callable[[str, int], None]) -> None:
        self.app = app
        self.names = names
        self.count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
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
