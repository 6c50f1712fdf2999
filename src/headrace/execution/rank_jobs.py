"""What all ranks do beside their steps, or none of them does: loading an adapter, replacing or releasing the weights.

The leader says when a job begins, asks until no rank is busy with it, and says when all take up its result: between the same two steps, since
messages are in the order of the steps. If a rank fails, no rank has changed. Its messages come from threads beside the one that runs the
steps, so a `Turn` goes between them. Whole weights come from the parts of all ranks: each follower writes its own to a safetensors file, with the
place of each in the metadata, and the leader puts them together.
"""

import contextlib
import itertools
import json
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec
import torch

from headrace.checkpoint.safetensors_file import SafetensorsFile
from headrace.checkpoint.weight_cache import content_of
from headrace.distributed.base import Group
from headrace.errors import ExecutionError, HeadraceError, ModelError, RequestError
from headrace.execution.lora import LoraPool
from headrace.execution.profiler import ExpertRecorder, StepProfiler, new_stem
from headrace.execution.rank_operations import REPLY_BYTES, gathered, reply_bytes
from headrace.execution.update_weights import Job, ModelWeights, bytes_message, tensor_in_file
from headrace.layers.mlp import ExpertCounts
from headrace.layers.weight import Weight
from headrace.log import get_logger
from headrace.messages.operations import OperationReply, OperationReq, StartProfileBody
from headrace.messages.packing import safetensors_parts
from headrace.messages.ranks import (
    RankAsk,
    RankBesideSteps,
    RankDrop,
    RankExperts,
    RankInstall,
    RankJob,
    RankLora,
    RankPages,
    RankParts,
    RankPoll,
    RankProfile,
    RankUnload,
    RankWeights,
    RankWork,
    pack,
)
from headrace.messages.weights import (
    CheckWeights,
    DestroyGroup,
    GetWeight,
    InitGroup,
    Prepared,
    ReleaseMemory,
    ResumeMemory,
    SaveWeights,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensors,
    WeightJob,
    WorkerOperation,
)

_logger = get_logger(__name__)

POLL_S = 0.01
_CPU = torch.device("cpu")
ANSWER_BYTES = 256
"""Of the text of an answer; the rest of a longer one is left out."""
_OTHER_BYTES = 32
"""Of the rest of an answer, at most."""


class Turn:
    """A lock for a few threads in which nobody waits forever: its last owner gets it again only after those who wait."""

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank is. text: why it failed, or the fingerprint of the files that it read. num_bytes: see `Prepared`."""

    state: Literal["busy", "done", "refused", "failed"]
    text: str = ""
    num_bytes: int = 0


_BUSY = _Answer("busy")
_read_answer = msgspec.msgpack.Decoder(_Answer).decode


def _gather_answers(group: Group, own: _Answer) -> list[_Answer]:
    """Those of all ranks; nothing in a follower."""
    text = own.text.encode()[:ANSWER_BYTES].decode(errors="ignore")
    data = msgspec.msgpack.encode(_Answer(own.state, text, own.num_bytes))
    return [_read_answer(one) for one in gathered(group, data, ANSWER_BYTES + _OTHER_BYTES)]


class LeaderJobs:
    """The leader's side. turn: what the steps run in."""

    def __init__(self, group: Group, turn: Turn) -> None:
        self._group = group
        self._turn = turn
        self._ids = itertools.count(1)

    def prepare(
        self, work: RankWork, own: Callable[[], Prepared], is_wanted: Callable[[], bool]
    ) -> tuple[int, Prepared]:
        """Do `work` in every rank, in this one by `own`. Returns the job's id, and what its `install` then does in all of them.

        Its num_bytes are those of all ranks. Waits for them, beside the steps. If it is not installed it must be dropped. Raises HeadraceError,
        also when `is_wanted` becomes false; then every rank has forgotten it.
        """
        job = next(self._ids)
        self.tell(RankJob(job, work))
        try:
            prepared = own()
            num_bytes = prepared.num_bytes + self._wait(job, prepared, is_wanted)
        except BaseException:
            self.drop(job)
            raise
        return job, replace(prepared, install=lambda: self._install(job, prepared), num_bytes=num_bytes)

    def ask(self, message: OperationReq, own: OperationReply) -> list[OperationReply]:
        """What all ranks reply to a control operation, this one first."""
        with self._turn:
            self._group.send(pack(RankAsk(message)))
            replies = gathered(self._group, reply_bytes(own), REPLY_BYTES)
        return [msgspec.msgpack.decode(reply, type=OperationReply) for reply in replies]

    @property
    def span_hosts(self) -> bool:
        """Whether some ranks see other files."""
        return self._group.spans_hosts

    def _seen_by_all(self, fingerprint: str) -> str:
        """What a fingerprint must have in common in all ranks."""
        return content_of(fingerprint) if self._group.spans_hosts else fingerprint

    def drop(self, job: int) -> None:
        """Let the followers forget a job. Ignored if it was installed."""
        with contextlib.suppress(ExecutionError):  # a broken group has forgotten everything
            self.tell(RankDrop(job))

    def tell(self, message: RankBesideSteps) -> None:
        """Send a message between two steps. Raises ExecutionError when the group is broken."""
        with self._turn:
            self._group.send(pack(message))

    def _wait(self, job: int, prepared: Prepared, is_wanted: Callable[[], bool]) -> int:
        """The followers' num_bytes, once all are done. Raises ModelError or ExecutionError if a rank failed."""
        pause = threading.Event()
        answers = self._poll(job)
        while any(answer.state == "busy" for answer in answers):
            if not is_wanted():
                raise ExecutionError("the operation was cancelled")
            pause.wait(POLL_S)
            answers = self._poll(job)
        for rank, answer in enumerate(answers, start=1):
            if answer.state == "refused":
                raise ModelError(answer.text)
            if answer.state == "failed":
                raise ExecutionError(f"rank {rank}: {answer.text}")
            if self._seen_by_all(answer.text) != self._seen_by_all(prepared.fingerprint):
                raise ModelError("its files changed while they were read; load it again")
        return sum(answer.num_bytes for answer in answers)

    def _poll(self, job: int) -> list[_Answer]:
        with self._turn:
            self._group.send(pack(RankPoll(job)))
            return _gather_answers(self._group, _Answer("done"))[1:]

    def _install(self, job: int, prepared: Prepared) -> None:
        """Take up the result in every rank. If this rank cannot, none does."""
        with self._turn:
            try:
                prepared.install()
            except BaseException:
                self._group.send(pack(RankDrop(job)))
                raise
            self._group.send(pack(RankInstall(job)))


class LeaderProfiler(StepProfiler):
    """Profiles the same steps in all ranks, each in a file of its own."""

    def __init__(self, folder: str | None, jobs: LeaderJobs) -> None:
        super().__init__(folder, "-rank0")
        self._jobs = jobs

    def handle(self, request: StartProfileBody | None) -> str:
        stem = new_stem()
        if request is not None:
            text = self.start(request, stem)
            self._jobs.tell(RankProfile(request, stem))
            return text
        self.check_running()
        self._jobs.tell(RankProfile(request, stem))  # before its own file, so that all write theirs at the same time
        return f"{self.stop()}, and each other rank its own file"


class LeaderExperts(ExpertRecorder):
    """Counts the choices of experts here; the other ranks count, too, so that all compute the same tokens."""

    def __init__(
        self, counts: Mapping[int, ExpertCounts], device: torch.device, jobs: LeaderJobs, refusal: str = ""
    ) -> None:
        super().__init__(counts, device, refusal)
        self._jobs = jobs

    def start(self) -> None:
        self._jobs.tell(RankExperts(True))
        super().start()

    def stop(self) -> None:
        self._jobs.tell(RankExperts(False))
        super().stop()


class LeaderAdapters:
    """The `Adapters` of all ranks. pool: the leader's."""

    def __init__(self, pool: LoraPool, jobs: LeaderJobs) -> None:
        self._pool = pool
        self._jobs = jobs

    def __contains__(self, lora_id: int) -> bool:
        return lora_id in self._pool

    def load(self, lora_id: int, path: str, fingerprint: str = "") -> str:
        work = RankLora(lora_id, path, fingerprint)
        try:
            _, prepared = self._jobs.prepare(
                work, lambda: _stage_adapter(self._pool, work), lambda: self._pool.is_loading(lora_id)
            )
            prepared.install()
        except BaseException:
            self._pool.unload(lora_id)
            raise
        return prepared.fingerprint

    def unload(self, lora_id: int) -> None:
        self._pool.unload(lora_id)
        self._jobs.tell(RankUnload(lora_id))


class LeaderWeights:
    """The `WeightExecutor` of all ranks. weights: the leader's own part. size: the number of ranks."""

    holds_steps = False

    def __init__(self, weights: ModelWeights, jobs: LeaderJobs, size: int) -> None:
        self._weights = weights
        self._jobs = jobs
        self._size = size

    def start(self, operation: WorkerOperation) -> WeightJob:
        match operation:
            case (
                UpdateFromTensors()
                | UpdateFromDistributed()
                | GetWeight()
                | CheckWeights()
                | SaveWeights()
                | InitGroup()
            ) if self._jobs.span_hosts:
                return Job(_refuse_on_several_hosts)
            case UpdateFromDisk() | UpdateFromTensors() | ReleaseMemory() | ResumeMemory():
                return _JobOfAll(self._jobs, lambda begun, abandoned: self._prepare(operation, begun, abandoned))
            case UpdateFromDistributed():
                return _JobOfAll(self._jobs, lambda begun, abandoned: self._received(operation, begun, abandoned))
            case GetWeight() | CheckWeights() | SaveWeights():
                return Job(lambda abandoned: self._whole(operation, abandoned))
            case InitGroup() | DestroyGroup():
                # A trainer has one connection to the server: the leader's.
                return self._weights.start(operation)

    def ask_ranks(self, message: OperationReq) -> list[OperationReply]:
        return self._jobs.ask(message, self._weights.answer(message, 0))

    def _prepare(self, operation: RankWeights, begun: list[int], abandoned: threading.Event) -> Prepared:
        job, prepared = self._jobs.prepare(
            operation, lambda: self._weights.prepare(operation, abandoned), lambda: not abandoned.is_set()
        )
        begun.append(job)
        if abandoned.is_set():  # just now, so nobody else tells them
            self._jobs.drop(job)
        match operation:
            case ReleaseMemory():
                return replace(prepared, message=bytes_message("released", prepared.num_bytes))
            case ResumeMemory():
                return replace(prepared, message=bytes_message("resumed", prepared.num_bytes))
            case _:
                return prepared

    def _whole(self, operation: GetWeight | CheckWeights | SaveWeights, abandoned: threading.Event) -> Prepared:
        """Read whole weights, of which the other ranks put their parts into files."""
        with self._folder(operation) as folder:
            wanted = self._weights.model.weights()
            if isinstance(operation, GetWeight):
                wanted = iter((self._weights.weight(operation.name),))
            names = tuple(weight.name for weight in wanted if weight.own_shape != weight.shape)
            job, _ = self._jobs.prepare(
                RankParts(folder, names), lambda: Prepared("nothing of its own"), lambda: not abandoned.is_set()
            )
            self._jobs.drop(job)
            files = [SafetensorsFile(Path(folder) / f"rank-{rank}") for rank in range(1, self._size)]
            return self._weights.prepare(operation, abandoned, lambda weight: read_whole(weight, files))

    def _folder(self, operation: GetWeight | CheckWeights | SaveWeights) -> tempfile.TemporaryDirectory[str]:
        """For the parts: where they are to be saved there is room. Raises RequestError or ExecutionError."""
        place = None
        try:
            if isinstance(operation, SaveWeights):
                place = self._weights.saver.target(operation.path).parent
                place.mkdir(parents=True, exist_ok=True)
            return tempfile.TemporaryDirectory(prefix=".headrace-ranks-", dir=place, ignore_cleanup_errors=True)
        except OSError as error:
            where = "the temporary directory" if place is None else "--save-dir"
            raise ExecutionError(f"{where} cannot be written: {error.strerror}") from error

    def _received(self, operation: UpdateFromDistributed, begun: list[int], abandoned: threading.Event) -> Prepared:
        """Receive the tensors here and hand them to all ranks in a file."""
        tensors = self._weights.receive(operation, abandoned)
        with tempfile.NamedTemporaryFile(prefix="headrace-weights-") as file:
            try:
                for data in safetensors_parts([(name, tensor.cpu().contiguous()) for name, tensor in tensors]):
                    file.write(data)
                file.flush()
            except OSError as error:
                raise ExecutionError(
                    f"the weights could not be written to the temporary directory: {error.strerror}"
                ) from error
            tensors.clear()
            return self._prepare(UpdateFromTensors(file.name), begun, abandoned)


def _refuse_on_several_hosts(abandoned: threading.Event) -> Prepared:
    raise ModelError(
        "ranks on several hosts (--nnodes) cannot exchange whole weights yet: update from a checkpoint that every host has at the same path"
    )


class _JobOfAll(Job):
    """A job of every rank: when it is given up, the others forget it too.

    work: appends the id of the ranks' job to the list that it gets once all of them have done it.
    """

    def __init__(self, jobs: LeaderJobs, work: Callable[[list[int], threading.Event], Prepared]) -> None:
        self._jobs = jobs
        self._begun: list[int] = []
        super().__init__(lambda abandoned: work(self._begun, abandoned))

    def abandon(self) -> None:
        """See `WeightJob`. While it is being prepared, its own thread notices and tells the others."""
        super().abandon()
        for job in self._begun:
            self._jobs.drop(job)


def without_pages(work: RankPages) -> Prepared:
    """What is done of pages of KV that cannot be copied."""
    raise ExecutionError("pages of KV cannot be copied here")


@dataclass(slots=True)
class _Begun:
    """A follower's job. outcome: once it is done."""

    work: RankWork
    job: Job
    answer: _Answer = _BUSY
    prepared: Prepared | None = None


class FollowerJobs:
    """A follower's side. Used by the thread that runs the steps. device: of the model. do_pages: what it does of `RankPages`."""

    def __init__(
        self,
        group: Group,
        loras: LoraPool,
        weights: ModelWeights,
        profiler: StepProfiler,
        device: torch.device = _CPU,
        do_pages: Callable[[RankPages], Prepared] = without_pages,
    ) -> None:
        self._group = group
        self._loras = loras
        self._weights = weights
        self._profiler = profiler
        self._device = device
        self._do_pages = do_pages
        self._begun: dict[int, _Begun] = {}

    def handle(self, message: RankBesideSteps) -> None:
        """Do what the leader says. What an installation raises must end the rank: the others have the result."""
        match message:
            case RankAsk():
                reply = self._weights.answer(message.message, self._group.rank)
                gathered(self._group, reply_bytes(reply), REPLY_BYTES)
            case RankJob():
                self._begun[message.id] = _Begun(message.work, self._start(message.work))
            case RankPoll():
                _gather_answers(self._group, self._progress(self._begun[message.id]))
            case RankInstall():
                prepared = self._begun.pop(message.id).prepared
                assert prepared is not None, message
                prepared.install()
            case RankDrop():
                begun = self._begun.pop(message.id, None)
                if begun is not None:
                    begun.job.abandon()
                    if isinstance(begun.work, RankLora):
                        self._loras.unload(begun.work.lora_id)
            case RankUnload():
                self._loras.unload(message.lora_id)
            case RankProfile():
                self._profile(message)
            case RankExperts():
                experts = ExpertRecorder(self._weights.model.expert_counts(), self._device)
                if message.counts:
                    experts.start()
                else:
                    experts.stop()

    def _profile(self, message: RankProfile) -> None:
        """What fails here is only logged: the leader has its own file."""
        try:
            if message.request is not None:
                self._profiler.start(message.request, message.stem)
            else:
                self._profiler.stop()
        except RequestError as error:
            _logger.error("this rank's profile: %s", error.message)

    def _start(self, work: RankWork) -> Job:
        match work:
            case RankLora():
                return Job(lambda abandoned: _stage_adapter(self._loras, work))
            case RankParts():
                return Job(lambda abandoned: self._write_parts(work))
            case RankPages():
                return Job(lambda abandoned: self._do_pages(work))
            case _:
                return self._weights.start(work)

    def _write_parts(self, work: RankParts) -> Prepared:
        names = frozenset(work.names)
        chosen = [weight for weight in self._weights.model.weights() if weight.name in names]
        write_parts(chosen, Path(work.folder) / f"rank-{self._group.rank}")
        return Prepared("written")

    def _progress(self, begun: _Begun) -> _Answer:
        if begun.answer.state == "busy" and begun.job.is_done:
            try:
                begun.prepared = begun.job.result()
                begun.answer = _Answer("done", begun.prepared.fingerprint, begun.prepared.num_bytes)
            except HeadraceError as error:
                begun.answer = _Answer("refused" if isinstance(error, ModelError) else "failed", error.message)
            except Exception:
                _logger.exception("%s failed", type(begun.work).__name__)
                begun.answer = _Answer("failed", "internal error; see the server's log")
        return begun.answer


def _stage_adapter(pool: LoraPool, work: RankLora) -> Prepared:
    staged = pool.stage(work.lora_id, work.path, work.fingerprint)
    return Prepared("", lambda: pool.enter(staged), fingerprint=staged.fingerprint)


def write_parts(weights: Iterable[Weight], file: Path) -> None:
    """Write what this rank keeps of these weights. Raises ExecutionError if there is no room."""
    here = [weight for weight in weights if not weight.is_elsewhere]
    parts = [(weight.name, weight.read().detach().cpu().contiguous()) for weight in here]
    places = {weight.name: json.dumps([[part.start, part.stop] for part in weight.own]) for weight in here}
    try:
        with file.open("xb") as out:
            for data in safetensors_parts(parts, places):
                out.write(data)
    except OSError as error:
        raise ExecutionError(f"a rank could not write its part of the weights: {error.strerror}") from error


def read_whole(weight: Weight, files: Sequence[SafetensorsFile]) -> torch.Tensor:
    """A weight, whole. weight: the leader's part of it; files: of the followers."""
    own = weight.read().detach().cpu()
    if weight.own_shape == weight.shape:
        return own
    parts = [] if weight.is_elsewhere else [(weight.own, own)]
    for file in files:
        if weight.name in file.entries:
            place = tuple(slice(start, stop) for start, stop in json.loads(file.metadata[weight.name]))
            parts.append((place, tensor_in_file(file, file.entries[weight.name])))
    whole = torch.empty(weight.shape, dtype=parts[0][1].dtype)
    for place, part in parts:
        whole[place] = part
    return whole
