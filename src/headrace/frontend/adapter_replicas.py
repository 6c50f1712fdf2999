"""Asks every replica to load or unload an adapter. Runs in the tokenizer manager's event loop."""

from collections.abc import Callable

from headrace.frontend.communicator import Communicator
from headrace.frontend.engine_link import EngineLink
from headrace.frontend.engine_loop import EngineLoop
from headrace.messages.lora import RESTORED, LoadLoraReq, LoraReply, UnloadLoraReq

LORA_TIMEOUT_S = 120.0


class AdapterReplicas:
    """The replicas of this server, as `adapters.AdapterEngine`."""

    def __init__(self, engine_loop: EngineLoop, link: EngineLink) -> None:
        self.replies = Communicator[LoraReply]("adapters")
        self._engine_loop = engine_loop
        self._link = link

    def check(self) -> None:
        """See `AdapterEngine`."""
        self._engine_loop.check_serving()

    async def call(self, make: Callable[[int], LoadLoraReq | UnloadLoraReq]) -> list[LoraReply]:
        """See `AdapterEngine`."""
        self._engine_loop.check()
        # The detokenizer has no part in it.
        replies = await self.replies.call_every(self._link.replicas_up, make, LORA_TIMEOUT_S)
        return list(replies.values())

    def handle(self, reply: LoraReply) -> None:
        """See `AdapterEngine`."""
        self.replies.handle(reply)

    def forget(self, lora_id: int) -> None:
        """See `AdapterEngine`."""
        self._link.send(UnloadLoraReq(RESTORED, lora_id))
