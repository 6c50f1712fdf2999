"""Rooms of a call (`bootstrap_host`, `bootstrap_port`, `bootstrap_room`): which prefill server computes its prompts, with --disaggregation-mode.

The names and their meaning are SGLang's, so that its routers work in front: both servers get the same body. Pure functions.
"""

import itertools
from collections.abc import Sequence
from typing import Literal, TypeVar

from headrace.config.server_args import ServerArgs
from headrace.config.web import PrefillHosts, address_of
from headrace.errors import RequestError
from headrace.messages.requests import CallInput, GenerateReqInput, Room

T = TypeVar("T")

DisaggregationMode = Literal["null", "prefill", "decode"]

HERE = "2.2.2.2"
"""The `bootstrap_host` of a request that one server does alone, as SGLang has it for probes."""

_MOST_ROOM = 2**63 - 1
_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank")


def check_rooms(obj: CallInput, mode: DisaggregationMode) -> None:
    """Raises RequestError for a call without rooms that needs some, and for one with rooms that can have none."""
    if not isinstance(obj, GenerateReqInput) or obj.bootstrap_host == HERE:
        return
    if mode == "null":
        given = next((name for name in _FIELDS if _is_given(getattr(obj, name))), None)
        if given is not None:
            raise RequestError(f"{given}: this server computes prompts and outputs (no --disaggregation-mode)", given)
        return
    rooms = obj.bootstrap_room if isinstance(obj.bootstrap_room, list) else [obj.bootstrap_room]
    if not rooms or any(room is None for room in rooms):
        raise RequestError(
            f"bootstrap_room is missing: this is a {mode} server, and a router names the room of each request",
            "bootstrap_room",
        )


def rooms_of(
    obj: GenerateReqInput, num_samples: Sequence[int], mode: DisaggregationMode, port: int, allowed: PrefillHosts
) -> list[Room | None]:
    """The room of the first sample of each prompt; the others have the next numbers. num_samples: of each. port: where none is given.
    allowed: addresses are looked at here, those of names when they are connected to.

    Raises RequestError.
    """
    if mode == "null" or obj.bootstrap_host == HERE or not _is_given(obj.bootstrap_room):
        return [None] * len(num_samples)
    hosts = _each("bootstrap_host", obj.bootstrap_host, num_samples)
    ports = _each("bootstrap_port", obj.bootstrap_port, num_samples)
    if isinstance(obj.bootstrap_room, int):
        firsts = itertools.accumulate(num_samples[:-1], initial=obj.bootstrap_room)
        rooms: list[int | None] = list(firsts)
    else:
        rooms = _each("bootstrap_room", obj.bootstrap_room, num_samples)
    replica = obj.disagg_prefill_dp_rank
    return [
        _room(mode, allowed, host, port if own is None else own, room, -1 if replica is None else replica)
        for host, own, room in zip(hosts, ports, rooms, strict=True)
    ]


def has_prompt_elsewhere(obj: GenerateReqInput, mode: DisaggregationMode) -> bool:
    """Whether the prefill server's answer has `input_token_logprobs`, to which a router joins the list of the decode server's."""
    return mode == "decode" and obj.bootstrap_room is not None and obj.bootstrap_host != HERE


def replica_of(obj: CallInput, room: Room | None, args: ServerArgs) -> int | None:
    """The only replica that may take a prompt; None = any. A decode server looks for a room in the replica that has its number."""
    if room is None or obj.replica is not None or args.disaggregation_mode != "prefill":
        return obj.replica
    return room.first % args.num_replicas


def of_sample(room: Room | None, number: int) -> Room | None:
    """The room of a sample of the prompt that has `room`."""
    return (
        room
        if room is None or not number
        else Room(room.host, room.port, room.number + number, room.first, room.replica)
    )


def _room(mode: str, allowed: PrefillHosts, host: str | None, port: int, room: int | None, replica: int) -> Room | None:
    if room is None or not 0 <= room <= _MOST_ROOM:
        raise RequestError(f"bootstrap_room must be between 0 and {_MOST_ROOM}, got {room}", "bootstrap_room")
    if mode == "decode" and not host:
        raise RequestError("bootstrap_host is missing: where the prompt is computed", "bootstrap_host")
    if mode == "decode" and host and address_of(host) is not None and not allowed.allows(host, host):
        raise RequestError(f"bootstrap_host: {host} is not among --disaggregation-prefill-hosts", "bootstrap_host")
    if not 0 < port < 65536:
        raise RequestError(f"bootstrap_port must be between 1 and 65535, got {port}", "bootstrap_port")
    return Room(host or "", port, room, room, replica)


def _each(name: str, value: T | list[T | None] | None, num_samples: Sequence[int]) -> list[T | None]:
    """One of each prompt; of a list that has one of each sample, as routers send with `n`, that of the prompt's first."""
    count = len(num_samples)
    if not isinstance(value, list):
        return [value] * count
    if len(value) == sum(num_samples):
        return [value[first] for first in itertools.accumulate(num_samples[:-1], initial=0)]
    if len(value) != count:
        raise RequestError(f"{name}: {len(value)} values for {count} prompts", name)
    return value


def _is_given(value: object) -> bool:
    return any(map(_is_given, value)) if isinstance(value, list) else value is not None and value != ""
