"""Converts the finish reason of a failed sample to an error."""

from headrace.errors import (
    CapacityError,
    ExecutionError,
    HeadraceError,
    LateError,
    NotFoundError,
    RequestError,
    TooLargeError,
)
from headrace.messages.outputs import FinishReason


def failure_of(finish: FinishReason, retry_after_s: float = 1.0) -> HeadraceError | None:
    """The error of an abort by the engine; None for other finish reasons, and for requested aborts."""
    if finish.type != "abort" or finish.status_code < 400:
        return None
    match finish.status_code:
        case 404:
            return NotFoundError(finish.message)
        case 408:
            return LateError(finish.message)
        case 413:
            return TooLargeError(finish.message)
        case 429 | 503:
            return CapacityError(finish.message, retry_after_s, status_code=finish.status_code)
        case code if code < 500:
            return RequestError(finish.message, finish.param or None)
        case _:
            return ExecutionError(finish.message)
