"""The control operations of the engine, a row each: what is asked of every scheduler, by whom, and what its answer looks like.

All that an operation needs besides its row is its work: a method of the row's name in `scheduler/control.py` (`at="scheduler"`) or a function
of that name in `execution/rank_operations.py` (`at="ranks"`). The row gives it its messages, its way through HTTP workers and replicas, its
route with the OpenAPI description, and what `Engine` and `Runtime` ask (docs/adding/operation.md). Operations on weights are in `weights`.

    route ─┐                                             ┌─> scheduler 0: its answer, or one of each rank
    Engine ─┴─> Operation.ask ─> frontend's Control ──────┴─> scheduler 1 ...
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

import msgspec

from headrace.errors import RequestError
from headrace.messages.cache_tree import CacheTree
from headrace.messages.control import (
    FlushCacheReply,
    FlushCacheReq,
    HealthCheckReply,
    HealthCheckReq,
    InternalState,
    InternalStateReq,
    ProfileReply,
)
from headrace.messages.experts import ExpertCountsReply, ExpertCountsReq
from headrace.messages.faults import Fault
from headrace.messages.field_errors import field_error

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R")

_encode = msgspec.msgpack.Encoder().encode


class OperationReq(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Ask a scheduler. name: of the operation. request: msgpack of its type."""

    id: int
    name: str
    request: bytes


class OperationReply(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """The answer: msgpack of the operation's type of replies, or why there is none. id: of the request."""

    id: int
    reply: bytes = b""
    fault: Fault | None = None


class Asks(Protocol):
    """Reaches the schedulers: the front end's `Control`, in this process or from an HTTP worker."""

    async def ask(self, name: str, request: bytes) -> dict[int, bytes]:
        """What each replica that lives answers, by its index. Raises HeadraceError."""
        ...


@dataclass(frozen=True, slots=True)
class Route:
    """How clients reach an operation. The fields of its request are the JSON body, or for GET the query. examples: bodies by a short title."""

    path: str
    summary: str
    method: Literal["GET", "POST"] = "POST"
    access: Literal["user", "admin"] = "admin"
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def listed(replies: Mapping[int, Any]) -> object:
    """All replies, in the form of a list."""
    return {"object": "list", "data": list(replies.values())}


@dataclass(frozen=True, slots=True)
class Operation(Generic[Q, R]):
    """A row.

    reply: what one scheduler answers; of an operation at the ranks, a list with what each of its ranks answers. lasts: a scheduler that is
    restarted gets the last request, too. combine: what clients get for the replies by replica. Raises RequestError if they mean a failure.
    """

    name: str
    request: type[Q]
    reply: type[R]
    at: Literal["scheduler", "ranks"] = "scheduler"
    timeout_s: float = 10.0
    lasts: bool = False
    route: Route | None = None
    combine: Callable[[Mapping[int, R]], object] = listed

    async def ask(self, control: Asks, request: Q) -> dict[int, R]:
        """What each replica that lives answers, by its index. Raises HeadraceError."""
        replies = await control.ask(self.name, _packed(request))
        return {replica: msgspec.msgpack.decode(reply, type=self.reply) for replica, reply in replies.items()}

    def message(self, message_id: int, request: Q) -> OperationReq:
        """The request as a message."""
        return OperationReq(message_id, self.name, _packed(request))

    def request_of(self, message: OperationReq) -> Q:
        """The request in a message. Raises RequestError if it is none."""
        try:
            return msgspec.msgpack.decode(message.request, type=self.request)
        except msgspec.ValidationError as error:
            raise field_error(str(error), self.request) from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestError(f"{self.name}: {error}") from None

    def reply_of(self, message: OperationReply) -> R:
        """The reply in a message."""
        return msgspec.msgpack.decode(message.reply, type=self.reply)


def _packed(request: msgspec.Struct) -> bytes:
    """Raises RequestError for values that msgpack cannot hold: integers beyond 64 bits, lone surrogates."""
    try:
        return _encode(request)
    except (OverflowError, UnicodeEncodeError) as error:
        raise RequestError(f"a value cannot be sent to the engine: {error}") from None


def answered(message_id: int, reply: object) -> OperationReply:
    """A reply as a message."""
    return OperationReply(message_id, _encode(reply))


class CacheTreeQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How deep to look, and how many nodes of each replica to list at most."""

    max_depth: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    max_nodes: Annotated[int, msgspec.Meta(ge=1, le=2000)] = 200


class StartProfileBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to record. output_dir: name of a folder below --profile-dir, not a path. num_steps: stop after this many."""

    output_dir: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)")] | None = None
    num_steps: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    activities: tuple[Literal["CPU", "GPU"], ...] = ("CPU",)


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request without fields."""


class SlowDownBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """forward_sleep_time: seconds to sleep after each step; null or 0: full speed."""

    forward_sleep_time: Annotated[float, msgspec.Meta(ge=0, le=10)] | None = None


class RankInfo(msgspec.Struct, frozen=True, gc=False):
    """A rank. resident_bytes: of its process, on the host. weight_bytes, kv_bytes: its part of the weights and of the KV cache."""

    rank: int
    pid: int
    resident_bytes: int
    weight_bytes: int
    kv_bytes: int


def _first_message(replies: Mapping[int, str]) -> object:
    """All replicas say the same."""
    return {"success": True, "message": next(iter(replies.values()))}


def _ranks(replies: Mapping[int, list[RankInfo]]) -> object:
    """All ranks in one list; each says which replica it belongs to, by the name that routers expect."""
    found = [
        {"dp_rank": replica, **msgspec.structs.asdict(rank)} for replica, ranks in replies.items() for rank in ranks
    ]
    return {"object": "list", "data": found}


def _profiled(replies: Mapping[int, ProfileReply]) -> object:
    """A profile that had ended by itself in some replicas is no failure."""
    messages = [reply.message for reply in replies.values()]
    if not any(reply.success for reply in replies.values()):
        raise RequestError(messages[0])
    return {"success": True, "message": "; ".join(dict.fromkeys(messages))}


FLUSH_CACHE = Operation("flush_cache", FlushCacheReq, FlushCacheReply)
INTERNAL_STATE = Operation("internal_state", InternalStateReq, InternalState)
CHECK_HEALTH = Operation("check_health", HealthCheckReq, HealthCheckReply)
COUNT_EXPERTS = Operation("count_experts", ExpertCountsReq, ExpertCountsReply, timeout_s=30.0)
CACHE_TREE = Operation(
    "cache_tree", CacheTreeQuery, CacheTree, route=Route("/cache_tree", "The tree of cached prefixes", "GET")
)
START_PROFILE = Operation(
    "start_profile",
    StartProfileBody,
    ProfileReply,
    timeout_s=120.0,  # writing a long trace may take this long; no step runs meanwhile
    route=Route("/start_profile", "Record steps", examples={"Ten steps": {"num_steps": 10}}),
    combine=_profiled,
)
STOP_PROFILE = Operation(
    "stop_profile",
    Nothing,
    ProfileReply,
    timeout_s=120.0,
    route=Route("/stop_profile", "Write the recorded steps"),
    combine=_profiled,
)
RANKS = Operation(
    "ranks",
    Nothing,
    list[RankInfo],
    at="ranks",
    route=Route("/ranks", "Process and memory of each rank", "GET"),
    combine=_ranks,
)
SLOW_DOWN = Operation(
    "slow_down",
    SlowDownBody,
    str,
    lasts=True,
    route=Route(
        "/slow_down",
        "Sleep after each step",
        examples={"50 ms": {"forward_sleep_time": 0.05}, "Full speed": {"forward_sleep_time": None}},
    ),
    combine=_first_message,
)

OPERATIONS: Mapping[str, Operation[Any, Any]] = {
    row.name: row
    for row in (
        FLUSH_CACHE,
        INTERNAL_STATE,
        CHECK_HEALTH,
        COUNT_EXPERTS,
        CACHE_TREE,
        START_PROFILE,
        STOP_PROFILE,
        RANKS,
        SLOW_DOWN,
    )
}
"""Every operation, by its name."""
