"""The files of packed weights: whole or refused, each under the identity of what it was made from."""

import os
import shutil
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from headrace.checkpoint import weight_cache
from headrace.checkpoint.weight_cache import ReadAhead, TensorBytes, WeightCacheError, WeightFile

ONE, TWO = "1" * 64, "2" * 64


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    return tmp_path / "weights"


def write(identity: str = ONE, fill: bytes = b"\x07", size: int = 100_000) -> Path:
    tensor = TensorBytes("uint8", (size,), memoryview(fill * size))
    odd = TensorBytes("float32", (3,), memoryview(bytes(range(12))))
    layers = {"a#0": {"data": tensor, "n": 5, "layout": "x", "bias": None}, "b#0": {"data": odd}}
    return weight_cache.write(identity, "tiny", "bfloat16", layers)


def read(path: Path) -> bytes:
    file = WeightFile(path)
    try:
        return bytes(file.read())
    finally:
        file.close()


def test_what_was_written_is_read():
    path = write()
    file = WeightFile(path)
    data = file.read()
    file.close()

    first, second = file.header.layers
    assert (file.header.identity, file.header.model, file.header.precision) == (ONE, "tiny", "bfloat16")
    assert (first.fields["n"], first.fields["layout"], first.fields["bias"]) == (5, "x", None)
    assert data[:100_000] == b"\x07" * 100_000
    assert second.fields["data"].offset % 64 == 0
    assert data[second.fields["data"].offset :][:12] == bytes(range(12))


def test_progress_ends_at_the_whole():
    file = WeightFile(write())
    seen: list[tuple[int, int]] = []
    file.read(lambda done, total: seen.append((done, total)))
    file.close()

    assert [done for done, _ in seen] == [0, 100_000, 100_012]


def opened(ahead: ReadAhead, identity: str) -> bytes:
    file = ahead.open(identity)
    try:
        return bytes(file.read())[:100_000]
    finally:
        file.close()


def test_what_the_last_start_with_the_same_options_used_is_read_ahead():
    path = write(ONE)
    assert opened(ReadAhead("options"), ONE) == b"\x07" * 100_000
    ahead, other = ReadAhead("options"), ReadAhead("other options")
    path.unlink()  # which is open already where it is read ahead

    with pytest.raises(FileNotFoundError):
        opened(other, ONE)
    assert opened(ahead, ONE) == b"\x07" * 100_000
    with pytest.raises(FileNotFoundError):
        opened(ReadAhead("options"), ONE)


def test_what_was_read_ahead_for_nothing_is_not_given():
    write(ONE, b"a"), write(TWO, b"b")
    assert opened(ReadAhead("options"), ONE) == b"a" * 100_000
    ahead = ReadAhead("options")
    assert opened(ahead, TWO) == b"b" * 100_000
    ahead.close()
    assert opened(ReadAhead("options"), TWO) == b"b" * 100_000
    ReadAhead("options").close()


def test_a_damaged_file_that_is_read_ahead_is_refused_where_it_is_used():
    path = write(ONE)
    assert opened(ReadAhead("options"), ONE)
    data = bytearray(path.read_bytes())
    data[-50_000] ^= 1
    path.write_bytes(data)

    with pytest.raises(WeightCacheError, match="checksum"):
        opened(ReadAhead("options"), ONE)


@pytest.mark.parametrize("hint", [b"", b"../../etc/passwd", b"-1", b"f" * 5000, bytes(range(256))])
def test_a_damaged_hint_leads_to_nothing(folder: Path, hint: bytes):
    write(ONE)
    assert opened(ReadAhead("options"), ONE)
    [last] = folder.glob("*.last")
    last.write_bytes(hint)
    ahead = ReadAhead("options")

    assert opened(ahead, ONE) == b"\x07" * 100_000
    assert last.read_bytes() == ONE.encode()


@pytest.mark.parametrize("keep", [0, 7, 24, 200, 5000, 90_000, -1])
def test_a_file_that_was_cut_off_is_refused(keep: int):
    path = write()
    os.truncate(path, keep if keep >= 0 else path.stat().st_size - 1)

    with pytest.raises(WeightCacheError):
        read(path)


@pytest.mark.parametrize("at", [3, 10, 20, 40, 4096 + 50_000, -60])
def test_one_changed_byte_is_noticed(at: int):
    path = write()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)

    with pytest.raises(WeightCacheError):
        read(path)


def test_writers_at_once_leave_one_whole_file(folder: Path):
    fills = [bytes([number]) for number in range(8)]
    barrier = threading.Barrier(len(fills))

    def race(fill: bytes) -> None:
        barrier.wait()
        write(fill=fill)

    threads = [threading.Thread(target=race, args=(fill,)) for fill in fills]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    data = read(weight_cache.path_of(ONE))
    assert data[:1] in fills
    assert data[:100_000] == data[:1] * 100_000
    assert len(list(folder.iterdir())) == 1


def test_a_file_may_be_replaced_and_deleted_while_it_is_read():
    file = WeightFile(write(fill=b"a"))
    write(fill=b"b")
    weight_cache.clear()

    assert file.read()[:100_000] == b"a" * 100_000
    file.close()


def test_the_oldest_go_when_the_share_of_the_disk_is_used_up(monkeypatch: pytest.MonkeyPatch):
    old, new = write(ONE), write(TWO)
    os.utime(old, (1, 1))
    size = old.stat().st_size
    usage = namedtuple("usage", "free")
    # A quarter of what is free and taken: room for two files.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free=4 * int(2.5 * size) - 2 * size))
    third = write("3" * 64)

    assert not old.exists()
    assert new.exists()
    assert third.exists()


def test_what_was_measured_does_not_wait_for_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A start would wait for all that is being written, such as the weights."""
    monkeypatch.setattr(os, "fsync", lambda handle: pytest.fail("it waits"))
    weight_cache.keep_measured(ONE, {"a": 0.25})

    assert weight_cache.read_measured(ONE) == {"a": 0.25}


def test_what_was_measured_is_kept_beside_the_weights_and_goes_with_them(folder: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in (("a", 0.25), ("b", 1.5), ("a", 0.5)):
        weight_cache.keep_measured(ONE, {name: value})
    measured = weight_cache.path_of(ONE).with_suffix(".measured")
    kept = measured.read_bytes()

    assert weight_cache.read_measured(ONE) == {"a": 0.5, "b": 1.5}
    assert weight_cache.read_measured(TWO) == {}
    assert weight_cache.read_measured(ONE[:-1] + "7") == {}  # another model, whose file has the same name
    measured.write_bytes(kept[:-3])
    assert weight_cache.read_measured(ONE) == {}
    measured.write_bytes(kept)

    usage = namedtuple("usage", "free")
    size = write(ONE).stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free=4 * int(1.5 * size) - size))
    write(TWO)
    assert weight_cache.read_measured(ONE) == {}
    weight_cache.keep_measured(TWO, {"a": 0.25})
    weight_cache.clear()
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_an_error_that_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free=1000))
    with pytest.raises(WeightCacheError, match="more than"):
        write()

    assert list(folder.iterdir()) == []


def test_a_write_that_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def no_space(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(WeightCacheError, match="No space left"):
        write()

    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "file"))

    with pytest.raises(WeightCacheError, match="cannot write"):
        write()


def test_files_are_listed_and_cleared(folder: Path):
    old, new = write(ONE), write(TWO)
    os.utime(old, (1, 1))
    (folder / "broken.weights").write_bytes(b"?")
    (folder / "x.unfinished").write_bytes(b"half")
    os.utime(folder / "broken.weights", (0, 0))

    listed = weight_cache.cached_files()
    freed = weight_cache.clear()

    assert [file.path.name for file in listed] == [new.name, old.name, "broken.weights"]
    assert [file.model for file in listed] == ["tiny", "tiny", "(damaged)"]
    assert freed == sum(file.num_bytes for file in listed) + 4
    assert list(folder.iterdir()) == []


def test_identity_follows_the_files_and_the_facts(tmp_path: Path):
    model = tmp_path / "model.safetensors"
    model.write_bytes(bytes(10_000_000))
    os.utime(model, ns=(5, 5))
    base = weight_cache.identity([model], {"dtype": "bfloat16"})

    assert weight_cache.identity([model], {"dtype": "bfloat16"}) == base
    assert weight_cache.identity([model], {"dtype": "float32"}) != base
    os.utime(model, ns=(5, 6))
    assert weight_cache.identity([model], {"dtype": "bfloat16"}) != base
    # Same size and time, other weights throughout.
    model.write_bytes(b"\x01" * 10_000_000)
    os.utime(model, ns=(5, 5))
    other = weight_cache.identity([model], {"dtype": "bfloat16"})
    assert other != base
    # And one byte where no sample is.
    content = weight_cache.files_fingerprint([model], {})
    with model.open("r+b") as file:
        file.seek(100_000)
        file.write(b"\x02")
    os.utime(model, ns=(5, 5))
    assert weight_cache.files_fingerprint([model], {}) == content
    assert weight_cache.identity([model], {"dtype": "bfloat16"}) != other


def test_other_code_is_another_digest(tmp_path: Path):
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "linear.py").write_text("a = 1\n")
    before = weight_cache.code_digest(tmp_path)
    (tmp_path / "layers" / "linear.py").write_text("a = 2\n")

    assert weight_cache.code_digest(tmp_path) != before
