"""What the leader of a tensor-parallel group tells its followers between steps: work that every rank does beside the steps, and takes up together.

RankJob ---> each rank begins, beside its steps
RankPoll --> each rank answers: busy, done or failed; sent until none is busy
RankInstall: all are done, so all have the result from here on       RankDrop: one failed, so none has it
"""

import msgspec

from headrace.messages.control import ProfileReq
from headrace.messages.operations import OperationReq
from headrace.messages.weights import ReleaseMemory, ResumeMemory, UpdateFromDisk, UpdateFromTensors


class RankLora(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Read an adapter, see `LoadLoraReq`."""

    lora_id: int
    path: str
    fingerprint: str


class RankParts(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Write what it has of these weights to a file `rank-N` in this folder. names: as the model has them."""

    folder: str
    names: tuple[str, ...]


RankWeights = UpdateFromDisk | UpdateFromTensors | ReleaseMemory | ResumeMemory
"""Operations on weights in which every rank does its part."""
RankWork = RankLora | RankParts | RankWeights


class RankJob(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Begin this work."""

    id: int
    work: RankWork


class RankPoll(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Say how far the job is, as a `RankAnswer`."""

    id: int


class RankInstall(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Take up the result of the job."""

    id: int


class RankDrop(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Forget the job. Unknown ids are ignored."""

    id: int


class RankUnload(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Unload an adapter, see `Adapters.unload`."""

    lora_id: int


class RankProfile(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Start or stop a profile of its steps. stem: of the file that is written, before the rank."""

    request: ProfileReq
    stem: str


class RankExperts(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Count the choices of experts, or stop. The leader's counts are those of all; but who counts computes more tokens in the last layer."""

    counts: bool


class RankAsk(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Answer a control operation, by a row of numbers that the leader gathers."""

    message: OperationReq


RankBesideSteps = RankAsk | RankJob | RankPoll | RankInstall | RankDrop | RankUnload | RankProfile | RankExperts
