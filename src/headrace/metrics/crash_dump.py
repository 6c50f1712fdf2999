"""Dumps of the most recent requests to a file, for debugging: when a process of the engine dies, or on an operator's request.

Owns the files. They contain prompts only with --crash-dump-prompts. Called by the tokenizer manager.
"""

import json
import os
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.log import get_logger
from headrace.metrics.timeline import Timeline
from headrace.version import VERSION

logger = get_logger(__name__)


def described(requests: Iterable[Timeline], prompts: bool) -> list[dict[str, Any]]:
    """The requests in the form of the file. Live requests have the state "waiting" or "running"."""
    return [each.describe() | ({"prompt": each.prompt} if prompts else {}) for each in requests]


def write_dump(folder: str, kind: str, message: str, requests: list[dict[str, Any]]) -> Path:
    """Write `<kind>-<time>-<pid>.json`, readable by the owner only. message: why. Raises OSError."""
    content = {"version": VERSION, "time": time.time(), "message": message, "requests": requests}
    now = datetime.now()
    path = Path(folder) / f"{kind}-{now:%Y%m%d-%H%M%S-%f}-{os.getpid()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(content, file, indent=1)
    return path


def write_crash_dump(folder: str, message: str, requests: Iterable[Timeline], prompts: bool) -> Path | None:
    """Write `crash-<time>-<pid>.json`. If it cannot be written, that is logged: None. message: what died."""
    found = described(requests, prompts)
    try:
        path = write_dump(folder, "crash", message, found)
    except OSError as error:
        logger.error("cannot write a crash dump: %s", error.strerror)
        return None
    logger.error("wrote a dump of the last requests (%d) to %s", len(found), path)
    return path
