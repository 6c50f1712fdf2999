"""Control operations as awaitable calls: a request with an id goes out, replies with that id come back.

Owns the ids and the waiters. Used by the tokenizer manager, in its event loop only.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from headrace.errors import ExecutionError, HeadraceError


class Reply(Protocol):
    """A reply names its request."""

    @property
    def id(self) -> int:
        """The request's id."""


R = TypeVar("R", bound=Reply)


@dataclass(slots=True)
class _Waiting(Generic[R]):
    """Replies to one request so far."""

    done: "asyncio.Future[list[R]]"
    num_wanted: int
    replies: list[R] = field(default_factory=list)


class Communicator(Generic[R]):
    """Asks `fan_out()` processes (the send function reaches them all) and gathers their replies."""

    def __init__(self, name: str, fan_out: Callable[[], int] = lambda: 1) -> None:
        self._name = name
        self._fan_out = fan_out
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Waiting[R]] = {}

    async def call(self, send: Callable[[int], None], timeout_s: float, num_wanted: int | None = None) -> list[R]:
        """Send a request with a fresh id and wait for all replies, in the order of their arrival.

        num_wanted: how many, when `send` does not reach all.
        Raises ExecutionError when they do not all come within `timeout_s` seconds, or `fail_all`'s error.
        """
        request_id = next(self._ids)
        waiting = _Waiting[R](asyncio.get_running_loop().create_future(), num_wanted or self._fan_out())
        self._waiting[request_id] = waiting
        try:
            send(request_id)
            return await asyncio.wait_for(waiting.done, timeout_s)
        except TimeoutError:
            raise ExecutionError(f"{self._name}: no answer from the engine within {timeout_s:g} s") from None
        finally:
            del self._waiting[request_id]

    def handle(self, reply: R) -> None:
        """Take a reply. One that nobody waits for any more is dropped."""
        waiting = self._waiting.get(reply.id)
        if waiting is None or waiting.done.done():
            return
        waiting.replies.append(reply)
        if len(waiting.replies) == waiting.num_wanted:
            waiting.done.set_result(waiting.replies)

    def fail_all(self, error: HeadraceError) -> None:
        """Every waiter gets `error`."""
        for waiting in self._waiting.values():
            if not waiting.done.done():
                waiting.done.set_exception(error)
