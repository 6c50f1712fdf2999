"""The bodies of failing replies, in the form of the API that the request's path belongs to.

OpenAI's form is that of every path without one of its own.
"""

from collections.abc import Callable
from typing import Final

import msgspec


class ApiError(msgspec.Struct, frozen=True):
    """Why a request failed; these are the fields of OpenAI's `error` object."""

    message: str
    type: str
    param: str | None
    code: str | None


ErrorForm = Callable[[int, ApiError], bytes]
"""Makes the JSON body of a failing reply from its status and error."""


def openai_error(status: int, error: ApiError) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return msgspec.json.encode({"error": error})


_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def anthropic_error(status: int, error: ApiError) -> bytes:
    """`{"type": "error", "error": {"type", "message"}}`."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})


def ollama_error(status: int, error: ApiError) -> bytes:
    """`{"error": "..."}`."""
    return msgspec.json.encode({"error": error.message})


_FORMS: Final[tuple[tuple[str, ErrorForm], ...]] = (("/v1/messages", anthropic_error), ("/api/", ollama_error))


def form_of(path: str) -> ErrorForm:
    """The form of errors on a path."""
    return next((form for prefix, form in _FORMS if path.startswith(prefix)), openai_error)
