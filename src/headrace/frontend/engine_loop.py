"""The loop that receives the engine's messages.

Owns its thread, and the reason why the engine has failed. Each kind of message has a handler elsewhere. Lives in the event loop
that first uses it; `is_here` may be called from any thread.
"""

import asyncio
import threading
from collections.abc import Callable

from headrace.errors import ExecutionError
from headrace.frontend.engine_link import EngineLink
from headrace.frontend.replica import no_live_replica
from headrace.log import get_logger
from headrace.messages.channel import Message, Receiver
from headrace.messages.dispatch import TypeBasedDispatcher
from headrace.metrics.watchdog import Watchdog

logger = get_logger(__name__)


class EngineLoop:
    """See the module docstring.

    handlers: by kind of message. failure: why the engine has failed; None while it works. on_broken: set by the owner; called in the event
    loop when a handler has failed and no more messages are received.
    """

    def __init__(self, receiver: Receiver, link: EngineLink, watchdog: Watchdog) -> None:
        self.handlers = TypeBasedDispatcher()
        self.failure: str | None = None
        self.on_broken: Callable[[], None] = lambda: None
        self._receiver = receiver
        self._link = link
        self._watchdog = watchdog
        self._thread = -1
        self._asyncio_loop: asyncio.AbstractEventLoop | None = None

    @property
    def asyncio_loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that it runs in; None before `start`."""
        return self._asyncio_loop

    @property
    def dropped_frames(self) -> int:
        """Number of malformed frames received from the engine."""
        return self._receiver.dropped_frames

    @property
    def num_stalls(self) -> int:
        """How often the loop was blocked for too long."""
        return self._watchdog.num_stalls

    def start(self) -> None:
        """Start receiving messages in the running event loop. Later calls do nothing."""
        if self._asyncio_loop is None:
            self._asyncio_loop = asyncio.get_running_loop()
            self._thread = threading.get_ident()
            self._receiver.listen(self._handle)
            self._watchdog.start()

    def close(self) -> None:
        """Stop receiving and close the receiver: in the loop. Idempotent."""
        self._receiver.close()
        self._watchdog.stop()

    def check(self) -> None:
        """Raises ExecutionError when the engine has failed."""
        if self.failure is not None:
            raise ExecutionError(self.failure)

    def check_serving(self) -> None:
        """Check that the engine can be asked, and make sure that its replies are received.

        Raises ExecutionError when it has failed, CapacityError while it is being restarted.
        """
        self.check()
        if not self._link.is_serving:
            raise no_live_replica()
        self.start()

    def is_here(self, method: Callable[..., None], *args: object) -> bool:
        """Whether this is the loop's thread (or there is none yet). If not, `method` is scheduled to be called there."""
        loop = self._asyncio_loop
        if loop is None or threading.get_ident() == self._thread:
            return True
        if not loop.is_closed():
            loop.call_soon_threadsafe(method, *args)
        return False

    def _handle(self, message: Message) -> None:
        self._watchdog.begin()
        try:
            self.handlers(message)
        except Exception:
            logger.exception("receiving engine messages failed")
            self._receiver.close()
            self.on_broken()
        self._watchdog.end()
