"""Brings a model from the Hugging Face Hub into the cache that Hugging Face's tools share. Uses the network.

Owns transfer: a file is written beside its place (`blobs/DIGEST.headrace.incomplete`), continued after an interruption,
checked against the digest that the Hub states, and only then given its name. The revision is entered last, so that a model
is found by its name only when it is whole. `headrace pull` runs it; serving never does.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

import requests

from headrace.checkpoint import hub_repository
from headrace.checkpoint.hub_cache import COMMIT, HubName, cache_folder, find_model, is_gguf_model
from headrace.checkpoint.hub_repository import RETRIED, Hub, HubFile, needed_files, weight_map
from headrace.checkpoint.huggingface import INDEX_NAME
from headrace.checkpoint.json_file import read_json_object
from headrace.errors import ModelError
from headrace.log import get_logger

if TYPE_CHECKING:
    import _hashlib

log = get_logger(__name__)

_CHUNK_BYTES = 1 << 20
_PIECE_BYTES = 1 << 16  # a connection that breaks loses the piece that it was in
_MAX_ATTEMPTS = 5  # without a byte of progress between them


class PullProgress(Protocol):
    """Is told how far a download is."""

    def start(self, num_files: int, total_bytes: int) -> None:
        """What there is to do, of which some may be here already."""

    def file(self, name: str) -> None:
        """The file that comes next."""

    def advance(self, num_bytes: int) -> None:
        """Bytes that are here and checked, or arrived. Negative: bytes that were wrong and come again."""


def pull_from_hub(name: HubName, progress: PullProgress) -> Path:
    """Download a model into the cache, and give the folder or GGUF file to serve. What is whole is not downloaded again.

    Raises ModelError: unknown or forbidden models, no network, wrong digests, too little space on the disk, another pull
    of the same model. What has arrived of an interrupted file stays, for the next call.
    """
    hub = Hub()
    commit, files = hub.files(name)
    try:
        with _lock(name):
            pull = _Pull(hub, name, commit, progress)
            pull.fetch_all(files)
    except OSError as error:
        raise ModelError(f"{name.repo} cannot be written to {cache_folder()}: {error.strerror}") from error
    return find_model(name)


class _Pull:
    def __init__(self, hub: Hub, name: HubName, commit: str, progress: PullProgress) -> None:
        self._hub = hub
        self._name = name
        self._commit = commit
        self._progress = progress
        self._blobs = name.folder / "blobs"
        self._snapshot = name.folder / "snapshots" / commit

    def fetch_all(self, files: list[HubFile]) -> None:
        index = next((file for file in files if file.name == INDEX_NAME), None)
        shards = None
        if index is not None and self._name.file is None:
            # It says which of the safetensors files are the model's.
            self._progress.start(1, index.num_bytes)
            self._fetch(index)
            shards = weight_map(read_json_object(self._blobs / index.digest))
            if shards is None:
                raise ModelError(f"{INDEX_NAME} of {self._name.repo} has no usable weight_map")
        needed = needed_files(files, self._name, shards)
        self._check_space(needed)
        self._progress.start(len(needed), sum(file.num_bytes for file in needed))
        for file in needed:
            self._fetch(file)
        for file in needed:
            self._link(file)
        for file in files:
            # GGUF files of earlier pulls: still there at a newer revision, if they have not changed.
            if is_gguf_model(file.name) and _size(self._blobs / file.digest) == file.num_bytes:
                self._link(file)
        if not COMMIT.fullmatch(self._name.revision):
            _write(self._name.folder / "refs" / self._name.revision, self._commit)

    def _check_space(self, needed: list[HubFile]) -> None:
        """Compare what is still to come with what the disk has."""
        lacking = {
            file.digest: file.num_bytes - max(_size(self._partial(file)), 0)
            for file in needed
            if _size(self._blobs / file.digest) != file.num_bytes
        }
        free, wanted = shutil.disk_usage(self._name.folder).free, sum(lacking.values())
        if wanted > free:
            raise ModelError(
                f"{self._name.repo} needs {wanted / 1e9:.1f} GB more, but the disk of {cache_folder()} has "
                f"{free / 1e9:.1f} GB free; set HF_HUB_CACHE to a folder on another disk"
            )

    def _partial(self, file: HubFile) -> Path:
        return self._blobs / f"{file.digest}.headrace.incomplete"

    def _fetch(self, file: HubFile) -> None:
        """Bring one file into the blobs, unless it is there and right."""
        self._progress.file(file.name)
        blob, partial = self._blobs / file.digest, self._partial(file)
        if blob.exists():
            if blob.stat().st_size == file.num_bytes:
                if self._digest_of(blob, file) == file.digest:
                    return
                self._progress.advance(-file.num_bytes)
            log.warning("%s of %s is damaged in the cache; it is downloaded again", file.name, self._name.repo)
            blob.unlink()
        blob.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("ab") as out:
                self._receive(file, out)
                out.flush()
                os.fsync(out.fileno())
        except ModelError:
            if not _size(partial):
                partial.unlink()
            raise
        found = self._digest_of(partial, file, quiet=True)
        if found != file.digest:
            partial.unlink()
            raise ModelError(
                f"{file.name} of {self._name.repo} arrived damaged: its digest is {found}, not {file.digest}; it was "
                "deleted, run the same command again"
            )
        partial.replace(blob)

    def _receive(self, file: HubFile, out: BinaryIO) -> None:
        """Append to `out` until it has the file's size, over several connections if need be."""
        if out.tell() > file.num_bytes:
            out.truncate(0)
            out.seek(0)
        self._progress.advance(out.tell())
        attempts, last = 0, -1
        while out.tell() < file.num_bytes:
            attempts = attempts + 1 if out.tell() == last else 1
            last = out.tell()
            if attempts > 1:
                time.sleep(hub_repository.WAIT_S * 2 ** (attempts - 2))
            try:
                status = self._receive_once(file, out)
            except requests.RequestException as error:
                log.warning("the connection failed while %s was downloaded: %s", file.name, type(error).__name__)
                status = 0
            if attempts == _MAX_ATTEMPTS and out.tell() == last:
                answer = f"status {status}" if status else "no answer"
                raise ModelError(
                    f"{file.name} of {self._name.repo} stopped at {out.tell()} of {file.num_bytes} bytes ({answer}, "
                    f"{attempts} attempts); the same command continues from there"
                )

    def _receive_once(self, file: HubFile, out: BinaryIO) -> int:
        """One request for the rest of the file; returns its status. Raises RequestException, ModelError for refusals."""
        have = out.tell()
        headers = {"Range": f"bytes={have}-"} if have else None
        with self._hub.get(self._hub.file_path(self._name.repo, self._commit, file.name), headers) as response:
            if response.status_code in RETRIED:
                return response.status_code
            if response.status_code == 416 or (response.status_code == 206 and _range_start(response) != have):
                self._restart(out)
                return response.status_code
            if not response.ok:
                raise self._hub.refusal(response, self._name)
            if response.status_code == 200 and have:
                self._restart(out)  # the server sends all of it again
            for chunk in response.iter_content(_PIECE_BYTES):
                if out.tell() + len(chunk) > file.num_bytes:
                    size = out.tell() + len(chunk)
                    self._restart(out)
                    raise ModelError(f"{file.name} of {self._name.repo} has {size} bytes or more, not {file.num_bytes}")
                out.write(chunk)
                self._progress.advance(len(chunk))
            return response.status_code

    def _restart(self, out: BinaryIO) -> None:
        self._progress.advance(-out.tell())
        out.truncate(0)
        out.seek(0)

    def _digest_of(self, path: Path, file: HubFile, quiet: bool = False) -> str:
        """The digest of a file on disk, of the kind that `file` has."""
        digest = hashlib.sha256() if len(file.digest) == 64 else _git_sha1(path.stat().st_size)
        with path.open("rb") as data:
            while chunk := data.read(_CHUNK_BYTES):
                digest.update(chunk)
                if not quiet:
                    self._progress.advance(len(chunk))
        return digest.hexdigest()

    def _link(self, file: HubFile) -> None:
        """Enter a blob into the snapshot, by a relative link as Hugging Face's library does."""
        link = self._snapshot / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        fresh = link.with_name(f".{link.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(os.path.relpath(self._blobs / file.digest, link.parent))
        fresh.replace(link)


@contextlib.contextmanager
def _lock(name: HubName) -> Iterator[None]:
    """One pull of a repository at a time. Raises ModelError if another is running."""
    file = cache_folder() / ".locks" / name.folder.name / "headrace.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    name.folder.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError(f"another `headrace pull` of {name.repo} is running; wait for it") from None
        yield


def _git_sha1(num_bytes: int) -> "_hashlib.HASH":
    """git's digest of a file: that of a header with its size, and of the file."""
    return hashlib.sha1(f"blob {num_bytes}\0".encode(), usedforsecurity=False)


def _range_start(response: requests.Response) -> int:
    """The first byte that a partial answer has; -1 if it does not say."""
    words = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")
    return int(words[0]) if words[0].isdecimal() else -1


def _size(path: Path) -> int:
    """Bytes of a file; -1 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)
