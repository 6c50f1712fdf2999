"""One-way channels between the tokenizer manager, the scheduler and the detokenizer.

Owns the interface, frames, queues within one process, and the private directory of the socket files. Does not own the meaning of messages.
Two implementations of one interface: sockets between processes (`sockets.py`), and queues within one process (`LocalChannels`), so that the
whole pipeline also runs in threads of one process. Each channel has one receiver and any number of senders. A frame is msgpack of one
typed struct; bytes that do not decode to a known message are dropped and counted.
"""

import asyncio
import fcntl
import os
import shutil
import stat
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar, get_args

import msgspec

from headrace.errors import ConfigError, RequestError
from headrace.messages.control import (
    AbortReq,
    ConfigureLoggingReq,
    FaultReq,
    FreezeGCReq,
    Heartbeat,
    ResetReq,
    SchedulerStats,
    SetLimitsReq,
    ShutdownReq,
    SourceGone,
)
from headrace.messages.front import FrontCall, FrontCancel, FrontNews, FrontReplies, FrontTaken
from headrace.messages.operations import OperationReply, OperationReq
from headrace.messages.outputs import BatchStrOut, BatchTokenIDOut, SamplesMoved
from headrace.messages.requests import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
from headrace.messages.weights import LoadLoraReq, LoraReply, UnloadLoraReq, WeightOpReply, WeightOpReq

Message = (
    TokenizedGenerateReqInput
    | BatchTokenizedGenerateReqInput
    | BatchTokenIDOut
    | SamplesMoved
    | BatchStrOut
    | OperationReq
    | OperationReply
    | AbortReq
    | LoadLoraReq
    | UnloadLoraReq
    | LoraReply
    | ConfigureLoggingReq
    | FreezeGCReq
    | SetLimitsReq
    | SchedulerStats
    | Heartbeat
    | ShutdownReq
    | ResetReq
    | SourceGone
    | FaultReq
    | WeightOpReq
    | WeightOpReply
    | FrontCall
    | FrontTaken
    | FrontCancel
    | FrontReplies
    | FrontNews
)
"""Every message that may cross a channel. A new message is added here and nowhere else; a new operation is a row of `operations`."""

ChannelName = Literal["to_scheduler", "to_detokenizer", "to_tokenizer", "to_front", "to_worker"]

_IPC_PATH_LIMIT = 107
"""Longest path of a Unix socket (sun_path of Linux, without the final NUL)."""


class Sender(Protocol):
    """The writing end. Safe to use from several threads; never waits for the receiver."""

    def send(self, message: Message) -> None:
        """Send one message. Messages of one sender arrive in order."""

    def close(self) -> None:
        """Close this end. Messages that have not been received may be lost. Idempotent."""


class Receiver(Protocol):
    """The reading end, used by one thread (or one event loop) only.

    dropped_frames: number of frames so far that were not a known message.
    """

    dropped_frames: int

    def recv_nowait(self) -> Message | None:
        """The next message, or None if there is none now."""

    def recv(self, timeout_s: float) -> Message | None:
        """The next message, or None after `timeout_s` seconds without one."""

    def listen(self, take: Callable[[Message], None]) -> None:
        """Call `take` with each message from now on, in the running event loop. Instead of the other two."""

    def close(self) -> None: ...


class Channels(Protocol):
    """Makes the ends of the named channels. index: number of the scheduler for `to_scheduler`, of the HTTP worker for `to_worker`."""

    def sender(self, name: ChannelName, index: int = 0) -> Sender: ...

    def receiver(self, name: ChannelName, index: int = 0) -> Receiver:
        """The reading end; one per channel."""

    def close(self) -> None:
        """Close every end made here. Idempotent."""


class Ports(msgspec.Struct, frozen=True):
    """Addresses of the channels: socket files. Given to child processes."""

    to_scheduler: str
    to_detokenizer: str
    to_tokenizer: str
    to_front: str
    to_worker: str

    @classmethod
    def in_directory(cls, directory: Path, detokenize_in: Literal["process", "main"] = "process") -> Self:
        """Socket files of `directory`. detokenize_in main: what is for the detokenizer goes to the tokenizer manager.

        Raises ConfigError when the path is too long for a Unix socket.
        """
        longest = directory / "to_scheduler.999"
        if len(os.fsencode(longest)) > _IPC_PATH_LIMIT:
            raise ConfigError(
                "the temporary directory's path is too long for a Unix socket; set TMPDIR to a shorter one"
            )
        ports = cls(*(str(directory / name) for name in cls.__struct_fields__))
        return (
            ports if detokenize_in == "process" else msgspec.structs.replace(ports, to_detokenizer=ports.to_tokenizer)
        )


class MessageCodec:
    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Message)

    def encode(self, message: Message) -> bytes:
        """One frame. Raises RequestError for values that msgpack cannot hold: integers beyond 64 bits, lone surrogates."""
        try:
            return self._encoder.encode(message)
        except (OverflowError, UnicodeEncodeError) as error:
            raise RequestError(f"a value cannot be sent to the engine: {error}") from None

    def decode(self, frame: bytes) -> Message | None:
        """The message in `frame`, or None if it is not a known message."""
        try:
            message: Message = self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError):
            return None
        return message


class LocalQueue:
    """Both ends of a channel within one process. Messages are passed without a copy, since they are frozen."""

    def __init__(self) -> None:
        self.dropped_frames = 0
        self._messages: deque[Message] = deque()
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._take: Callable[[Message], None] = lambda message: None
        self._closed = False

    def send(self, message: Message) -> None:
        """See `Sender`. After `close` it does nothing."""
        with self._changed:
            if self._closed:
                return
            self._messages.append(message)
            self._changed.notify()
            # call_soon_threadsafe under the lock: the loop cannot be released by `close` in between.
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._hand_over)

    def recv_nowait(self) -> Message | None:
        with self._changed:
            return self._messages.popleft() if self._messages else None

    def recv(self, timeout_s: float) -> Message | None:
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._closed, timeout_s)
            return self._messages.popleft() if self._messages else None

    def listen(self, take: Callable[[Message], None]) -> None:
        with self._changed:
            self._take = take
            self._loop = asyncio.get_running_loop()
            for _ in self._messages:
                self._loop.call_soon(self._hand_over)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._messages.clear()
            self._loop = None
            self._changed.notify_all()

    def _hand_over(self) -> None:
        message = self.recv_nowait()
        if message is not None:
            self._take(message)


class LocalChannels:
    """The channels within one process. Share one object between the parts. There is one scheduler: index 0.

    detokenize_in: see `Ports.in_directory`.
    """

    def __init__(self, detokenize_in: Literal["process", "main"] = "process") -> None:
        self._queues: dict[ChannelName, LocalQueue] = {name: LocalQueue() for name in get_args(ChannelName)}
        if detokenize_in == "main":
            self._queues["to_detokenizer"] = self._queues["to_tokenizer"]

    def sender(self, name: ChannelName, index: int = 0) -> LocalQueue:
        assert index == 0, index
        return self._queues[name]

    receiver = sender

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()


class IpcDir:
    """A private directory (mode 0700) for socket files, removed when the context ends.

    A process that is killed leaves its directory behind; the next process removes it. The owner holds a lock on the file `lock`
    in it, which the kernel releases when the owner dies, however it dies.
    """

    _PREFIX = "headrace-ipc-"

    def __init__(self) -> None:
        self._owner = -1
        self._lock_fd = -1
        self.path = Path()

    def __enter__(self) -> Path:
        """Create it. Raises ConfigError if a temporary directory cannot be created."""
        try:
            parent = Path(tempfile.gettempdir())
            _remove_abandoned(parent, self._PREFIX)
            self.path = Path(tempfile.mkdtemp(prefix=self._PREFIX, dir=parent))
            self._lock_fd = os.open(self.path / "lock.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            (self.path / "lock.new").rename(self.path / "lock")
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot create a temporary directory: {error.strerror}; set TMPDIR") from error
        self._owner = os.getpid()
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove it, unless this process is a fork of the owner. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
        if self._owner == os.getpid():
            shutil.rmtree(self.path, ignore_errors=True)
            self._owner = -1


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove directories whose owner has died: they have our uid, and nobody holds their lock."""
    for path in parent.glob(f"{prefix}*"):
        try:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            # Gone meanwhile, or its owner is only just creating it.
            continue
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock_fd)


class FanOutSender:
    def __init__(self, senders: Sequence[Sender]) -> None:
        self._senders = senders

    def send(self, message: Message) -> None:
        for sender in self._senders:
            sender.send(message)

    def close(self) -> None:
        for sender in self._senders:
            sender.close()


M = TypeVar("M")


class TypeBasedDispatcher:
    """A table from message type to handler. Types match exactly: message structs are not subclassed."""

    def __init__(self) -> None:
        self._handlers: dict[type, Callable[[Any], object]] = {}
        self.num_unhandled = 0

    def register(self, kind: type[M], handler: Callable[[M], object]) -> None:
        assert kind not in self._handlers, kind
        self._handlers[kind] = handler

    def __call__(self, message: object) -> bool:
        """Handle one message. Returns False, and counts it, if no handler is registered for its type."""
        handler = self._handlers.get(type(message))
        if handler is None:
            self.num_unhandled += 1
            return False
        handler(message)
        return True
