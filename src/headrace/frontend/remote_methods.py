"""How the front end's methods cross between processes: the arguments and results of each, from the signatures of a Protocol.

A method that is added to the Protocol crosses with it; what its annotations say is what is checked when a call arrives. Used by both
sides (`front_door`, `remote_frontend`).
"""

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self, get_args, get_origin, get_type_hints

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
from headrace.frontend.tenants import Caller
from headrace.log import get_logger
from headrace.messages.front import FrontFault

logger = get_logger(__name__)


class WireCaller(msgspec.Struct, frozen=True):
    """A `Caller`, whose tenant is known by name in the main process."""

    tenant: str | None = None
    traceparent: str = ""
    is_admin: bool = False

    @classmethod
    def of(cls, caller: Caller) -> Self:
        """The caller as it crosses."""
        return cls(caller.tenant.name if caller.tenant is not None else None, caller.traceparent, caller.is_admin)


@dataclass(frozen=True, slots=True)
class RemoteMethod:
    """How one method crosses. arguments: a struct of those that were given. result: its type; streams: it gives many of them."""

    arguments: type[msgspec.Struct]
    result: Any
    streams: bool


def remote_methods(protocol: type) -> dict[str, RemoteMethod]:
    """The methods of a Protocol, by name."""
    methods = {}
    for name, function in vars(protocol).items():
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        hints = get_type_hints(function)
        result = hints["return"]
        streams = get_origin(result) is AsyncGenerator
        result = get_args(result)[0] if streams else _awaited(result)
        methods[name] = RemoteMethod(_arguments(function, hints), result, streams)
    return methods


def _awaited(result: Any) -> Any:
    """T of `T | Awaitable[T]`; anything else is itself."""
    awaited = [kind for kind in get_args(result) if get_origin(kind) is Awaitable]
    return get_args(awaited[0])[0] if awaited else result


def _arguments(function: Callable[..., Any], hints: dict[str, Any]) -> type[msgspec.Struct]:
    fields: list[tuple[str, Any, Any]] = []
    for name in inspect.signature(function).parameters:
        if name == "self":
            continue
        kind = WireCaller if hints[name] is Caller else hints[name]
        # What was not given is left to the method itself: its own defaults count.
        fields.append((name, kind | msgspec.UnsetType, msgspec.UNSET))
    title = "".join(word.capitalize() for word in function.__name__.split("_"))
    return msgspec.defstruct(f"{title}Arguments", fields, frozen=True, kw_only=True, forbid_unknown_fields=True)


def fault_of(error: BaseException) -> FrontFault:
    """An error as it crosses. Anything but a HeadraceError is a fault of ours: it is logged here and not described."""
    if not isinstance(error, HeadraceError):
        logger.error("a call of an HTTP worker failed", exc_info=error)
        return FrontFault("ExecutionError", "internal error; the server's log has the cause")
    if isinstance(error, CapacityError):
        return FrontFault(
            "CapacityError",
            error.message,
            retry_after_s=error.retry_after_s,
            status_code=error.status_code,
            limited="tokens" if error.error_type == "tokens" else "requests",
        )
    if isinstance(error, RequestError):
        kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _REQUEST_ERRORS)
        return msgspec.convert(
            {"kind": kind, "message": error.message, "param": error.param, "code": error.code}, FrontFault
        )
    return FrontFault("ExecutionError", error.message)


def error_of_fault(fault: FrontFault) -> HeadraceError:
    """The other way."""
    if fault.kind == "CapacityError":
        return CapacityError(fault.message, fault.retry_after_s, fault.status_code, fault.limited)
    if fault.kind == "ExecutionError":
        return ExecutionError(fault.message)
    return _REQUEST_ERRORS[fault.kind](fault.message, fault.param, fault.code)


_REQUEST_ERRORS: dict[str, type[RequestError]] = {
    kind.__name__: kind for kind in (RequestError, NotFoundError, AuthError, ForbiddenError, LateError, TooLargeError)
}
