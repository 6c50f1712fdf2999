"""Opening files that an operator or a client names, without ever waiting for one that is no file.

A FIFO without a writer, a terminal or a socket in the place of a file would hold its reader for ever. No torch.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from headrace.errors import ModelError

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Raises ModelError naming any other kind, OSError as `open` does."""
    # Opening a FIFO waits for its writer otherwise. What is opened is what is checked: the name may change hands.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind != stat.S_IFREG:
            raise ModelError(f"{path.name} is {_KINDS.get(kind, 'something else')}; only regular files are read")
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise
