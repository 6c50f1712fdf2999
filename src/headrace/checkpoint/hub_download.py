"""Brings a model from the Hugging Face Hub into the cache that Hugging Face's tools share. `headrace pull` runs it; serving never does.

Requests go through huggingface_hub: its HTTP client, proxies, token, headers and addresses. Reading the answers is ours, since the library neither
continues a file that an earlier process began, nor bounds what it reads, nor checks a digest: here a file is written beside its place
(`blobs/DIGEST.headrace.incomplete`), continued after an interruption, at most as long as the Hub says, checked against the digest that the Hub
states, and only then given its name. The revision is entered last, so that a model is found by its name only when it is whole.

API: https://huggingface.co/docs/hub/api; errors are told by the header X-Error-Code.
"""

import contextlib
import fcntl
import hashlib
import os
import queue
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol
from urllib.parse import quote

import msgspec
from huggingface_hub import get_token, hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

from headrace.checkpoint.files import gguf_parts, json_fault, read_json_object
from headrace.checkpoint.hub_cache import (
    COMMIT,
    HubName,
    cache_folder,
    choose_gguf,
    find_model,
    is_gguf_model,
    mmprojs_of,
)
from headrace.checkpoint.huggingface import INDEX_NAME, weight_map
from headrace.errors import ModelError
from headrace.log import get_logger
from headrace.plain_types import plain_reason
from headrace.version import VERSION

log = get_logger(__name__)

TIMEOUT_S = (10.0, 60.0, 60.0, 10.0)  # to connect, between two pieces of data in either direction, to get a connection
ANSWER_S = 60.0  # until the head of an answer is there, and again until the list of files is
WINDOW_S = 60.0
MIN_WINDOW_BYTES = 1 << 16
"""When less of a file than this comes in such a time, the connection is dropped, as if it had broken."""
WAIT_S = 1.0  # before the second attempt; doubles
_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
MAX_LIST_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_MAX_ATTEMPTS = 5  # without a byte of progress between them
_MAX_SLOW_WINDOWS = 3  # after each other
_MAX_REDIRECTS = 10
_OFFLINE = ("1", "ON", "YES", "TRUE")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
# Beside the weights: configuration, tokenizers, templates, and the modules of sentence-transformers (1_Pooling, 2_Dense). Never code, never pickles.
_COMPANIONS = re.compile(
    r"[^/]+\.(json|jinja)|tokenizer\.model|merges\.txt|vocab\.txt|additional_chat_templates/[^/]+\.jinja"
    r"|[0-9]+_[A-Za-z]+/(config\.json|model\.safetensors)"
)
_OTHER_WEIGHTS = re.compile(r"(pytorch_model|flax_model|tf_model|consolidated)[.-]")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class _Lfs(msgspec.Struct):
    sha256: str
    size: int


class _Sibling(msgspec.Struct):
    rfilename: str
    size: int | None = None
    blobId: str | None = None
    lfs: _Lfs | None = None


class _Info(msgspec.Struct):
    sha: str
    siblings: list[_Sibling] = []


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. digest: sha256 of its bytes for large files, else git's sha1; it is its name in the cache."""

    name: str
    num_bytes: int
    digest: str


class Hub:
    """One Hub ($HF_ENDPOINT, else huggingface.co), with the user's token ($HF_TOKEN, or of `hf auth login`)."""

    def __init__(self) -> None:
        """Raises ModelError if the environment forbids the network."""
        for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            if os.environ.get(variable, "").upper() in _OFFLINE:
                raise ModelError(f"{variable} is set, so nothing is downloaded; unset it for `headrace pull`")
        self.endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        if not self.endpoint.startswith(("http://", "https://")):
            raise ModelError(f"HF_ENDPOINT is {self.endpoint!r}; expected an http or https URL")
        self._token = get_token()
        self._headers = build_hf_headers(token=self._token or False, library_name="headrace", library_version=VERSION)
        # httpx is what version 1 of the library has, httpx2 what version 2 has.
        self.error: type[Exception] = sys.modules[type(get_session()).__module__.partition(".")[0]].HTTPError

    @contextlib.contextmanager
    def get(self, url: str, have: int = 0) -> Iterator[Any]:
        """A GET whose body the caller reads. have: bytes that it need not send. Entering it raises `error`, _SlowError, or ModelError for a server
        that redirects for ever."""
        ranges = {"Range": f"bytes={have}-"} if have else {}
        headers = {**self._headers, "Accept-Encoding": "identity", **ranges}
        request = get_session().build_request("GET", url, headers=headers, timeout=TIMEOUT_S)
        # The client would read the whole body of a redirect, however long.
        for _ in range(_MAX_REDIRECTS + 1):
            with self._answer(request) as response:
                request = response.next_request
                if request is None:
                    yield response
                    return
        raise ModelError(f"{self.endpoint} redirects more than {_MAX_REDIRECTS} times")

    def _answer(self, request: Any) -> contextlib.closing[Any]:
        """The head of an answer. Its timeout is between two bytes, so the whole is awaited here; the thread of a late one is left alone."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def send() -> None:
            try:
                answers.put(get_session().send(request, stream=True, follow_redirects=False))
            except BaseException as error:
                answers.put(error)

        threading.Thread(target=send, name="pull", daemon=True).start()
        try:
            answer = answers.get(timeout=ANSWER_S)
        except queue.Empty:
            raise _SlowError(f"no answer within {ANSWER_S:g} s") from None
        if isinstance(answer, BaseException):
            raise answer
        return contextlib.closing(answer)

    def files(self, name: HubName) -> tuple[str, list[HubFile]]:
        """The commit that a revision is now, and its files. Raises ModelError."""
        url = f"{self.endpoint}/api/models/{name.repo}/revision/{quote(name.revision, safe='')}?blobs=true"
        for wait_s in (WAIT_S, 2 * WAIT_S, None):
            try:
                with self.get(url) as response:
                    body = self._whole(response)
            except self.error as error:
                raise ModelError(
                    f"{self.endpoint} cannot be reached ({type(error).__name__}); check the network, or set HF_ENDPOINT "
                    "to a mirror"
                ) from error
            except _SlowError as error:
                raise ModelError(f"{self.endpoint} is too slow ({error}); try again later") from None
            if response.status_code not in _RETRIED or wait_s is None:
                break
            time.sleep(wait_s)
        if not response.is_success:
            raise self.refusal(response, name)
        try:
            info = msgspec.json.decode(body, type=_Info)
        except (msgspec.DecodeError, RecursionError) as error:
            why = json_fault(error) if isinstance(error, RecursionError) else plain_reason(error)
            raise ModelError(f"{self.endpoint} did not answer as the Hub does: {why}") from error
        if not COMMIT.fullmatch(info.sha):
            raise ModelError(f"{self.endpoint} gave no commit of {name.repo}")
        return info.sha, [file for file in map(_file, info.siblings) if file is not None]

    def _whole(self, response: Any) -> bytes:
        body, until_s = bytearray(), time.monotonic() + ANSWER_S
        for piece in response.iter_raw():
            body += piece
            if len(body) > MAX_LIST_BYTES:
                raise ModelError(f"{self.endpoint} did not answer as the Hub does: more than {MAX_LIST_BYTES} bytes")
            if time.monotonic() > until_s:
                raise _SlowError(f"{len(body)} bytes of the list of files in {ANSWER_S:g} s")
        return bytes(body)

    def refusal(self, response: Any, name: HubName) -> ModelError:
        code, status = response.headers.get("X-Error-Code", ""), response.status_code
        if code == "GatedRepo":
            return ModelError(
                f"{name.repo} is gated: accept its terms at {self.endpoint}/{name.repo}, and set HF_TOKEN to a token "
                "of the account that did"
            )
        if code == "RevisionNotFound":
            return ModelError(f"{name.repo} has no revision {name.revision} at {self.endpoint}")
        if code == "EntryNotFound":
            return ModelError(f"{self.endpoint} does not have all files of {name.repo} that it lists; try again later")
        if status == 401 and self._token is None:
            return ModelError(
                f"there is no model {name.repo} at {self.endpoint}, or it is private; for a private one set HF_TOKEN"
            )
        if status in (401, 403):
            return ModelError(f"{self.endpoint} refuses {name.repo} with this token (status {status}); check HF_TOKEN")
        if status == 404:
            return ModelError(f"there is no model {name.repo} at {self.endpoint}, or this token may not see it")
        return ModelError(f"{self.endpoint} answered with status {status} for {name.repo}; try again later")


class _SlowError(Exception):
    """Too little comes. Says how little."""


class _Pace:
    """Whether a file comes fast enough, over all its connections. num_slow: windows with too little, after each other."""

    def __init__(self, have: int) -> None:
        self._begun_s, self._begun = time.monotonic(), have
        self.num_slow = 0

    def restart(self, have: int) -> None:
        """What is there comes again, from its beginning; what has come in this window still counts."""
        self._begun -= have

    def check(self, have: int) -> None:
        """Raises _SlowError at the end of a window in which too little has come."""
        now_s = time.monotonic()
        if now_s < self._begun_s + WINDOW_S:
            return
        came, took_s = have - self._begun, now_s - self._begun_s
        self._begun_s, self._begun = now_s, have
        self.num_slow = self.num_slow + 1 if came < MIN_WINDOW_BYTES else 0
        if self.num_slow:
            raise _SlowError(f"{came} bytes in {took_s:.0f} s")


class PullProgress(Protocol):
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
        needed = needed_files(files, self._name, None if shards is None else shards.values())
        self._check_space(needed)
        self._progress.start(len(needed), sum(file.num_bytes for file in needed))
        for file in needed:
            self._fetch(file)
        for file in needed:
            self._link(file)
        here = {file.name: file for file in files if _size(self._blobs / file.digest) == file.num_bytes}
        for name, file in here.items():
            # GGUF files of earlier pulls: still there at a newer revision, if they have not changed, with all their parts.
            if name.endswith(".gguf") and all(part in here for part in gguf_parts(name)):
                self._link(file)
        if not COMMIT.fullmatch(self._name.revision):
            _write(self._name.folder / "refs" / self._name.revision, self._commit)

    def _check_space(self, needed: list[HubFile]) -> None:
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
        pace = _Pace(out.tell())
        while out.tell() < file.num_bytes:
            attempts = attempts + 1 if out.tell() == last else 1
            last = out.tell()
            if attempts > 1:
                time.sleep(WAIT_S * 2 ** (attempts - 2))
            answer = "no answer"
            try:
                pace.check(out.tell())
                status = self._receive_once(file, out, pace)
                answer = f"status {status}"
            except self._hub.error as error:
                log.warning("the connection failed while %s was downloaded: %s", file.name, type(error).__name__)
            except _SlowError as error:
                log.warning("%s is downloaded too slowly: %s", file.name, error)
                answer = f"too slow: {error}"
            if pace.num_slow == _MAX_SLOW_WINDOWS or (attempts == _MAX_ATTEMPTS and out.tell() == last):
                raise ModelError(
                    f"{file.name} of {self._name.repo} stopped at {out.tell()} of {file.num_bytes} bytes ({answer}, "
                    f"{attempts} attempts); the same command continues from there"
                )

    def _receive_once(self, file: HubFile, out: BinaryIO, pace: _Pace) -> int:
        """One request for the rest of the file; returns its status. Raises the client's error, _SlowError, ModelError for refusals."""
        have = out.tell()
        url = hf_hub_url(self._name.repo, file.name, revision=self._commit, endpoint=self._hub.endpoint)
        with self._hub.get(url, have) as response:
            status: int = response.status_code
            if status in _RETRIED:
                return status
            if status == 416 or (status == 206 and _range_start(response) != have):
                self._restart(out, pace)
                return status
            if not response.is_success:
                raise self._hub.refusal(response, self._name)
            if status == 200 and have:
                self._restart(out, pace)  # the server sends all of it again
            for chunk in response.iter_raw():
                if out.tell() + len(chunk) > file.num_bytes:
                    size = out.tell() + len(chunk)
                    self._restart(out, pace)
                    raise ModelError(f"{file.name} of {self._name.repo} has {size} bytes or more, not {file.num_bytes}")
                out.write(chunk)
                self._progress.advance(len(chunk))
                pace.check(out.tell())
            return status

    def _restart(self, out: BinaryIO, pace: _Pace) -> None:
        pace.restart(out.tell())
        self._progress.advance(-out.tell())
        out.truncate(0)
        out.seek(0)

    def _digest_of(self, path: Path, file: HubFile, quiet: bool = False) -> str:
        digest = hashlib.sha256()
        if len(file.digest) != 64:  # git's: of a header with the file's size, and of the file
            digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
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


def _range_start(response: Any) -> int:
    """The first byte that a partial answer has; -1 if it does not say."""
    words = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")
    return int(words[0]) if words[0].isdecimal() else -1


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)


def needed_files(files: list[HubFile], name: HubName, indexed: Iterable[str] | None) -> list[HubFile]:
    """The files that serving the model takes: safetensors with their companions, or one GGUF file with its vision encoder.

    indexed: the shards that the repository's index names, None without an index. Raises ModelError if the repository has
    no such weights, or several GGUF files of which none was chosen.
    """
    by_name = {file.name: file for file in files}
    safetensors = [file for file in by_name if file.endswith(".safetensors") and "/" not in file]
    if name.file is None and safetensors:
        if indexed is not None:
            weights = list(dict.fromkeys(indexed))
        elif "model.safetensors" in by_name:
            weights = ["model.safetensors"]
        else:
            weights = [file for file in safetensors if not _OTHER_WEIGHTS.match(file)]
        missing = [file for file in weights if file not in safetensors]
        if missing:
            raise ModelError(f"{INDEX_NAME} of {name.repo} names {missing[0]}, which is not a safetensors file of it")
        companions = [file for file in by_name if _COMPANIONS.fullmatch(file) and not _OTHER_WEIGHTS.match(file)]
        return [by_name[file] for file in (*companions, *weights)]
    if name.file is None and not any(map(is_gguf_model, by_name)):
        pickled = any(file.endswith(_PICKLED) for file in by_name)
        hint = "; its pickled weights are never downloaded, convert them to safetensors" if pickled else ""
        raise ModelError(f"{name.repo} has neither safetensors nor GGUF files{hint}")
    parts = gguf_parts(choose_gguf(by_name, name.file, name.repo))
    if missing := [part for part in parts if part not in by_name]:
        raise ModelError(f"{name.repo} lacks {missing[0]}, one of the {len(parts)} parts of {parts[0]}")
    return [by_name[file] for file in (*parts, *mmprojs_of(by_name, parts[0]))]


def _file(sibling: _Sibling) -> HubFile | None:
    """None for a name or a digest that is no such thing: it becomes a path here."""
    path = PurePosixPath(sibling.rfilename)
    sound = not path.is_absolute() and ".." not in path.parts and path.as_posix() == sibling.rfilename
    if not sound or not sibling.rfilename.isprintable() or "\\" in sibling.rfilename:
        return None
    if sibling.lfs is not None:
        sound = sibling.lfs.size >= 0 and _SHA256.fullmatch(sibling.lfs.sha256) is not None
        return HubFile(sibling.rfilename, sibling.lfs.size, sibling.lfs.sha256) if sound else None
    if sibling.size is None or sibling.size < 0 or sibling.blobId is None or not _SHA1.fullmatch(sibling.blobId):
        return None
    return HubFile(sibling.rfilename, sibling.size, sibling.blobId)
