"""When each process of the engine was last heard. Written in the tokenizer manager's event loop."""

from collections.abc import Callable

from headrace.messages.control import Heartbeat

HEARTBEAT_LIMIT_S = 5.0
"""A process that has been heard before and is then silent for this long is not healthy."""
DETOKENIZER = "detokenizer"
"""Every other process that sends heartbeats is a scheduler."""


class Heartbeats:
    """See the module docstring. clock: in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard_s: dict[str, float] = {}
        self._dropped_frames: dict[str, int] = {}

    def handle(self, message: Heartbeat) -> None:
        """Note that a process is alive."""
        self._heard_s[message.process] = self._clock()
        self._dropped_frames[message.process] = message.dropped_frames

    def forget(self, process: str) -> None:
        """The process has died."""
        self._heard_s.pop(process, None)

    def begin_anew(self, process: str) -> None:
        """Another process has started under this name; that it did counts as heard."""
        self._heard_s[process] = self._clock()

    def age_s(self, process: str) -> float | None:
        """Seconds since a process was last heard; None if it never was. May be called from any thread."""
        last_s = self._heard_s.get(process)
        return None if last_s is None else self._clock() - last_s

    @property
    def is_silent(self) -> bool:
        """The detokenizer, or every scheduler, has not been heard for too long."""
        now = self._clock()
        silent = {name: now - last_s > HEARTBEAT_LIMIT_S for name, last_s in self._heard_s.items()}
        schedulers = [is_silent for name, is_silent in silent.items() if name != DETOKENIZER]
        return silent.get(DETOKENIZER, False) or (bool(schedulers) and all(schedulers))

    @property
    def detokenizer_dropped_frames(self) -> int:
        """Number of malformed frames that the detokenizer has received."""
        return self._dropped_frames.get(DETOKENIZER, 0)
