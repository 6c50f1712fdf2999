"""What is done about a dead part: another one, the other replicas, or the end of the engine."""

import queue
from types import SimpleNamespace

import pytest

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, ExecutionError, ModelError
from headrace.execution.model_source import args_of_update
from headrace.messages.channel import IpcDir, Ports
from headrace.messages.weights import UpdateFromDisk
from headrace.processes.parts import ChildParts, Restarts


class Child:
    """error: why its replacement cannot start."""

    def __init__(self, kind, index=0, error=None):
        self.name = f"{kind} {index}"
        self.kind = kind
        self.index = index
        self.error = error
        self.source = 7
        self.exit_code = None
        self.info = SimpleNamespace(fingerprint="weights")

    def wait_ready(self, on_progress=lambda done, total: None, should_stop=lambda: False):
        if self.error is not None:
            raise self.error

    def kill(self):
        self.exit_code = -9

    end = kill


class Channels:
    """Gives out ends that only note that they were closed."""

    def __init__(self):
        self.closed = []

    def sender(self, name, index):
        return SimpleNamespace(close=lambda: self.closed.append((name, index)))


class PartsOfFrontEnd:
    """Stands for the front end's EngineParts: writes down what it is told."""

    def __init__(self, heard, rejoin_error):
        self.heard = heard
        self.rejoin_error = rejoin_error

    def down(self, name, replica):
        self.heard.put(("down", name, replica))

    def up(self, name):
        self.heard.put(("up", name))

    def gone(self, name, replica):
        self.heard.put(("gone", name, replica))

    def rejoin(self, name, replica, source, sender, fingerprint):
        if self.rejoin_error is not None:
            error, self.rejoin_error = self.rejoin_error, None
            raise error
        self.heard.put(("rejoined", name, replica, fingerprint))


class Manager:
    """rejoin_error: why the first replacement cannot be put into service. in_force: the update that it has to begin with."""

    def __init__(self, can_restore=True, rejoin_error=None, in_force=None):
        self.heard = queue.Queue()
        self.parts = PartsOfFrontEnd(self.heard, rejoin_error)
        self.weights = SimpleNamespace(can_restore=can_restore, reload=lambda: in_force)
        self.heartbeats = SimpleNamespace(age_s=lambda name: None)
        self.link = SimpleNamespace(on_dismissed=None)
        self.channels = Channels()


@pytest.fixture
def watched(monkeypatch):
    """Two schedulers and a detokenizer, watched. Called with the manager and why a replacement cannot start; gives the children.

    dead: how many of them have ended before anybody looks.
    """
    monkeypatch.setattr("headrace.processes.recovery.CHECK_INTERVAL_S", 0.001)
    started = []

    def watch(manager, error=None, dead=0, **options):
        children = [Child("scheduler", 0), Child("scheduler", 1), Child("detokenizer")]
        for child in children[:dead]:
            child.exit_code = 1
        restarts = Restarts(
            ServerArgs(model_path="x", dp_size=2, **options),
            children,
            lambda dead, begin_with: Child(dead.kind, dead.index, None if begin_with else error),
            manager.channels,
            manager,
            lambda message: manager.heard.put(("died", message)),
        )
        started.append(restarts)
        restarts.start()
        return children

    yield watch
    for restarts in started:
        restarts.stop()


def heard(manager, count):
    return [manager.heard.get(timeout=60) for _ in range(count)]


def test_a_scheduler_is_started_again_and_rejoins(watched):
    manager = Manager()
    watched(manager)[1].exit_code = 1

    assert heard(manager, 2) == [("down", "scheduler 1", 1), ("rejoined", "scheduler 1", 1, "weights")]


def test_a_detokenizer_is_started_again_and_has_nothing_to_rejoin(watched):
    manager = Manager()
    watched(manager)[2].exit_code = 1

    assert heard(manager, 2) == [("down", "detokenizer 0", None), ("up", "detokenizer 0")]


def test_a_scheduler_that_cannot_be_brought_up_to_date_is_started_once_more(watched):
    manager = Manager(rejoin_error=ExecutionError("the update failed"))
    watched(manager)[0].exit_code = 1

    assert heard(manager, 2) == [("down", "scheduler 0", 0), ("rejoined", "scheduler 0", 0, "weights")]
    assert manager.channels.closed == [("to_scheduler", 0)]


def test_pushed_weights_are_left_to_the_schedulers_that_have_them(watched):
    manager = Manager(can_restore=False)
    children = watched(manager)
    children[0].exit_code = 1

    assert heard(manager, 2) == [("down", "scheduler 0", 0), ("gone", "scheduler 0", 0)]

    children[0].exit_code = 1  # the other one, which was the last that had them
    assert heard(manager, 1) == [("died", "the scheduler 1 process has ended unexpectedly")]


def test_pushed_weights_are_lost_with_the_last_schedulers_that_have_them(watched):
    manager = Manager(can_restore=False)
    watched(manager, dead=2)

    assert heard(manager, 1) == [("died", "the scheduler 0 process has ended unexpectedly")]


def test_a_scheduler_that_is_refused_leaves_its_requests_to_the_others(watched):
    manager = Manager()
    watched(manager, error=ConfigError("no memory"))[0].exit_code = 1

    assert heard(manager, 2) == [("down", "scheduler 0", 0), ("gone", "scheduler 0", 0)]


def test_the_last_scheduler_without_weights_is_not_the_end_and_comes_back_with_others(watched):
    manager = Manager()
    children = watched(manager, error=ModelError("model.safetensors is cut off"), dead=2)
    assert sorted(heard(manager, 4)) == [(what, f"scheduler {n}", n) for what in ("down", "gone") for n in (0, 1)]
    assert [child.kind for child in children] == ["detokenizer"]

    manager.weights.reload = lambda: "an update"
    assert manager.weights.revive() == ""
    assert sorted(heard(manager, 2)) == [("rejoined", f"scheduler {n}", n, "weights") for n in (0, 1)]


def test_why_there_are_still_no_weights_is_told(watched):
    manager = Manager(rejoin_error=ModelError("the files have changed"))
    watched(manager)[0].exit_code = 1
    assert heard(manager, 2) == [("down", "scheduler 0", 0), ("gone", "scheduler 0", 0)]
    manager.parts.rejoin_error = ModelError("it is cut off")
    assert manager.weights.revive() == "it is cut off"
    assert manager.weights.revive() == ""
    assert heard(manager, 2) == [("gone", "scheduler 0", 0), ("rejoined", "scheduler 0", 0, "weights")]


def test_a_checkpoint_that_cannot_be_read_any_more_is_not_needed_where_an_update_is_in_force(watched):
    manager = Manager(in_force="an update")
    watched(manager, error=ModelError("model.safetensors is cut off"))[0].exit_code = 1
    assert heard(manager, 2) == [("down", "scheduler 0", 0), ("rejoined", "scheduler 0", 0, "weights")]


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_begins_with_an_update_has_the_vision_encoder_that_the_update_had(tmp_path, monkeypatch, is_folder):
    monkeypatch.setattr("headrace.processes.recovery.CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr("headrace.processes.parts.stop_all", lambda children, limit_s: None)
    path = tmp_path / "update" if is_folder else tmp_path / "update.gguf"
    if is_folder:
        path.mkdir()
        (path / "config.json").write_text("{}")
    else:
        path.write_bytes(b"GGUF")
    encoder, spawned = str(tmp_path / "vision.gguf"), []

    def spawn(kind, args, ports, index=0, source=0):
        spawned.append(args)
        return Child(kind, index, ModelError("its files have gone") if len(spawned) == 2 else None)

    manager = Manager(in_force=UpdateFromDisk(str(path)))
    manager.ready = SimpleNamespace(max_total_tokens=100)
    manager.link.new_source = lambda: 8
    with IpcDir() as folder:
        args = ServerArgs(model_path="x.gguf", mmproj=encoder, detokenize_in="main")
        parts = ChildParts(args, Ports.in_directory(folder, "main"), spawn, args_of_update=args_of_update)
        parts.watch(manager, lambda message: None)
        parts.children[0].exit_code = 1
        assert heard(manager, 2)[1] == ("rejoined", "scheduler 0", 0, "weights")
        parts.stop()

    assert [(one.model_path, one.mmproj) for one in spawned] == [
        ("x.gguf", encoder),
        ("x.gguf", encoder),
        (str(path), "auto" if is_folder else encoder),
    ]


def test_a_detokenizer_that_is_refused_is_the_end(watched):
    manager = Manager()
    watched(manager, error=ConfigError("no tokenizer"))[2].exit_code = 1

    assert heard(manager, 2)[1] == ("died", "the detokenizer 0 process has died and could not be restarted")


def test_without_recovery_the_first_death_is_the_end(watched):
    manager = Manager()
    watched(manager, disable_recovery=True)[0].exit_code = 1

    assert heard(manager, 1) == [("died", "the scheduler 0 process has ended unexpectedly")]


def test_a_scheduler_that_the_front_end_dismisses_is_ended(watched):
    manager = Manager()
    watched(manager)
    manager.link.on_dismissed(1)

    assert heard(manager, 2) == [("down", "scheduler 1", 1), ("rejoined", "scheduler 1", 1, "weights")]
