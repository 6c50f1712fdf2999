"""Checks the limit of open files before anything is started.

With too low a limit, a start would fail somewhere in the middle, with an obscure message of some library.
"""

import resource

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError

ENGINE_FILES = 64
REPLICA_FILES = 16
"""Pipes and sockets of each additional replica."""
CONNECTION_FILES = 192
"""Needed by a server besides its engine: connections, and the reserve beside them (`server.connection`)."""


def check_open_files(args: ServerArgs, with_server: bool = False) -> None:
    """Raises ConfigError if the limit of open files is too low."""
    needed = ENGINE_FILES + REPLICA_FILES * (args.num_replicas - 1) + (CONNECTION_FILES if with_server else 0)
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        what = "a server" if with_server else "an engine"
        raise ConfigError(
            f"this process may have {allowed} files open and {what} needs {needed}: raise the limit with ulimit -n {needed}"
        )
