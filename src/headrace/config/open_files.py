"""How many files and sockets a process of ours needs to have open, checked before anything is started.

Without enough of them a start fails somewhere in the middle, in the words of whichever library met the limit.
"""

import resource

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError

ENGINE_FILES = 64
REPLICA_FILES = 16
"""Each further replica's pipes and sockets."""
CONNECTION_FILES = 192
"""What a server needs beside its engine: a useful number of connections, and what they leave over (`server.connection`)."""


def check_open_files(args: ServerArgs, with_server: bool = False) -> None:
    """Raises ConfigError when this process may not have as many files open as it needs."""
    needed = ENGINE_FILES + REPLICA_FILES * (args.dp_size - 1) + (CONNECTION_FILES if with_server else 0)
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        what = "a server" if with_server else "an engine"
        raise ConfigError(
            f"this process may have {allowed} files open and {what} needs {needed}: raise the limit with ulimit -n {needed}"
        )
