"""Waits of the leader for its device, which end when the other ranks do not do their part.

A step of several ranks meets the others' on the devices, so a rank that has stopped shows as values that never come. Used by the thread that runs
the steps.
"""

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from headrace.distributed.device_group import DeviceGroup
from headrace.errors import ExecutionError
from headrace.execution.device import Device, Download, Event, Graph

_SHORTEST_NAP_S = 20e-6
_LONGEST_NAP_S = 200e-6
"""Between two looks at the device; each nap is twice the one before. With two steps in flight the device has work meanwhile."""


class WatchedDevice:
    """A `Device` whose waits end when the group is broken, or after `limit_s`: then it breaks up the group and calls `on_broken` with the reason."""

    def __init__(self, device: Device, devices: DeviceGroup, limit_s: float, on_broken: Callable[[str], None]) -> None:
        self._device = device
        self._devices = devices
        self._limit_s = limit_s
        self._on_broken = on_broken

    def upload(self, values: npt.NDArray[np.generic], out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Device`."""
        return self._device.upload(values, out)

    def download(self, values: torch.Tensor) -> Download:
        """See `Device`. Its `wait` raises ExecutionError when the other ranks do not do their part."""
        return _WatchedDownload(self._device.download(values), self)

    def record(self) -> Event:
        """See `Device`."""
        return self._device.record()

    def capture(self, run: Callable[[], None]) -> Graph:
        """See `Device`."""
        return self._device.capture(run)

    def settle(self) -> None:
        """Wait for what is queued, so that reading values does not wait for other ranks any more. Raises ExecutionError like `download`."""
        self.wait_for(self._device.record().is_done)

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


class _WatchedDownload:
    def __init__(self, download: Download, device: WatchedDevice) -> None:
        self._download = download
        self._device = device

    def is_done(self) -> bool:
        return self._download.is_done()

    def wait(self) -> npt.NDArray[np.int64]:
        self._device.wait_for(self._download.is_done)
        return self._download.wait()
