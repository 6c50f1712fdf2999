"""The trainer's side: rank 0 of a group, from which engines take weights.

Owns the group and the order of broadcasts. How the engine is told of them (HTTP, `Engine`) is the trainer's: `describe` gives the fields
of `update_weights_from_distributed`. Runs in the trainer's process; both sides of each call must run at the same time.
"""

from collections.abc import Sequence

import torch

from headrace.weight_sync.group import Backend, WeightGroup

NamedTensors = Sequence[tuple[str, torch.Tensor]]


def describe(named_tensors: NamedTensors) -> tuple[list[str], list[str], list[list[int]]]:
    """(names, dtypes, shapes) of tensors in the order in which they will be sent."""
    return (
        [name for name, _ in named_tensors],
        [str(tensor.dtype).removeprefix("torch.") for _, tensor in named_tensors],
        [list(tensor.shape) for _, tensor in named_tensors],
    )


class WeightSender:
    """Rank 0. Making one waits until the engines have joined. Raises ExecutionError when they do not come in time."""

    def __init__(
        self,
        address: str,
        port: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: Backend = "gloo",
        timeout_s: float = 300.0,
    ) -> None:
        self._group = WeightGroup(address, port, 0, world_size, group_name, backend, timeout_s)

    def send(self, named_tensors: NamedTensors, *, bucketed: bool = False) -> None:
        """Broadcast them, one after the other or as one. Raises ExecutionError when an engine does not take them in time."""
        tensors = [tensor.detach().to(self._group.device).contiguous() for _, tensor in named_tensors]
        if bucketed:
            tensors = [torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])]
        for tensor in tensors:
            self._group.broadcast(tensor)

    def close(self) -> None:
        self._group.close()
