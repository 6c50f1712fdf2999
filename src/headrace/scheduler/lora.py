"""Loads and unloads adapters beside the scheduler's loop.

Owns the thread that reads adapters while the loop continues, its time limit, and the adapters that are to be unloaded once nothing uses
them. Does not know their names or contents. Called by the scheduler's thread.
"""

import math
import queue
import threading
from collections.abc import Callable

from headrace.errors import HeadraceError, ModelError
from headrace.log import get_logger
from headrace.messages.channel import Sender
from headrace.messages.weights import Adapters, LoadLoraReq, LoraReply, UnloadLoraReq
from headrace.scheduler.state import SchedulerState

logger = get_logger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""How long shutdown waits for an adapter that is being read."""

Task = LoadLoraReq | UnloadLoraReq


class Lane:
    """A thread that runs one task after another. A daemon, so that a hanging file system cannot keep the process from exiting."""

    def __init__(self, clock: Callable[[], float], answer: Callable[["Lane", Task], None]) -> None:
        self.lock = threading.Lock()
        self.task: Task | None = None
        self.begun_s = 0.0
        self.abandoned = False
        self._todo: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._clock = clock
        # Only the running thread refers to the owner, which holds the worker: no reference cycle keeps the model alive after shutdown.
        self._thread = threading.Thread(target=self._run, args=(answer,), name="lora-loader", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        self._todo.put(task)

    def abandon(self) -> list[Task]:
        """Give up on the current task. Returns the tasks behind it, which will not run."""
        self.abandoned = True
        rest: list[Task] = []
        while not self._todo.empty():
            task = self._todo.get()
            if task is not None:
                rest.append(task)
        self._todo.put(None)
        return rest

    def close(self) -> None:
        """Stop after the submitted tasks; a hanging task is abandoned."""
        self._todo.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self, answer: Callable[["Lane", Task], None]) -> None:
        while (task := self._todo.get()) is not None:
            self.begun_s = self._clock()
            self.task = task
            answer(self, task)


class LoraLoader:
    """Loads and unloads adapters. Every request is answered once, in the order in which they take effect.

    limit_s: time limit for reading one adapter; 0 = no limit.
    """

    def __init__(self, adapters: Adapters, replies: Sender, limit_s: float, clock: Callable[[], float]) -> None:
        self._adapters = adapters
        self._replies = replies
        self._limit_s = limit_s or math.inf
        self._clock = clock
        self._lane = Lane(clock, self._do)
        self._leaving: list[UnloadLoraReq] = []

    def load(self, request: LoadLoraReq) -> None:
        """Start to load. The reply comes from the thread, or at once if the adapter must be there at once."""
        if request.at_once:
            self._replies.send(self._outcome(request))
        else:
            self._lane.submit(request)

    def unload(self, request: UnloadLoraReq) -> None:
        """Unload as soon as no request uses it."""
        self._leaving.append(request)

    def advance(self, state: SchedulerState, now_s: float) -> None:
        """Give up on loads that take too long, and unload adapters that are no longer used. Called once a turn.

        A request that has ended stays in `running` while a step in flight uses it.
        """
        if self._lane.task is not None:
            self._give_up(now_s)
        if not self._leaving:
            return
        used = {req.asked.lora_id for req in [*state.running, *state.waiting, *state.not_ready]}
        for request in [request for request in self._leaving if request.lora_id not in used]:
            self._leaving.remove(request)
            self._lane.submit(request)

    def close(self) -> None:
        self._lane.close()

    def _give_up(self, now_s: float) -> None:
        """A hanging read cannot be interrupted: abandon its thread and give the next tasks a new one."""
        lane = self._lane
        with lane.lock:
            if lane.task is None or now_s < lane.begun_s + self._limit_s:
                return
            request = lane.task
            rest = lane.abandon()
        why = f"reading it took longer than {self._limit_s:g} s (--weight-update-timeout-s)"
        logger.error("gave up on an adapter: %s", why)
        # Before the tasks behind it can be answered by their thread.
        self._replies.send(LoraReply(request.id, request.lora_id, 500, why))
        self._lane = Lane(self._clock, self._do)
        for task in rest:
            self._lane.submit(task)

    def _do(self, lane: Lane, task: Task) -> None:
        """Runs in the lane's thread."""
        reply = self._outcome(task)
        with lane.lock:
            lane.task = None
            if lane.abandoned:
                return
        self._replies.send(reply)

    def _outcome(self, request: Task) -> LoraReply:
        """Carry it out; an error fails only this operation."""
        fingerprint = ""
        try:
            if isinstance(request, LoadLoraReq):
                fingerprint = self._adapters.load(request.lora_id, request.path, request.fingerprint)
            else:
                self._adapters.unload(request.lora_id)
        except HeadraceError as error:
            status_code = 400 if isinstance(error, ModelError) else 500
            return LoraReply(request.id, request.lora_id, status_code, error.message)
        except Exception:
            logger.exception("an adapter could not be loaded or unloaded")
            return LoraReply(request.id, request.lora_id, 500, "internal error")
        return LoraReply(request.id, request.lora_id, fingerprint=fingerprint)
