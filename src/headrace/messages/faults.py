"""A HeadraceError as a message: what one process raises, and another answers with."""

from typing import Literal

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
    """The error of a fault; the inverse of `fault_of`."""
    if fault.kind == "CapacityError":
        return CapacityError(fault.message, fault.retry_after_s, fault.status_code, fault.limited)
    if fault.kind == "ExecutionError":
        return ExecutionError(fault.message)
    return _REQUEST_ERRORS[fault.kind](fault.message, fault.param, fault.code)


_REQUEST_ERRORS: dict[str, type[RequestError]] = {
    kind.__name__: kind for kind in (RequestError, NotFoundError, AuthError, ForbiddenError, LateError, TooLargeError)
}
