"""Updates and reads the weights of a running model, and releases memory.

An update is prepared as a whole beside the old weights and then switched to between two steps: a failure before that changes
nothing. Owns the process groups with trainers, and released memory. Does not decide when to switch: the scheduler does. Each operation is
prepared in a thread of its own beside the steps, one at a time; `install` of its result runs in the scheduler's thread. A thread that was
given up on touches only its own data.

Memory while an update is prepared: the old weights, the new ones in the kernels' layout (of the updated layers only), and the tensors
as they came (a mapped file, or what was received).
"""

import hashlib
import json
import math
import os
import threading
import traceback
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from headrace.attention.base import AttentionBackend, KvPool
from headrace.attention.torch_native import TorchNativeAttention
from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.safetensors_file import SafetensorsEntry, SafetensorsFile
from headrace.errors import ExecutionError, ModelError, RequestError
from headrace.execution.rank_operations import RankView, answer
from headrace.execution.released import DraftMemory, Released, keepers_of, release_kv, release_weights
from headrace.execution.weight_files import WeightSaver, bytes_of
from headrace.garbage import give_back_free_memory
from headrace.layers.weight import Keeper, Kept, Weight
from headrace.log import get_logger
from headrace.messages.operations import OperationReply, OperationReq
from headrace.messages.packing import DTYPE_NAMES
from headrace.messages.weights import (
    CheckWeights,
    DestroyGroup,
    GetWeight,
    InitGroup,
    MemoryTag,
    Prepared,
    ReleaseMemory,
    ResumeMemory,
    SaveWeights,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensors,
    WorkerOperation,
)
from headrace.models.spec import Model
from headrace.weight_sync import bucket
from headrace.weight_sync.group import WeightGroup

_logger = get_logger(__name__)

MAX_RECEIVED_PER_WEIGHT_BYTE = 16
_NAMES_IN_A_MESSAGE = 4
_NICE = 5
"""Nice value of an update: it gets about a quarter of a core while steps use all cores (setpriority(2), sched(7))."""
_UNRELATED = frozenset(
    {
        "architectures",
        "dtype",
        "eos_token_ids",
        "bos_token_id",
        "pad_token_id",
        "sampling_defaults",
        "quantization",
        "raw",
        "around",
    }
)
"""Config fields that do not affect the computation."""
_FLOATS = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


def check_same_model(ours: ModelConfig, theirs: ModelConfig) -> None:
    """Raises ModelError that lists the differences that affect the computation."""
    differing = [
        name
        for name in ours.__struct_fields__
        if name not in _UNRELATED and getattr(ours, name) != getattr(theirs, name)
    ]
    if differing:
        shown = [f"{name} is {getattr(theirs, name)!r}, not {getattr(ours, name)!r}" for name in differing]
        more = f"; and {len(shown) - _NAMES_IN_A_MESSAGE} more" if len(shown) > _NAMES_IN_A_MESSAGE else ""
        raise ModelError(
            "the checkpoint is not of the served model: "
            f"{'; '.join(text[:200] for text in shown[:_NAMES_IN_A_MESSAGE])}{more}"
        )


class Job:
    """An operation in a low-priority thread of its own. See `WeightJob`.

    work: gets an event that is set when the operation is abandoned.
    """

    def __init__(self, work: Callable[[threading.Event], Prepared]) -> None:
        self._outcome: Prepared | BaseException | None = None
        self._abandoned = threading.Event()
        self._lock = threading.Lock()
        # A daemon, so that a trainer or a file system that never answers cannot keep the process from exiting.
        self._thread = threading.Thread(target=self._run, args=(work,), name="weights", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Prepared:
        self._thread.join()
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None, "asked twice, or abandoned"
        return outcome

    def abandon(self) -> None:
        with self._lock:
            self._abandoned.set()
            self._outcome = None
        give_back_free_memory()

    def _run(self, work: Callable[[threading.Event], Prepared]) -> None:
        outcome: Prepared | BaseException
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # also of threads that it starts
            with torch.no_grad():
                outcome = work(self._abandoned)
        except BaseException as error:
            # Raised again by `result`. Its frames must not keep the loaded tensors alive.
            traceback.clear_frames(error.__traceback__)
            outcome = error
        with self._lock:
            if not self._abandoned.is_set():
                self._outcome = outcome
                return
        del outcome
        give_back_free_memory()


@dataclass(slots=True)
class ModelWeights:
    """The `WeightExecutor` of a model.

    pool: the KV cache. rename: maps names of tensors to the model's. ignored: name parts of tensors that may be sent but are not needed.
    load: loads a checkpoint as a second model and returns it with the fingerprint of its files. Raises ModelError.
    moved: called when the addresses of the weights have changed. at_first_update: what the first update warns of.
    holds_steps: see `WeightExecutor`. saver: writes the weights to the operator's folder.
    draft: what guesses, if it has weights; its memory is released with the model's.
    """

    model: Model
    attention: AttentionBackend
    pool: KvPool
    rename: Callable[[str], str]
    ignored: tuple[str, ...]
    load: Callable[[UpdateFromDisk], tuple[Model, str]]
    moved: Callable[[], None] = lambda: None
    at_first_update: str = ""
    holds_steps: bool = False
    saver: WeightSaver = field(default_factory=lambda: WeightSaver(None, {}, "none"))
    draft: DraftMemory | None = None
    _groups: dict[str, WeightGroup] = field(default_factory=dict)
    _released: dict[MemoryTag, Released] = field(default_factory=dict)
    _snapshot: dict[str, str] | None = None

    def start(self, operation: WorkerOperation) -> Job:
        return Job(lambda abandoned: self.prepare(operation, abandoned))

    def ask_ranks(self, message: OperationReq) -> list[OperationReply]:
        """See `WeightExecutor`; of this rank alone."""
        return [self.answer(message, 0)]

    def answer(self, message: OperationReq, rank: int) -> OperationReply:
        return answer(RankView(rank, self.model, self.pool), message)

    def prepare(
        self,
        operation: WorkerOperation,
        abandoned: threading.Event,
        read: Callable[[Weight], torch.Tensor] = lambda weight: weight.read(),
    ) -> Prepared:
        """What `start` does in its thread. read: returns a whole weight. Raises HeadraceError; then nothing has changed."""
        match operation:
            case UpdateFromDisk():
                return self._from_disk(operation)
            case UpdateFromTensors(random_but=tuple() as skipped):
                return self._updated(_random_tensors(self.model, skipped), lambda name: name)
            case UpdateFromTensors():
                return self._updated(_file_tensors(Path(operation.file), operation.bucketed))
            case UpdateFromDistributed():
                return self._updated(self.receive(operation, abandoned))
            case InitGroup():
                return self._init_group(operation)
            case DestroyGroup():
                self._take_group(operation.group_name).close()
                return Prepared(f"left the group {operation.group_name!r}")
            case GetWeight():
                rows = read(self.weight(operation.name))[: operation.truncate_size].float().cpu().contiguous()
                return Prepared("read", shape=tuple(rows.shape), values=rows.numpy().tobytes())
            case CheckWeights():
                return self._check(operation, read)
            case SaveWeights():
                return self.saver.save(self.model.weights(), operation.path, read)
            case ReleaseMemory():
                return self._release(operation.tags)
            case ResumeMemory():
                return self._resume(operation.tags)

    # -- updates

    def _from_disk(self, operation: UpdateFromDisk) -> Prepared:
        other, fingerprint = self.load(operation)
        new = [(ours, theirs.kept()) for ours, theirs in zip(_keepers(self.model), _keepers(other), strict=True)]
        switch = self._switch(new)
        return Prepared(f"loaded layers: {len(new)}", switch, changes_weights=True, fingerprint=fingerprint)

    def _updated(self, tensors: list[tuple[str, torch.Tensor]], rename: Callable[[str], str] | None = None) -> Prepared:
        """Stage named tensors. Consumes the list, so that each is freed once it is packed. Raises ModelError."""
        given, rename = len(tensors), rename or self.rename
        wanted = {weight.name: weight for weight in self.model.weights()}
        _check_tensors([(rename(name), tensor) for name, tensor in tensors], wanted, self.ignored)
        parts: dict[int, tuple[Keeper, dict[str, torch.Tensor]]] = {}
        while tensors:
            name, tensor = tensors.pop()
            weight = wanted.get(rename(name))
            for keeper in weight.keepers if weight is not None else ():
                parts.setdefault(id(keeper), (keeper, {}))[1][weight.part] = tensor  # type: ignore[union-attr]
        new = []
        for key in list(parts):
            keeper, own = parts.pop(key)
            new.append((keeper, keeper.staged(own)))
        return Prepared(f"updated tensors: {given}", self._switch(new), changes_weights=True)

    def _switch(self, new: list[tuple[Keeper, Kept]]) -> Callable[[], None]:
        """The switch to complete new weights: of all or of none. To be called between two steps."""

        def install() -> None:
            old = [(keeper, keeper.kept()) for keeper, _ in new]
            try:
                self._take(new)
            except BaseException:
                self._take(old)
                raise
            new.clear()
            old.clear()
            # Otherwise the allocator would keep the memory of the old weights.
            give_back_free_memory()
            if self.at_first_update:
                _logger.warning("%s", self.at_first_update)
                self.at_first_update = ""

        return install

    def _take(self, weights: list[tuple[Keeper, Kept]]) -> None:
        for keeper, kept in weights:
            keeper.restore(kept)
        # The native call refers to the weights' old addresses.
        self.model.fuse(self.attention)
        self.moved()

    # -- groups

    def _init_group(self, operation: InitGroup) -> Prepared:
        name = operation.group_name
        if name in self._groups:
            raise RequestError(f"the group {name!r} already exists; destroy it first", "group_name")
        group = WeightGroup(
            operation.master_address,
            operation.master_port,
            operation.rank_offset,
            operation.world_size,
            name,
            operation.backend,
            operation.timeout_s,
        )
        rank = f"rank {operation.rank_offset} of {operation.world_size}"
        return Prepared(f"joined the group {name!r} as {rank}", lambda: self._groups.update({name: group}))

    def _take_group(self, name: str) -> WeightGroup:
        """Remove a group from the table, so that a thread that was given up on never shares it. Raises RequestError."""
        if name not in self._groups:
            raise RequestError(f"there is no group {name!r}; call init_weights_update_group first", "group_name")
        return self._groups.pop(name)

    def receive(self, operation: UpdateFromDistributed, abandoned: threading.Event) -> list[tuple[str, torch.Tensor]]:
        """Receive everything that rank 0 sends, even tensors that will be refused, or the trainer would wait forever.

        Raises RequestError and ExecutionError, and ModelError for a tensor whose dtype no weight can have.
        """
        dtypes = [_dtype(name) for name in operation.dtypes]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(operation.shapes, dtypes, strict=True)]
        limit = MAX_RECEIVED_PER_WEIGHT_BYTE * sum(math.prod(w.shape) * 4 for w in self.model.weights())
        if sum(sizes) > limit:
            raise RequestError(f"shapes: {sum(sizes)} bytes are more than this model can have ({limit})", "shapes")
        group = self._take_group(operation.group_name)
        try:
            if operation.bucketed:
                bucket = torch.empty(sum(sizes), dtype=torch.uint8, device=group.device)
                group.broadcast(bucket, abandoned)
                # A slice may be misaligned for its dtype, so each is copied.
                flat = [part.clone().view(dtype) for part, dtype in zip(bucket.split(sizes), dtypes, strict=True)]
                tensors = [part.view(shape) for part, shape in zip(flat, operation.shapes, strict=True)]
            else:
                tensors = []
                for shape, dtype in zip(operation.shapes, dtypes, strict=True):
                    tensors.append(torch.empty(shape, dtype=dtype, device=group.device))
                    group.broadcast(tensors[-1], abandoned)
        except ExecutionError as error:
            group.close()
            raise ExecutionError(
                f"{error.message}. The group {operation.group_name!r} was left; join it again"
            ) from error
        self._groups[operation.group_name] = group
        named = list(zip(operation.names, tensors, strict=True))
        _raise([fault for name, tensor in named if (fault := _dtype_fault(name, tensor))])
        return named

    # -- reading

    def weight(self, name: str) -> Weight:
        """The weight of this Hugging Face name. Raises RequestError."""
        ours = self.rename(name)
        for weight in self.model.weights():
            if ours in (weight.name, weight.tied_name):
                return weight
        raise RequestError(f"the model has no weight {name!r}", "name")

    def _check(self, operation: CheckWeights, read: Callable[[Weight], torch.Tensor]) -> Prepared:
        """Raises RequestError without a snapshot, and ModelError where the weights are not those of the snapshot."""
        if operation.action == "compare" and self._snapshot is None:
            raise RequestError("there is no snapshot of the weights to compare with; ask for one first", "action")
        sums = {weight.name: _checksum(read(weight)) for weight in _chosen(self.model, operation.skipped)}
        match operation.action:
            case "checksum":
                return Prepared(f"checksums of weights: {len(sums)}", values=json.dumps(sums).encode())
            case "snapshot":
                self._snapshot = sums
                return Prepared(f"weights in the snapshot: {len(sums)}")
            case "compare":
                kept = self._snapshot or {}
                differing = [name for name, checksum in sums.items() if kept.get(name) != checksum]
                if differing:
                    more = ", ..." if len(differing) > _NAMES_IN_A_MESSAGE else ""
                    shown = ", ".join(differing[:_NAMES_IN_A_MESSAGE])
                    raise ModelError(
                        f"{len(differing)} of {len(sums)} weights are not those of the snapshot: {shown}{more}"
                    )
                return Prepared(f"weights as in the snapshot: {len(sums)}")

    # -- memory

    def _release(self, tags: Sequence[MemoryTag]) -> Prepared:
        new: dict[MemoryTag, Released] = {}
        drafts = () if self.draft is None else (self.draft,)
        for tag in tags:
            if tag in self._released:
                continue
            if tag == "weights":
                new[tag] = release_weights(
                    [*_keepers(self.model), *(keeper for one in drafts for keeper in one.keepers)]
                )
            else:
                new[tag] = release_kv([self.pool, *(one.pool for one in drafts)])

        def install() -> None:
            for tag, released in new.items():
                released.let_go()
                self._released[tag] = released
            if "weights" in new:
                # The native call refers to the weights too; without pages there is none.
                self.model.fuse(TorchNativeAttention())
                if self.draft is not None:
                    self.draft.bind(TorchNativeAttention())
            give_back_free_memory()

        num_bytes = sum(one.num_bytes for one in new.values())
        return Prepared(bytes_message("released", num_bytes), install, num_bytes=num_bytes)

    def _resume(self, tags: Sequence[MemoryTag]) -> Prepared:
        again = {tag: self._released[tag].read() for tag in tags if tag in self._released}
        taken = sum(self._released[tag].num_bytes for tag in again)

        def install() -> None:
            for tag, restore in again.items():
                restore()
                del self._released[tag]
            if "weights" in again:
                self.model.fuse(self.attention)
                if self.draft is not None:
                    self.draft.bind(self.draft.attention)
                self.moved()

        return Prepared(bytes_message("resumed", taken), install, num_bytes=taken)


def _chosen(model: Model, skipped: Sequence[str]) -> list[Weight]:
    """The weights whose names hold none of the parts `skipped`."""
    return [weight for weight in model.weights() if not any(part in weight.name for part in skipped)]


def _checksum(tensor: torch.Tensor) -> str:
    """Of dtype, shape and bytes."""
    found = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    found.update(bytes_of(tensor.cpu().contiguous()))
    return found.hexdigest()


def _random_tensors(model: Model, skipped: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
    """Values that no training gives, the same in every rank."""
    tensors = []
    for weight in _chosen(model, skipped):
        source = torch.Generator().manual_seed(zlib.crc32(weight.name.encode()))
        tensors.append((weight.name, torch.rand(weight.shape, generator=source).to(torch.bfloat16)))
    return tensors


def bytes_message(done: Literal["released", "resumed"], num_bytes: int) -> str:
    """What the client is told of released or resumed memory."""
    return f"{num_bytes} bytes were {done}"


def _keepers(model: Model) -> list[Keeper]:
    """Every layer that keeps weights, once, in the model's order. Raises ModelError for a weight that cannot be replaced."""
    weights = list(model.weights())
    for weight in weights:
        _check_replaceable(weight)
    return keepers_of(weights)


def _check_replaceable(weight: Weight) -> None:
    if not weight.keepers:
        raise ModelError(f"{weight.name} cannot be replaced while the model serves")


def _check_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], wanted: dict[str, Weight], ignored: tuple[str, ...]
) -> None:
    """Raises ModelError that lists every tensor that does not fit."""
    faults: list[str] = []
    seen: set[str] = set()
    given = dict(tensors_list := list(tensors))
    tied = {weight.tied_name: name for name, weight in wanted.items() if weight.tied_name}
    for name, tensor in tensors_list:
        if name in seen:
            faults.append(f"{name} is given twice")
        seen.add(name)
        if name in tied:
            embedding = given.get(tied[name])
            if embedding is None or embedding.shape != tensor.shape or not torch.equal(embedding, tensor):
                faults.append(f"{name} is tied to {tied[name]} in this model and differs from it")
        elif name not in wanted:
            if not any(part in name for part in ignored):
                faults.append(f"the model has no weight {name}")
        elif tuple(tensor.shape) != wanted[name].shape:
            faults.append(f"{name} is {list(tensor.shape)}, not {list(wanted[name].shape)}")
        elif fault := _dtype_fault(name, tensor):
            faults.append(fault)
        elif tensor.numel() and not all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor)):
            faults.append(f"{name} contains NaN or infinity")
        else:
            _check_replaceable(wanted[name])
    if not given:
        faults.append("no tensors were given")
    _raise(faults)


def _dtype_fault(name: str, tensor: torch.Tensor) -> str:
    """Why a tensor of this dtype cannot be a weight, or ""."""
    if tensor.dtype in _FLOATS.values():
        return ""
    *others, last = _FLOATS
    return f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not {', '.join(others)} or {last}"


def _raise(faults: Sequence[str]) -> None:
    if faults:
        more = f" and {len(faults) - _NAMES_IN_A_MESSAGE} more" if len(faults) > _NAMES_IN_A_MESSAGE else ""
        raise ModelError(f"the tensors do not fit the model: {'; '.join(faults[:_NAMES_IN_A_MESSAGE])}{more}")


def _file_tensors(path: Path, bucketed: bool) -> list[tuple[str, torch.Tensor]]:
    """Views of the mapped file. Raises ModelError for anything but a whole safetensors file."""
    try:
        file = SafetensorsFile(path)
    except ModelError as error:
        reason = error.message.replace(path.name, "the body", 1)
        raise ModelError(
            f"{reason}. Tensors are sent as a safetensors file (safetensors.torch.save), its bytes as the body or in base64 in "
            "serialized_named_tensors; pickled objects are not accepted, because reading them runs code"
        ) from None
    named = [(name, tensor_in_file(file, entry)) for name, entry in file.entries.items()]
    return bucket.unpack(dict(named), file.metadata, _FLOATS) if bucketed else named


def tensor_in_file(file: SafetensorsFile, entry: SafetensorsEntry) -> torch.Tensor:
    """See `SafetensorsFile.tensor`. Raises ModelError for a dtype in which no tensors are sent."""
    if entry.dtype not in DTYPE_NAMES.values():
        raise ModelError(f"tensor {entry.name} has dtype {entry.dtype}; known: {', '.join(DTYPE_NAMES.values())}")
    return file.tensor(entry.name)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise RequestError(f"dtypes: {name!r} is not a dtype of torch", "dtypes")
    return dtype
