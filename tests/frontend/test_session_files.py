"""Sessions that go on after a restart, from files that may hold anything."""

import os
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CapacityError, ExecutionError, NotFoundError, RequestError
from headrace.frontend.session_files import SessionFiles, SessionRecord, TurnRecord
from headrace.frontend.sessions import Sessions
from headrace.frontend.tenants import Caller, Tenant, TenantLimits
from headrace.messages.requests import SessionParams

VOCAB, MOST = 100, 50


def started(folder: Path, model: str = "model", now: float = 0.0, most: int = MOST) -> Sessions:
    """Those of a server that has just started."""
    files = SessionFiles(folder, model, 3, most, 60.0)
    return Sessions(3, most, 60.0, str, lambda: now, files, VOCAB)


def turn(
    sessions: Sessions, own_rid: str, ids: list[int], outputs: list[int], tenant: Tenant | None = None, **fields: object
):
    asked = SessionParams(id="s", **fields)
    prompt, entered, _ = sessions.begin(asked, own_rid, ids, **({} if tenant is None else {"tenant": tenant}))
    sessions.finish(entered, outputs)
    return prompt


def test_a_session_goes_on_where_it_was(tmp_path):
    sessions = started(tmp_path)
    sessions.open("s")
    turn(sessions, "a", [1, 2], [3])
    turn(sessions, "b", [4], [5, 6])
    turn(sessions, "c", [7], [8], rid="a")
    sessions.begin(SessionParams(id="s"), "unfinished", [9])

    sessions = started(tmp_path)
    assert turn(sessions, "d", [10], [11]) == [1, 2, 3, 7, 8, 10]
    assert turn(sessions, "e", [12], [], rid="b", drop_previous_output=True) == [1, 2, 3, 4, 12]
    with pytest.raises(RequestError, match="already a turn"):
        turn(sessions, "c", [1], [])
    with pytest.raises(RequestError, match="already open"):
        started(tmp_path).open("s")
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_what_was_closed_or_is_too_old_stays_closed(tmp_path):
    for close in (lambda sessions: sessions.close("s"), lambda sessions: started(tmp_path).close("s")):
        sessions = started(tmp_path)
        sessions.open("s")
        turn(sessions, "a", [1], [2])
        close(sessions)
        with pytest.raises(NotFoundError):
            turn(started(tmp_path), "b", [3], [4])
        assert not list(tmp_path.iterdir())

    sessions = started(tmp_path)
    sessions.open("s", timeout_s=5.0)
    [file] = tmp_path.iterdir()
    os.utime(file, (file.stat().st_atime - 10, file.stat().st_mtime - 10))
    with pytest.raises(NotFoundError):
        turn(started(tmp_path), "b", [3], [4])
    assert not list(tmp_path.iterdir())


def test_a_session_is_of_its_key_and_of_its_model(tmp_path):
    def tenant(name: str) -> Tenant:
        return Tenant(TenantLimits(name=name))

    sessions, mine = started(tmp_path), tenant("mine")
    sessions.open("s", tenant=mine)
    turn(sessions, "a", [1], [2], mine)

    for other in (tenant("other"), None):
        with pytest.raises(NotFoundError):
            turn(started(tmp_path), "b", [3], [4], other)
    with pytest.raises(NotFoundError):
        started(tmp_path).close("s", Caller(tenant=tenant("other")))
    with pytest.raises(NotFoundError):
        turn(started(tmp_path, model="other"), "b", [3], [4], tenant("mine"))
    assert turn(started(tmp_path), "b", [3], [4], tenant("mine")) == [1, 2, 3]


def test_limits_hold_for_sessions_from_files(tmp_path):
    sessions = started(tmp_path)
    sessions.open("s")
    turn(sessions, "a", [1] * 20, [2] * 20)
    with pytest.raises(CapacityError):
        turn(started(tmp_path, most=30), "b", [3], [4])
    for number in range(5):
        SessionFiles(tmp_path, "model", 3, MOST, 60.0).save("", SessionRecord(f"{number}", 0.0, 0, -1, []))
    started(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_what_is_put_replaces_what_was_there_and_is_written_or_refused(tmp_path):
    sessions = started(tmp_path)
    sessions.put("s", [1, 2], [3])
    assert turn(sessions, "more", [4], []) == [1, 2, 3, 4]
    assert started(tmp_path).get("s", "filename") == [1, 2, 3], "what was put, and not what came after it"
    sessions.put("s", [5], [])
    assert started(tmp_path).get("s", "filename") == sessions.get("s", "filename") == [5]

    with pytest.raises(CapacityError):
        sessions.put("s", [1] * MOST, [2])
    assert sessions.get("s", "filename") == [5]
    sessions.open("other")
    assert sessions.get("other", "filename") == []
    shutil.rmtree(tmp_path)
    with pytest.raises(ExecutionError, match="--session-dir"):
        sessions.put("t", [1], [2])
    with pytest.raises(NotFoundError):
        sessions.get("t", "filename")


def one(rid: str = "a", parent: int = -1, num_kept: int = 0, prompt: bytes = bytes(4), outputs: bytes = bytes(4)):
    return TurnRecord(rid, parent, num_kept, prompt, outputs)


@pytest.mark.parametrize(
    "record",
    [
        SessionRecord("s", 0.0, 0, 5, [one()]),
        SessionRecord("s", 0.0, 0, 0, []),
        SessionRecord("s", float("nan"), 0, 0, [one()]),
        SessionRecord("s", 0.0, 0, 0, [one(parent=0)]),
        SessionRecord("s", 0.0, 0, 1, [one(), one("b", 0, 3)]),
        SessionRecord("s", 0.0, 0, 1, [one(), one("b", 0, -1)]),
        SessionRecord("s", 0.0, 0, 1, [one(), one()]),
        SessionRecord("s", 0.0, 0, 0, [one(prompt=bytes(3))]),
        SessionRecord("s", 0.0, 0, 0, [one(outputs=VOCAB.to_bytes(4, "little"))]),
        SessionRecord("s", 0.0, 0, 0, [one(outputs=b"\xff" * 4)]),
    ],
)
def test_a_record_that_is_no_session_is_none(tmp_path, record):
    SessionFiles(tmp_path, "model", 3, MOST, 60.0).save("", record)
    with pytest.raises(NotFoundError):
        turn(started(tmp_path), "z", [1], [2])


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200), cut=st.integers(0, 200), place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_no_file_does_harm(tmp_path_factory, data, cut, place, bit):
    """Random bytes, and a file that is cut or changed in a bit: it is no session."""
    folder = tmp_path_factory.mktemp("sessions")
    sessions = started(folder)
    sessions.open("s")
    turn(sessions, "a", [1, 2], [3])
    [file] = folder.iterdir()
    whole = bytearray(file.read_bytes())
    whole[place % len(whole)] ^= 1 << bit
    for hostile in (data, bytes(whole[:cut]), bytes(whole)):
        file.write_bytes(hostile)
        with pytest.raises(NotFoundError):
            turn(started(folder), "b", [4], [5])


def test_links_and_what_is_no_file_are_not_read(tmp_path):
    folder = tmp_path / "sessions"
    folder.mkdir()
    sessions = started(folder)
    sessions.open("s")
    [file] = folder.iterdir()
    other = tmp_path / "other"
    file.rename(other)
    file.symlink_to(other)
    with pytest.raises(NotFoundError):
        turn(started(folder), "a", [1], [2])
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(NotFoundError):
        turn(started(folder), "a", [1], [2])
    file.unlink()
    file.write_bytes(msgspec.msgpack.encode([1] * (4 * MOST + (2 << 20))))
    with pytest.raises(NotFoundError):
        turn(started(folder), "a", [1], [2])
