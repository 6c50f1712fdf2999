"""The list of models: `GET /v1/models`, `GET /v1/models/{id}`. Runs in the event loop that serves HTTP."""

from headrace.server.context import ServingContext
from headrace.server.http import Exchange


class ModelsAPI:
    """Handlers that list what is served."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def list_models(self, exchange: Exchange) -> None:
        """The served model by each of its names, and its adapters."""
        await exchange.reply_json({"object": "list", "data": [self._card(name) for name in self.context.listed_names]})

    async def get_model(self, exchange: Exchange) -> None:
        """One model or adapter by its id; 404 when it is not served here."""
        await exchange.reply_json(self._card(self.context.listed_name(exchange.path_param("id"))))

    def _card(self, name: str) -> dict[str, object]:
        model = self.context.model
        is_adapter = name not in model.names
        return {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "headrace",
            "root": name if is_adapter else model.name,
            "parent": model.name if is_adapter else None,
            "max_model_len": model.context_length,
        }
