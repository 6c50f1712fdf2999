"""The control operations of the engine, a row each: what is asked of every scheduler, by whom, and what its answer looks like.

All that an operation needs besides its row is its work: a method of the row's name in `scheduler/control.py` (`at="scheduler"`), or a
function of that name in `execution/rank_operations.py` (`at="ranks"`) or a method of it in `frontend/control.py` (`at="main"`). The row gives it its
messages, its way through HTTP workers and replicas, its route with the OpenAPI description, and what `Engine` and `Runtime` ask
(docs/adding/operation.md). Operations on weights are in `weights`.

    route ─┐                                             ┌─> scheduler 0: its answer, or one of each rank
    Engine ─┴─> Operation.ask ─> frontend's Control ──────┴─> scheduler 1 ...
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

import msgspec

from headrace.errors import (
    AuthError,
    CapacityError,
    ExecutionError,
    ForbiddenError,
    HeadraceError,
    LateError,
    NotFoundError,
    RequestError,
    TooLargeError,
)
from headrace.log import get_logger
from headrace.messages.bodies import field_error
from headrace.messages.control import (
    CacheTree,
    CacheUse,
    ExpertCountsReply,
    ExpertCountsReq,
    HealthCheckReply,
    InternalState,
    Outcome,
)

logger = get_logger(__name__)


class Fault(msgspec.Struct, frozen=True):
    """A HeadraceError. kind: its class, or the nearest class above it that is listed here."""

    kind: Literal[
        "RequestError",
        "NotFoundError",
        "AuthError",
        "ForbiddenError",
        "LateError",
        "TooLargeError",
        "CapacityError",
        "ExecutionError",
    ]
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float = 1.0
    status_code: int = 503
    limited: Literal["requests", "tokens"] = "requests"


def fault_of(error: BaseException) -> Fault:
    """An error in the form for messages. Anything but a HeadraceError is a bug: it is logged here and not described."""
    if not isinstance(error, HeadraceError):
        logger.error("a call of another process failed", exc_info=error)
        return Fault("ExecutionError", "internal error; see the server's log")
    if isinstance(error, CapacityError):
        return Fault(
            "CapacityError",
            error.message,
            retry_after_s=error.retry_after_s,
            status_code=error.status_code,
            limited="tokens" if error.error_type == "tokens" else "requests",
        )
    if isinstance(error, RequestError):
        kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _REQUEST_ERRORS)
        return msgspec.convert(
            {"kind": kind, "message": error.message, "param": error.param, "code": error.code}, Fault
        )
    return Fault("ExecutionError", error.message)


def error_of_fault(fault: Fault) -> HeadraceError:
    if fault.kind == "CapacityError":
        return CapacityError(fault.message, fault.retry_after_s, fault.status_code, fault.limited)
    if fault.kind == "ExecutionError":
        return ExecutionError(fault.message)
    return _REQUEST_ERRORS[fault.kind](fault.message, fault.param, fault.code)


_REQUEST_ERRORS: dict[str, type[RequestError]] = {
    kind.__name__: kind for kind in (RequestError, NotFoundError, AuthError, ForbiddenError, LateError, TooLargeError)
}


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

    at: who does it. reply: what one scheduler answers; of an operation at the ranks, a list with what each of its ranks answers; the main process
    answers as one replica, with what its route replies. lasts: a scheduler that is
    restarted gets the last request, too. combine: what clients get for the replies by replica. Raises RequestError if they mean a failure.
    """

    name: str
    request: type[Q]
    reply: type[R]
    at: Literal["main", "scheduler", "ranks"] = "scheduler"
    timeout_s: float = 10.0
    lasts: bool = False
    route: Route | None = None
    combine: Callable[[Mapping[int, R]], object] = listed

    async def ask(self, control: Asks, request: Q) -> dict[int, R]:
        replies = await control.ask(self.name, _packed(request))
        return {replica: msgspec.msgpack.decode(reply, type=self.reply) for replica, reply in replies.items()}

    def message(self, message_id: int, request: Q) -> OperationReq:
        return OperationReq(message_id, self.name, _packed(request))

    def request_of(self, message: OperationReq) -> Q:
        """The request in a message. Raises RequestError if it is none."""
        try:
            return msgspec.msgpack.decode(message.request, type=self.request)
        except msgspec.ValidationError as error:
            raise field_error(str(error), self.request) from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestError(f"{self.name}: {error}") from None


def _packed(request: msgspec.Struct) -> bytes:
    """Raises RequestError for values that msgpack cannot hold: integers beyond 64 bits, lone surrogates."""
    try:
        return _encode(request)
    except (OverflowError, UnicodeEncodeError) as error:
        raise RequestError(f"a value cannot be sent to the engine: {error}") from None


def answered(message_id: int, reply: object) -> OperationReply:
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


LogLevel = Literal["debug", "info", "warning", "error"]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class LimitChanges(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options that may change at run time; None = unchanged. Same meaning as the options of these names."""

    max_running_requests: Count | None = None
    max_queued_requests: Count | None = None
    chunked_prefill_size: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    schedule_conservativeness: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)] | None = None
    max_step_ms: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None


class SetInternalStateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options by name, with their new values."""

    server_args: LimitChanges


class ConfigureLoggingBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to change; fields that are left out stay as they are."""

    level: LogLevel | None = None
    log_requests: bool | None = None
    log_requests_level: Literal[0, 1, 2, 3] | None = None


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request without fields."""


class SlowDownBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """forward_sleep_time: seconds to sleep after each step; null or 0: full speed."""

    forward_sleep_time: Annotated[float, msgspec.Meta(ge=0, le=10)] | None = None


class PinReq(msgspec.Struct, frozen=True, gc=False):
    """Keep what the tree has of a prefix until `until_s` (time.monotonic). id: of the pin; one that is known is set anew. owner: whose it is.
    tenant: of whose share of what pins may hold it takes; "" = of nobody's. weight: of the tenant. tokens: as `PromptContent.cache_key` has them. The
    reply: the tokens that are kept."""

    id: str
    owner: str
    tenant: str
    tokens: bytes
    namespace: str
    until_s: float
    weight: float = 1.0


class UnpinReq(msgspec.Struct, frozen=True, gc=False):
    """Let go of a pin. An unknown one is harmless."""

    id: str


class CacheUseReq(msgspec.Struct, frozen=True, gc=False):
    """owner: of pins; None = all of them. key_name: whose tokens to count, None = of those without a key. everything: of all."""

    owner: str | None = None
    key_name: str | None = None
    everything: bool = False


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


def _profiled(replies: Mapping[int, Outcome]) -> object:
    """A profile that had ended by itself in some replicas is no failure."""
    messages = [reply.message for reply in replies.values()]
    if not any(reply.success for reply in replies.values()):
        raise RequestError(messages[0])
    return {"success": True, "message": "; ".join(dict.fromkeys(messages))}


FLUSH_CACHE = Operation("flush_cache", Nothing, Outcome)
INTERNAL_STATE = Operation("internal_state", Nothing, InternalState)
CHECK_HEALTH = Operation("check_health", Nothing, HealthCheckReply)
COUNT_EXPERTS = Operation("count_experts", ExpertCountsReq, ExpertCountsReply, timeout_s=30.0)
CACHE_TREE = Operation(
    "cache_tree", CacheTreeQuery, CacheTree, route=Route("/cache_tree", "The tree of cached prefixes", "GET")
)
PIN = Operation("pin", PinReq, int)
UNPIN = Operation("unpin", UnpinReq, bool)
CACHE_USE = Operation("cache_use", CacheUseReq, CacheUse)
START_PROFILE = Operation(
    "start_profile",
    StartProfileBody,
    Outcome,
    timeout_s=120.0,  # writing a long trace may take this long; no step runs meanwhile
    route=Route("/start_profile", "Record steps", examples={"Ten steps": {"num_steps": 10}}),
    combine=_profiled,
)
STOP_PROFILE = Operation(
    "stop_profile",
    Nothing,
    Outcome,
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


def _main(
    kind: type[Q], path: str, summary: str, examples: Mapping[str, Mapping[str, Any]] | None = None
) -> Operation[Q, dict[str, Any]]:
    """A row of the main process, which answers with what the route replies. The name is the path's."""
    route = Route(path, summary, examples=examples or {})
    return Operation(path[1:], kind, dict[str, Any], at="main", route=route, combine=lambda replies: replies[0])


START_EXPERTS = _main(Nothing, "/start_expert_distribution_record", "Record which experts are chosen")
STOP_EXPERTS = _main(Nothing, "/stop_expert_distribution_record", "Record it no more")
DUMP_EXPERTS = _main(Nothing, "/dump_expert_distribution_record", "Tokens by layer and expert")
CONFIGURE_LOGGING = _main(
    ConfigureLoggingBody,
    "/configure_logging",
    "What is logged",
    {"A line for each request": {"log_requests": True, "log_requests_level": 1}},
)
FREEZE_GC = _main(Nothing, "/freeze_gc", "Exclude current objects from garbage collection")
SET_INTERNAL_STATE = _main(
    SetInternalStateBody,
    "/set_internal_state",
    "Change limits",
    {"A longer queue": {"server_args": {"max_queued_requests": 64}}},
)
DUMP_REQUESTS = _main(Nothing, "/dump_requests", "Write a dump of the latest requests")

OPERATIONS: Mapping[str, Operation[Any, Any]] = {
    row.name: row for row in tuple(globals().values()) if isinstance(row, Operation)
}
"""Every operation above, by its name."""


def operation_named(name: str, fields: Mapping[str, Any], *others: str) -> tuple[Operation[Any, Any], msgspec.Struct]:
    """An operation that has a route, and its request with these fields. Raises RequestError, which lists these names and the `others`."""
    operation = OPERATIONS.get(name)
    if operation is None or operation.route is None:
        names = ", ".join(sorted([*others, *(row.name for row in OPERATIONS.values() if row.route is not None)]))
        raise RequestError(f"there is no operation {name!r:.100}; there are {names}", "method")
    try:
        return operation, msgspec.convert(dict(fields), operation.request)
    except msgspec.ValidationError as error:
        raise field_error(str(error), operation.request) from None
