"""What the last requests were when a part of the engine died, as a file for whoever looks into it.

Owns the file. Prompts are in it only when the operator asked for them. Called by the tokenizer manager, in its event loop, for each death.
"""

import json
import os
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import headrace
from headrace.frontend.timeline import Timeline
from headrace.log import get_logger

logger = get_logger(__name__)


def write_crash_dump(folder: str, message: str, requests: Iterable[Timeline], prompts: bool) -> Path | None:
    """Write `crash-<time>-<pid>.json`, readable by the owner only. A folder that cannot be written is logged: None.

    message: what died. Live requests have the state "running".
    """
    described = [each.describe() | ({"prompt": each.prompt} if prompts else {}) for each in requests]
    content = {"version": headrace.__version__, "time": time.time(), "message": message, "requests": described}
    now = datetime.now()
    path = Path(folder) / f"crash-{now:%Y%m%d-%H%M%S-%f}-{os.getpid()}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(content, file, indent=1)
    except OSError as error:
        logger.error("no crash dump could be written: %s", error.strerror)
        return None
    logger.error("the last %d requests are in %s", len(described), path)
    return path
