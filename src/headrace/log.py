"""The one logger tree, set up once per process by `configure`.

Lines are single: CR, LF and other control characters of a message are escaped, so that a request cannot forge a line. As JSON, every line is one
object, also that of a traceback.
"""

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

_PLAIN_WORD = re.compile(
    r"[!#-&(-<>-~]+"
)  # no space, quote or "=" that could be taken for the beginning of another field


def _time(record: logging.LogRecord) -> str:
    """ISO 8601 in local time with its zone, to the millisecond."""
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


class _SingleLine(logging.Formatter):
    """Escapes control characters of the message; a traceback keeps its own lines, indented under the message."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = "".join(
            c if c.isprintable() else c.encode("unicode_escape").decode() for c in record.getMessage()
        )
        record.asctime = _time(record)
        line = self.formatMessage(record)
        if record.exc_info:
            line += "\n  " + self.formatException(record.exc_info).replace("\n", "\n  ")
        return line


class _Json(logging.Formatter):
    """One ASCII JSON object per line: time, level, process, logger and message, the fields of the line, and its traceback."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **record.__dict__.get("fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def as_words(fields: Mapping[str, object]) -> str:
    """Fields for a line of text: `name=value name=value`. Texts that are not one plain word are quoted."""
    return " ".join(f"{name}={_word(value)}" for name, value in fields.items())


def _word(value: object) -> str:
    return repr(value) if isinstance(value, str) and not _PLAIN_WORD.fullmatch(value) else str(value)


def with_fields(fields: Mapping[str, object]) -> dict[str, object]:
    """The `extra` argument of a call that logs: fields that a line of JSON has beside its message."""
    return {"fields": fields}


def get_logger(name: str) -> logging.Logger:
    """The logger `headrace.<name>`; `name` may already start with `headrace.`."""
    return logging.getLogger(name if name.startswith("headrace") else f"headrace.{name}")


def set_level(level: str) -> None:
    """Log from `level` (debug, info, warning, error) on."""
    logging.getLogger("headrace").setLevel(level.upper())


def configure(level: str = "info", process: str = "main", log_format: LogFormat = "text") -> None:
    """Send the tree to stderr with the name of this process; replaces what an earlier call set up.

    level: debug, info, warning or error.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_Json(process))
    else:
        handler.setFormatter(_SingleLine(f"%(asctime)s {process} %(levelname).1s %(name)s: %(message)s"))
    root = logging.getLogger("headrace")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
