"""Routes that load and unload LoRA adapters.

Runs in the event loop that serves HTTP. Who may call the routes is declared in app.py.
"""

import msgspec

from headrace.config.server_args import spellings
from headrace.errors import RequestError
from headrace.server.context import ServingContext
from headrace.server.http import Exchange


class LoadLoraBody(msgspec.Struct, forbid_unknown_fields=True):
    """lora_path: a folder on the server's machine, as saved by peft. pinned: never evicted."""

    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadLoraBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which adapter to unload."""

    lora_name: str


_LOAD = msgspec.json.Decoder(LoadLoraBody)
_UNLOAD = msgspec.json.Decoder(UnloadLoraBody)


class LoraAPI:
    """Handlers of the adapter routes."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def load(self, exchange: Exchange) -> None:
        """Load an adapter; 400 with the reason if it is refused, 503 if there is no room."""
        body = await exchange.read_json(_LOAD)
        if any(name in self.context.model.names for name in spellings(body.lora_name)):
            raise RequestError(f"{body.lora_name!r} is the model's own name", "lora_name")
        async with exchange.until_client_leaves():
            await self.context.frontend.adapters.load(body.lora_name, body.lora_path, body.pinned)
        await self._done(exchange, "the adapter is loaded")

    async def unload(self, exchange: Exchange) -> None:
        """Unload an adapter once the requests that use it have ended; 404 for an unknown name."""
        body = await exchange.read_json(_UNLOAD)
        async with exchange.until_client_leaves():
            await self.context.frontend.adapters.unload(body.lora_name)
        await self._done(exchange, "the adapter is unloaded")

    async def _done(self, exchange: Exchange, message: str) -> None:
        names = self.context.frontend.adapters.names
        await exchange.reply_json({"success": True, "message": message, "loaded_adapters": names})
