"""The one logger tree, set up once per process by `configure`.

Lines are single: CR, LF and other control characters of a message are escaped, so that a request cannot forge a line.
"""

import logging
import sys


class _SingleLine(logging.Formatter):
    """Escapes control characters of the message; a traceback keeps its own lines, indented under the message."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = "".join(
            c if c.isprintable() else c.encode("unicode_escape").decode() for c in record.getMessage()
        )
        record.asctime = self.formatTime(record, self.datefmt)
        line = self.formatMessage(record)
        if record.exc_info:
            line += "\n  " + self.formatException(record.exc_info).replace("\n", "\n  ")
        return line


def get_logger(name: str) -> logging.Logger:
    """The logger `headrace.<name>`; `name` may already start with `headrace.`."""
    return logging.getLogger(name if name.startswith("headrace") else f"headrace.{name}")


def set_level(level: str) -> None:
    """Log from `level` (debug, info, warning, error) on."""
    logging.getLogger("headrace").setLevel(level.upper())


def configure(level: str = "info", process: str = "main") -> None:
    """Send the tree to stderr with the name of this process; replaces what an earlier call set up.

    level: debug, info, warning or error.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_SingleLine(f"%(asctime)s {process} %(levelname).1s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger("headrace")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
