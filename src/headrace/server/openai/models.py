"""The list of models: `GET /v1/models`, `GET /v1/models/{id}`. Runs in the event loop that serves HTTP."""

from headrace.server.context import ServingContext
from headrace.server.http import Exchange


class ModelsAPI:
    """Handlers that list what is served."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def list_models(self, exchange: Exchange) -> None:
        """The served model and its adapters."""
        cards = [self._card(), *map(self._adapter_card, self.context.frontend.adapters.names)]
        await exchange.reply_json({"object": "list", "data": cards})

    async def get_model(self, exchange: Exchange) -> None:
        """One model or adapter by its id; 404 when it is not served here."""
        adapter = self.context.adapter_of(exchange.path_param("id"))
        await exchange.reply_json(self._card() if adapter is None else self._adapter_card(adapter))

    def _adapter_card(self, name: str) -> dict[str, object]:
        return self._card() | {"id": name, "root": name, "parent": self.context.model.name}

    def _card(self) -> dict[str, object]:
        model = self.context.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "headrace",
            "root": model.name,
            "parent": None,
            "max_model_len": model.context_length,
        }
