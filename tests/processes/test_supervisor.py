"""The death of a child is noticed once; silence is only noted."""

import threading

from headrace.processes.recovery import Supervisor


class Child:
    def __init__(self, name):
        self.name = name
        self.exit_code = None


def test_the_first_death_is_reported_once():
    children = [Child("scheduler"), Child("detokenizer")]
    deaths = []
    supervisor = Supervisor(children, deaths.append)

    assert supervisor.check()
    children[1].exit_code = -9
    assert not supervisor.check()
    children[0].exit_code = 1
    assert not supervisor.check()

    assert deaths == ["the detokenizer process has ended unexpectedly"]
    assert supervisor.dead == "detokenizer"


def test_it_watches_from_a_thread_of_its_own(monkeypatch):
    monkeypatch.setattr("headrace.processes.recovery.CHECK_INTERVAL_S", 0.001)
    child, died = Child("scheduler"), threading.Event()
    supervisor = Supervisor([child], lambda message: died.set())
    supervisor.start()
    child.exit_code = 3

    assert died.wait(20)
    supervisor.stop()


def test_nothing_is_reported_after_it_was_stopped(monkeypatch):
    monkeypatch.setattr("headrace.processes.recovery.CHECK_INTERVAL_S", 0.001)
    child, deaths = Child("scheduler"), []
    supervisor = Supervisor([child], deaths.append)
    supervisor.start()
    supervisor.stop()
    supervisor.stop()
    child.exit_code = 0

    assert not deaths


def test_silence_is_logged_when_it_begins_and_when_it_ends(caplog):
    age = {"scheduler": 1.0}
    supervisor = Supervisor([Child("scheduler"), Child("detokenizer")], lambda message: None, age.get)
    with caplog.at_level("INFO"):
        for value in (1.0, 6.0, 7.0, 0.1):
            age["scheduler"] = value
            assert supervisor.check()

    assert [record.getMessage() for record in caplog.records] == [
        "no heartbeat from the scheduler process for 6.0 s",
        "the scheduler process sends heartbeats again",
    ]
