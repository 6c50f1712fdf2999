"""The command line, `headrace`. Commands import what they run only when they run it.

Read first: app.py (the commands and their options), bench.py (those of `bench`), arguments.py (what both take).

The terminal chat: chat.py (read it first), chat_sources.py (where its replies come from), conversation.py, media.py (files that are sent),
chat_commands.py (what begins with a slash), typed_input.py (lines that are typed, and their history), reply_writer.py (how a reply is shown).

`top`: top.py (read it first), top_reader.py (what a server says), top_view.py (how it is shown).

The others: command_group.py (commands of other tools), running_servers.py (`ps`), given_json.py (JSON schemas
and tools given to commands), doctor.py (what runs on this machine, and why not), quantize.py, pull.py (`pull` and `models`), __main__.py
(`python -m headrace.cli`).
"""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit; see `app.main`. Ctrl-C is one line and exit code 130 while the commands are imported, too."""
    try:
        from headrace.cli.app import main as run

        run(argv)
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        sys.exit(130)
