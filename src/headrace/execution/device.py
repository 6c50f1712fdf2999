"""What the runner needs from a GPU besides arithmetic: asynchronous copies, events, captured graphs.

Owns the interface (`Device`, `Download`) and its CUDA implementation, also one for the leader of several ranks; that of the tests runs on the CPU.
Does not own what is copied or captured. Used by the thread that runs the steps.

    compute stream   inputs n | layers, sample n | inputs n+1 | layers, sample n+1 | ...
    copy stream                                  | ids of n -> host
    host             launch n+1 (while n runs)   | wait for the ids of n, plan and launch n+2 (while n+1 runs)
"""

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.distributed.device_group import DeviceGroup
from headrace.errors import ExecutionError

ALIGNMENT = 64
"""Alignment of each part of a shared upload, in bytes. Kernels are compiled for aligned addresses."""


@dataclass(frozen=True, slots=True)
class Download:
    """A tensor on its way to the host. is_done: whether the values are there, without waiting. wait: for them, as they were when the download was
    queued."""

    is_done: Callable[[], bool]
    wait: Callable[[], npt.NDArray[np.int64]]


class Device(Protocol):
    """A device that works asynchronously. Work is queued in order; only `Download.wait` waits."""

    def upload(self, values: npt.NDArray[np.generic], out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy `values` to the device, into `out` if given. `values` may be changed at once."""

    def download(self, values: torch.Tensor) -> Download:
        """Queue a copy of int64 `values` to the host, after the work queued so far. `values` must not be written afterwards."""

    def record(self) -> Callable[[], bool]:
        """What tells, without waiting, whether the work queued so far is done."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run `run` to warm up, then capture what it queues; what queues that again, on the same memory. All graphs share one memory pool: capture
        the largest first."""


def upload_parts(device: Device, parts: Sequence[npt.NDArray[np.generic]]) -> list[torch.Tensor]:
    """Copy one-dimensional arrays of the same dtype to the device in one copy; each part is aligned."""
    size = ALIGNMENT // parts[0].dtype.itemsize
    starts = np.cumsum([0, *(-(-len(part) // size) * size for part in parts)])
    joined = np.zeros(int(starts[-1]), dtype=parts[0].dtype)
    for start, part in zip(starts, parts, strict=False):
        joined[start : start + len(part)] = part
    whole = device.upload(joined)
    return [whole[start : start + len(part)] for start, part in zip(starts.tolist(), parts, strict=False)]


class CudaDevice:
    """`Device` over torch's CUDA streams.

    Pinned memory comes from torch's caching host allocator, which reuses a block only when the copies queued from it are done; so each
    step may allocate a new one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()
        self._pool: Any = None

    def upload(self, values: npt.NDArray[np.generic], out: torch.Tensor | None = None) -> torch.Tensor:
        staged = torch.from_numpy(values).pin_memory()
        return staged.to(self._device, non_blocking=True) if out is None else out.copy_(staged, non_blocking=True)

    def download(self, values: torch.Tensor) -> Download:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        done = torch.cuda.Event()
        with torch.cuda.stream(self._copies):
            host.copy_(values, non_blocking=True)
            done.record(self._copies)
        # Its memory must not be reused by later work of the compute stream before the copy is done.
        values.record_stream(self._copies)

        def wait() -> npt.NDArray[np.int64]:
            done.synchronize()
            return host.numpy()

        return Download(done.query, wait)

    def record(self) -> Callable[[], bool]:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.query

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `Device`. https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs"""
        # Libraries and kernels initialise in their first run, with calls that cannot be captured.
        side, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            run()
        current.wait_stream(side)
        if not self._graphs:  # a pool ends with the last graph in it, and cannot be used again
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device during the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        self._graphs.add(graph)
        return graph.replay


_SHORTEST_NAP_S = 20e-6
_LONGEST_NAP_S = 200e-6
"""Between two looks at the device; each nap is twice the one before. With two steps in flight the device has work meanwhile."""


class WatchedDevice:
    """A `Device` whose waits end when the group is broken, or after `limit_s`: then it breaks up the group and calls `on_broken` with the reason.

    A rank that has stopped shows as values that never come.
    """

    def __init__(self, device: Device, devices: DeviceGroup, limit_s: float, on_broken: Callable[[str], None]) -> None:
        self._device = device
        self.upload, self.record, self.capture = device.upload, device.record, device.capture
        self._devices = devices
        self._limit_s = limit_s
        self._on_broken = on_broken

    def download(self, values: torch.Tensor) -> Download:
        """See `Device`. Its `wait` raises ExecutionError when the other ranks do not do their part."""
        download = self._device.download(values)

        def wait() -> npt.NDArray[np.int64]:
            self.wait_for(download.is_done)
            return download.wait()

        return Download(download.is_done, wait)

    def settle(self) -> None:
        """Wait for what is queued, so that reading values does not wait for other ranks any more. Raises ExecutionError like `download`."""
        self.wait_for(self.record())

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done`. Raises ExecutionError."""
        end_s, nap_s = time.monotonic() + self._limit_s, _SHORTEST_NAP_S
        try:
            while not is_done():
                self._devices.check()
                if time.monotonic() > end_s:
                    reason = f"the ranks' devices did not finish a step within {self._limit_s:g} s (--rank-timeout-s)"
                    self._devices.break_up(reason)
                    raise ExecutionError(f"the group of ranks is broken: {reason}")
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        except ExecutionError as error:
            self._on_broken(error.message)
            raise
