"""Control operations as awaitable calls: sends a request to some replicas and gathers the replies.

Owns the ids and the waiters. Each replica gets its own id, so that a reply identifies its sender, and late replies of a dead replica are
dropped.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import CapacityError, ExecutionError, HeadraceError
from headrace.messages.channel import Message, Sender

RESTARTING = "a process of the engine has died and is being restarted"
RESTART_RETRY_S = 2.0
NO_WEIGHTS = (
    "the scheduler has died and its weights cannot be loaded again (the server's log says why); the server goes on with the next weights that "
    "it is given from a checkpoint (/update_weights_from_disk)"
)
NO_WEIGHTS_RETRY_S = 30.0


@dataclass(slots=True, eq=False)
class Replica:
    """An incarnation. index: 0 to --dp-size - 1. source: marks its outputs, and changes when the detokenizer is restarted.

    is_lost: it has died. The next incarnation with the same index is another object.
    """

    index: int
    sender: Sender
    source: int
    is_lost: bool = False


def no_live_replica() -> CapacityError:
    """The error while every scheduler is being restarted."""
    return CapacityError(RESTARTING, retry_after_s=RESTART_RETRY_S)


def no_weights() -> CapacityError:
    """The error while no scheduler can be restarted before there are other weights."""
    return CapacityError(NO_WEIGHTS, retry_after_s=NO_WEIGHTS_RETRY_S)


@dataclass(slots=True, eq=False)
class _Waiting:
    """Replies to one request so far. missing: replicas that have not replied, by id."""

    done: "asyncio.Future[None]"
    missing: dict[int, Replica] = field(default_factory=dict)
    replies: dict[Replica, Any] = field(default_factory=dict)

    def check(self) -> None:
        if not self.missing and not self.done.done():
            self.done.set_result(None)


class Communicator:
    """Sends requests to replicas and gathers their replies, of any type, which have their `id`. Does not wait for replicas that die meanwhile."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._error: HeadraceError | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a reply is missing."""
        return bool(self._waiting)

    async def call(
        self, replicas: Sequence[Replica], make: Callable[[int], Message], timeout_s: float, name: str
    ) -> dict[Replica, Any]:
        """Send `make(id)` to each of `replicas` and return the replies of those that stay alive, at least one. name: for errors.

        Raises CapacityError if none stays alive, ExecutionError if the replies do not come within `timeout_s` seconds, or `fail_all`'s error.
        """
        if self._error is not None:
            raise self._error
        waiting = _Waiting(asyncio.get_running_loop().create_future())
        asked = {next(self._ids): replica for replica in replicas if not replica.is_lost}
        waiting.missing.update(asked)
        self._waiting.update(dict.fromkeys(asked, waiting))
        try:
            # Without an await in between: two calls reach every replica in the same order.
            for request_id, replica in asked.items():
                replica.sender.send(make(request_id))
            waiting.check()
            await asyncio.wait_for(waiting.done, timeout_s)
        except TimeoutError:
            raise ExecutionError(f"{name}: no answer from the engine within {timeout_s:g} s") from None
        finally:
            for request_id in asked:
                self._waiting.pop(request_id, None)
        if not waiting.replies:
            raise no_live_replica()
        return waiting.replies

    async def call_every(
        self, living: Callable[[], Sequence[Replica]], make: Callable[[int], Message], timeout_s: float, name: str
    ) -> dict[Replica, Any]:
        """Like `call`, for all replicas that are alive when it returns, including one that comes back meanwhile."""
        replies: dict[Replica, Any] = {}
        while missing := [replica for replica in living() if replica not in replies]:
            replies |= await self.call(missing, make, timeout_s, name)
        found = {replica: replies[replica] for replica in living()}
        if not found:
            raise no_live_replica()
        return found

    def handle(self, reply: Any) -> None:
        waiting = self._waiting.get(reply.id)
        if waiting is None or reply.id not in waiting.missing:
            return
        waiting.replies[waiting.missing.pop(reply.id)] = reply
        waiting.check()

    def lost(self, replica: Replica) -> None:
        for request_id, waiting in self._waiting.items():
            if waiting.missing.get(request_id) is replica:
                del waiting.missing[request_id]
                waiting.check()

    def fail_all(self, error: HeadraceError) -> None:
        """The engine is gone: fail all calls, and every later one, with `error`."""
        self._error = error
        for waiting in self._waiting.values():
            if not waiting.done.done():
                waiting.done.set_exception(error)
