"""The command line, `headrace`. Commands import what they run only when they run it.

Read first: app.py (the commands and their options), bench.py (those of `bench`), arguments.py (what they share).

The terminal chat: chat.py (read it first), chat_sources.py (where its replies come from), terminal.py (lines that are typed, and
how a reply is shown), given.py (files and JSON that are given to commands).

The others: top.py, running_servers.py (`ps`, and what a server says of itself), doctor.py (what runs on this machine, and why
not), quantize.py, pull.py (`pull` and `models`), kv.py (`cache kv`), __main__.py (`python -m headrace.cli`).
"""

import sys
from collections.abc import Sequence

from headrace.processes import early

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit; see `app.main`. Ctrl-C is one line and exit code 130, while the commands are imported, too."""
    try:
        # Without the options, which say what it will do: reading them takes as long as a quarter of its imports.
        if argv is None and sys.argv[1:2] == ["serve"] and not {"--help", "-h"} & set(sys.argv):
            early.begin()
        from headrace.cli.app import main as run

        run(argv)
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        early.end()
