"""Diagnostic routes: timelines of requests.

Runs in the event loop that serves HTTP. Who may call them is declared in app.py.
"""

from typing import Annotated

import msgspec

from headrace.server.context import ServingContext
from headrace.server.http import Exchange
from headrace.server.request_frontend import answer


class LatestQuery(msgspec.Struct, forbid_unknown_fields=True):
    """limit: how many to list at most."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


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
