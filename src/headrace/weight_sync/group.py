"""A process group between a trainer (rank 0) and engines, apart from any group that either has of its own.

Owns the joining and the broadcasts. Only raw tensors cross it: no object is ever pickled. The keys in the store are those that
`torch.distributed` uses for a group of this name that was made with a store of its own, so a trainer may join by that way instead
(torch/distributed/distributed_c10d.py, `_new_process_group_helper`). Used by one thread at a time.
"""

import threading
import time
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from headrace.errors import ExecutionError
from headrace.log import get_logger

log = get_logger(__name__)

Backend = Literal["gloo", "nccl"]

CANCEL_POLL_S = 0.2
"""How often a wait for a broadcast looks whether it was cancelled."""


class WeightGroup:
    """A joined group. timeout_s: for joining, and for each broadcast. After a failure it is of no use any more: close it.

    What answers at its address may be anything, so no error repeats what it sent: the log has that.
    """

    def __init__(
        self, address: str, port: int, rank: int, world_size: int, name: str, backend: Backend, timeout_s: float
    ) -> None:
        """Waits for all ranks. Raises ExecutionError when they do not come in time, or when the backend is not here."""
        self.backend = backend
        self.timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        host = f"[{address}]" if ":" in address else address
        try:
            store, _, _ = next(rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=timeout))
            store.set_timeout(timeout)
            device = "cpu" if backend == "gloo" else "cuda"
            for prefix in (name, f"{name}/", f"{device}/"):
                store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
            self._group: Any = self._make(store, rank, world_size, timeout)
        except (RuntimeError, ValueError, OSError) as error:
            log.warning("joining the group %r at %s:%d failed: %s", name, address, port, _first_line(error))
            raise ExecutionError(
                f"the group {name!r} of {world_size} ranks could not be joined within {timeout_s:g} s: the trainer did not join, or "
                "something else answers at that address; see the server's log"
            ) from None

    def _make(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
        if self.backend == "gloo":
            return dist.ProcessGroupGloo(store, rank, world_size, timeout=timeout)
        if not dist.is_nccl_available() or not torch.cuda.is_available():
            raise ExecutionError("backend nccl needs a GPU and a torch with NCCL; use gloo")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world_size, options)

    @property
    def device(self) -> torch.device:
        """Where tensors must be to be broadcast."""
        return torch.device("cpu" if self.backend == "gloo" else "cuda")

    def broadcast(self, tensor: torch.Tensor, cancelled: threading.Event | None = None) -> None:
        """From rank 0's `tensor` into everybody else's, which must be contiguous, of the same dtype and number of elements.

        cancelled: ends the wait when it is set, on gloo within CANCEL_POLL_S. Raises ExecutionError then, when the tensor does not come in
        time, and when a peer is gone.
        """
        if tensor.numel() == 0:
            return
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=self.timeout_s)
        try:
            work = self._group.broadcast([tensor], options)
            if self.backend == "gloo" and cancelled is not None:
                self._wait(work, cancelled)
            else:
                work.wait(options.timeout)
        except (RuntimeError, ValueError) as error:
            log.warning("a broadcast failed: %s", _first_line(error))
            raise ExecutionError(
                f"a broadcast did not complete within {self.timeout_s:g} s, or a peer is gone; see the server's log"
            ) from None

    def _wait(self, work: Any, cancelled: threading.Event) -> None:
        """In short turns: a wait in torch cannot be interrupted. Raises ExecutionError when cancelled, RuntimeError when it fails."""
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            try:
                work.wait(timedelta(seconds=CANCEL_POLL_S))
                return
            except RuntimeError:
                if work.is_completed() or time.monotonic() >= deadline_s:
                    raise
            if cancelled.is_set():
                raise ExecutionError("the broadcast was cancelled")

    def close(self) -> None:
        """Leave. Nothing else may be done with it."""
        if self.backend == "nccl":
            self._group.abort()
        self._group = None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
