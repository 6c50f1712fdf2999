"""What each replica of --dp-size gets of the machine."""

import pytest

from headrace.config.server_args import ServerArgs
from headrace.processes.environment import environment
from headrace.processes.scheduler_process import share_of_machine


@pytest.mark.parametrize(
    "own, replica, seen",
    [({}, 1, "1"), ({"CUDA_VISIBLE_DEVICES": "4, 6"}, 1, "6"), ({"CUDA_VISIBLE_DEVICES": "4"}, 1, "")],
)
def test_each_replica_sees_one_gpu(own: dict[str, str], replica: int, seen: str):
    given = environment({**own, "HOME": "/h"}, "scheduler", ServerArgs(dp_size=2), replica)
    assert given == {"HOME": "/h", "CUDA_VISIBLE_DEVICES": seen}


def test_one_replica_and_the_detokenizer_see_what_we_see():
    own = {"CUDA_VISIBLE_DEVICES": "4,6", "OMP_NUM_THREADS": "2"}
    assert environment(own, "scheduler", ServerArgs(), 0) == own
    assert environment(own, "detokenizer", ServerArgs(dp_size=2), 0) == own
    assert environment(own, "scheduler", ServerArgs(dp_size=2, device="cpu"), 1) == own


def test_cores_and_memory_are_divided_and_there_is_a_thread_at_least():
    share = share_of_machine(ServerArgs(dp_size=4, device="cpu", num_threads=9, mem_fraction_static=0.8))
    assert (share.num_threads, share.mem_fraction_static) == (2, 0.2)
    assert share_of_machine(ServerArgs(dp_size=4, device="cpu", num_threads=2)).num_threads == 1
    alone = ServerArgs(num_threads=9)
    assert share_of_machine(alone) is alone
