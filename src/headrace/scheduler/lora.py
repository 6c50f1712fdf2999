"""Loads and unloads adapters beside the scheduler's loop.

Owns a thread, in which adapters are read while the loop goes on, the limit of its time, and the adapters that are to go once nothing uses
them. Does not know their names, nor what is in them. Called by the scheduler's thread.
"""

import math
import queue
import threading
from collections.abc import Callable

from headrace.errors import HeadraceError, ModelError
from headrace.log import get_logger
from headrace.messages.channel import Sender
from headrace.messages.lora import Adapters, LoadLoraReq, LoraReply, UnloadLoraReq
from headrace.scheduler.state import SchedulerState

logger = get_logger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""How long the end waits for what is being read."""

Task = tuple[LoadLoraReq | UnloadLoraReq, Callable[[], str]]


class Lane:
    """A thread that does one task after the other. A daemon: a file system that hangs must not keep the process from ending."""

    def __init__(self, clock: Callable[[], float], answer: Callable[["Lane", Task], None]) -> None:
        self.lock = threading.Lock()
        self.task: Task | None = None
        self.begun_s = 0.0
        self.abandoned = False
        self._todo: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._clock = clock
        # Its owner, which holds the worker, is known to the running thread alone: no cycle keeps the model beyond the end.
        self._thread = threading.Thread(target=self._run, args=(answer,), name="lora-loader", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Behind the others."""
        self._todo.put(task)

    def abandon(self) -> list[Task]:
        """Give up on the task that it is at; those behind it, which it will not come to."""
        self.abandoned = True
        rest: list[Task] = []
        while not self._todo.empty():
            task = self._todo.get()
            if task is not None:
                rest.append(task)
        self._todo.put(None)
        return rest

    def close(self) -> None:
        """End after what was submitted; what hangs is left."""
        self._todo.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self, answer: Callable[["Lane", Task], None]) -> None:
        while (task := self._todo.get()) is not None:
            self.begun_s = self._clock()
            self.task = task
            answer(self, task)


class LoraLoader:
    """Every request is answered once, in the order in which they take effect.

    limit_s: how long one adapter may take to read; 0 = any time.
    """

    def __init__(self, adapters: Adapters, replies: Sender, limit_s: float, clock: Callable[[], float]) -> None:
        self._adapters = adapters
        self._replies = replies
        self._limit_s = limit_s or math.inf
        self._clock = clock
        self._lane = Lane(clock, self._do)
        self._leaving: list[UnloadLoraReq] = []

    def load(self, request: LoadLoraReq) -> None:
        """Begin to load; the reply comes from the thread, unless it is to be there at once."""

        def work() -> str:
            return self._adapters.load(request.lora_id, request.path, request.fingerprint)

        if request.at_once:
            self._replies.send(self._outcome((request, work)))
        else:
            self._lane.submit((request, work))

    def unload(self, request: UnloadLoraReq) -> None:
        """Let it go as soon as no request uses it."""
        self._leaving.append(request)

    def advance(self, state: SchedulerState, now_s: float) -> None:
        """Give up on what takes too long, and unload what no request uses any more; once a turn.

        A request that has ended stays in `running` while a step in flight uses it.
        """
        self._give_up(now_s)
        if not self._leaving:
            return
        used = {req.asked.lora_id for req in [*state.running, *state.waiting]}
        for request in [request for request in self._leaving if request.lora_id not in used]:
            self._leaving.remove(request)
            self._lane.submit((request, self._unloading(request.lora_id)))

    def close(self) -> None:
        """End the thread after what it is at."""
        self._lane.close()

    def _unloading(self, lora_id: int) -> Callable[[], str]:
        def work() -> str:
            self._adapters.unload(lora_id)
            return ""

        return work

    def _give_up(self, now_s: float) -> None:
        """What hangs cannot be interrupted: its thread is left alone, and the next tasks get another one."""
        lane = self._lane
        with lane.lock:
            if lane.task is None or now_s < lane.begun_s + self._limit_s:
                return
            request, _ = lane.task
            rest = lane.abandon()
        self._lane = Lane(self._clock, self._do)
        for task in rest:
            self._lane.submit(task)
        why = f"reading it took longer than {self._limit_s:g} s (--weight-update-timeout-s)"
        logger.error("gave up on an adapter: %s", why)
        self._replies.send(LoraReply(request.id, request.lora_id, 500, why))

    def _do(self, lane: Lane, task: Task) -> None:
        """In the lane's thread."""
        reply = self._outcome(task)
        with lane.lock:
            lane.task = None
            if lane.abandoned:
                return
        self._replies.send(reply)

    def _outcome(self, task: Task) -> LoraReply:
        """The boundary of one operation's faults."""
        request, work = task
        try:
            fingerprint = work()
        except HeadraceError as error:
            status_code = 400 if isinstance(error, ModelError) else 500
            return LoraReply(request.id, request.lora_id, status_code, error.message)
        except Exception:
            logger.exception("an adapter could not be loaded or unloaded")
            return LoraReply(request.id, request.lora_id, 500, "internal error")
        return LoraReply(request.id, request.lora_id, fingerprint=fingerprint)
