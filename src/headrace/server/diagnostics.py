"""Diagnostic routes: timelines of requests, logging, dumps.

Runs in the event loop that serves HTTP. Who may call them is declared in app.py.
"""

from typing import Annotated, Literal

import msgspec

from headrace.server.context import ServingContext
from headrace.server.http import Exchange
from headrace.server.request_frontend import answer


class LatestQuery(msgspec.Struct, forbid_unknown_fields=True):
    """limit: how many to list at most."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class ConfigureLoggingBody(msgspec.Struct, forbid_unknown_fields=True):
    """What to change; fields that are left out stay as they are."""

    level: Literal["debug", "info", "warning", "error"] | None = None
    log_requests: bool | None = None
    log_requests_level: Literal[0, 1, 2, 3] | None = None


_LOGGING = msgspec.json.Decoder(ConfigureLoggingBody)


class DiagnosticsAPI:
    """Handlers of the diagnostic routes; none changes the replies to clients."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def explain_request(self, exchange: Exchange) -> None:
        """The timeline of a recent request, without its text. The admin key sees all requests, other keys only their own."""
        samples = await answer(self.context.frontend.records.timelines(exchange.path_param("id"), exchange.caller))
        await exchange.reply_json({"object": "list", "data": samples})

    async def latest_requests(self, exchange: Exchange) -> None:
        """Live requests and those that ended last, without their text. The admin key sees all, other keys only their own."""
        limit = exchange.read_query(LatestQuery).limit
        samples = await answer(self.context.frontend.records.latest(limit, exchange.caller))
        await exchange.reply_json({"object": "list", "data": samples})

    async def configure_logging(self, exchange: Exchange) -> None:
        """Change what is logged, in every process."""
        body = await exchange.read_json(_LOGGING)
        now = await answer(
            self.context.frontend.settings.configure_logging(body.level, body.log_requests, body.log_requests_level)
        )
        await exchange.reply_json({"success": True, **now})

    async def dump_requests(self, exchange: Exchange) -> None:
        """Write a dump of the most recent requests to the operator's folder. Returns the file's name and their number."""
        await exchange.read_no_fields()
        name, count = await self.context.frontend.records.dump()
        message = f"wrote {name}; number of requests: {count}"
        await exchange.reply_json({"success": True, "message": message, "file": name, "num_requests": count})
