"""The command line, `headrace`. Commands import what they run only when they run it.

Read first: app.py (the commands and their options).

The terminal chat: chat.py (read it first), chat_sources.py (where its replies come from), conversation.py, chat_commands.py (what begins with a
slash), typed_input.py (lines that are typed, and their history), reply_writer.py (how a reply is shown).

The others: schema.py and tools.py (JSON schemas and tools given to commands), doctor.py (what runs on this machine, and why not), quantize.py,
pull.py (`pull` and `models`), __main__.py (`python -m headrace.cli`).
"""

from headrace.cli.app import main

__all__ = ["main"]
