"""Routes that open and close sessions.

Runs in the event loop that serves HTTP. Who may call them is declared in app.py.
"""

import msgspec

from headrace.server.context import ServingContext
from headrace.server.http import Exchange
from headrace.server.request_frontend import answer


class OpenSessionBody(msgspec.Struct, forbid_unknown_fields=True):
    """session_id: a name chosen by the caller; default: random. See `Sessions.open` for the other fields."""

    capacity_of_str_len: int = 0
    session_id: str | None = None
    timeout: float | None = None


class CloseSessionBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which session to close."""

    session_id: str


_OPEN = msgspec.json.Decoder(OpenSessionBody)
_CLOSE = msgspec.json.Decoder(CloseSessionBody)


class SessionAPI:
    """Handlers of the session routes."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def open(self, exchange: Exchange) -> None:
        """Open a session for the caller. The reply is its id, a JSON string."""
        body = await exchange.read_json(_OPEN)
        session_id = await answer(
            self.context.frontend.open_session(body.capacity_of_str_len, body.session_id, body.timeout, exchange.caller)
        )
        await exchange.reply_json(session_id)

    async def close(self, exchange: Exchange) -> None:
        """Close a session of the caller, or any session with the admin key; 404 for an unknown id."""
        body = await exchange.read_json(_CLOSE)
        await answer(self.context.frontend.close_session(body.session_id, exchange.caller))
        await exchange.reply_json({"success": True, "message": "the session is closed"})
