"""Which routes mean the same whichever replica answers, behind a balancer that knows nothing of replicas.

The others would change or show one replica and leave the rest: they are refused. A new route is refused, too, until it is listed here.
Runs in the event loop of a replica.
"""

from headrace.errors import RequestError
from headrace.server.http import ASGIApp, Receive, Scope, Send, send_error
from headrace.server.request_counter import UNKNOWN_ROUTE, RouteNames

SAME_IN_ALL = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/chat/completions",
        "/completions",
        "/embeddings",
        "/responses",
        "/messages",
        "/messages/count_tokens",
        "/models",
        "/models/{id:path}",
        "/generate",
        "/infill",
        "/embed",
        "/v1/embed",
        "/v2/embed",
        "/info",
        "/encode",
        "/classify",
        "/v1/classify",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/health",
        "/health_generate",
        "/ready",
        "/ping",
        "/tokenize",
        "/detokenize",
        "/v1/tokenize",
        "/v1/detokenize",
        "/v1/models",
        "/v1/models/{id:path}",
        "/model_info",
        "/get_model_info",
        "/openapi.json",
        "/",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/api/version",
        "/api/tags",
        "/api/ps",
        "/api/show",
        "/api/pull",
        "/docs",
        "/ui",
        "/ui/{path:path}",
    }
)
"""Declared paths of routes that only generate or tell what all replicas have in common."""


class OneReplicaGate:
    """Refuses routes that would reach one of several replicas. paths: all declared ones; a path that nobody declares goes on to its 404."""

    def __init__(self, app: ASGIApp, paths: list[str]) -> None:
        self.app = app
        self.names = RouteNames(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, or answer 400."""
        route = self.names.of(scope["path"]) if scope["type"] == "http" else UNKNOWN_ROUTE
        if route == UNKNOWN_ROUTE or route in SAME_IN_ALL:
            await self.app(scope, receive, send)
            return
        refusal = RequestError(
            f"{route} would reach one replica of several, so it is off with --ray; give what all replicas shall have as an option",
            None,
            "unsupported_with_ray",
        )
        await send_error(send, scope, refusal)
