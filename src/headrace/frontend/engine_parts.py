"""Whether the engine is alive and makes tokens, and what the front end does when one of its processes dies and has been restarted.

Owns the restarted schedulers that are on their way into service: each first gets all operations that the others have carried out, then it
gets requests. Nothing is awaited between the last operation and the first request, so no operation is missed. The methods of `EngineParts`
may be called from any thread; the work is done in the event loop.
"""

import asyncio
import concurrent.futures
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from headrace.errors import ExecutionError, HeadraceError
from headrace.frontend.communicator import Replica
from headrace.frontend.control import Control
from headrace.frontend.engine_link import EngineLink, EngineLoop
from headrace.frontend.records import Records
from headrace.frontend.runtime_settings import RuntimeSettings
from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.weight_control import WeightControl
from headrace.log import get_logger
from headrace.messages.channel import Sender
from headrace.messages.control import Heartbeat
from headrace.messages.requests import CallInput, EmbeddingReqInput, GenerateReqInput
from headrace.metrics.catalog import Metrics
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
    """When each process of the engine was last heard. clock: in seconds. dropped_frames: malformed ones that each has received."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard_s: dict[str, float] = {}
        self.dropped_frames: dict[str, int] = {}

    def handle(self, message: Heartbeat) -> None:
        self._heard_s[message.process] = self._clock()
        self.dropped_frames[message.process] = message.dropped_frames

    def forget(self, process: str) -> None:
        self._heard_s.pop(process, None)

    def restarted(self, process: str) -> None:
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


@dataclass(eq=False)
class Health:
    """Whether the engine lives and works. generate: runs a request of the server's own. clock: seconds. pools: whether it is an embedding model
    or a classifier."""

    engine_loop: EngineLoop
    link: EngineLink
    heartbeats: Heartbeats
    control: Control
    generate: Callable[[CallInput], AsyncGenerator[SampleUpdate, None]]
    clock: Callable[[], float]
    pools: bool = False

    def __post_init__(self) -> None:
        self._probe = SharedProbe(self._can_generate, self.clock)

    def is_alive(self) -> bool:
        """The detokenizer and a scheduler are running, and have been heard lately."""
        if self.engine_loop.failure is not None or not self.link.is_serving:
            return False
        self.engine_loop.start()
        return not self.heartbeats.is_silent

    async def makes_tokens(self) -> bool:
        """The engine is alive and makes a token now, or did within the last second; see `SharedProbe`."""
        return self.is_alive() and await self._probe.result()

    async def _can_generate(self) -> bool:
        try:
            return await self.control.is_busy() or await asyncio.wait_for(self._generate_one(), HEALTH_TIMEOUT_S)
        except (HeadraceError, TimeoutError):
            return False

    async def _generate_one(self) -> bool:
        # Random: a client that uses the same rid would make the server look dead.
        rid = f"{HEALTH_RID_PREFIX}{uuid.uuid4().hex}"
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        probe: CallInput = (
            EmbeddingReqInput(input_ids=[0], rid=rid)
            if self.pools
            else GenerateReqInput(input_ids=[0], rid=rid, sampling_params=sampling)
        )
        async for update in self.generate(probe):
            return update.finish is not None and update.finish.type != "abort"
        return False


logger = get_logger(__name__)

LOOK_S = 0.2
"""Seconds between two checks that the event loop still runs, while a thread waits for it."""


@dataclass(eq=False)
class EngineParts:
    """num_restarts: how often a process came back into service. tellers: tell a scheduler that has just started what it does not know, in order."""

    engine_loop: EngineLoop
    link: EngineLink
    weights: WeightControl
    settings: RuntimeSettings
    heartbeats: Heartbeats
    records: Records
    metrics: Metrics
    tellers: Sequence[Callable[[Sender], None]]
    num_restarts: int = field(init=False, default=0)
    _rejoining: dict[int, Replica] = field(init=False, default_factory=dict)

    @property
    def num_rejoining(self) -> int:
        return len(self._rejoining)

    def down(self, name: str, index: int | None = None) -> None:
        """A process has died and is being restarted. index: of a scheduler; None = the detokenizer."""
        if not self.engine_loop.is_here(self.down, name, index):
            return
        self.heartbeats.forget(name)
        self.records.crash_dump(f"the {name} process has died and is being restarted")
        if index is None:
            self.link.detokenizer_down()
            return
        if (rejoining := self._rejoining.get(index)) is not None:
            rejoining.is_lost = True
            self.link.replies.lost(rejoining)
        self.link.replies.lost(self.link.scheduler_down(index))

    def gone(self, name: str, index: int) -> None:
        """A scheduler that has died is not restarted before there are other weights; the other replicas continue."""
        if not self.engine_loop.is_here(self.gone, name, index):
            return
        self.link.scheduler_gone(index)
        goes_on = (
            "the next update from a checkpoint starts it" if self.link.awaits_weights else "the other replicas continue"
        )
        logger.error("the %s process is not restarted; %s", name, goes_on)

    def up(self, name: str, index: int | None = None, source: int = 0, sender: Sender | None = None) -> None:
        """A process is back. index, source, sender: of a restarted scheduler."""
        if not self.engine_loop.is_here(self.up, name, index, source, sender):
            return
        self.heartbeats.restarted(name)
        self.num_restarts += 1
        self.metrics.count_restart(name)
        if index is None or sender is None:
            self.settings.tell_detokenizer()
            self.link.detokenizer_up()
        else:
            for tell in self.tellers:
                tell(sender)
            self.link.scheduler_up(index, source, sender)

    def rejoin(self, name: str, index: int, source: int, sender: Sender, started_from: str) -> None:
        """Bring a restarted scheduler into service. From any thread but the loop's; returns when it is in service.

        started_from: fingerprint of the checkpoint that it began with. Raises ModelError when the files of the current weights are missing or
        have changed, another HeadraceError when it fails otherwise.
        """
        loop = self.engine_loop.asyncio_loop
        if loop is None:
            self.weights.check_start(started_from)
            self.up(name, index, source, sender)
            return
        done = asyncio.run_coroutine_threadsafe(self._catch_up(name, index, source, sender, started_from), loop)
        while True:
            try:
                return done.result(LOOK_S)
            except concurrent.futures.TimeoutError:
                if not loop.is_running():
                    raise ExecutionError("the server has stopped") from None

    async def _catch_up(self, name: str, index: int, source: int, sender: Sender, started_from: str) -> None:
        replica = Replica(index, sender, source)
        self._rejoining[index] = replica
        try:
            await self.weights.catch_up(replica, started_from)
            if replica.is_lost:
                raise ExecutionError(f"the {name} process died before it could serve")
            self.up(name, index, source, sender)
        finally:
            del self._rejoining[index]
