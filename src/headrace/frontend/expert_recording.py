"""The choice of experts, recorded by every replica and added up.

A replica that was started again begins again, too, when the others record: what it had counted before is gone, and the reply says so. Used by
the tokenizer manager, in its event loop only.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from headrace.errors import HeadraceError, RequestError
from headrace.frontend.communicator import Communicator
from headrace.frontend.replica import Replica
from headrace.messages.channel import Sender
from headrace.messages.experts import ExpertCountsReply, ExpertCountsReq

TIMEOUT_S = 30.0


class ExpertRecording:
    """See the module's text. check: raises when the engine takes no control calls now."""

    def __init__(self, replicas_up: Callable[[], Sequence[Replica]], check: Callable[[], None]) -> None:
        self.replies = Communicator[ExpertCountsReply]("experts")
        self._replicas_up = replicas_up
        self._check = check
        self._is_recording = False
        self._num_begun_again = 0

    async def start(self) -> None:
        """Record from now on. Raises RequestError, ExecutionError."""
        if self._is_recording:
            raise RequestError("the choice of experts is being recorded: stop it first")
        # At once: a replica that returns meanwhile shall record, too.
        self._is_recording, self._num_begun_again = True, 0
        try:
            await self._ask("start")
        except HeadraceError:
            self._is_recording = False
            raise

    async def stop(self) -> None:
        """Record no more; `dump` still gives what there is. Raises RequestError, ExecutionError."""
        if not self._is_recording:
            raise RequestError("the choice of experts is not being recorded")
        await self._ask("stop")
        self._is_recording = False

    async def dump(self) -> dict[str, Any]:
        """Tokens by layer and expert of all replicas since the last dump or the start. Raises RequestError, ExecutionError."""
        replies = await self._ask("dump")
        layers: dict[int, list[int]] = {}
        for reply in replies:
            for layer, counts in reply.layers.items():
                before = layers.get(layer, [0] * len(counts))
                layers[layer] = [a + b for a, b in zip(before, counts, strict=True)]
        begun_again, self._num_begun_again = self._num_begun_again, 0
        return {
            "is_recording": self._is_recording,
            "num_replicas": len(replies),
            "num_replicas_begun_again": begun_again,
            "layers": {str(layer): layers[layer] for layer in sorted(layers)},
        }

    def tell_scheduler(self, sender: Sender) -> None:
        """One that was started again, before it gets a request."""
        if self._is_recording:
            self._num_begun_again += 1
            sender.send(ExpertCountsReq(0, "start"))

    async def _ask(self, action: Literal["start", "stop", "dump"]) -> list[ExpertCountsReply]:
        self._check()
        replicas = self._replicas_up()
        replies = list((await self.replies.call(replicas, lambda i: ExpertCountsReq(i, action), TIMEOUT_S)).values())
        for reply in replies:
            if not reply.success:
                raise RequestError(reply.message)
        return replies
