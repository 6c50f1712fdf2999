"""Routes that change the limits and the garbage collection of a running server.

Runs in the event loop that serves HTTP. Who may call them is declared in app.py.
"""

import msgspec

from headrace.frontend.runtime_settings import LimitChanges
from headrace.server.context import ServingContext
from headrace.server.http import Exchange
from headrace.server.request_frontend import answer


class SetInternalStateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options by name, with their new values."""

    server_args: LimitChanges


_SET_STATE = msgspec.json.Decoder(SetInternalStateBody)


class SettingsAPI:
    """Handlers of these routes."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def set_internal_state(self, exchange: Exchange) -> None:
        """Change limits in every replica. The reply has all current limits."""
        body = await exchange.read_json(_SET_STATE)
        now = await answer(self.context.frontend.settings.change_limits(body.server_args))
        await exchange.reply_json({"success": True, "updated": True, "server_args": now})

    async def freeze_gc(self, exchange: Exchange) -> None:
        """Exclude all objects that exist now from garbage collection, in every process."""
        await exchange.read_no_fields()
        await answer(self.context.frontend.settings.freeze_gc())
        message = "the objects that exist now are left out of garbage collection, in every process"
        await exchange.reply_json({"success": True, "message": message})
