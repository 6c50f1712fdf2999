"""Copies of the checkpoints that weights were updated from: a trainer that writes each step to one path overwrites what a restarted scheduler needs.

`Copies` is the folder of one server, below the cache's, and holds what serves (while an update is carried out, also what will); it ends with the
server, and what a killed one left goes with the first update of the next. `copy_checkpoint` is called by who loads, between two looks at the
fingerprint, so that a copy has the bytes that were loaded. Not a hard link, since a trainer may write in place. No torch.
"""

import fcntl
import itertools
import os
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from headrace.checkpoint.files import first_part, is_mmproj, open_regular
from headrace.checkpoint.names import cache_dir
from headrace.log import get_logger

_logger = get_logger(__name__)

_ROOT = "updates"
_LOCK = "lock"
MAX_SHARE = 0.5
"""Of the free disk space, the most that a copy may take."""
_MAX_JSON_BYTES = 64 << 20
_FICLONE = 0x40049409
"""ioctl_ficlone(2): the new file shares the blocks of the old one until either is written."""
_CHUNK_BYTES = 64 << 20


class Copies:
    """is_on: otherwise there are none. Used by one thread at a time."""

    def __init__(self, is_on: bool = False) -> None:
        self._is_on = is_on
        self._folder: Path | None = None
        self._lock: BinaryIO | None = None
        self._numbers = itertools.count(1)

    def next_path(self) -> str:
        """Where the next copy is to be put; "" = nowhere. Nothing is there yet."""
        if not self._is_on:
            return ""
        try:
            if self._folder is None:
                self._folder, self._lock = _own_folder(cache_dir() / _ROOT)
        except OSError as error:
            _logger.warning("no copy of the new weights is kept: the cache cannot be written (%s)", error.strerror)
            return ""
        return str(self._folder / str(next(self._numbers)))

    def keep_only(self, path: str) -> None:
        """Delete all others."""
        if self._folder is None:
            return
        with suppress(OSError):
            others = [entry for entry in self._folder.iterdir() if entry.name != _LOCK and str(entry) != path]
            _delete_soon(others)

    def close(self) -> None:
        """Delete them all. Idempotent."""
        if self._folder is not None and self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()
            self._folder, self._is_on = None, False


def _own_folder(root: Path) -> tuple[Path, BinaryIO]:
    """A new folder and the lock that says that its server lives. Folders of servers that do not are removed. Raises OSError."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / _LOCK).open("ab") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        abandoned = []
        for entry in root.iterdir():
            # Without a lock it was half deleted. Otherwise it lives, or belongs to another user.
            try:
                with (entry / _LOCK).open("rb") as other:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            abandoned.append(entry)
        _delete_soon(abandoned)
        folder = Path(tempfile.mkdtemp(dir=root))
        own = (folder / _LOCK).open("wb")
        fcntl.flock(own, fcntl.LOCK_EX)
        return folder, own


def _delete_soon(folders: list[Path]) -> None:
    """In a thread: large files take a while."""

    def delete() -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    if folders:
        threading.Thread(target=delete, name="old weights").start()


def copy_checkpoint(path: Path, tensors: list[Path], target: str, clones_only: bool) -> None:
    """Make the folder `target`, which can be served like the checkpoint. It appears when it is complete; the first of several callers makes it.

    path: of the checkpoint. tensors: its files that hold them. clones_only: where the file system cannot share blocks there is no copy.
    Raises nothing: why there is no copy is logged.
    """
    begin, unfinished = time.perf_counter(), Path(f"{target}.unfinished")
    lock = -1
    try:
        # One that was killed at it has left what is there.
        unfinished.mkdir(exist_ok=True)
        lock = os.open(unfinished, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if os.path.exists(target):
            return
        files = _files_of(path, tensors)
        num_bytes = sum(file.stat().st_size for file in files.values())
        are_clones: list[bool] = []
        for name, file in files.items():
            are_clones.append(_clone(file, unfinished / name))
            if not are_clones[-1]:
                if all(are_clones[:-1]):
                    _check_room(unfinished, num_bytes, clones_only)
                _copy(file, unfinished / name)
        unfinished.rename(target)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        _logger.warning(
            "no copy of the new weights is kept (%s): a scheduler that dies comes back only while their files stay as they are",
            error.strerror,
        )
        return
    finally:
        if lock >= 0:
            os.close(lock)
    how = "blocks shared" if all(are_clones) else "copied"
    took_s = time.perf_counter() - begin
    _logger.info("a copy of the new weights is kept: %d MiB, %s in %.2f s", num_bytes >> 20, how, took_s)


def own_mmproj(model: Path, wanted: str) -> str:
    """The vision encoder of a GGUF file when `wanted` is named: of a copy its own, since the named file may have changed."""
    is_copy = Path(os.path.abspath(cache_dir() / _ROOT)) in model.parents  # as `mkdtemp` has it
    return str(model.parent / _place_of_mmproj(wanted)) if is_copy else wanted


def _place_of_mmproj(file: str | Path) -> str:
    """In a copy, beside whose model a GGUF file of any other name would be another model."""
    name = Path(file).name
    return name if is_mmproj(name) else f"mmproj/{name}"


def _files_of(base: Path, tensors: list[Path]) -> dict[str, Path]:
    """What a copy needs, by the name in its folder: the tensors, and the JSON files that describe them."""
    if not base.is_dir():
        parts = {
            file for file in tensors if file.parent == base.parent and first_part(file.name) == first_part(base.name)
        }
        return {file.name if file in parts else _place_of_mmproj(file): file for file in tensors}
    about = [file for pattern in ("*.json", "*/*.json") for file in base.glob(pattern) if file.is_file()]
    small = [file for file in about if file.stat().st_size <= _MAX_JSON_BYTES]
    return {str(file.relative_to(base)): file for file in (*tensors, *small)}


def _clone(source: Path, target: Path) -> bool:
    """Whether the file system can share the blocks. Raises OSError."""
    target.parent.mkdir(exist_ok=True)
    with open_regular(source) as old, target.open("wb") as new:
        try:
            fcntl.ioctl(new, _FICLONE, old.fileno())
        except OSError:
            return False
        return True


def _check_room(folder: Path, num_bytes: int, clones_only: bool) -> None:
    """Raises OSError if a copy may not be made there."""
    if clones_only:
        raise OSError(0, "the file system cannot share blocks")
    free = shutil.disk_usage(folder).free
    if num_bytes > free * MAX_SHARE:
        raise OSError(0, f"{num_bytes >> 20} MiB are more than half of the {free >> 20} MiB that are free")


def _copy(source: Path, target: Path) -> None:
    """Raises OSError."""
    with open_regular(source) as old, target.open("wb") as new:
        while os.sendfile(new.fileno(), old.fileno(), None, _CHUNK_BYTES):
            pass
