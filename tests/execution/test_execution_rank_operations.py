"""Control operations at the ranks: what a rank answers, and how the answer crosses a group."""

from types import SimpleNamespace

import msgspec
import pytest
import torch

from headrace.checkpoint.gguf import BLOCK_TYPES
from headrace.checkpoint.quantized_matrix import BlockMatrix
from headrace.checkpoint.weight_formats import Scheme
from headrace.execution import rank_operations
from headrace.execution.rank_operations import REPLY_BYTES, RankView, answer, gathered, ranks, reply_bytes
from headrace.execution.released import keepers_of, release_weights
from headrace.kernels import cpu
from headrace.layers.linear import Linear
from headrace.layers.weight import Placement
from headrace.messages.operations import OPERATIONS, Nothing, OperationReply, OperationReq


def test_ranks_have_the_work_of_every_operation_of_theirs():
    assert {name for name, row in OPERATIONS.items() if row.at == "ranks"} == set(rank_operations.WORK)


def test_an_operation_that_a_rank_does_not_have_is_refused():
    view = RankView(1, SimpleNamespace(), SimpleNamespace())
    for message in (OperationReq(1, "flush_cache", b""), OperationReq(1, "no_such_operation", b"")):
        fault = answer(view, message).fault
        assert fault is not None
        assert "ranks have no operation" in fault.message


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("none", 2 * 64 * 64), ("gguf", 64 + 64 * 2 * 18), ("int8", 64 * 2 * 34)]
)
def test_weights_are_counted_as_they_are_held_and_released_ones_not(name: Scheme, num_bytes: int):
    if cpu.why_not():
        pytest.skip(cpu.why_not())
    layer = Linear(64, {"a": 64}, Placement(torch.device("cpu"), torch.bfloat16, 32, name))
    [weight] = layer.weights("")
    if name == "gguf":
        assert weight.load_quantized is not None
        weight.load_quantized(BlockMatrix(BLOCK_TYPES[2], torch.ones(64, 2 * 18, dtype=torch.uint8)))
    else:
        weight.load(torch.ones(64, 64))
    view = RankView(0, SimpleNamespace(weights=lambda: layer.weights("")), SimpleNamespace(num_bytes=7))
    before = ranks(view, Nothing()).weight_bytes
    released = release_weights(keepers_of(layer.weights("")))

    released.let_go()
    during = ranks(view, Nothing()).weight_bytes
    released.read()()

    assert num_bytes <= before <= 1.1 * num_bytes  # beside them there may be a factor of each column
    assert (during, ranks(view, Nothing()).weight_bytes) == (0, before)


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
