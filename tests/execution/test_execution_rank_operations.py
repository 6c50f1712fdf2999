"""Control operations at the ranks: what a rank answers, and how the answer crosses a group."""

from types import SimpleNamespace

import msgspec
import pytest
import torch

from headrace.execution import rank_operations
from headrace.execution.rank_operations import REPLY_BYTES, RankView, answer, gathered, reply_bytes
from headrace.messages.operations import OPERATIONS, OperationReply, OperationReq


def test_ranks_have_the_work_of_every_operation_of_theirs():
    assert {name for name, row in OPERATIONS.items() if row.at == "ranks"} == set(rank_operations.WORK)


def test_an_operation_that_a_rank_does_not_have_is_refused():
    view = RankView(1, SimpleNamespace(), SimpleNamespace())
    for message in (OperationReq(1, "flush_cache", b""), OperationReq(1, "no_such_operation", b"")):
        fault = answer(view, message).fault
        assert fault is not None
        assert "ranks have no operation" in fault.message


class LoneGroup:
    """A leader whose only follower gives the same."""

    rank, size = 0, 2

    def gather(self, x, columns, out):
        out.copy_(torch.cat([x, x], 1))
        assert columns == [x.shape[1]] * 2


@pytest.mark.parametrize("size", [0, 1, 255, 256, REPLY_BYTES - 32])
def test_an_answer_crosses_as_numbers(size: int):
    data = bytes(index % 256 for index in range(size))
    assert gathered(LoneGroup(), data, REPLY_BYTES) == [data, data]
    reply = OperationReply(7, data)
    assert msgspec.msgpack.decode(reply_bytes(reply), type=OperationReply) == reply


def test_an_answer_that_is_too_long_is_an_error_of_that_rank():
    fault = msgspec.msgpack.decode(reply_bytes(OperationReply(7, bytes(REPLY_BYTES))), type=OperationReply).fault
    assert fault is not None
    assert "at most 1024" in fault.message
