"""Calls into the event loop of an `Engine`, from any thread and from any other event loop.

Owns the loop and its thread. Does not know what is called.
"""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from headrace.errors import ExecutionError

T = TypeVar("T")


class EngineCalls:
    """A running loop. is_closed: set by the owner; calls are refused from then on."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.is_closed = False
        self._thread = threading.Thread(target=self.loop.run_forever, name="engine loop", daemon=True)
        self._thread.start()
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is the child of a fork, which has no thread that runs the loop."""
        return os.getpid() != self._pid

    def end(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`; the loop goes on for calls that end now."""
        asyncio.run_coroutine_threadsafe(last, self.loop).result()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def call(self, work: Callable[[], T]) -> T:
        async def run() -> T:
            return work()

        return self.result(run())

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin to run it in the loop. Raises ExecutionError after the end and in a fork."""
        if self.is_forked:
            coroutine.close()
            raise ExecutionError(
                f"this Engine belongs to process {self._pid} and cannot be used in its fork, process {os.getpid()}. "
                "Make an Engine after os.fork(), or use HTTP"
            )
        if self.is_closed:
            coroutine.close()
            raise ExecutionError("the engine has been shut down")
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("the engine's own event loop cannot wait for itself; use async_generate elsewhere")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def result(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C while waiting: cancel the call in the engine's loop too. Has no effect on a finished future.
            future.cancel()
            raise

    async def aresult(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Like `result`, in any event loop."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def each(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        try:
            while (item := self.result(_next(items))) is not None:
                yield item
        finally:
            self._abandon(items)

    async def aeach(self, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Like `each`, in any event loop."""
        try:
            while (item := await self.aresult(_next(items))) is not None:
                yield item
        finally:
            self._abandon(items)

    def _abandon(self, items: AsyncGenerator[Any, None]) -> None:
        """Close a generator in its loop without waiting: this may run in any thread, even from garbage collection."""
        if not self.is_closed and not self.is_forked:
            asyncio.run_coroutine_threadsafe(_close(items), self.loop)


async def _next(items: AsyncGenerator[T, None]) -> T | None:
    return await anext(items, None)


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()
