"""Watchdogs, with a clock that the test moves."""

import threading

from headrace.metrics.watchdog import Watchdog


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_stall_is_reported_once_until_the_loop_turns_again(caplog):
    clock, stalls = Clock(), []
    watchdog = Watchdog("loop", 10.0, lambda: stalls.append(clock.now), clock)

    clock.now += 10.0
    assert not watchdog.check()
    clock.now += 0.1
    assert watchdog.check()
    assert watchdog.check()
    assert len(stalls) == 1

    watchdog.feed()
    assert not watchdog.check()
    clock.now += 11.0
    assert watchdog.check()
    assert len(stalls) == 2
    assert "loop: no progress" in caplog.text


def test_waiting_for_work_is_no_stall():
    clock = Clock()
    watchdog = Watchdog("loop", 1.0, clock=clock)

    watchdog.end()
    clock.now += 100.0
    assert not watchdog.check()
    watchdog.begin()
    assert not watchdog.check()
    clock.now += 1.1
    assert watchdog.check()


def test_a_timeout_of_zero_never_reports_and_starts_no_thread():
    clock = Clock()
    watchdog = Watchdog("loop", 0.0, clock=clock)
    watchdog.start()
    clock.now += 1e9

    assert not watchdog.check()
    watchdog.stop()


def test_it_checks_from_a_thread_of_its_own():
    clock, stalled = Clock(), threading.Event()
    watchdog = Watchdog("loop", 0.01, stalled.set, clock)
    watchdog.start()
    clock.now += 1.0

    assert stalled.wait(20)
    watchdog.stop()
    watchdog.stop()
