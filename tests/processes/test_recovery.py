"""A dead child is started again, a bounded number of times."""

import threading

from headrace.errors import ConfigError, ExecutionError, ModelError
from headrace.processes import recovery
from headrace.processes.recovery import Recovery, RestartBudget


class Child:
    """errors: what the next starts fail with, shared by all lives. holds: waits until it is told to stop."""

    def __init__(self, name="scheduler", errors=(), holds=False):
        self.name = name
        self.errors = list(errors)
        self.holds = holds
        self.exit_code = None
        self.killed = False
        self.waits = threading.Event()

    def wait_ready(self, on_progress=lambda done, total: None, should_stop=lambda: False):
        if self.holds:
            self.waits.set()
            while not should_stop():
                self.waits.wait()
            raise ExecutionError("stopped during start-up")
        if self.errors:
            raise self.errors.pop(0)

    def kill(self):
        self.killed = True


class Rig:
    def __init__(self, max_restarts=3, start_limit_s=0.0, child=None, on_up=lambda process: None):
        self.now = 0.0
        self.on_up = on_up
        self.heard = []
        self.changed = threading.Event()
        self.first = child or Child()
        self.children = [self.first]
        self.spawned = []
        self.recovery = Recovery(
            self.children,
            RestartBudget(max_restarts, lambda: self.now),
            self.spawn,
            lambda dead: self.heard.append("down"),
            self.put_into_service,
            lambda process, message: self.say("failed"),
            lambda process, message, error: self.say("refused"),
            start_limit_s,
        )

    def say(self, what):
        self.heard.append(what)
        self.changed.set()

    def put_into_service(self, process):
        self.on_up(process)
        self.say("up")

    def spawn(self, dead):
        process = Child(dead.name, holds=dead.holds)
        process.errors = dead.errors
        self.spawned.append(process)
        return process

    def die(self):
        self.changed.clear()
        taken = self.recovery.recover(self.children[0])
        assert not taken or self.changed.wait(20)
        return taken


def test_a_new_process_takes_the_place_of_the_dead_one():
    rig = Rig()

    assert rig.die()

    assert rig.heard == ["down", "up"]
    assert rig.first.killed
    assert rig.children == rig.spawned
    rig.recovery.stop()


def test_too_many_deaths_within_the_window_are_not_taken_in_hand():
    rig = Rig(max_restarts=2)
    assert rig.die()
    assert rig.die()
    assert not rig.die()

    rig.now += recovery.WINDOW_S + 1

    assert rig.die()
    rig.recovery.stop()


def test_a_start_that_fails_is_tried_again_within_the_budget():
    rig = Rig(max_restarts=3, child=Child(errors=[ExecutionError("died while starting")] * 2))
    rig.die()
    assert rig.heard == ["down", "up"]
    assert [process.killed for process in rig.spawned] == [True, True, False]

    rig = Rig(max_restarts=2, child=Child(errors=[ExecutionError("died while starting")] * 9))
    rig.die()
    assert rig.heard == ["down", "failed"]
    assert len(rig.spawned) == 2
    assert all(process.killed for process in rig.spawned)


def test_a_model_that_is_gone_is_not_tried_again():
    rig = Rig(child=Child(errors=[ConfigError("no such model")]))
    rig.die()

    assert rig.heard == ["down", "refused"]
    assert len(rig.spawned) == 1


def test_weights_that_are_gone_are_not_tried_again():
    def gone(process):
        raise ModelError("the current weights could not be loaded again")

    rig = Rig(on_up=gone)
    rig.die()

    assert rig.heard == ["down", "refused"]
    assert [process.killed for process in rig.spawned] == [True]
    assert rig.children == []


def test_one_that_was_given_up_already_is_not_recovered_once_more():
    def gone(process):
        raise ModelError("the current weights could not be loaded again")

    rig = Rig(on_up=gone)
    rig.die()
    heard = list(rig.heard)

    assert rig.recovery.recover(rig.spawned[0]), "the supervisor had looked before it was taken out"

    assert rig.heard == heard
    assert len(rig.spawned) == 1


def test_one_that_dies_while_it_is_put_into_service_is_one_death_and_one_line(caplog):
    rig = None

    def die_at_once(process):
        if len(rig.spawned) == 1:
            assert rig.recovery.recover(process), "the supervisor has seen it"
            raise ExecutionError("nobody answers")

    rig = Rig(on_up=die_at_once)
    rig.die()

    assert rig.heard == ["down", "down", "up"]
    assert len(rig.spawned) == 2
    assert rig.children == rig.spawned[1:]
    rig.recovery.stop()
    (line,) = [record for record in caplog.records if "nobody answers" in record.getMessage()]
    assert line.exc_info is None


def test_the_end_ends_what_is_only_just_starting():
    rig = Rig(child=Child(holds=True))
    assert rig.recovery.recover(rig.first)
    while not rig.spawned:
        threading.Event().wait(0.001)
    assert rig.spawned[0].waits.wait(20)

    rig.recovery.stop()

    assert rig.spawned[0].killed
    assert rig.heard == ["down"]
    assert not rig.recovery.recover(rig.first)


def test_a_start_that_takes_too_long_has_failed():
    rig = Rig(max_restarts=1, start_limit_s=1e-9, child=Child(holds=True))
    rig.die()

    assert rig.heard == ["down", "failed"]
    assert rig.spawned[0].killed
