"""Control operations that every rank answers (`at="ranks"` in `messages.operations`): a function of the row's name each.

They only read: they run beside the steps of this rank. Also how an answer crosses a `Group`, which gathers numbers.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from headrace.attention.base import KvPool
from headrace.child_pool.child_side import resident_bytes
from headrace.distributed.base import Group
from headrace.errors import ExecutionError, HeadraceError, RequestError
from headrace.execution.released import keepers_of
from headrace.messages.operations import OPERATIONS, Nothing, OperationReply, OperationReq, RankInfo, answered, fault_of
from headrace.models.spec import Model

REPLY_BYTES = 1024
"""Of an answer of one rank."""


@dataclass(frozen=True, slots=True)
class RankView:
    """What an operation may read. rank: its number."""

    rank: int
    model: Model
    pool: KvPool


def ranks(view: RankView, request: Nothing) -> RankInfo:
    """The process of this rank, and what it keeps in memory; of weights that are released, nothing."""
    kept = [value for keeper in keepers_of(view.model.weights()) for value in keeper.kept().values()]
    weight_bytes = sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))
    return RankInfo(view.rank, os.getpid(), resident_bytes(), weight_bytes, view.pool.num_bytes)


WORK: Mapping[str, Callable[[RankView, Any], object]] = {"ranks": ranks}
"""The function of each operation, by its name."""


def answer(view: RankView, message: OperationReq) -> OperationReply:
    """What one rank replies to an operation, or why it does not."""
    try:
        if message.name not in WORK:
            raise RequestError(f"ranks have no operation {message.name!r:.40}")
        request = OPERATIONS[message.name].request_of(message)
        return answered(message.id, WORK[message.name](view, request))
    except HeadraceError as error:
        return OperationReply(message.id, fault=fault_of(error))


def reply_bytes(reply: OperationReply) -> bytes:
    """What `gathered` takes of a reply, or of why it is too long."""
    data = msgspec.msgpack.encode(reply)
    if len(data) > REPLY_BYTES:
        too_long = ExecutionError(f"the answer of a rank has {len(data)} bytes, at most {REPLY_BYTES} are sent")
        data = msgspec.msgpack.encode(OperationReply(reply.id, fault=fault_of(too_long)))
    return data


def gathered(group: Group, data: bytes, most: int) -> list[bytes]:
    """What each rank gives, at most `most` bytes, in their order; nothing in a follower. A group gathers numbers, so each byte is one."""
    columns = [2 + most] * group.size
    row = len(data).to_bytes(2, "little") + data.ljust(most, b"\0")
    out = torch.empty(1, sum(columns)) if group.rank == 0 else None
    group.gather(torch.frombuffer(bytearray(row), dtype=torch.uint8).float()[None], columns, out)
    if out is None:
        return []
    rows = [bytes(whole) for whole in out.view(group.size, -1).int().tolist()]
    return [whole[2 : 2 + int.from_bytes(whole[:2], "little")] for whole in rows]
