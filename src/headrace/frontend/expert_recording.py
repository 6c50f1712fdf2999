"""Records which experts are chosen, on every replica, and sums the counts.

A restarted replica records too if the others do; its earlier counts are lost, and the reply says so. Used by
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
    """See the module docstring. check: raises while the engine takes no control calls."""

    def __init__(self, replicas_up: Callable[[], Sequence[Replica]], check: Callable[[], None]) -> None:
        self.replies = Communicator[ExpertCountsReply]("experts")
        self._replicas_up = replicas_up
        self._check = check
        self._is_recording = False
        self._num_begun_again = 0

    async def start(self) -> None:
        """Start recording. Raises RequestError, ExecutionError."""
        if self._is_recording:
            raise RequestError("the choice of experts is being recorded: stop it first")
        # Set before the call, so that a replica that comes back meanwhile records too.
        self._is_recording, self._num_begun_again = True, 0
        try:
            await self._ask("start")
        except HeadraceError:
            self._is_recording = False
            raise

    async def stop(self) -> None:
        """Stop recording; `dump` still returns the counts. Raises RequestError, ExecutionError."""
        if not self._is_recording:
            raise RequestError("the choice of experts is not being recorded")
        await self._ask("stop")
        self._is_recording = False

    async def dump(self) -> dict[str, Any]:
        """Tokens per layer and expert of all replicas, since the last dump or the start. Raises RequestError, ExecutionError."""
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
        """Start recording on a restarted scheduler, before it gets requests."""
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
