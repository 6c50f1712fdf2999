"""What the layers of ranks exchange that have a device each, through a process group of torch: nccl on GPUs, and gloo in tests, which have none.

Owns the process group, and how the ranks of one host find each other: through a file in a directory that only their user can read. Does not own
their messages, which go through the group of the host. Nothing is pickled, and no global state of torch.distributed is used.

On a GPU nothing here waits in the host: a call is queued in the stream of the steps, in every rank at the same place, and can be captured in a
graph. So a rank that is lost shows in the values that never come (`WatchedDevice`), and by its process. With gloo a call waits, at most
as long as the limit. Used by the thread that runs the steps.

nccl adds in an order of its own, which may depend on the size of a tensor and on how the GPUs are connected; every rank gets the same bits.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch._C import _distributed_c10d as c10d
from torch.distributed import is_nccl_available

from headrace.distributed.base import Group
from headrace.errors import ExecutionError

JOIN_S = 300.0
"""How long a rank waits for the others' connections when it starts."""

CHECK_S = 0.05
"""How often the leader looks whether the others are still there while it waits for them."""

_Result = TypeVar("_Result")

_LOOPBACK = "127.0.0.1"
_NOTHING = torch.empty(0)


class DeviceGroup:
    """The `Collectives` of the ranks of one host. After a call has failed it is of no use any more: all ranks make a new one.

    host: of the same ranks. It is broken up when a call fails here.
    """

    address = None

    def __init__(self, host: Group, store: c10d.Store, resources: ExitStack) -> None:
        """Not yet connected, see `join`. store: of all ranks. resources: what is let go of when it closes."""
        self.rank = host.rank
        self.size = host.size
        self._host = host
        self._store = store
        self._resources = resources
        self._ranks: Any = None

    @classmethod
    def join(
        cls, host: Group, device: torch.device, limit_s: float, check: Callable[[], None] = lambda: None
    ) -> "DeviceGroup":
        """The group of the host's ranks, connected, once each of them has called this. device: this rank's own.

        limit_s: how long a call may wait for another rank. check: called in the leader while it waits; what it raises ends the wait. Raises
        ExecutionError when a rank is lost meanwhile, or cannot be reached.
        """
        with ExitStack() as resources:
            if host.rank == 0:
                folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="headrace-ranks-"))
                host.send(folder.encode())
            else:
                folder = host.receive().decode()
            store = c10d.FileStore(str(Path(folder) / "ranks"), host.size)
            store.set_timeout(timedelta(seconds=JOIN_S))
            group = cls(host, store, resources)
            group.offer("joined", 0)
            if host.rank == 0:
                group.offered("joined", check)
            group._connect(device, limit_s, check)
            group._resources = resources.pop_all()
        return group

    def _connect(self, device: torch.device, limit_s: float, check: Callable[[], None]) -> None:
        """Make the connections, by a first sum; in a thread, since torch waits for the other ranks without looking for them."""
        self._ranks = _checking(check, lambda: _process_group(self._store, self._host, device, limit_s))
        if device.type == "cpu":
            # nccl would wait for the graphs that use it: there it ends with the process.
            self._resources.callback(self._ranks.abort)
        total = _checking(check, lambda: self._sum_of_ones(device))
        if total != self.size:
            raise ExecutionError(f"a sum of {self.size} ones over the ranks' devices was {total:g}")

    def _sum_of_ones(self, device: torch.device) -> float:
        ones = torch.ones(1, device=device)
        self.all_reduce(ones)
        return float(ones)

    def all_reduce(self, x: torch.Tensor) -> None:
        assert x.is_contiguous(), (x.shape, x.stride())
        self._call("allreduce", [x], options=c10d.AllreduceOptions())

    def gather(self, x: torch.Tensor, columns: Sequence[int], out: torch.Tensor | None) -> None:
        """Every rank receives all parts, padded to the widest, in x's dtype."""
        widest, rows = max(columns), x.shape[0]
        own = F.pad(x, (0, widest - x.shape[1])).contiguous()
        parts = torch.empty(self.size, rows, widest, dtype=x.dtype, device=x.device)
        self._call("_allgather_base", parts.view(-1), own.view(-1), options=c10d.AllgatherOptions())
        if out is None:
            return
        begin = 0
        for part, count in zip(parts, columns, strict=True):
            out[:, begin : begin + count].copy_(part[:, :count])
            begin += count

    def broadcast(self, x: torch.Tensor) -> None:
        """The leader's x, contiguous, into everybody else's, of the same shape and dtype."""
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._call("broadcast", [x], options=options)

    def offer(self, name: str, number: int) -> None:
        """Tell the leader a number, once under each name; it asks by `offered`. Does not wait."""
        self._store.set(f"{name}/{self.rank}", str(number))

    def offered(self, name: str, check: Callable[[], None]) -> list[int]:
        """What each follower has offered; waits for it in the leader, as long as it takes. What `check` raises ends the wait."""
        keys = [f"{name}/{rank}" for rank in range(1, self.size)]
        while not self._store.check(keys):
            check()
            self.check()
            time.sleep(CHECK_S)
        return [int(self._store.get(key)) for key in keys]

    def check(self) -> None:
        """Raises ExecutionError if the host's group is broken. Does not wait."""
        self._host.all_reduce(_NOTHING)  # a sum of nothing only looks

    def break_up(self, reason: str) -> None:
        """Break up the host's group, too; the first reason stays. With nccl, what is queued is left to the end of the process."""
        self._host.break_up(reason)

    def close(self) -> None:
        """Leave: later calls raise ExecutionError, and with gloo those of the others. Idempotent."""
        self._ranks = None
        self._resources.close()

    def _call(self, name: str, *tensors: Any, options: Any) -> None:
        if self._ranks is None:
            raise ExecutionError(f"rank {self.rank} has left its group")
        options.asyncOp = False
        try:
            work = getattr(self._ranks, name)(*tensors, options)
            if work is not None:
                work.wait()  # with nccl the stream waits, not the host
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            reason = f"rank {self.rank} cannot reach the others: {(str(error).splitlines() or ['unknown'])[0][:300]}"
            self.break_up(reason)
            raise ExecutionError(f"the group of ranks is broken: {reason}") from error


def _process_group(store: c10d.Store, host: Group, device: torch.device, limit_s: float) -> Any:
    """nccl's connects with its first call, gloo's at once. Raises ExecutionError if torch cannot make one for this device."""
    limit, store = timedelta(seconds=limit_s), c10d.PrefixStore("collectives", store)
    if device.type == "cpu":
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = limit
        return c10d.ProcessGroupGloo(store, host.rank, host.size, options)
    if not is_nccl_available():
        raise ExecutionError("several ranks on GPUs need a torch with nccl; this one was built without it")
    # The GPUs of a host find each other by its loopback; their data does not go through sockets.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    nccl = c10d.ProcessGroupNCCL.Options()
    nccl._timeout = limit
    return c10d.ProcessGroupNCCL(store, host.rank, host.size, nccl)


def _checking(check: Callable[[], None], act: Callable[[], _Result]) -> _Result:
    """The result of `act`, which runs in a thread that does not keep the process from ending. What `check` raises meanwhile ends the wait."""
    result: Future[_Result] = Future()

    def run() -> None:
        try:
            result.set_result(act())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="connect", daemon=True).start()
    while not wait([result], CHECK_S).done:
        check()
    return result.result()
