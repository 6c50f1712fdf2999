"""An update in phases, as several replicas get it: prepared beside the steps, held, then committed or dropped."""

from fake_worker import Rig, expected_outputs

from headrace.messages.packing import pack_int32
from headrace.messages.weights import (
    CancelUpdate,
    CommitUpdate,
    DropUpdate,
    GetWeight,
    HoldForUpdate,
    PrepareUpdate,
    SchedulerOperation,
    UpdateFromDisk,
    WeightOpReply,
    WeightOpReq,
)

ENDLESS = 10**9
UPDATE = PrepareUpdate(7, UpdateFromDisk("1", weight_version="one"))


class Phases:
    """A scheduler that is asked for one phase after the other."""

    def __init__(self) -> None:
        self.rig = Rig(eos_every=ENDLESS)
        self.num_asked = 0

    def ask(self, operation: SchedulerOperation) -> int:
        self.num_asked += 1
        self.rig.inbox.send(WeightOpReq(self.num_asked, operation))
        self.rig.turn()
        return self.num_asked

    def reply(self, number: int) -> WeightOpReply | None:
        return next((m for m in self.rig.back.messages if isinstance(m, WeightOpReply) and m.id == number), None)

    def succeeded(self, number: int) -> bool:
        reply = self.reply(number)
        assert reply is not None, "no answer"
        return reply.success

    def prepare(self) -> None:
        asked = self.ask(UPDATE)
        self.rig.worker.weights.finish()
        self.rig.turn()
        assert self.succeeded(asked)


def test_steps_go_on_while_an_update_is_prepared_and_nothing_has_changed_then():
    phases = Phases()
    rig = phases.rig
    rig.add("a", [0, 1], 20, stream=True)
    rig.turn()
    asked = phases.ask(UPDATE)
    made = len(rig.ids.get("a", []))
    for _ in range(4):
        rig.turn()
    assert len(rig.ids["a"]) > made
    assert phases.reply(asked) is None
    rig.worker.weights.finish()
    rig.turn()
    assert phases.succeeded(asked)
    rig.drain()
    assert rig.worker.version == 0
    assert rig.state.weight_version == "default"
    assert rig.ids["a"] == expected_outputs([0, 1], 20, ENDLESS)


def test_what_has_begun_ends_with_the_old_weights_and_what_has_not_gets_the_new():
    phases = Phases()
    rig = phases.rig
    rig.add("a", [0, 1], 12)
    rig.turn()
    phases.prepare()
    held = phases.ask(HoldForUpdate(7))
    rig.add("late", [0, 0, 1], 5)
    for _ in range(20):
        rig.turn()
    assert phases.succeeded(held)
    assert rig.finish["a"].type == "length"
    assert "late" not in rig.ids
    committed = phases.ask(CommitUpdate(7))
    assert phases.succeeded(committed)
    assert phases.reply(committed).weight_version == "one"
    rig.drain()
    assert rig.ids["a"] == expected_outputs([0, 1], 12, ENDLESS)
    assert rig.ids["late"] == expected_outputs([0, 0, 1], 5, ENDLESS, version=1)
    rig.check_idle()


def test_a_request_of_a_dead_replica_that_comes_while_it_is_held_ends_before_the_commit():
    phases = Phases()
    rig = phases.rig
    phases.prepare()
    assert phases.succeeded(phases.ask(HoldForUpdate(7)))
    begun = expected_outputs([0, 1], 8, ENDLESS)
    rig.add("moved", [0, 1], 8, output_ids=pack_int32(begun[:3]), attempt=1)
    rig.ids["moved"] = begun[:3]
    for _ in range(4):
        rig.turn()
    assert rig.ids["moved"] == begun[:3], "it is held"
    again = phases.ask(HoldForUpdate(7))
    for _ in range(20):
        rig.turn()
    assert phases.succeeded(again)
    assert rig.ids["moved"] == begun
    assert phases.succeeded(phases.ask(CommitUpdate(7)))
    rig.check_idle()


def test_a_dropped_update_has_not_been():
    for is_held in (False, True):
        phases = Phases()
        rig = phases.rig
        phases.prepare()
        if is_held:
            assert phases.succeeded(phases.ask(HoldForUpdate(7)))
        assert phases.succeeded(phases.ask(DropUpdate(7)))
        assert not phases.succeeded(phases.ask(CommitUpdate(7)))
        rig.add("a", [0, 1], 6)
        rig.drain()
        assert rig.ids["a"] == expected_outputs([0, 1], 6, ENDLESS)
        rig.check_idle()


def test_a_drop_ends_every_phase_that_waits_and_what_is_prepared_meanwhile():
    phases = Phases()
    rig = phases.rig
    rig.add("a", [0, 1], 10)
    rig.turn()
    prepared = phases.ask(UPDATE)
    held = phases.ask(HoldForUpdate(7))
    assert phases.succeeded(phases.ask(DropUpdate(7)))
    assert not phases.succeeded(held)
    rig.worker.weights.finish()
    rig.turn()
    assert not phases.succeeded(prepared)
    rig.drain()
    assert not phases.succeeded(phases.ask(HoldForUpdate(7)))
    assert rig.worker.version == 0
    rig.check_idle()


def test_reading_a_weight_lets_nothing_run_while_an_update_is_held():
    phases = Phases()
    rig = phases.rig
    phases.prepare()
    assert phases.succeeded(phases.ask(HoldForUpdate(7)))
    rig.add("late", [0, 1], 4)
    phases.ask(GetWeight("w", 1))
    rig.worker.weights.finish()
    for _ in range(4):
        rig.turn()
    assert "late" not in rig.ids
    phases.ask(DropUpdate(7))
    rig.drain()
    assert rig.ids["late"] == expected_outputs([0, 1], 4, ENDLESS)


def test_requests_that_an_update_is_to_end_are_ended_when_it_is_held():
    phases = Phases()
    rig = phases.rig
    rig.add("a", [0, 1], 40)
    rig.turn()
    asked = phases.ask(PrepareUpdate(7, UpdateFromDisk("1", abort_all_requests=True)))
    rig.worker.weights.finish()
    rig.turn()
    assert phases.succeeded(asked)
    assert "a" not in rig.finish
    held = phases.ask(HoldForUpdate(7))
    for _ in range(4):
        rig.turn()
    assert rig.finish["a"].type == "abort"
    assert phases.succeeded(held)
    assert phases.succeeded(phases.ask(CommitUpdate(7)))


def test_an_update_can_be_cancelled_until_it_is_held():
    for state in ("preparing", "prepared", "holding", "held"):
        phases = Phases()
        rig = phases.rig
        rig.add("a", [0, 1], 20)
        rig.turn()
        asked = [phases.ask(UPDATE)]
        if state != "preparing":
            rig.worker.weights.finish()
            rig.turn()
        if state in ("holding", "held"):
            asked.append(phases.ask(HoldForUpdate(7)))
        if state == "held":
            rig.drain()
            rig.turn()
            assert phases.succeeded(asked[-1])
        assert phases.succeeded(phases.ask(CancelUpdate()))
        rig.worker.weights.finish()
        if state == "held":
            assert phases.succeeded(phases.ask(CommitUpdate(7)))
            assert rig.worker.version == 1
            continue
        if state != "prepared":
            assert not phases.succeeded(asked[-1])
        assert not phases.succeeded(phases.ask(HoldForUpdate(7)))
        rig.drain()
        assert rig.worker.version == 0
        assert not rig.state.gate.draining
        assert rig.ids["a"] == expected_outputs([0, 1], 20, ENDLESS)


def test_a_preparation_that_hangs_is_given_up():
    phases = Phases()
    asked = phases.ask(UPDATE)
    phases.rig.now += 600.0
    phases.rig.turn()
    assert not phases.succeeded(asked)
    assert "--weight-update-timeout-s" in phases.reply(asked).message
    phases.prepare()
