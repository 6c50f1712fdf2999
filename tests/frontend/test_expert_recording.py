"""The choice of experts over replicas that come and go."""

import pytest

from headrace.errors import ExecutionError, HeadraceError, RequestError
from headrace.frontend.control import ExpertRecording
from headrace.messages.channel import LocalQueue
from headrace.messages.control import ExpertCountsReply, ExpertCountsReq
from headrace.messages.operations import COUNT_EXPERTS, OperationReq, answered


class Replicas:
    """Two of them, which answer at once."""

    def __init__(self) -> None:
        self.seen: list[ExpertCountsReq] = []
        self.layers: list[dict[int, list[int]]] = [{0: [1, 2], 3: [4, 0]}, {0: [10, 0], 3: [0, 5]}]
        self.error: HeadraceError | None = None
        self.recording = ExpertRecording(self)

    async def ask(self, name: str, request: bytes) -> dict[int, bytes]:
        asked = COUNT_EXPERTS.request_of(OperationReq(1, name, request))
        self.seen += [asked] * len(self.layers)
        if self.error is not None:
            raise self.error
        told = self.layers if asked.action == "dump" else [{}] * len(self.layers)
        return {index: answered(1, ExpertCountsReply(layers)).reply for index, layers in enumerate(told)}


async def test_the_counts_of_all_replicas_are_added_up():
    replicas = Replicas()
    await replicas.recording.start()
    got = await replicas.recording.dump()
    await replicas.recording.stop()

    assert got["layers"] == {"0": [11, 2], "3": [4, 5]}
    assert (got["is_recording"], got["num_replicas"], got["num_replicas_begun_again"]) == (True, 2, 0)
    assert [request.action for request in replicas.seen] == ["start", "start", "dump", "dump", "stop", "stop"]


async def test_a_replica_that_returns_records_too_and_the_reply_says_what_is_missing():
    replicas = Replicas()
    returned = LocalQueue()
    replicas.recording.tell_scheduler(returned)
    assert returned.recv_nowait() is None
    await replicas.recording.start()
    replicas.recording.tell_scheduler(returned)

    assert returned.recv_nowait() == COUNT_EXPERTS.message(0, ExpertCountsReq("start"))
    assert (await replicas.recording.dump())["num_replicas_begun_again"] == 1
    assert (await replicas.recording.dump())["num_replicas_begun_again"] == 0


async def test_starting_twice_and_stopping_what_does_not_run_is_refused():
    recording = Replicas().recording
    with pytest.raises(RequestError, match="not being recorded"):
        await recording.stop()
    await recording.start()
    with pytest.raises(RequestError, match="stop it first"):
        await recording.start()


async def test_a_start_that_fails_can_be_tried_again():
    replicas = Replicas()
    replicas.error = RequestError("this model has no experts")
    with pytest.raises(RequestError, match="no experts"):
        await replicas.recording.start()
    replicas.error = ExecutionError("gone")
    with pytest.raises(ExecutionError, match="gone"):
        await replicas.recording.start()
    replicas.error = None
    await replicas.recording.start()
