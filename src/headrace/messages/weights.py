"""Operations on weights, adapters, memory, and generation as a whole: requests of the front end, and of the scheduler to its worker.

One request carries one operation, and its reply the same `id`. Tensors never cross a channel: they are in a file that only the two
processes can access, in a checkpoint, or come over a process group. The engine knows an adapter by a number that is never reused (`lora_id`,
from 1; 0 = the base model); only the front end knows names. No torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from headrace.messages.operations import OperationReply, OperationReq

PauseMode = Literal["abort", "retract", "in_place"]
MemoryTag = Literal["kv_cache", "weights"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("kv_cache", "weights")
FOREIGN_TAGS = ("cuda_graph",)
"""Tags of memory that other servers can release separately and this one does not have: accepted without effect."""


class _Operation(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of operations."""


class PauseGeneration(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Stop planning steps. abort: end every request. retract: move running requests back to the queue. in_place: keep their KV."""

    mode: PauseMode = "abort"


class ContinueGeneration(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Resume planning steps."""


class UpdateFromDisk(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """All weights from the checkpoint at `model_path`, a name or a path. load_format: as --load-format. keep_at: a new folder for a copy of it, see
    `checkpoint.copies`; "" = none is kept."""

    model_path: str
    load_format: Literal["auto", "safetensors", "gguf"] = "auto"
    abort_all_requests: bool = False
    weight_version: str | None = None
    keep_at: str = ""


class UpdateFromTensors(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Some or all weights from `file`, a safetensors file with Hugging Face names. bucketed: in the form of `weight_sync.bucket`.

    random_but: random values for all weights whose names hold none of these parts, in place of a file's; None = those of the file.
    """

    file: str
    abort_all_requests: bool = False
    weight_version: str | None = None
    bucketed: bool = False
    random_but: tuple[str, ...] | None = None


class UpdateFromDistributed(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Some or all weights from rank 0 of a group, one broadcast each in this order; bucketed: one broadcast of all their bytes."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    group_name: str
    bucketed: bool = False
    abort_all_requests: bool = False
    weight_version: str | None = None


class InitGroup(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Join the process group `group_name` as rank `rank_offset` of `world_size`. The trainer is rank 0 and listens at the address.

    timeout_s: for joining, and for each later broadcast.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: Literal["gloo", "nccl"]
    timeout_s: float


class DestroyGroup(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    group_name: str


class GetWeight(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """The first `truncate_size` rows of a weight (elements of a vector), by its Hugging Face name."""

    name: str
    truncate_size: int


class CheckWeights(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Checksums of all weights whose names hold none of the parts `skipped`.

    checksum: return them, JSON of name -> checksum. snapshot: keep them. compare: with those that were kept; it fails if one differs.
    """

    action: Literal["checksum", "snapshot", "compare"]
    skipped: tuple[str, ...] = ()


class SaveWeights(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Write all current weights to a new folder called `path` below --save-dir."""

    path: str


class SetWeightVersion(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    new_version: str
    abort_all_requests: bool = False


class ReleaseMemory(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Return memory to the system. Nothing runs until all of it has been resumed."""

    tags: tuple[MemoryTag, ...]


class ResumeMemory(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Allocate released memory again; weights are restored."""

    tags: tuple[MemoryTag, ...]


Update = UpdateFromDisk | UpdateFromTensors | UpdateFromDistributed


class PrepareUpdate(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Load and check an update beside the current weights, and keep it. Steps continue; nothing changes yet.

    update_id: names it in the three messages below. Preparing another update drops this one.
    """

    update_id: int
    update: Update


class HoldForUpdate(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Finish requests that have begun, hold back others, and reply once no step runs. Then wait for the commit or the drop.

    Requests are aborted for `abort_all_requests` here, so that an update that cannot be prepared aborts none.

    Sent again while it waits, it first finishes requests that have begun meanwhile (those of a replica that died), and replies again.
    """

    update_id: int


class CommitUpdate(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Switch to the prepared weights and resume."""

    update_id: int


class DropUpdate(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Drop an update that is prepared or being prepared, and resume with the current weights. Unknown ids are ignored."""

    update_id: int


class CancelUpdate(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Fail every update and every joining of a group that can still be stopped: not one that is held or is being installed."""


WorkerOperation = (
    Update | InitGroup | DestroyGroup | GetWeight | CheckWeights | SaveWeights | ReleaseMemory | ResumeMemory
)
"""Operations of the worker; the scheduler does the others itself."""
WeightOperation = WorkerOperation | PauseGeneration | ContinueGeneration | SetWeightVersion | CancelUpdate
"""Operations of clients. An update is carried out in phases, so that either all replicas have it or none."""
SchedulerOperation = WeightOperation | PrepareUpdate | HoldForUpdate | CommitUpdate | DropUpdate


class WeightOpReq(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    id: int
    operation: SchedulerOperation


class WeightOpReply(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Result of an operation. weight_version: the current one. num_paused_requests: running and waiting requests at that time.

    shape, values: float32[shape] little-endian, of `GetWeight`; values: also the checksums of `CheckWeights`. fingerprint: see `Prepared`.
    """

    id: int
    success: bool
    message: str
    weight_version: str
    num_paused_requests: int = 0
    shape: tuple[int, ...] = ()
    values: bytes = b""
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An operation whose slow part is done and has changed nothing. install: the quick rest, to be called between two steps.

    changes_weights: KV computed before it must not be used after it. fingerprint: of the files that were read; empty if there are none.
    num_bytes: that are released or resumed.
    """

    message: str
    install: Callable[[], None] = lambda: None
    changes_weights: bool = False
    shape: tuple[int, ...] = ()
    values: bytes = b""
    fingerprint: str = ""
    num_bytes: int = 0


class WeightJob(Protocol):
    """An operation that is being prepared in a thread of its own."""

    @property
    def is_done(self) -> bool:
        """Whether `result` returns at once."""

    def result(self) -> Prepared:
        """The prepared operation. Raises HeadraceError; then nothing has changed."""

    def abandon(self) -> None:
        """Give up the operation: its memory is freed now, or when the thread returns."""


class WeightExecutor(Protocol):
    """The worker's side. One job at a time, not counting abandoned ones; it runs beside the steps.

    holds_steps: the preparation of an update from disk must not run beside steps.
    """

    holds_steps: bool

    def start(self, operation: WorkerOperation) -> WeightJob:
        """Start the operation; returns at once."""

    def ask_ranks(self, message: OperationReq) -> list[OperationReply]:
        """What each rank replies to a control operation, in their order. Raises ExecutionError when their group is broken."""


RESTORED = 0
"""Id of requests sent to a restarted scheduler; the reply is not waited for."""


class LoadLoraReq(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Read the adapter in the folder `path` and keep it as `lora_id`. If that fails, nothing changes.

    at_once: before the next message is read, which may be a request that uses it; otherwise beside the steps. fingerprint: the expected one of
    its files, empty = any.
    """

    id: int
    lora_id: int
    path: str
    at_once: bool = False
    fingerprint: str = ""


class UnloadLoraReq(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Unload the adapter once no request in the scheduler uses it. Unknown ids are ignored."""

    id: int
    lora_id: int


class LoraReply(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Result of a load or unload. message: why it failed. status_code: 200 = done, 400 = the adapter is at fault, 500 = we are.

    fingerprint: of the files of an adapter that was loaded.
    """

    id: int
    lora_id: int
    status_code: int = 200
    message: str = ""
    fingerprint: str = ""


class Adapters(Protocol):
    """The worker's side: the adapters in memory, by `lora_id`."""

    def __contains__(self, lora_id: int) -> bool:
        """Whether sequences may use it."""

    def load(self, lora_id: int, path: str, fingerprint: str) -> str:
        """Read an adapter whose files have this fingerprint (empty = any), and return theirs. Called in its own thread, while steps run.

        Raises ModelError; then nothing has changed.
        """

    def unload(self, lora_id: int) -> None:
        """Unload an adapter that no step in flight uses. Unknown ids are ignored."""
