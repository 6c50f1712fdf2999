"""Refuses, behind a balancer that knows nothing of replicas, the routes that would change or show one of them and leave the rest.

Which do not, their rows of the route table say (`with_replicas`); a new one is refused until its row does. Runs in the event loop of a replica.
"""

from collections.abc import Sequence

from headrace.errors import RequestError
from headrace.server.http import ASGIApp, Receive, Scope, Send, send_error
from headrace.server.middleware import UNKNOWN_ROUTE, RouteNames
from headrace.server.routes import RouteSpec


class OneReplicaGate:
    """Refuses routes that would reach one of several replicas. routes: all declared ones; a path that nobody declares goes on to its 404."""

    def __init__(self, app: ASGIApp, routes: Sequence[RouteSpec]) -> None:
        self.app = app
        self.names = RouteNames(spec.path for spec in routes)
        self.open = {spec.path for spec in routes if spec.with_replicas} | {UNKNOWN_ROUTE}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, or answer 400."""
        route = self.names.of(scope["path"]) if scope["type"] == "http" else UNKNOWN_ROUTE
        if route in self.open:
            await self.app(scope, receive, send)
            return
        refusal = RequestError(
            f"{route} would reach one replica of several, so it is off with --ray; give what all replicas shall have as an option",
            None,
            "unsupported_with_ray",
        )
        await send_error(send, scope, refusal)
