"""Weights that come over a process group; the trainer is a thread of the test, joined as a trainer would."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper
from torch.distributed.rendezvous import rendezvous
from weights_harness import engine_of, fresh, tensors_of, tokens

from headrace.errors import ExecutionError, RequestError
from headrace.weight_sync.openrlhf import OpenRlhfWorker
from headrace.weight_sync.sender import WeightSender, describe


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def engine(old):
    with engine_of(old) as engine:
        yield engine


@pytest.fixture
def trainer():
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def answers(old, new):
    return fresh(old), fresh(new)


def joined(engine, trainer, port, name, timeout_s=20.0):
    sender = trainer.submit(WeightSender, "127.0.0.1", port, 2, name, timeout_s=timeout_s)
    assert engine.init_weights_update_group("127.0.0.1", port, 1, 2, name, "gloo", timeout_s=timeout_s)[0]
    return sender.result()


@pytest.mark.parametrize("bucketed", [False, True], ids=["one by one", "bucketed"])
def test_what_the_trainer_sends_is_served(bucketed, engine, trainer, port, old, new, answers):
    name = f"group-{bucketed}"
    sender = joined(engine, trainer, port, name)
    for folder, want in ((new, answers[1]), (old, answers[0])):
        # Of mixed precision, so that parts of a bucket begin at odd places.
        named = list(tensors_of(folder).items())
        named[0] = (named[0][0], named[0][1].to(torch.float64))
        sent = trainer.submit(sender.send, named, bucketed=bucketed)
        result = engine.update_weights_from_distributed(*describe(named), name, bucketed=bucketed, weight_version="7")
        assert result == (True, f"updated tensors: {len(named)}")
        sent.result()
        assert tokens(engine) == want
    assert engine.destroy_weights_update_group(name)[0]
    assert not engine.destroy_weights_update_group(name)[0]
    sender.close()


def test_a_trainer_may_join_with_torch_alone(engine, trainer, port, new, old, answers):
    """As trainers for other engines do: a group with a store of its own, made by torch.distributed."""
    timeout = timedelta(seconds=20)

    def join():
        store, rank, world_size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timeout))
        store.set_timeout(timeout)
        store = PrefixStore("theirs", store)
        return _new_process_group_helper(world_size, rank, [], "gloo", store, group_name="theirs", timeout=timeout)[0]

    theirs = trainer.submit(join)
    assert engine.init_weights_update_group("127.0.0.1", port, 1, 2, "theirs", "gloo", timeout_s=20)[0]
    group = theirs.result()
    for folder, want in ((new, answers[1]), (old, answers[0])):
        named = list(tensors_of(folder).items())

        def send(named=named):
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            for _, tensor in named:
                group.broadcast([tensor], options).wait()

        sent = trainer.submit(send)
        assert engine.update_weights_from_distributed(*describe(named), "theirs")[0]
        sent.result()
        assert tokens(engine) == want
    assert engine.destroy_weights_update_group("theirs")[0]


def test_openrlhf_calls(engine, trainer, port, new, old, answers):
    worker = OpenRlhfWorker(engine)
    sender = trainer.submit(WeightSender, "127.0.0.1", port, 2, "actor", timeout_s=20)
    worker.init_process_group("127.0.0.1", port, 1, 2, "actor", backend="gloo")
    sender = sender.result()
    for folder, want in ((new, answers[1]), (old, answers[0])):
        for name, tensor in tensors_of(folder).items():
            sent = trainer.submit(sender.send, [(name, tensor)])
            worker.update_weight(name, tensor.dtype, tensor.shape, empty_cache=True)
            sent.result()
        assert tokens(engine) == want
    sent = trainer.submit(sender.send, [("model.norm.weight", torch.ones(3))])
    with pytest.raises(ExecutionError, match="not \\[64\\]"):
        worker.update_weight("model.norm.weight", "float32", [3])
    sent.result()  # what is refused is received all the same: the trainer does not hang
    assert tokens(engine) == answers[0]
    assert engine.destroy_weights_update_group("actor")[0]


def test_a_trainer_that_never_comes_or_dies_is_a_timeout(engine, trainer, port, new, answers):
    success, message = engine.init_weights_update_group("127.0.0.1", port, 1, 2, "nobody", "gloo", timeout_s=0.5)
    assert not success
    assert "could not be joined" in message
    assert tokens(engine) == answers[0]

    joined(engine, trainer, port, "dead", timeout_s=1.0)
    named = list(tensors_of(new).items())
    success, message = engine.update_weights_from_distributed(*describe(named), "dead")
    assert not success
    assert "join it again" in message
    assert tokens(engine) == answers[0]
    assert engine.update_weights_from_distributed(*describe(named), "dead")[1].startswith("there is no group")


def cancelled(engine, call, want):
    """The result of an operation that hangs on a silent peer, once it was cancelled; generation goes on meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        hangs = pool.submit(call)
        while engine.cancel_weight_update()[1] == "cancelled: 0 operations":
            assert not hangs.done()
        assert tokens(engine) == want
        return hangs.result()


def test_a_silent_peer_holds_up_no_generation_and_can_be_cancelled(engine, trainer, port, new, old, answers):
    assert engine.update_weights_from_disk(old)[0]
    sender = joined(engine, trainer, port, "silent", timeout_s=30.0)
    named = list(tensors_of(new).items())
    receive = lambda: engine.update_weights_from_distributed(*describe(named), "silent")  # noqa: E731
    assert cancelled(engine, receive, answers[0]) == (False, "cancelled; nothing has changed")
    success, message = receive()
    assert not success
    assert "there is no group" in message or "join it again" in message
    sender.close()

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        other = listening.getsockname()[1]
        join = lambda: engine.init_weights_update_group("127.0.0.1", other, 1, 2, "never", "gloo", timeout_s=120.0)  # noqa: E731
        assert cancelled(engine, join, answers[0]) == (False, "cancelled; nothing has changed")
    assert engine.update_weights_from_disk(new)[0]
    assert tokens(engine) == answers[1]
    assert engine.update_weights_from_disk(old)[0]


def test_a_trainer_that_dies_halfway_leaves_the_old_weights(engine, trainer, port, new, answers):
    sender = joined(engine, trainer, port, "half", timeout_s=2.0)
    named = list(tensors_of(new).items())
    sent = trainer.submit(sender.send, named[: len(named) // 2])
    success, _ = engine.update_weights_from_distributed(*describe(named), "half")
    assert not success
    sent.result()
    assert tokens(engine) == answers[0]
    assert engine.internal_state().weight_version != "half"


def test_groups_that_cannot_be_are_refused(engine):
    for bad in ({"rank_offset": 0}, {"rank_offset": 2}, {"backend": "mpi"}, {"timeout_s": 0.0}, {"master_port": 0}):
        asked = {"master_address": "127.0.0.1", "master_port": 5, "rank_offset": 1, "world_size": 2, **bad}
        with pytest.raises(RequestError):
            engine.init_weights_update_group(**asked)
    if not torch.cuda.is_available():
        success, message = engine.init_weights_update_group("127.0.0.1", 5, 1, 2, "g", "nccl", timeout_s=0.5)
        assert not success
        assert message
