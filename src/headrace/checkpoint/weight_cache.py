"""The folder of packed weights: files that hold a model's weights as the kernels want them, so that a second start need not convert.

A file: 8 bytes of magic, the length of the header (uint64) and its CRC-32 (uint64), little-endian; the header, JSON; zeros up to a multiple of 4096;
the tensors, each at a multiple of 64. Every tensor has a CRC-32, so a file that was cut off, or damaged on disk, is found out and replaced. A file
appears under its name only when it is complete, so readers and writers need no locks, and any file may be deleted at any time. No torch. Used by the
process that loads a model (`execution.weight_files`), and by `headrace cache`.
"""

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from headrace.checkpoint.files import open_regular
from headrace.checkpoint.names import cache_dir
from headrace.errors import HeadraceError
from headrace.plain_types import plain_reason

_MAGIC = b"HRWEIGHT"
_PROLOGUE = struct.Struct("<8sQQ")
_SUFFIX = ".weights"
_MEASURED_SUFFIX = ".measured"
_LAST_SUFFIX = ".last"
_SUFFIXES = (_SUFFIX, _MEASURED_SUFFIX, _LAST_SUFFIX, ".unfinished")
_PAGE = 4096
_ALIGNMENT = 64
_CHUNK_BYTES = 4 << 20
_MOST_READERS = 4
_MAX_HEADER_BYTES = 64 << 20
_MAX_SHARE = 0.25
"""Of the disk space that is free or taken by the cache, the most that the cache may take."""

_CONTENT_DIGITS = 32
_SAMPLES = 64
_SAMPLE_BYTES = 64 << 10
_HASHED_BYTES = 32 << 20


class WeightCacheError(HeadraceError):
    """A file of the cache cannot be read or written. Never reaches a user as an error: the weights are converted again."""


class StoredTensor(msgspec.Struct, frozen=True):
    """dtype: its torch name. offset: bytes from the start of the data. sha256: of its bytes, in hexadecimal; for who asks which weights these are."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    crc32: int
    sha256: str


class StoredLayer(msgspec.Struct, frozen=True):
    """What one layer keeps: tensors, and the facts that say how they are laid out."""

    name: str
    fields: dict[str, StoredTensor | int | str | None]


class Header(msgspec.Struct, frozen=True):
    """identity: everything that the bytes depend on (`identity`). model, precision: for people."""

    identity: str
    model: str
    precision: str
    layers: tuple[StoredLayer, ...]
    data_bytes: int


class Measured(msgspec.Struct, frozen=True):
    """What was measured of the weights of an identity, by name; in a file of its own beside them."""

    identity: str
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class CachedFile:
    """One file of the cache, for lists. used_s: when it was last written or read, seconds since the epoch."""

    path: Path
    model: str
    precision: str
    num_bytes: int
    used_s: float


def folder() -> Path:
    return cache_dir() / "weights"


def identity(files: Iterable[Path], facts: Mapping[str, object]) -> str:
    """A name for what is made of `files` under `facts`: 64 hexadecimal digits.

    A file counts with its name, size, both times of change (nanoseconds) and a hash of its beginning, its end and samples between: reading all of
    it would cost what the cache saves. The time of the inode's change shows a write that a program has hidden by setting back the other one; links,
    renames and new rights change it, too, and cost a conversion. Raises OSError.
    """
    return _hash([(file.name, *_fingerprint(file)) for file in sorted(files)], facts)


def files_fingerprint(files: Iterable[Path], facts: Mapping[str, object]) -> str:
    """A name for `files` that shows any change of them: `content_of` it is the same for copies on other hosts. Raises OSError."""
    described = sorted((file.name, *_fingerprint(file)[:3]) for file in files)
    without_times = [(name, size, digest) for name, size, digest, _ in described]
    return _hash(without_times, facts)[:_CONTENT_DIGITS] + _hash(described, facts)[:_CONTENT_DIGITS]


def content_of(fingerprint: str) -> str:
    """The part of a fingerprint that does not depend on when files were written, with which it begins."""
    return fingerprint[:_CONTENT_DIGITS]


def whole_content(files: Iterable[Path]) -> str:
    """A hash of every byte of `files`, whatever their names: as fast as the processor's cores hash. Raises OSError."""

    def digest(part: tuple[Path, int]) -> bytes:
        with open_regular(part[0]) as file:
            file.seek(part[1])
            return hashlib.sha256(file.read(_HASHED_BYTES)).digest()

    def whole(file: Path) -> str:
        size = file.stat().st_size
        return f"{size} {b''.join(pool.map(digest, ((file, at) for at in range(0, size, _HASHED_BYTES)))).hex()}"

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return _hash(sorted(map(whole, files)), {})


def code_digest(root: Path) -> str:
    """A hash of the code below `root` that makes packed weights: other code, other files."""
    digest = hashlib.sha256()
    for room in ("checkpoint", "distributed", "kernels", "layers", "models"):
        for file in sorted((root / room).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def path_of(identity: str) -> Path:
    """The file of this identity, there or not."""
    return folder() / f"{identity[:32]}{_SUFFIX}"


def read_measured(identity: str) -> dict[str, float]:
    """What was measured of these weights, by name; empty when nothing is kept, or the file is damaged."""
    try:
        found = msgspec.json.decode(_measured_path(identity).read_bytes(), type=Measured)
    except (OSError, msgspec.DecodeError):
        return {}
    return found.values if found.identity == identity else {}


def keep_measured(identity: str, values: Mapping[str, float]) -> None:
    _keep(_measured_path(identity), msgspec.json.encode(Measured(identity, {**read_measured(identity), **values})))


def _keep(path: Path, text: bytes) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Without waiting for the disk, which may still be writing packed weights: what a crash leaves of it is not read.
        _write_whole(path, lambda file: file.write(text), lasting=False)
    except OSError as error:
        raise WeightCacheError(f"cannot write to {path.parent}: {error.strerror}") from error


def _measured_path(identity: str) -> Path:
    return path_of(identity).with_suffix(_MEASURED_SUFFIX)


class WeightFile:
    """An open file of the cache. header; read() gives the data."""

    def __init__(self, path: Path) -> None:
        """Read and check the header. Raises FileNotFoundError, or WeightCacheError when it is no whole file of this format."""
        self._readers: ThreadPoolExecutor | None = None
        self._reading: tuple[mmap.mmap, list[tuple[StoredTensor, Future[None]]]] | None = None
        try:
            self._file = path.open("rb")
        except FileNotFoundError:
            raise
        except OSError as error:
            raise WeightCacheError(f"{path.name} cannot be opened: {error.strerror}") from error
        try:
            self._read_header(path)
        except (OSError, WeightCacheError) as error:
            self.close()
            if isinstance(error, WeightCacheError):
                raise
            raise WeightCacheError(f"{path.name} cannot be read: {error.strerror}") from error

    def _read_header(self, path: Path) -> None:
        prologue = self._file.read(_PROLOGUE.size)
        if len(prologue) < _PROLOGUE.size:
            raise WeightCacheError(f"{path.name} is cut off")
        magic, length, crc32 = _PROLOGUE.unpack(prologue)
        if magic != _MAGIC or length > _MAX_HEADER_BYTES:
            raise WeightCacheError(f"{path.name} is not a file of packed weights")
        text = self._file.read(length)
        if len(text) < length or zlib.crc32(text) != crc32:
            raise WeightCacheError(f"{path.name}: its header is damaged")
        try:
            self.header = msgspec.json.decode(text, type=Header)
        except msgspec.DecodeError as error:
            raise WeightCacheError(f"{path.name}: its header is of another version ({plain_reason(error)})") from error
        self._data_start = _round_up(_PROLOGUE.size + length, _PAGE)
        size = os.fstat(self._file.fileno()).st_size
        if size != self._data_start + self.header.data_bytes:
            raise WeightCacheError(
                f"{path.name} has {size} bytes, not {self._data_start + self.header.data_bytes}: it is cut off"
            )
        self._path = path

    def begin(self) -> None:
        """Begin to read, in threads; `read` waits for them. Once."""
        data = mmap.mmap(-1, max(1, self.header.data_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            data.madvise(mmap.MADV_HUGEPAGE)
        tensors = [
            field for layer in self.header.layers for field in layer.fields.values() if isinstance(field, StoredTensor)
        ]
        view = memoryview(data)
        # Neither the system's copies nor the checksums hold Python's lock.
        readers = self._readers = ThreadPoolExecutor(_MOST_READERS, "weight cache")
        self._reading = data, [(tensor, readers.submit(self._read_tensor, tensor, view)) for tensor in tensors]

    def read(self, progress: Callable[[int, int], None] = lambda done, total: None) -> mmap.mmap:
        """All the data in fresh memory, in huge pages where there are any. Once. Raises WeightCacheError when a checksum is wrong."""
        if self._reading is None:
            self.begin()
        assert self._reading is not None
        (data, reading), done, self._reading = self._reading, 0, None
        progress(done, self.header.data_bytes)
        try:
            for tensor, result in reading:
                result.result()
                done += tensor.num_bytes
                progress(done, self.header.data_bytes)
        except OSError as error:
            raise WeightCacheError(f"{self._path.name} cannot be read: {error.strerror}") from error
        with contextlib.suppress(OSError):  # a folder that may only be read
            os.utime(self._path)
        return data

    def _read_tensor(self, tensor: StoredTensor, into: memoryview) -> None:
        begin, end, crc32 = tensor.offset, tensor.offset + tensor.num_bytes, 0
        if not 0 <= begin <= end <= len(into):
            raise WeightCacheError(f"{self._path.name}: a tensor lies outside the file")
        # In pieces, so that the checksum finds them in the processor's cache.
        for at in range(begin, end, _CHUNK_BYTES):
            piece = into[at : min(end, at + _CHUNK_BYTES)]
            if os.preadv(self._file.fileno(), [piece], self._data_start + at) < len(piece):
                raise WeightCacheError(f"{self._path.name} is cut off")
            crc32 = zlib.crc32(piece, crc32)
        if crc32 != tensor.crc32:
            raise WeightCacheError(f"{self._path.name}: a checksum is wrong")

    def close(self) -> None:
        """Ends what was begun."""
        if self._readers is not None:
            self._readers.shutdown(cancel_futures=True)
        self._reading = None
        self._file.close()


class ReadAhead:
    """The packed weights that the last start with the same options has used, read while this process still imports what takes them. Only a hint
    leads to them: what they are of is for `open` to compare. key: stands for the options; None = nothing is read."""

    def __init__(self, key: str | None) -> None:
        self._path = (
            None if key is None else folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{_LAST_SUFFIX}"
        )
        self._file: WeightFile | None = None
        with contextlib.suppress(OSError, ValueError, WeightCacheError):
            if self._path is not None:
                identity = f"{int(self._path.read_bytes(), 16):064x}"
                self._file = WeightFile(path_of(identity))
                self._file.begin()

    def open(self, identity: str) -> WeightFile:
        """The file of this identity, and the hint for the next start. Raises as `WeightFile`."""
        file, self._file = self._file, None
        if file is not None:
            if file.header.identity == identity:
                return file
            file.close()
        if self._path is not None:
            with contextlib.suppress(WeightCacheError):
                _keep(self._path, identity.encode())
        return WeightFile(path_of(identity))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


NOTHING_AHEAD = ReadAhead(None)


@dataclass(frozen=True, slots=True)
class TensorBytes:
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def write(
    identity: str,
    model: str,
    precision: str,
    layers: Mapping[str, Mapping[str, TensorBytes | int | str | None]],
    rest: Callable[[float], object] = lambda worked_s: None,
) -> Path:
    """Write the file of `identity`, complete or not at all. layers: by name, what each keeps. rest: called after a millisecond or two of work, with
    what it took in seconds. Raises WeightCacheError. Removes the files that were used longest ago when the cache takes more than its share of the
    disk."""
    offset = 0
    stored: list[StoredLayer] = []
    buffers: list[tuple[int, memoryview]] = []
    for name, fields in layers.items():
        described: dict[str, StoredTensor | int | str | None] = {}
        for field, value in fields.items():
            if isinstance(value, TensorBytes):
                num_bytes, sha256, crc = value.data.nbytes, hashlib.sha256(), 0
                for piece in _pieces(value.data, rest):
                    sha256.update(piece)
                    crc = zlib.crc32(piece, crc)
                described[field] = StoredTensor(value.dtype, value.shape, offset, num_bytes, crc, sha256.hexdigest())
                buffers.append((offset, value.data))
                offset = _round_up(offset + num_bytes, _ALIGNMENT)
            else:
                described[field] = value
        stored.append(StoredLayer(name, described))
    header = msgspec.json.encode(Header(identity, model, precision, tuple(stored), offset))
    start = _round_up(_PROLOGUE.size + len(header), _PAGE)
    path = path_of(identity)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(start + offset)

        def fill(file: BinaryIO) -> None:
            file.write(_PROLOGUE.pack(_MAGIC, len(header), zlib.crc32(header)) + header)
            for at, data in buffers:
                file.seek(start + at)
                for piece in _pieces(data, rest):
                    file.write(piece)
            file.truncate(start + offset)

        _write_whole(path, fill)
    except OSError as error:
        raise WeightCacheError(f"cannot write to {path.parent}: {error.strerror}") from error
    return path


def _pieces(data: memoryview, rest: Callable[[float], object]) -> Iterator[memoryview]:
    """`data` by the MiB; `rest` is told how long the caller worked on each."""
    for at in range(0, data.nbytes, 1 << 20):
        begin = time.perf_counter()
        yield data[at : at + (1 << 20)]
        rest(time.perf_counter() - begin)


def _write_whole(path: Path, fill: Callable[[BinaryIO], object], lasting: bool = True) -> None:
    handle, unfinished = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".unfinished", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            fill(file)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def cached_files() -> list[CachedFile]:
    """The files of the cache, the latest used first. A damaged one has no model."""
    found = []
    for path in folder().glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):  # deleted meanwhile
            status = path.stat()
            model, precision = "(damaged)", ""
            with contextlib.suppress(WeightCacheError):
                file = WeightFile(path)
                file.close()
                model, precision = file.header.model, file.header.precision
            found.append(CachedFile(path, model, precision, status.st_size, status.st_mtime))
    return sorted(found, key=lambda file: -file.used_s)


def clear() -> int:
    """Delete every file, unfinished ones and what was measured, too. Returns the bytes that this frees. Raises WeightCacheError."""
    freed = 0
    for path in [path for suffix in _SUFFIXES for path in folder().glob(f"*{suffix}")]:
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise WeightCacheError(f"cannot delete {path}: {error.strerror}") from error
        freed += size
    return freed


def _make_room(num_bytes: int) -> None:
    """Delete the least recently used files until `num_bytes` more fit in the cache's share of the disk."""
    files = cached_files()
    taken = sum(file.num_bytes for file in files)
    share = int((shutil.disk_usage(folder()).free + taken) * _MAX_SHARE)
    if num_bytes > share:
        raise WeightCacheError(
            f"{num_bytes / 2**20:.0f} MiB are more than the {share / 2**20:.0f} MiB that it may take"
        )
    while taken + num_bytes > share:
        oldest = files.pop()
        oldest.path.unlink(missing_ok=True)
        oldest.path.with_suffix(_MEASURED_SUFFIX).unlink(missing_ok=True)
        taken -= oldest.num_bytes


def _hash(described: object, facts: Mapping[str, object]) -> str:
    text = json.dumps([described, dict(facts)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _fingerprint(path: Path) -> tuple[int, str, int, int]:
    """Its size, the hash of its samples, and when its content and its inode were changed, in nanoseconds."""
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        digest = hashlib.sha256()
        last = max(0, status.st_size - _SAMPLE_BYTES)
        for number in range(_SAMPLES):
            file.seek(last * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return status.st_size, digest.hexdigest(), status.st_mtime_ns, status.st_ctime_ns


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
