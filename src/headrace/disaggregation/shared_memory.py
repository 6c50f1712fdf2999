"""Memory that a decode server makes and a prefill server of the same machine writes pages to (`--disaggregation-transfer-backend shm`).

Owns the memory in parts of equal size, used in turns: the prefill side takes one, fills it and says where, the decode side copies it out and gives it
back. The file has a name only until both have it open. Each object is used by the threads of one connection.
"""

import contextlib
import mmap
import os
import secrets
import stat
from pathlib import Path
from typing import Self

from headrace.log import get_logger

_logger = get_logger(__name__)

FOLDER = Path("/dev/shm")
_PREFIX = "headrace-kv-"
_BYTES = 32 << 20
_MOST_PARTS = 4
"""So that one side can write the next ones while the other copies."""


class Ring:
    """See the module docstring. path: of the file."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.path = path
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.view = memoryview(self._memory)
        self._part_bytes = 0
        self._num_parts = 0
        self._num_taken = self._num_returned = 0

    @classmethod
    def create(cls) -> Self:
        """Raises OSError."""
        path = FOLDER / f"{_PREFIX}{secrets.token_hex(16)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _BYTES)
            return cls(descriptor, path)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def attach(cls, name: str) -> Self | None:
        """The memory that another process of this user has made; None where there is none of that name: on another machine, for example."""
        path = Path(name)
        if path.parent != FOLDER or not path.name.startswith(_PREFIX):
            return None
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                about = os.fstat(descriptor)
                if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_size != _BYTES:
                    return None
                return cls(descriptor, path)
            finally:
                os.close(descriptor)
        except OSError as error:
            _logger.info("no memory in common with a decode server (%s): KV goes over TCP", error.strerror)
            return None

    def divide(self, part_bytes: int) -> bool:
        """Into parts of so many bytes. False: there would be fewer than two."""
        self._part_bytes, self._num_parts = part_bytes, min(_MOST_PARTS, len(self.view) // part_bytes)
        return self._num_parts >= 2

    @property
    def has_room(self) -> bool:
        """Whether a part is free."""
        return self._num_taken - self._num_returned < self._num_parts

    def take(self, num_bytes: int) -> tuple[int, memoryview]:
        """Where the next part begins, and its first bytes."""
        place = self._num_taken % self._num_parts * self._part_bytes
        self._num_taken += 1
        return place, self.view[place : place + num_bytes]

    def give_back(self) -> None:
        """The part that was taken first is free."""
        self._num_returned = min(self._num_returned + 1, self._num_taken)

    def unlink(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()

    def close(self) -> None:
        """Idempotent. The memory itself goes with the last view of it."""
        self.unlink()
        with contextlib.suppress(BufferError):
            self.view.release()
            self._memory.close()
