"""Whether the engine is alive, and whether it makes tokens: heartbeats of its processes, and a probe. Runs in the tokenizer manager's event loop."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable

from headrace.errors import HeadraceError
from headrace.frontend.control import Control
from headrace.frontend.engine_link import EngineLink
from headrace.frontend.engine_loop import EngineLoop
from headrace.frontend.sample_update import SampleUpdate
from headrace.messages.control import Heartbeat
from headrace.messages.requests import CallInput, EmbeddingReqInput, GenerateReqInput
from headrace.sampling.params import SamplingParams

HEALTH_TIMEOUT_S = 10.0
HEALTH_RID_PREFIX = "headrace-health-"

HEARTBEAT_LIMIT_S = 5.0
"""A process that has been heard before and is then silent for this long is not healthy."""
DETOKENIZER = "detokenizer"
"""Every other process that sends heartbeats is a scheduler."""

FRESH_S = 1.0
"""A result is reused for this many seconds."""


class Heartbeats:
    """When each process of the engine was last heard. clock: in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard_s: dict[str, float] = {}
        self._dropped_frames: dict[str, int] = {}

    def handle(self, message: Heartbeat) -> None:
        """Note that a process is alive."""
        self._heard_s[message.process] = self._clock()
        self._dropped_frames[message.process] = message.dropped_frames

    def forget(self, process: str) -> None:
        """The process has died."""
        self._heard_s.pop(process, None)

    def begin_anew(self, process: str) -> None:
        """Another process has started under this name; that it did counts as heard."""
        self._heard_s[process] = self._clock()

    def age_s(self, process: str) -> float | None:
        """Seconds since a process was last heard; None if it never was. May be called from any thread."""
        last_s = self._heard_s.get(process)
        return None if last_s is None else self._clock() - last_s

    @property
    def is_silent(self) -> bool:
        """The detokenizer, or every scheduler, has not been heard for too long."""
        now = self._clock()
        silent = {name: now - last_s > HEARTBEAT_LIMIT_S for name, last_s in self._heard_s.items()}
        schedulers = [is_silent for name, is_silent in silent.items() if name != DETOKENIZER]
        return silent.get(DETOKENIZER, False) or (bool(schedulers) and all(schedulers))

    @property
    def detokenizer_dropped_frames(self) -> int:
        """Number of malformed frames that the detokenizer has received."""
        return self._dropped_frames.get(DETOKENIZER, 0)


class SharedProbe:
    """Shares the results of `probe`, which must not raise: however many ask, one runs at a time, and its result is reused for a moment. clock:
    seconds."""

    def __init__(self, probe: Callable[[], Awaitable[bool]], clock: Callable[[], float]) -> None:
        self._probe = probe
        self._clock = clock
        self._running: asyncio.Task[bool] | None = None
        self._found = False
        self._found_s = float("-inf")

    async def result(self) -> bool:
        """The probe's result, new or recent. Cancelling one caller does not affect others."""
        if self._running is None:
            if self._clock() - self._found_s < FRESH_S:
                return self._found
            self._running = asyncio.create_task(self._run())
        return await asyncio.shield(self._running)

    async def _run(self) -> bool:
        try:
            self._found = await self._probe()
            self._found_s = self._clock()
            return self._found
        finally:
            self._running = None


class Health:
    """Whether the engine lives and works. generate: runs a request of the server's own. clock: seconds. pools: whether the model makes vectors
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
