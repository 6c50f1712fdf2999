"""What crosses between the main process and its HTTP workers (--tokenizer-worker-num): calls of the front end's methods, and their results.

A call names a method of `RequestFrontend`; its arguments and results are msgpack of the types in that method's signature, which both
sides read from there (`frontend.remote_methods`). `worker` numbers the sender, `id` its calls.
"""

from typing import Literal

from msgspec import Struct

from headrace.messages.control import ReadyInfo


class FrontCall(Struct, frozen=True, tag=True, array_like=True):
    """Call a method. arguments: a map of those that were given."""

    worker: int
    id: int
    method: str
    arguments: bytes


class FrontTaken(Struct, frozen=True, tag=True, array_like=True):
    """So many more outputs of a stream have been taken: as many may follow."""

    worker: int
    id: int
    count: int


class FrontCancel(Struct, frozen=True, tag=True, array_like=True):
    """The caller has left: what is unfinished is aborted, and nothing more is sent."""

    worker: int
    id: int


class FrontOutput(Struct, frozen=True, tag=True, array_like=True):
    """One output of a stream."""

    id: int
    value: bytes


class FrontFault(Struct, frozen=True):
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


class FrontEnd(Struct, frozen=True, tag=True, array_like=True):
    """The last word on a call: its result (a stream has none), or why there is none."""

    id: int
    value: bytes = b""
    fault: FrontFault | None = None


class FrontReplies(Struct, frozen=True, tag=True, array_like=True):
    """What one turn of the main process's loop has for a worker, in order."""

    replies: list[FrontOutput | FrontEnd]


class FrontNews(Struct, frozen=True, tag=True, array_like=True):
    """What a worker answers without asking: sent when it begins and whenever it changes, before the reply of the call that changed it.

    accepting: new requests are welcome. keys_generation: how often the file of keys was read anew.
    """

    adapters: list[str]
    weight_version: str
    accepting: bool
    log_level: str
    keys_generation: int = 0
    model_path: str | None = None


class HttpWorkerStart(Struct, frozen=True):
    """What a worker is given. number: of this life of it. slot: which of the workers it is. listening_fd: the socket that they share."""

    number: int
    slot: int
    listening_fd: int
    ready: ReadyInfo
