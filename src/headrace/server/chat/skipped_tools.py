"""Tools that a request offers and the model is not shown, because only their vendor can run them: said in a header and in the log."""

from collections.abc import Sequence

from headrace.log import get_logger
from headrace.server.http import Headers

log = get_logger(__name__)

SKIPPED_HEADER = b"x-headrace-skipped-tools"
"""Header of a reply with the names of the tools that the model was not offered."""

MAX_LOGGED = 1000
"""Most names that are logged; they are the clients' own."""


class SkippedTools:
    """What one API says about them; a name is logged when it is met for the first time."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def headers(self, names: Sequence[str]) -> Headers:
        """The header for a reply; nothing without names."""
        if not names:
            return []
        new = [name for name in names if name not in self._logged]
        if new and len(self._logged) < MAX_LOGGED:
            self._logged.update(new)
            log.info(
                "tools that only their vendor can run are not offered to the model: %s", header_value(new).decode()
            )
        return [(SKIPPED_HEADER, header_value(names))]


def header_value(names: Sequence[str]) -> bytes:
    """The names as printable ASCII, at most 1,000 characters."""
    shown = ", ".join(names).encode("ascii", "replace")[:1000]
    return bytes(byte if 32 <= byte < 127 else ord("?") for byte in shown)
