"""Two replicas, in processes of their own, in one group with a trainer; the trainer is a thread of the test."""

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from weights_harness import GREEDY, PROMPTS, engine_of, fresh, tensors_of

from headrace.api.engine import Engine
from headrace.errors import RequestError
from headrace.weight_sync.sender import WeightSender, describe

GROUP = "both"


def tokens_of(engine: Engine, replica: int) -> list[list[int]]:
    outputs = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, routed_dp_rank=replica)
    return [output["output_ids"] for output in outputs]


@pytest.mark.slow
def test_both_get_what_the_trainer_sends_or_neither(old: str, new: str):
    want = fresh(old), fresh(new)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ThreadPoolExecutor(1) as pool, engine_of(old, single_process=False, dp_size=2, device="cpu") as engine:
        with pytest.raises(RequestError, match="world_size must be at least 3"):
            engine.init_weights_update_group("127.0.0.1", port, 1, 2, GROUP, "gloo", timeout_s=60)
        joining = pool.submit(WeightSender, "127.0.0.1", port, 3, GROUP, timeout_s=60)
        assert engine.init_weights_update_group("127.0.0.1", port, 1, 3, GROUP, "gloo", timeout_s=60)[0]
        trainer = joining.result()

        named = list(tensors_of(new).items())
        sent = pool.submit(trainer.send, named, bucketed=True)
        success, message = engine.update_weights_from_distributed(
            *describe(named), GROUP, bucketed=True, weight_version="new"
        )
        sent.result()
        assert success, message
        assert [tokens_of(engine, replica) for replica in (0, 1)] == [want[1], want[1]]

        # What does not fit is received by both, and taken by none.
        wrong = [("model.norm.weight", torch.ones(3))]
        sent = pool.submit(trainer.send, wrong)
        assert not engine.update_weights_from_distributed(*describe(wrong), GROUP)[0]
        sent.result()
        assert [tokens_of(engine, replica) for replica in (0, 1)] == [want[1], want[1]]

        # Weights from disk may be loaded again by a replica that dies; the group it is not in any more.
        assert engine.update_weights_from_disk(old, weight_version="old")[0]
        victim = next(c for c in engine._running.parts.children if c.name == "scheduler 1")
        os.kill(victim.pid, signal.SIGKILL)
        assert tokens_of(engine, 1) == want[0], "it waits for the replica, which has the weights of the update"
        with pytest.raises(RequestError, match="replica 1 was restarted"):
            engine.update_weights_from_distributed(*describe(named), GROUP)
        assert engine.destroy_weights_update_group(GROUP)[0]
        trainer.close()
