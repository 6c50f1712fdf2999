"""Sessions in files, which outlive the process: the token ids of each in one file below --session-dir.

A file is replaced as a whole, under a temporary name first, and begins with a hash of the rest. It is found by a hash of its owner's name and of its
id, and read when a request names a session that is not open. Whatever does not fit (a changed byte, another model, ids outside of the vocabulary, a
tree that is none, a link, a file of somebody else) is no session. Owns the files; how they become sessions is the matter of `sessions`. Runs in the
event loop: a file has 4 bytes a token.
"""

import contextlib
import hashlib
import os
import stat
import time
from pathlib import Path

import msgspec

from headrace.log import get_logger

_logger = get_logger(__name__)

_FORMAT = 1
_SUFFIX = ".session"
_OTHER_BYTES = 1 << 20
"""Of a file, beside its tokens."""
TOKEN_BYTES = 4


_DIGEST_BYTES = 16


class TurnRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A finished turn. parent: index of an earlier one; -1 = none. prompt, outputs: int32 bytes. The others as in `Turn`."""

    rid: str
    parent: int
    num_kept: int
    prompt: bytes
    outputs: bytes


class SessionRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A session. latest: index of its latest turn, -1 = none."""

    id: str
    timeout_s: float
    max_characters: int
    latest: int
    turns: list[TurnRecord]


class _File(msgspec.Struct, frozen=True, array_like=True, gc=False):
    format: int
    model: str
    owner: str
    session: SessionRecord


class SessionFiles:
    """folder: private. model: whose token ids they are. max_files: the latest stay. max_tokens: of a session. timeout_s: after so long a file is
    removed; 0 = never."""

    def __init__(self, folder: Path, model: str, max_files: int, max_tokens: int, timeout_s: float) -> None:
        self._folder = folder
        self._model = model
        self._max_files = max_files
        self._most_bytes = TOKEN_BYTES * max_tokens + _OTHER_BYTES
        self._timeout_s = timeout_s
        self._prune()

    def save(self, owner: str, session: SessionRecord) -> bool:
        """Whether it could be written; if not, the log says why."""
        path = self._path(owner, session.id)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
                body = msgspec.msgpack.encode(_File(_FORMAT, self._model, owner, session))
                file.write(_digest(body) + body)
            unfinished.rename(path)
        except OSError as error:
            _logger.warning("a session is not kept: --session-dir: %s", error.strerror)
            with contextlib.suppress(OSError):
                unfinished.unlink()
            return False
        return True

    def load(self, owner: str, session_id: str) -> SessionRecord | None:
        """None: there is no such session."""
        path = self._path(owner, session_id)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or about.st_size > self._most_bytes:
                    raise ValueError("not a file of this server")
                digest, body = file.read(_DIGEST_BYTES), file.read(self._most_bytes)
                if digest != _digest(body):
                    raise ValueError("changed")
                found = msgspec.msgpack.decode(body, type=_File)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _logger.warning("a file of --session-dir is no session: %s: %s", path.name, error)
            return None
        limits = [limit for limit in (self._timeout_s, found.session.timeout_s) if limit]
        if limits and time.time() - about.st_mtime > min(limits):
            self.remove(owner, session_id)
            return None
        is_it = (found.format, found.model, found.owner, found.session.id) == (_FORMAT, self._model, owner, session_id)
        return found.session if is_it else None

    def remove(self, owner: str, session_id: str) -> bool:
        """Whether there was one."""
        try:
            self._path(owner, session_id).unlink()
        except OSError:
            return False
        return True

    def _path(self, owner: str, session_id: str) -> Path:
        return self._folder / (hashlib.sha256(msgspec.json.encode([owner, session_id])).hexdigest() + _SUFFIX)

    def _prune(self) -> None:
        """Remove those that are too old, and too many."""
        ages = []
        for path in self._folder.glob(f"*{_SUFFIX}*"):
            with contextlib.suppress(OSError):
                ages.append((time.time() - path.lstat().st_mtime, path))
        for number, (age_s, path) in enumerate(sorted(ages)):
            if number >= self._max_files or (self._timeout_s and age_s > self._timeout_s):
                with contextlib.suppress(OSError):
                    path.unlink()


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
