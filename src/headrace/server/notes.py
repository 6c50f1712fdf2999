"""What a reply says in a header about how its request was read: fields without an effect or with another value, and tools that are not offered.

Owns these headers, the lines of the log, and the limit of output tokens that is lowered to the room in the context; the APIs say what is noted.
Runs in the event loop that serves HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.frontend.sample_update import SampleUpdate
from headrace.log import get_logger
from headrace.messages.bodies import asks_for_nothing
from headrace.server.http import Headers

log = get_logger(__name__)

SKIPPED_HEADER = b"x-headrace-skipped-tools"
"""Header of a reply with the names of the tools that the model was not offered."""

NOTED_HEADER = b"x-headrace-noted"
"""Header of a reply with the fields of its request that had no effect (`verbosity`), or another value (`max_tokens=495`)."""

MAX_LOGGED = 1000
"""Most names that are logged; they are the clients' own."""


NO_EFFECT = (
    "options", "num_ctx", "num_keep", "num_batch", "num_gpu", "num_thread", "main_gpu", "low_vram", "numa", "use_mmap", "use_mlock", "keep_alive",
    "timings_per_token", "request_id", "id_slot", "service_tier",
)  # fmt: skip
"""Fields of OpenAI's routes that other servers know and that change no reply here: how Ollama loads a model, what llama.cpp's server reports."""


def without_effect(request: msgspec.Struct, names: Sequence[str]) -> list[str]:
    """Those of the fields `names` that ask for something."""
    return [name for name in names if not asks_for_nothing(name, getattr(request, name))]


@dataclass(slots=True, eq=False)
class HeaderNotes:
    """One header of one API. line: for the log, with %s for names that are met for the first time."""

    header: bytes
    line: str
    _logged: set[str] = field(default_factory=set)

    def headers(self, notes: Sequence[str]) -> Headers:
        """The header for a reply; nothing without notes, which are names or `name=value`."""
        if not notes:
            return []
        names = dict.fromkeys(note.partition("=")[0] for note in notes)
        new = [name for name in names if name not in self._logged]
        if new and len(self._logged) < MAX_LOGGED:
            self._logged.update(new)
            log.info(self.line, header_value(new).decode())
        return [(self.header, header_value(notes))]


def skipped_tools() -> HeaderNotes:
    """Of the tools that a request offers and the model is not shown."""
    return HeaderNotes(SKIPPED_HEADER, "tools that only their vendor can run are not offered to the model: %s")


def noted_fields() -> HeaderNotes:
    """Of the fields of a request that are not honoured as they stand."""
    return HeaderNotes(
        NOTED_HEADER, f"fields without an effect here or with another value, see {NOTED_HEADER.decode()}: %s"
    )


def header_value(names: Sequence[str]) -> bytes:
    """The names as printable ASCII, at most 1,000 characters."""
    shown = ", ".join(names).encode("ascii", "replace")[:1000]
    return bytes(byte if 32 <= byte < 127 else ord("?") for byte in shown)


@dataclass(slots=True)
class OutputLimit:
    """asked: of a request; None = it gives none. least_room: tokens that its prompts leave for certain. lowered_to: the least room that a prompt
    left, if that was less than asked for; None = none was seen to."""

    asked: int | None
    context_length: int
    least_room: int = 0
    lowered_to: int | None = None

    @property
    def strict(self) -> int | None:
        """What the sampling parameters say; None if the limit may have to be lowered: then it is the call's default."""
        return None if self.may_be_lowered else self.asked

    @property
    def may_be_lowered(self) -> bool:
        """Whether the limit is given to the front end as the call's default, which it keeps within the room. 0 and less stays as it is."""
        return self.asked is not None and self.asked > max(0, self.least_room)

    def default(self, if_not_asked: int) -> int:
        """`default_max_new_tokens` of the call."""
        return self.asked if self.may_be_lowered and self.asked is not None else if_not_asked

    def fit(self, room: int) -> None:
        """Note the room that a prompt leaves."""
        if self.may_be_lowered and self.asked is not None and self.asked > room:
            self.lowered_to = room if self.lowered_to is None else min(room, self.lowered_to)

    def watch(self, update: SampleUpdate) -> None:
        """Look at an update of the reply, which knows the length of its prompt. A stream may begin before it, with a ping."""
        self.fit(self.context_length - update.usage.prompt_tokens)

    def notes(self, name: str) -> list[str]:
        """For the header of a reply, see `server/notes.py`. name: of the field."""
        return [] if self.lowered_to is None else [f"{name}={self.lowered_to}"]
