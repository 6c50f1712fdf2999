"""What the processes of a tensor-parallel group say to each other.

Before, between and after the calls of a group over several hosts:

    Hello ---> the leader: a process wants to be this rank, or to watch the group
    Welcome <- the group is whole        Refused <- the process cannot be in it; why
    Broken <-> why it has ended          Ended <-> the process has ended as it should

From the leader, work beside the steps that all ranks install together:

    RankJob ---> each rank begins, beside its steps
    RankPoll --> each rank answers: busy, done or failed; sent until none is busy
    RankInstall: all are done, so all have the result from here on       RankDrop: one failed, so none has it

And steps, the wire form of plans: the followers compute the same step, each its part, but sample nothing. What was sampled comes with the next
step, or from device to device.
"""

from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np

from headrace.messages.operations import OperationReq, StartProfileBody
from headrace.messages.requests import PromptContent
from headrace.messages.step import Int32Array, ModelWorkerBatch
from headrace.messages.weights import ReleaseMemory, ResumeMemory, UpdateFromDisk, UpdateFromTensors


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """rank: None = of a process that has no part of the model and only watches. host: for messages to people. facts: what must be the same."""

    rank: int | None
    size: int
    host: str
    facts: dict[str, str]


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All ranks are there."""


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process cannot be in the group. for_now: it may try again later."""

    reason: str
    for_now: bool = False


class Broken(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The group is of no use any more."""

    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process has ended without an error: a follower may do so before the leader, who told it that there is no more."""


GroupNote = Hello | Welcome | Refused | Broken | Ended


def difference(own: dict[str, str], theirs: dict[str, str]) -> str:
    """In words, what differs between the facts of two processes; "" if nothing does."""
    found = [
        f"{name} is {theirs.get(name, 'not known')} there and {own.get(name, 'not known')} here"
        for name in sorted(own.keys() | theirs.keys())
        if own.get(name) != theirs.get(name)
    ]
    return "; ".join(found)


class RankLora(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Read an adapter, see `LoadLoraReq`."""

    lora_id: int
    path: str
    fingerprint: str


class RankParts(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Write what it has of these weights to a file `rank-N` in this folder. names: as the model has them."""

    folder: str
    names: tuple[str, ...]


class RankPages(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Exchange its part of pages of KV, or a description of it, by a file `rank-N` in this folder: `describe` and `read` write it; `write` reads it,
    and fills the pages when it is installed."""

    kind: Literal["describe", "read", "write"]
    folder: str
    pages: tuple[int, ...]


RankWeights = UpdateFromDisk | UpdateFromTensors | ReleaseMemory | ResumeMemory
"""Operations on weights in which every rank does its part."""
RankWork = RankLora | RankParts | RankPages | RankWeights


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
    """Start a profile of its steps, or stop it (None). stem: of the file that is written, before the rank."""

    request: StartProfileBody | None
    stem: str


class RankExperts(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Count the choices of experts, or stop. The leader's counts are those of all; but who counts computes more tokens in the last layer."""

    counts: bool


class RankAsk(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Answer a control operation, by a row of numbers that the leader gathers."""

    message: OperationReq


RankBesideSteps = RankAsk | RankJob | RankPoll | RankInstall | RankDrop | RankUnload | RankProfile | RankExperts


class SampledTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens that steps wrote to the token buffer: token ids[i] of sequence seqs[i] at positions[i]."""

    seqs: list[int] = []
    positions: list[int] = []
    ids: list[int] = []


QueuedKind = Literal["eager", "graph", "greedy graph"]
"""How a step is queued on devices: op by op, as the replay of a captured graph whose logits are sampled then, or of one that samples, too."""

StepKind = Literal["none", "whole"] | QueuedKind
"""How the leader runs a step, and so each follower. none: it found a fault before the layers, so that only the tables change. whole: as
`ModelRunner.run` does, and what is sampled comes with the next plan. Else it is queued, and the ids come from the leader's device."""


class RankStep(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A plan (`for_followers`). sampled: in the host, since the plan before it.

    only_peaks: of a whole step without other stages, whether the leader needs only the largest logits of the rows that it samples, not all.
    """

    plan: ModelWorkerBatch
    sampled: SampledTokens
    kind: StepKind
    only_peaks: bool = False


class RankLateRows(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Rows of the last queued step that the leader has sampled after it: their ids come from its device. seqs, positions: where they go."""

    seqs: Int32Array
    positions: Int32Array


class RankCapture(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Capture the graphs of decode steps, as the leader does now."""


class RankFinish(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """For the ranks of the first of several stages: compute logits of the oldest step that was not finished. only_peaks: as in `RankStep`."""

    only_peaks: bool


class RankStop(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """There are no more steps."""


RankMessage = RankStep | RankLateRows | RankCapture | RankFinish | RankStop | RankBesideSteps


def _array_of(kind: type, data: bytes) -> Int32Array:
    return np.frombuffer(bytearray(data), np.int32)  # torch wants memory that may be written


_encoder = msgspec.msgpack.Encoder(enc_hook=lambda array: array.astype(np.int32, copy=False).tobytes())
_notes = msgspec.msgpack.Decoder(GroupNote)
_messages = msgspec.msgpack.Decoder(RankMessage, dec_hook=_array_of)


def pack(message: GroupNote | RankMessage) -> bytes:
    return _encoder.encode(message)


def unpack_note(data: bytes | memoryview) -> GroupNote:
    """As it was sent. Raises msgspec.DecodeError."""
    note: GroupNote = _notes.decode(data)
    return note


def unpack(data: bytes) -> RankMessage:
    message: RankMessage = _messages.decode(data)
    return message


def for_followers(plan: ModelWorkerBatch) -> ModelWorkerBatch:
    """The plan without what only the leader needs: grammars, namespaces, prompts but their embeddings, faults, and work of the media encoder."""
    new = [replace(one, content=PromptContent(b"", one.content.embeds), grammar=None, namespace="") for one in plan.new]
    return replace(plan, new=tuple(new), left=(), faults=(), encode=None)
