"""The one error tree.

HeadraceError
├── RequestError          the caller's fault                       400
│   ├── ContextLengthError prompt and output do not fit            400
│   ├── NotFoundError     unknown model, adapter, session, rid     404
│   ├── AuthError         missing or wrong key                     401
│   ├── ForbiddenError    a web page or a host name that is not allowed  403
│   ├── MethodError       another method is wanted                  405
│   ├── LateError         not done within the server's time limit  408
│   └── TooLargeError     body or prompt beyond a byte limit       413
├── CapacityError         no room now; `retry_after_s` says when   429 / 503
├── ConfigError           the options cannot work: refuse to start (process exit 2)
├── ModelError            the checkpoint is missing, broken or not supported
└── ExecutionError        our fault                                500

A message says what happened, the numbers, and what to do. It never carries a path of this machine, a class name or a
traceback: messages of `RequestError`, `CapacityError` and `ExecutionError` are sent to clients as they are.
"""

from typing import Literal, Self


class HeadraceError(Exception):
    """Base of every error that Headrace raises on purpose."""

    status_code: int = 500
    error_type: str = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(HeadraceError):
    """The request cannot be served as it is.

    param: the request field at fault, as the client spelled it, if there is one.
    """

    status_code = 400
    error_type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """Prompt and output are longer than the context.

    Clients recognise the code and OpenAI's words, and shorten the prompt: do not change the words.
    """

    def __init__(self, param: str, context_length: int, asked: str, remedy: str = "messages", held: str = "") -> None:
        """asked: what the request needs. remedy: what to shorten. held: why the context is shorter than the model's."""
        limit = f"{context_length} tokens{f' ({held})' if held else ''}"
        message = f"This model's maximum context length is {limit}. However, {asked}. Please reduce the length of the {remedy}."
        super().__init__(message, param, "context_length_exceeded")

    @classmethod
    def of_prompt(cls, param: str, context_length: int, num_prompt_tokens: int, held: str = "") -> Self:
        return cls(param, context_length, f"your messages resulted in {num_prompt_tokens} tokens", held=held)

    @classmethod
    def of_both(cls, param: str, context_length: int, num_prompt_tokens: int, num_output_tokens: int) -> Self:
        asked = (
            f"you requested {num_prompt_tokens + num_output_tokens} tokens ({num_prompt_tokens} in the messages, "
            f"{num_output_tokens} in the completion)"
        )
        return cls(param, context_length, asked, "messages or completion")


class NotFoundError(RequestError):
    status_code = 404
    error_type = "not_found_error"


class AuthError(RequestError):
    status_code = 401
    error_type = "authentication_error"


class ForbiddenError(RequestError):
    """A request of this kind is refused, whatever its key."""

    status_code = 403
    error_type = "permission_error"


class MethodError(RequestError):
    """The route answers this method to others only; POST it."""

    status_code = 405


class LateError(RequestError):
    """The request took longer than the server allows. Repeating it would take as long."""

    status_code = 408


class TooLargeError(RequestError):
    status_code = 413


class CapacityError(HeadraceError):
    """No room now. The client should try again after `retry_after_s` seconds.

    status_code: 503 when the server is full or stopping, 429 when this client's own limit is reached. limited: what the
    limit of a 429 counts, OpenAI's `type` of such errors.
    """

    error_type = "overloaded_error"

    def __init__(
        self,
        message: str,
        retry_after_s: float = 1.0,
        status_code: int = 503,
        limited: Literal["requests", "tokens"] = "requests",
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status_code = status_code
        self.code: str | None = None
        if status_code == 429:
            self.code, self.error_type = "rate_limit_exceeded", limited


class ConfigError(HeadraceError):
    """The options, alone or with this model and device, cannot work."""


class ModelError(HeadraceError):
    """The checkpoint cannot be used. Names the file and, if any, the tensor."""


class ExecutionError(HeadraceError):
    """An error of the server itself."""
