"""Server-sent events as OpenAI-compatible servers send them: bytes in any pieces -> the data of each event.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html. Only `data` matters here; comments, `event`, `id` and
`retry` lines are passed over. Used by the benchmark client and by the terminal chat.
"""

from collections.abc import Iterator

DONE = b"[DONE]"


class EventParser:
    """Cuts a byte stream into events. Keeps what an unfinished line holds; a line may end in LF or CRLF."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of every event that `piece` completes, several `data` lines of one event joined by LF."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                event, self._data = b"\n".join(self._data), []
                yield event
