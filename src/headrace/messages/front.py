"""Messages between the main process and its HTTP workers (--tokenizer-worker-num): calls of the front end's methods, and their results.

A call names a method of `RequestFrontend`; its arguments and results are msgpack of the types in that method's signature, which both
sides derive from it (`frontend.front_door`). `worker` is the number of the sender, `id` that of its call.
"""

from msgspec import Struct

from headrace.messages.control import ReadyInfo
from headrace.messages.operations import Fault


class FrontCall(Struct, frozen=True, tag=True, array_like=True):
    """Call a method. arguments: a map of the given arguments."""

    worker: int
    id: int
    method: str
    arguments: bytes


class FrontTaken(Struct, frozen=True, tag=True, array_like=True):
    """This many more outputs of a stream have been consumed, and as many more may be sent."""

    worker: int
    id: int
    count: int


class FrontCancel(Struct, frozen=True, tag=True, array_like=True):
    """The caller has left: abort what is unfinished, and send nothing more."""

    worker: int
    id: int


class FrontOutput(Struct, frozen=True, tag=True, array_like=True):
    id: int
    value: bytes


class FrontEnd(Struct, frozen=True, tag=True, array_like=True):
    """The last message of a call: its result (a stream has none), or its error."""

    id: int
    value: bytes = b""
    fault: Fault | None = None


class FrontReplies(Struct, frozen=True, tag=True, array_like=True):
    """All replies to a worker from one turn of the main process's loop, in order."""

    replies: list[FrontOutput | FrontEnd]


class FrontNews(Struct, frozen=True, tag=True, array_like=True):
    """State that a worker answers from without a call: sent at its start and at every change, before the reply to the call that changed it.

    accepting: new requests are accepted. keys_generation: number of times the key file has been reloaded.
    """

    adapters: list[str]
    weight_version: str
    accepting: bool
    log_level: str
    keys_generation: int = 0
    model_path: str | None = None


class HttpWorkerStart(Struct, frozen=True):
    """What a worker gets at its start. number: of this incarnation. slot: which of the workers it is. listening_fd: the shared socket."""

    number: int
    slot: int
    listening_fd: int
    ready: ReadyInfo
