"""Records which experts are chosen, on every replica, and sums the counts.

A restarted replica records too if the others do; its earlier counts are lost, and the reply says so. Used by
the tokenizer manager, in its event loop only.
"""

from typing import Any, Literal

from headrace.errors import HeadraceError, RequestError
from headrace.messages.channel import Sender
from headrace.messages.experts import ExpertCountsReply, ExpertCountsReq
from headrace.messages.operations import COUNT_EXPERTS, Asks


class ExpertRecording:
    """See the module docstring."""

    def __init__(self, control: Asks) -> None:
        self._control = control
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
            sender.send(COUNT_EXPERTS.message(0, ExpertCountsReq("start")))

    async def _ask(self, action: Literal["start", "stop", "dump"]) -> list[ExpertCountsReply]:
        return list((await COUNT_EXPERTS.ask(self._control, ExpertCountsReq(action))).values())
