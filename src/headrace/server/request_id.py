"""The `x-request-id` header of every reply: the client's own id, else the rid, else a new id. Anthropic's routes have it as `request-id`, too.

Owns the headers. A client's id is only echoed and not used otherwise, so two requests may have the same. Runs in the event loop
that serves HTTP.
"""

import re
import uuid

from headrace.server.http import ASGIApp, Message, Receive, RequestId, Scope, Send

HEADER = b"x-request-id"
ANTHROPICS = b"request-id"
"""What Anthropic's clients call it."""

_SANE = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestIdMiddleware:
    """Adds the header to every reply."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        is_sane = _SANE.fullmatch(given) is not None
        request_id = RequestId(given.decode() if is_sane else uuid.uuid4().hex, is_clients=is_sane)
        scope["headrace.request_id"] = request_id
        names = (HEADER, ANTHROPICS) if _is_for_anthropic(scope) else (HEADER,)
        scope["headrace.write"] = send  # of the outermost middleware

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {
                    **message,
                    "headers": [*message.get("headers", ()), *((name, request_id.value.encode()) for name in names)],
                }
            await send(message)

        await self.app(scope, receive, send_with_id)


def _is_for_anthropic(scope: Scope) -> bool:
    return scope["path"].startswith(("/v1/messages", "/messages")) or any(
        name == b"anthropic-version" for name, _ in scope["headers"]
    )
