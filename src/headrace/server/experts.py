"""Routes that record which experts a mixture-of-experts model uses.

Runs in the event loop that serves HTTP.
"""

from headrace.server.context import ServingContext
from headrace.server.http import Exchange
from headrace.server.routes import RouteSpec


class ExpertsAPI:
    """Handlers of the three routes."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    def routes(self) -> list[RouteSpec]:
        """Their rows of the route table."""
        return [
            RouteSpec(
                "/start_expert_distribution_record", ("POST",), "admin", self.start, "Record which experts are chosen"
            ),
            RouteSpec("/stop_expert_distribution_record", ("POST",), "admin", self.stop, "Record it no more"),
            RouteSpec("/dump_expert_distribution_record", ("POST",), "admin", self.dump, "Tokens by layer and expert"),
        ]

    async def start(self, exchange: Exchange) -> None:
        """Start counting from zero."""
        await exchange.read_no_fields()
        await self.context.frontend.experts.start()
        await exchange.reply_json({"success": True, "message": "the choice of experts is being recorded"})

    async def stop(self, exchange: Exchange) -> None:
        """Stop counting."""
        await exchange.read_no_fields()
        await self.context.frontend.experts.stop()
        await exchange.reply_json({"success": True, "message": "the choice of experts is not recorded any more"})

    async def dump(self, exchange: Exchange) -> None:
        """Return the counts and reset them."""
        await exchange.read_no_fields()
        await exchange.reply_json({"success": True, **await self.context.frontend.experts.dump()})
