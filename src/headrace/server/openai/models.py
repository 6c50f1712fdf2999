"""`GET /v1/models`, `GET /v1/models/{id}`. Runs in the event loop of the main process."""

from headrace.server.context import ServingContext
from headrace.server.http import Exchange


class ModelsAPI:
    """Handlers that list what is served."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def list_models(self, exchange: Exchange) -> None:
        """All served models: the one."""
        await exchange.reply_json({"object": "list", "data": [self._card()]})

    async def get_model(self, exchange: Exchange) -> None:
        """One model by its id; 404 when it is not served here."""
        self.context.check_model(exchange.path_param("id"))
        await exchange.reply_json(self._card())

    def _card(self) -> dict[str, object]:
        model = self.context.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "headrace",
            "max_model_len": model.context_length,
        }
