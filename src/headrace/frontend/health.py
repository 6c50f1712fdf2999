"""Whether the engine is alive, and whether it makes tokens. Runs in the tokenizer manager's event loop."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable

from headrace.errors import HeadraceError
from headrace.frontend.control import Control
from headrace.frontend.engine_link import EngineLink
from headrace.frontend.engine_loop import EngineLoop
from headrace.frontend.heartbeats import Heartbeats
from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.shared_probe import SharedProbe
from headrace.messages.requests import CallInput, EmbeddingReqInput, GenerateReqInput
from headrace.sampling.params import SamplingParams

HEALTH_TIMEOUT_S = 10.0
HEALTH_RID_PREFIX = "headrace-health-"


class Health:
    """See the module docstring. generate: runs a request of the server's own. clock: seconds. pools: whether the model makes vectors
    instead of tokens."""

    def __init__(
        self,
        engine_loop: EngineLoop,
        link: EngineLink,
        heartbeats: Heartbeats,
        control: Control,
        generate: Callable[[CallInput], AsyncGenerator[SampleUpdate, None]],
        clock: Callable[[], float],
        *,
        pools: bool = False,
    ) -> None:
        self._engine_loop = engine_loop
        self._link = link
        self._heartbeats = heartbeats
        self._control = control
        self._generate = generate
        self._pools = pools
        self._probe = SharedProbe(self._can_generate, clock)

    def is_alive(self) -> bool:
        """The detokenizer and a scheduler are running, and have been heard lately."""
        if self._engine_loop.failure is not None or not self._link.is_serving:
            return False
        self._engine_loop.start()
        return not self._heartbeats.is_silent

    async def makes_tokens(self) -> bool:
        """The engine is alive and makes a token now, or did within the last second; see `SharedProbe`."""
        return self.is_alive() and await self._probe.result()

    async def _can_generate(self) -> bool:
        """Whether the engine is making tokens, or makes one when asked."""
        try:
            return await self._control.is_busy() or await asyncio.wait_for(self._generate_one(), HEALTH_TIMEOUT_S)
        except (HeadraceError, TimeoutError):
            return False

    async def _generate_one(self) -> bool:
        # Random: a client that uses the same rid would make the server look dead.
        rid = f"{HEALTH_RID_PREFIX}{uuid.uuid4().hex}"
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        probe: CallInput = (
            EmbeddingReqInput(input_ids=[0], rid=rid)
            if self._pools
            else GenerateReqInput(input_ids=[0], rid=rid, sampling_params=sampling)
        )
        async for update in self._generate(probe):
            return update.finish is not None and update.finish.type != "abort"
        return False
