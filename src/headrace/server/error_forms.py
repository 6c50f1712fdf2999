"""The bodies of failing replies, in the form of the API that the request's path belongs to.

OpenAI's form is that of every path without one of its own.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, Literal

import msgspec

from headrace.errors import RequestError


class ApiError(msgspec.Struct, frozen=True):
    """Why a request failed; these are the fields of OpenAI's `error` object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, frozen=True):
    """Body of a failing reply."""

    error: ApiError


class OllamaErrorReply(msgspec.Struct, frozen=True):
    """Body of a failing reply of Ollama's API. error: the message."""

    error: str


class AnthropicError(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happened, and its kind. details: what the vendor's clients look at to recover by themselves."""

    type: str
    message: str
    details: dict[str, str] | None = None


class AnthropicErrorReply(msgspec.Struct, frozen=True):
    """Body of a failing reply of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicError


ErrorForm = Callable[[int, ApiError], bytes]
"""Makes the JSON body of a failing reply from its status and error."""


def openai_error(status: int, error: ApiError) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`."""
    return msgspec.json.encode({"error": error})


THREAD_NOT_FOUND: Final = "thread_not_found"
"""Anthropic's code of a conversation that the server does not hold: its clients then send all messages again."""

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
    """`{"type": "error", "error": {"type", "message"}}`, for a thread with `details`."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"error_code": THREAD_NOT_FOUND} if error.code == THREAD_NOT_FOUND else None
    return msgspec.json.encode(AnthropicErrorReply("error", AnthropicError(kind, error.message, details)))


def ollama_error(status: int, error: ApiError) -> bytes:
    """`{"error": "..."}`."""
    return msgspec.json.encode({"error": error.message})


_FORMS: Final[tuple[tuple[str, ErrorForm, type], ...]] = (
    ("/v1/messages", anthropic_error, AnthropicErrorReply),
    ("/messages", anthropic_error, AnthropicErrorReply),
    ("/api/", ollama_error, OllamaErrorReply),
)


def renaming(names: Mapping[str, str]) -> Callable[[RequestError], RequestError]:
    """What puts an API's own names of fields into an error. names: by ours, which are replaced wherever they stand as words."""
    pattern = re.compile(rf"\b({'|'.join(names)})\b")

    def renamed(error: RequestError) -> RequestError:
        error.message = pattern.sub(lambda found: names[found[0]], error.message)
        error.param = names.get(error.param, error.param) if error.param is not None else None
        return error

    return renamed


def form_of(path: str) -> ErrorForm:
    return next((form for prefix, form, _ in _FORMS if path.startswith(prefix)), openai_error)


def reply_type_of(path: str) -> type:
    return next((kind for prefix, _, kind in _FORMS if path.startswith(prefix)), ErrorReply)
