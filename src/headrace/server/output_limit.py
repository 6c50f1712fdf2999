"""The limit of output tokens in APIs whose clients send a fixed one: it is lowered to the room in the context, and the reply says so.

Pure bookkeeping, in the event loop that serves HTTP. The front end lowers it, because only there the length of every prompt is known.
"""

from dataclasses import dataclass

from headrace.frontend.sample_update import SampleUpdate


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
