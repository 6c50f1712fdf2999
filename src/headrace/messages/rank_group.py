"""What the processes of a group over several hosts say to each other before, between and after its calls.

Hello ---> the leader: a process wants to be this rank, or to watch the group
Welcome <- the group is whole        Refused <- the process cannot be in it; why
Broken <-> why it has ended          Ended <-> the process has ended as it should
"""

import msgspec


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """rank: None = of a process that has no part of the model and only watches. host: for messages to people. facts: what must be the same."""

    rank: int | None
    size: int
    host: str
    facts: dict[str, str]


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All ranks are there."""


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process cannot be in the group. for_now: it may try again later."""

    reason: str
    for_now: bool = False


class Broken(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The group is of no use any more."""

    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process has ended without an error: a follower may do so before the leader, who told it that there is no more."""


GroupNote = Hello | Welcome | Refused | Broken | Ended

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GroupNote)


def pack_note(note: GroupNote) -> bytes:
    """As it is sent."""
    return _encoder.encode(note)


def unpack_note(data: bytes | memoryview) -> GroupNote:
    """As it was sent. Raises msgspec.DecodeError."""
    note: GroupNote = _decoder.decode(data)
    return note


def difference(own: dict[str, str], theirs: dict[str, str]) -> str:
    """In words, what differs between the facts of two processes; "" if nothing does."""
    found = [
        f"{name} is {theirs.get(name, 'not known')} there and {own.get(name, 'not known')} here"
        for name in sorted(own.keys() | theirs.keys())
        if own.get(name) != theirs.get(name)
    ]
    return "; ".join(found)
