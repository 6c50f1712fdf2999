"""RMSNorm (B. Zhang and R. Sennrich, 2019). Runs in the thread that runs the model."""

from collections.abc import Iterator
from typing import cast

import torch

from headrace import kernels
from headrace.layers.weight import Kept, Parts, Placement, Weight


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (weight + unit_offset).

    unit_offset: 1 where the checkpoint stores the weight minus one (Gemma).
    """

    def __init__(self, size: int, eps: float, placement: Placement, *, unit_offset: float = 0.0) -> None:
        self._size = size
        self._eps = eps
        self._placement = placement
        self._offset = unit_offset
        self._stored: torch.Tensor
        self._weight: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        """float32[size], the factor as it is applied."""
        return self._weight

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, size] -> [rows, size]. residual: becomes residual + x in place, and that is normalised."""
        return kernels.rms_norm(x, self._weight, self._eps, residual)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads, size], each head normalised alone -> the same shape, contiguous."""
        return kernels.rms_norm(x.reshape(-1, self._size), self._weight, self._eps).view(x.shape)

    def weights(self, prefix: str) -> Iterator[Weight]:
        """`<prefix>.weight`."""
        init = "zeros" if self._offset else "ones"
        yield Weight(
            f"{prefix}.weight",
            (self._size,),
            self._load,
            lambda: self._stored,
            init=init,  # type: ignore[arg-type]
            keepers=(self,),
            part="weight",
        )

    def kept(self) -> Kept:
        """The weight as it is stored."""
        return {"stored": self._stored}

    def restore(self, kept: Kept) -> None:
        """See `Keeper`."""
        self._stored = cast(torch.Tensor, kept["stored"])
        self._weight = self._stored + self._offset if self._offset else self._stored

    def staged(self, parts: Parts) -> Kept:
        """See `Keeper`."""
        tensor = cast(torch.Tensor, parts["weight"])
        return {"stored": tensor.to(device=self._placement.device, dtype=torch.float32, copy=True)}

    def _load(self, tensor: torch.Tensor) -> None:
        self.restore(self.staged({"weight": tensor}))
