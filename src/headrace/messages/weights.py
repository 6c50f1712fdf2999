"""Operations on the weights, on generation as a whole and on memory: what the front end asks, what the scheduler asks of the worker.

One request carries one operation and its reply the same `id`. Tensors never cross a channel: they lie in a file that only the two
processes can name, in a checkpoint, or come over a process group. No torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

PauseMode = Literal["abort", "retract", "in_place"]
MemoryTag = Literal["kv_cache", "weights"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("kv_cache", "weights")
FOREIGN_TAGS = ("cuda_graph",)
"""Memory that other servers release apart, and this one has not: such tags are accepted, and nothing is done for them."""


class _Operation(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of operations."""


class PauseGeneration(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Plan no more steps. abort: end every request. retract: running requests go back to the queue. in_place: they keep their KV."""

    mode: PauseMode = "abort"


class ContinueGeneration(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Plan steps again."""


class UpdateFromDisk(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """All weights from the checkpoint at `model_path`, a name or a path. load_format: as --load-format."""

    model_path: str
    load_format: Literal["auto", "safetensors", "gguf"] = "auto"
    abort_all_requests: bool = False
    weight_version: str | None = None


class UpdateFromTensors(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Some or all weights from `file`, a safetensors file; Hugging Face names. bucketed: it is a bucket (`weight_sync.bucket`)."""

    file: str
    abort_all_requests: bool = False
    weight_version: str | None = None
    bucketed: bool = False


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

    timeout_s: for joining, and for every broadcast later.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: Literal["gloo", "nccl"]
    timeout_s: float


class DestroyGroup(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Leave a process group."""

    group_name: str


class GetWeight(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """The first `truncate_size` rows of a weight (elements of a vector), by its Hugging Face name."""

    name: str
    truncate_size: int


class SaveWeights(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Write all weights as they serve to a new folder called `path` below --save-dir."""

    path: str


class SetWeightVersion(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Name the weights that are served."""

    new_version: str
    abort_all_requests: bool = False


class ReleaseMemory(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Give memory back to the system. Nothing runs until all of it has been resumed."""

    tags: tuple[MemoryTag, ...]


class ResumeMemory(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Take released memory again; weights are what they were."""

    tags: tuple[MemoryTag, ...]


Update = UpdateFromDisk | UpdateFromTensors | UpdateFromDistributed


class PrepareUpdate(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Load and check an update beside the weights that serve, and keep it. Steps go on, and nothing has changed yet.

    update_id: by which the three messages below name it. Preparing another one lets this one go.
    """

    update_id: int
    update: Update


class HoldForUpdate(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """End what has begun, hold back what has not, and answer once no step runs. Then wait for the commit, or for a drop.

    The requests that `abort_all_requests` is to end are ended here: an update that cannot be prepared ends none.

    Asked again while it waits, it lets what has begun meanwhile (requests of a replica that died) go on to its end, and answers again.
    """

    update_id: int


class CommitUpdate(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Switch to the prepared weights, and go on with them."""

    update_id: int


class DropUpdate(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Forget a prepared update, or one that is being prepared, and go on with the weights that serve. Unknown ids are ignored."""

    update_id: int


class CancelUpdate(_Operation, frozen=True, tag=True, array_like=True, gc=False):
    """Let every update, and every joining of a group, fail that has not been decided yet: one that is held, or goes on in one message
    and is installed, is past that."""


WorkerOperation = Update | InitGroup | DestroyGroup | GetWeight | SaveWeights | ReleaseMemory | ResumeMemory
"""What the worker does; the rest is the scheduler's own."""
WeightOperation = WorkerOperation | PauseGeneration | ContinueGeneration | SetWeightVersion | CancelUpdate
"""What a client may ask for. An update is carried out in phases, so that all replicas have it or none."""
SchedulerOperation = WeightOperation | PrepareUpdate | HoldForUpdate | CommitUpdate | DropUpdate


class WeightOpReq(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Ask for an operation."""

    id: int
    operation: SchedulerOperation


class WeightOpReply(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """What became of it. weight_version: of now. num_paused_requests: running and waiting when it was done.

    shape, values: float32[shape] little-endian, of `GetWeight`. fingerprint: see `Prepared`.
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
    """The slow part of an operation is done, and has changed nothing. install: what is left, to be called between two steps; quick.

    changes_weights: no KV computed before may be used after it. fingerprint: of the files that were read, empty when there are none.
    """

    message: str
    install: Callable[[], None] = lambda: None
    changes_weights: bool = False
    shape: tuple[int, ...] = ()
    values: bytes = b""
    fingerprint: str = ""


class WeightJob(Protocol):
    """An operation under way in a thread of its own."""

    @property
    def is_done(self) -> bool:
        """Whether `result` answers at once."""

    def result(self) -> Prepared:
        """What is left to do. Raises HeadraceError, and then nothing has changed."""

    def abandon(self) -> None:
        """Nobody will ask for `result`, or install it: whatever was made is let go, now or when the thread comes back."""


class WeightExecutor(Protocol):
    """The worker's side. One job at a time, beside those that were abandoned. It runs beside the steps.

    holds_steps: the preparation of an update from disk must not meet steps.
    """

    holds_steps: bool

    def start(self, operation: WorkerOperation) -> WeightJob:
        """Begin; returns at once."""
