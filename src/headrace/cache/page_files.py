"""Pages of KV in files, which outlive the process: a run of pages of one prefix in each.

A file is written once, under a temporary name, and never changed; what a killed writer leaves goes when the folder is opened again. Its name is the
key of its first page: a chain of hashes over the fingerprint (of all that KV depends on beside its tokens), the namespace, and the tokens up to the
end of the page. So a name says what must be inside, whoever wrote it, and a prefix that leaves a run in its middle goes on in a file of its own.

    magic, length and CRC-32 of the header | header, in msgpack (`_Header`) | padding | page 0 | page 1 | ...

Whatever does not fit (another header, a page whose CRC-32 differs, a file that ends early) is a miss, and the file is removed. Owns the files of one
fingerprint, and how many bytes they may take. No torch; used by the tier's thread. Several processes may share the folder: they write the same
bytes under the same names.
"""

import contextlib
import fcntl
import hashlib
import io
import itertools
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.cache.radix_cache import TOKEN_BYTES
from headrace.log import get_logger

_logger = get_logger(__name__)

KEY_BYTES = 16
_MAGIC = b"HRKV\x00\x01\r\n"
_PROLOGUE = struct.Struct("<8sII")
_ALIGNMENT = 4096
_MOST_HEADER = 64 << 20
_SUFFIX = ".kv"
_KEPT_AFTER_PRUNING = 0.9
"""Of the limit: so that not every file that is written is followed by a look at all of them."""


class _Header(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """parent: key of the page before the first one, or of the namespace. tokens: of all pages, as in `page_keys`. crcs: uint32 of each page."""

    fingerprint: str
    parent: bytes
    tokens: bytes
    page_bytes: int
    crcs: bytes


@dataclass(frozen=True, slots=True)
class Run:
    """Pages first .. first + count - 1 of a prefix, from page `skipped` on in this file."""

    path: Path
    first: int
    count: int
    skipped: int
    data_start: int
    crcs: bytes


def page_keys(fingerprint: str, namespace: str, tokens: bytes, page_size: int) -> list[bytes]:
    """The key of the namespace, and those of the whole pages of `tokens` (4 bytes each)."""
    key = hashlib.blake2b(f"{fingerprint} {namespace}".encode(), digest_size=KEY_BYTES).digest()
    size = page_size * TOKEN_BYTES
    keys = [key]
    for start in range(0, len(tokens) // size * size, size):
        key = hashlib.blake2b(key + tokens[start : start + size], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys


class PageFiles:
    """The files of one fingerprint below a folder. limit_bytes: of all files in the folder, those of other fingerprints too.

    num_damaged: files that were removed because of what was in them. num_bytes: of all files in the folder, as far as is known.
    """

    def __init__(self, folder: Path, fingerprint: str, page_size: int, page_bytes: int, limit_bytes: int) -> None:
        self._folder = folder
        self._own = folder / hashlib.sha256(fingerprint.encode()).hexdigest()[:32]
        self._fingerprint = fingerprint
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._limit_bytes = limit_bytes
        self._remove_abandoned()
        self.num_bytes = sum(size for _, size, _ in self._all())
        self._numbers = itertools.count()
        self.num_damaged = 0

    def keys(self, namespace: str, tokens: bytes) -> list[bytes]:
        """See `page_keys`."""
        return page_keys(self._fingerprint, namespace, tokens, self._page_size)

    def find(self, keys: Sequence[bytes], tokens: bytes) -> list[Run]:
        """The runs that hold the first pages of a prefix, in order and without a gap."""
        runs: list[Run] = []
        page, num_pages = 0, len(keys) - 1
        while page < num_pages:
            path = self._path(keys[page + 1])
            header, data_start = self._header(path)
            if header is None:
                break
            count = self._common(header, keys[page], tokens, page, num_pages)
            if not count:
                self._remove(path)
                break
            runs.append(Run(path, page, count, 0, data_start, header.crcs))
            page += count
        return runs

    def read(self, run: Run, keys: Sequence[bytes], at_once: int) -> Iterator[tuple[int, memoryview]]:
        """The pages of a run, `at_once` at a time: the first of them, and the bytes of all. Ends before the first that is damaged.

        The memory is used again for the next ones.
        """
        buffer = memoryview(bytearray(min(at_once, run.count) * self._page_bytes))
        crcs = memoryview(run.crcs).cast("I")[run.skipped :]
        try:
            with run.path.open("rb", buffering=0) as file:
                file.seek(run.data_start + run.skipped * self._page_bytes)
                for start in range(0, run.count, at_once):
                    count = min(at_once, run.count - start)
                    part = buffer[: count * self._page_bytes]
                    num_whole = _read_whole(file, part) // self._page_bytes
                    crc_of = (
                        _crc(page, key)
                        for page, key in zip(self._pages(part), keys[run.first + start + 1 :], strict=False)
                    )
                    num_good = next(
                        (i for i, crc in enumerate(itertools.islice(crc_of, num_whole)) if crc != crcs[start + i]),
                        num_whole,
                    )
                    if num_good:
                        yield run.first + start, part[: num_good * self._page_bytes]
                    if num_good < count:
                        self._remove(run.path)
                        return
            os.utime(run.path)
        except OSError as error:
            _logger.warning("a file of --kv-cache-dir cannot be read: %s", error.strerror)

    def write(self, keys: Sequence[bytes], tokens: bytes, first: int, parts: Iterable[memoryview]) -> None:
        """Write the pages from `first` on. parts: their bytes, any number of pages at a time; they may end early: then there is no file.

        Raises OSError.
        """
        count = len(keys) - 1 - first
        size = self._page_size * TOKEN_BYTES
        crcs = bytearray()
        header_bytes = len(self._encoded(keys[first], tokens[first * size : (first + count) * size], bytes(4 * count)))
        data_start = -(-(_PROLOGUE.size + header_bytes) // _ALIGNMENT) * _ALIGNMENT
        path = self._path(keys[first + 1])
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.{next(self._numbers)}")
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # as long as this process lives: see `_remove_abandoned`
                file.seek(data_start)
                rest = iter(keys[first + 1 :])
                for part in parts:
                    for page in self._pages(part):
                        crcs += _crc(page, next(rest)).to_bytes(4, "little")
                    _write_whole(file.fileno(), part)
                if len(crcs) < 4 * count:
                    return
                header = self._encoded(keys[first], tokens[first * size : (first + count) * size], bytes(crcs))
                file.seek(0)
                _write_whole(file.fileno(), _PROLOGUE.pack(_MAGIC, len(header), zlib.crc32(header)) + header)
                unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
        self.num_bytes += data_start + count * self._page_bytes
        if self.num_bytes > self._limit_bytes:
            self._prune()

    def forget(self) -> None:
        """Remove all files of this fingerprint."""
        for path, size, _ in self._all():
            if self._own in path.parents:
                with contextlib.suppress(OSError):
                    path.unlink()
                    self.num_bytes -= size

    # -- inside

    def _pages(self, part: memoryview) -> Iterator[memoryview]:
        """The pages of some bytes, one by one."""
        return (part[start : start + self._page_bytes] for start in range(0, len(part), self._page_bytes))

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._own / name[:2] / (name + _SUFFIX)

    def _encoded(self, parent: bytes, tokens: bytes, crcs: bytes) -> bytes:
        return msgspec.msgpack.encode(_Header(self._fingerprint, parent, tokens, self._page_bytes, crcs))

    def _header(self, path: Path) -> tuple[_Header | None, int]:
        """The header of a file and where its pages begin; None if there is no such file, or it has none of ours."""
        try:
            with path.open("rb", buffering=0) as file:
                start = file.read(_PROLOGUE.size)
                magic, length, crc = _PROLOGUE.unpack(start) if len(start) == _PROLOGUE.size else (b"", 0, 0)
                text = file.read(length) if magic == _MAGIC and length <= _MOST_HEADER else b""
                if text and zlib.crc32(text) == crc:
                    header = msgspec.msgpack.decode(text, type=_Header)
                    if header.fingerprint == self._fingerprint and header.page_bytes == self._page_bytes:
                        return header, -(-(_PROLOGUE.size + length) // _ALIGNMENT) * _ALIGNMENT
        except FileNotFoundError:
            return None, 0
        except (OSError, msgspec.MsgspecError):
            pass
        self._remove(path)
        return None, 0

    def _common(self, header: _Header, parent: bytes, tokens: bytes, page: int, num_pages: int) -> int:
        """How many pages of a run are the prefix's from `page` on."""
        size = self._page_size * TOKEN_BYTES
        count = min(len(header.crcs) // 4, len(header.tokens) // size, num_pages - page)
        if header.parent != parent:
            return 0
        wanted = tokens[page * size : (page + count) * size]
        if header.tokens[: len(wanted)] == wanted:
            return count
        return next(
            i for i in range(count) if header.tokens[i * size : (i + 1) * size] != wanted[i * size : (i + 1) * size]
        )

    def _remove(self, path: Path) -> None:
        self.num_damaged += 1
        _logger.warning("removed a damaged file of --kv-cache-dir: %s", path.name)
        with contextlib.suppress(OSError):
            path.unlink()

    def _all(self) -> Iterator[tuple[Path, int, float]]:
        return files_below(self._folder)

    def _remove_abandoned(self) -> None:
        """Remove unfinished files whose writer has been killed."""
        for path, _, _ in self._all():
            if path.name.startswith("."):
                with contextlib.suppress(OSError), path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()

    def _prune(self) -> None:
        """Remove those that were not used for longest. One process at a time: two would remove twice as much."""
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            files = sorted(self._all(), key=lambda file: file[2])
            self.num_bytes = sum(size for _, size, _ in files)
            for path, size, _ in files:
                if self.num_bytes <= _KEPT_AFTER_PRUNING * self._limit_bytes:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                    self.num_bytes -= size


def files_below(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """Every file of pages in the folder of --kv-cache-dir, unfinished ones too, with its bytes and when it was used last."""
    for parent, _, names in os.walk(folder):
        for name in names:
            if _SUFFIX in name:
                with contextlib.suppress(OSError):
                    path = Path(parent, name)
                    about = path.stat()
                    yield path, about.st_size, about.st_mtime


def _crc(page: memoryview, key: bytes) -> int:
    """Of a page that has this key: pages that change places are noticed."""
    return zlib.crc32(page, zlib.crc32(key))


def _read_whole(file: io.FileIO, data: memoryview) -> int:
    """How many bytes there were, up to as many as `data` takes."""
    num_bytes = 0
    while num_bytes < len(data) and (count := file.readinto(data[num_bytes:])):
        num_bytes += count
    return num_bytes


def _write_whole(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]
