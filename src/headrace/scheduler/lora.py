"""Loads and unloads adapters beside the scheduler's loop.

Owns a thread, in which adapters are read while the loop goes on, and the adapters that are to go once nothing uses them. Does not know their
names, nor what is in them. Called by the scheduler's thread.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from headrace.errors import HeadraceError, ModelError
from headrace.log import get_logger
from headrace.messages.channel import Sender
from headrace.messages.lora import LoadLoraReq, LoraReply, UnloadLoraReq
from headrace.messages.step import Worker
from headrace.scheduler.state import SchedulerState

logger = get_logger(__name__)


class LoraLoader:
    """Every request is answered once, in the order in which they take effect."""

    def __init__(self, worker: Worker, replies: Sender) -> None:
        self._worker = worker
        self._replies = replies
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lora-loader")
        self._leaving: list[UnloadLoraReq] = []

    def load(self, request: LoadLoraReq) -> None:
        """Begin to load; the reply comes from the thread, unless it is to be there at once."""

        def work() -> None:
            self._worker.load_lora(request.lora_id, request.path)

        if request.at_once:
            self._answer(request, work)
        else:
            self._thread.submit(self._answer, request, work)

    def unload(self, request: UnloadLoraReq) -> None:
        """Let it go as soon as no request uses it."""
        self._leaving.append(request)

    def unload_idle(self, state: SchedulerState) -> None:
        """Unload what no request uses any more; once a turn. A request that has ended stays in `running` while a step in flight uses it."""
        if not self._leaving:
            return
        used = {req.asked.lora_id for req in [*state.running, *state.waiting]}
        for request in [request for request in self._leaving if request.lora_id not in used]:
            self._leaving.remove(request)
            self._thread.submit(self._answer, request, self._unloading(request.lora_id))

    def close(self) -> None:
        """End the thread after what it is at."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _unloading(self, lora_id: int) -> Callable[[], None]:
        return lambda: self._worker.unload_lora(lora_id)

    def _answer(self, request: LoadLoraReq | UnloadLoraReq, work: Callable[[], None]) -> None:
        """The boundary of one operation's faults."""
        try:
            work()
            reply = LoraReply(request.id, request.lora_id)
        except HeadraceError as error:
            status_code = 400 if isinstance(error, ModelError) else 500
            reply = LoraReply(request.id, request.lora_id, status_code, error.message)
        except Exception:
            logger.exception("an adapter could not be loaded or unloaded")
            reply = LoraReply(request.id, request.lora_id, 500, "internal error")
        self._replies.send(reply)
