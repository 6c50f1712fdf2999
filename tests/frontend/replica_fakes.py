"""Schedulers that keep what they were told and answer when the test says so, behind a real front end."""

import asyncio
import os
from collections.abc import Callable

from frontend_fakes import READY, ByteTokenizer, answers_of, request, turns

from headrace.config.server_args import ServerArgs
from headrace.frontend.tokenizer_manager import TokenizerManager
from headrace.messages.channel import LocalQueue
from headrace.messages.outputs import BatchStrOut, FinishReason, StrOut, TokenIDOut
from headrace.messages.packing import pack_int32
from headrace.messages.requests import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
from headrace.messages.weights import (
    CommitUpdate,
    ContinueGeneration,
    DestroyGroup,
    DropUpdate,
    HoldForUpdate,
    InitGroup,
    LoadLoraReq,
    LoraReply,
    PauseGeneration,
    PrepareUpdate,
    ReleaseMemory,
    ResumeMemory,
    SchedulerOperation,
    SetWeightVersion,
    UnloadLoraReq,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensors,
    WeightOperation,
    WeightOpReply,
    WeightOpReq,
)

CONTENT_DIGITS = 32
"""Of a fingerprint, see `content_of`."""


class FakeReplica:
    """What a scheduler remembers of its orders. refuses: kinds of orders that it answers with a failure. disk: path -> fingerprint. can_copy: whether
    it makes the copies that it is told to."""

    def __init__(self, back: LocalQueue, disk: dict[str, str], source: int) -> None:
        self.inbox = LocalQueue()
        self.back = back
        self.disk = disk
        self.source = source
        self.weights, self.version = "start", "default"
        self.paused: str | None = None
        self.released: frozenset[str] = frozenset()
        self.loras: dict[int, str] = {}
        self.groups: dict[str, int] = {}
        self.staged: PrepareUpdate | None = None
        self.is_held = False
        self.refuses: set[type] = set()
        self.can_copy = False
        self.waiting: list[object] = []
        self.requests: dict[str, TokenizedGenerateReqInput] = {}
        self.heard: list[SchedulerOperation] = []

    @property
    def state(self) -> tuple[object, ...]:
        return self.weights, self.version, self.paused, self.released, tuple(sorted(self.loras.items()))

    def take(self) -> None:
        """Read what has come, without a word."""
        while (message := self.inbox.recv_nowait()) is not None:
            if isinstance(message, TokenizedGenerateReqInput):
                self.requests[message.rid] = message
            elif isinstance(message, BatchTokenizedGenerateReqInput):
                self.requests |= {one.rid: one for one in message.requests}
            elif isinstance(message, WeightOpReq | LoadLoraReq | UnloadLoraReq):
                self.waiting.append(message)

    def asked(self, kind: type) -> bool:
        """Whether an order of this kind waits for its answer."""
        self.take()
        return any(isinstance(m, WeightOpReq) and isinstance(m.operation, kind) for m in self.waiting)

    def obey(self, num_orders: int = 10**9) -> None:
        """Do what has come, in order, and say so."""
        self.take()
        for _ in range(min(num_orders, len(self.waiting))):
            message = self.waiting.pop(0)
            if isinstance(message, WeightOpReq):
                self._operate(message)
            elif isinstance(message, LoadLoraReq):
                self.loras[message.lora_id] = message.path
                self.back.send(LoraReply(message.id, message.lora_id))
            elif isinstance(message, UnloadLoraReq):
                self.loras.pop(message.lora_id, None)
                self.back.send(LoraReply(message.id, message.lora_id))

    def _operate(self, message: WeightOpReq) -> None:
        self.heard.append(message.operation)
        fingerprint = ""
        success = type(message.operation) not in self.refuses
        if success:
            fingerprint = self._do(message.operation)
        self.back.send(
            WeightOpReply(message.id, success, "done" if success else "no good", self.version, fingerprint=fingerprint)
        )

    def _do(self, operation: SchedulerOperation) -> str:
        match operation:
            case PrepareUpdate():
                self.staged = operation
                return self._read(operation.update)
            case HoldForUpdate():
                assert self.staged is not None
                self.is_held = True
            case CommitUpdate():
                assert self.staged is not None
                assert self.is_held
                assert self.staged.update_id == operation.update_id
                self._install(self.staged.update)
                self.staged, self.is_held = None, False
            case DropUpdate():
                self.staged, self.is_held = None, False
            case UpdateFromDisk():
                self._install(operation)
                return self._read(operation)
            case SetWeightVersion():
                self.version = operation.new_version
            case PauseGeneration():
                self.paused = operation.mode
            case ContinueGeneration():
                self.paused = None
            case ReleaseMemory():
                self.released |= set(operation.tags)
            case ResumeMemory():
                self.released -= set(operation.tags)
            case InitGroup():
                self.groups[operation.group_name] = operation.rank_offset
            case DestroyGroup():
                self.groups.pop(operation.group_name, None)
        return ""

    def _read(self, update: object) -> str:
        if not isinstance(update, UpdateFromDisk):
            return ""
        if update.keep_at and self.can_copy:
            os.makedirs(update.keep_at, exist_ok=True)
            content = self.disk.get(update.model_path, "")[:CONTENT_DIGITS]
            self.disk.setdefault(update.keep_at, content.ljust(CONTENT_DIGITS) + "copied later")
        return self.disk.get(update.model_path, "")

    def _install(self, update: UpdateFromDisk | UpdateFromTensors | UpdateFromDistributed) -> None:
        match update:
            case UpdateFromDisk():
                self.weights = update.model_path
            case UpdateFromTensors():
                self.weights = update.file
            case UpdateFromDistributed():
                self.weights = "received"
        self.version = update.weight_version or self.version

    def say(self, rid: str, ids: list[int], num_ids: int, is_last: bool = False, **fields: object) -> None:
        """An output of a request. fields: of the `TokenIDOut`."""
        finish = FinishReason("length", length=num_ids) if is_last else None
        self.back.send(
            BatchStrOut(
                (StrOut("x" * len(ids), TokenIDOut(rid, pack_int32(ids), num_ids, finish, **fields)),), self.source
            )
        )


class Replicas:
    """Two of them behind a front end. dismissed: indices that it wanted to be started again."""

    def __init__(self, num_replicas: int = 2, **options: object) -> None:
        self.back = LocalQueue()
        self.disk: dict[str, str] = {}
        self.dismissed: list[int] = []
        self.all = [FakeReplica(self.back, self.disk, index) for index in range(num_replicas)]
        self.manager = TokenizerManager(
            ServerArgs(model_path="fake", dp_size=num_replicas, **options),
            READY,
            ByteTokenizer(),
            self.all[0].inbox,
            self.back,
            more_schedulers=[one.inbox for one in self.all[1:]],
        )
        self.manager.link.on_dismissed = self.dismissed.append
        self.manager.start()

    def operate(self, operation: WeightOperation) -> "asyncio.Task[WeightOpReply]":
        return asyncio.create_task(self.manager.weights.operate(operation))

    def call(self, text: str, **fields: object) -> "asyncio.Task[list[object]]":
        asked = request(text, **{"sampling_params": {"max_new_tokens": 8, "temperature": 0.0}} | fields)

        async def collect() -> list[object]:
            return [answer async for answer in answers_of(self.manager, asked)]

        return asyncio.create_task(collect())

    async def until(self, holds: Callable[[], bool], *obedient: int) -> None:
        """Until it holds; those of these indices do what they are told meanwhile."""
        async with asyncio.timeout(20):
            while not holds():
                for index in obedient:
                    self.all[index].obey()
                await turns(1)

    async def reach(self, kind: type, *indices: int) -> None:
        """Until an order of this kind waits at each of these, which do what comes before it."""

        def has_come() -> bool:
            for index in indices:
                if not self.all[index].asked(kind):
                    self.all[index].obey(1)
            return all(self.all[index].asked(kind) for index in indices)

        await self.until(has_come)

    async def given(self, index: int, rid: str) -> TokenizedGenerateReqInput:
        """What this one gets of a request."""

        def has_come() -> bool:
            self.all[index].take()
            return rid in self.all[index].requests

        await self.until(has_come)
        return self.all[index].requests[rid]

    async def done(self, task: "asyncio.Task[WeightOpReply]", *obedient: int) -> WeightOpReply:
        """Its result, once these have done what they are told."""
        await self.until(task.done, *obedient)
        return await task

    def die(self, index: int) -> None:
        self.manager.parts.down(f"scheduler {index}", index)

    def come_back(self, index: int, started_from: str = "") -> "asyncio.Task[None]":
        """Another life begins; the task ends when it is in service."""
        source = self.manager.link.new_source()
        life = self.all[index] = FakeReplica(self.back, self.disk, source)
        return asyncio.create_task(
            asyncio.to_thread(self.manager.parts.rejoin, f"scheduler {index}", index, source, life.inbox, started_from)
        )

    def is_up(self, index: int) -> bool:
        return any(replica.index == index for replica in self.manager.link.replicas_up())
