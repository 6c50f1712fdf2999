"""Injected faults, for tests: what stands between a scheduler and its messages, its queue and its worker under --enable-fault-injection.

The scheduler knows nothing of them. `FaultReq`s are taken out of its messages; the fault of an admission happens there, and one of a step is put into
the plan of the step that gives the token, for which `execution/faults.py` has the rest. Runs in the scheduler's thread.
"""

import time
from dataclasses import replace
from typing import Any, cast

from headrace.messages.channel import Message, Receiver, Sender
from headrace.messages.control import FaultReq
from headrace.messages.step import ModelWorkerBatch, NewSequence, StepResult, Worker


class InjectedFaults:
    """The faults that are still to happen."""

    def __init__(self) -> None:
        self._waiting: list[FaultReq] = []

    def receiver(self, receiver: Receiver, to_detokenizer: Sender) -> Receiver:
        """Takes the faults out of what `receiver` gives; those of the detokenizer are passed on."""
        return cast("Receiver", _FaultReceiver(receiver, self._waiting, to_detokenizer))

    def worker(self, worker: Worker) -> Worker:
        """Puts the faults that are due into the plans of `worker`."""
        return cast("Worker", _FaultWorker(worker, self._waiting))

    def on_admission(self, rid: str) -> None:
        """Do the faults of stage admission. Raises RuntimeError."""
        for fault in self._waiting[:]:
            if fault.rid == rid and fault.stage == "admission":
                self._waiting.remove(fault)
                if fault.kind != "sleep":
                    raise RuntimeError("injected fault")
                time.sleep(fault.seconds)


class _FaultReceiver:
    """The rest is the receiver's."""

    def __init__(self, receiver: Receiver, waiting: list[FaultReq], to_detokenizer: Sender) -> None:
        self._receiver = receiver
        self._waiting = waiting
        self._to_detokenizer = to_detokenizer

    def recv_nowait(self) -> Message | None:
        return self._without_faults(self._receiver.recv_nowait())

    def recv(self, timeout_s: float) -> Message | None:
        return self._without_faults(self._receiver.recv(timeout_s))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)

    def _without_faults(self, message: Message | None) -> Message | None:
        while isinstance(message, FaultReq):
            if message.stage == "detokenize":
                self._to_detokenizer.send(message)
            else:
                self._waiting.append(message)
            message = self._receiver.recv_nowait()
        return message


class _FaultWorker:
    """While faults wait, results have no drafts: which of its tokens a step with drafts gives is not known before. The rest is the worker's."""

    def __init__(self, worker: Worker, waiting: list[FaultReq]) -> None:
        self._worker = worker
        self._waiting = waiting
        self._entered: dict[int, NewSequence] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def submit(self, batch: ModelWorkerBatch) -> None:
        self._entered.update((new.seq, new) for new in batch.new)
        if self._waiting and (due := self._due(batch)):
            self._waiting[:] = [fault for fault in self._waiting if fault not in due]
            batch = replace(batch, faults=due)
        self._worker.submit(batch)

    def collect(self) -> StepResult:
        result = self._worker.collect()
        return replace(result, drafts={}) if self._waiting else result

    def _due(self, batch: ModelWorkerBatch) -> tuple[FaultReq, ...]:
        """The faults of the tokens that this step may give, but for those of admissions."""
        given: set[tuple[str, int]] = set()
        ends = (batch.starts + batch.counts).tolist()
        for seq, end, num_logits in zip(batch.seqs.tolist(), ends, batch.num_logits.tolist(), strict=True):
            new = self._entered[seq]
            num_outputs = end - new.num_prompt_tokens
            if num_logits or not new.task.max_new_tokens:
                given |= {(new.rid, num_outputs - before) for before in range(max(1, num_logits))}
        return tuple(fault for fault in self._waiting if (fault.rid, fault.at_token) in given)
