"""The choice of experts over replicas that come and go."""

import pytest

from headrace.errors import ExecutionError, RequestError
from headrace.frontend.expert_recording import ExpertRecording
from headrace.frontend.replica import Replica
from headrace.messages.experts import ExpertCountsReply, ExpertCountsReq


class Replicas:
    """Two of them, which answer at once."""

    def __init__(self) -> None:
        self.seen: list[ExpertCountsReq] = []
        self.layers: list[dict[int, list[int]]] = [{0: [1, 2], 3: [4, 0]}, {0: [10, 0], 3: [0, 5]}]
        self.message = ""
        self.error: ExecutionError | None = None
        self.up = [Replica(index, Inbox(self, index), index) for index in range(2)]
        self.recording = ExpertRecording(lambda: self.up, lambda: None)


class Inbox:
    """Where a replica is sent to."""

    def __init__(self, replicas: Replicas, index: int) -> None:
        self.replicas, self.index = replicas, index

    def send(self, request: ExpertCountsReq) -> None:
        replicas = self.replicas
        replicas.seen.append(request)
        if replicas.error is not None:
            raise replicas.error
        told = replicas.layers[self.index] if request.action == "dump" else {}
        replicas.recording.replies.handle(ExpertCountsReply(request.id, not replicas.message, replicas.message, told))


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
    replicas.recording.tell_scheduler(replicas.up[0].sender)
    assert replicas.seen == []
    await replicas.recording.start()
    replicas.seen.clear()
    replicas.recording.tell_scheduler(replicas.up[0].sender)

    assert replicas.seen == [ExpertCountsReq(0, "start")]
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
    replicas.message = "this model has no experts"
    with pytest.raises(RequestError, match="no experts"):
        await replicas.recording.start()
    replicas.message, replicas.error = "", ExecutionError("gone")
    with pytest.raises(ExecutionError, match="gone"):
        await replicas.recording.start()
    replicas.error = None
    await replicas.recording.start()
