"""RMSNorm (B. Zhang and R. Sennrich, 2019) and LayerNorm (J. Ba, J. Kiros and G. Hinton, 2016). Run in the thread that runs the model."""

from collections.abc import Iterator

import torch

from headrace import kernels
from headrace.layers.weight import Placement, TensorKeeper, Weight


class RMSNorm(TensorKeeper):
    """x / sqrt(mean(x^2) + eps) * (weight + unit_offset). unit_offset: 1 if the checkpoint stores the weight minus one (Gemma)."""

    def __init__(self, size: int, eps: float, placement: Placement, *, unit_offset: float = 0.0) -> None:
        super().__init__(placement)
        self._size = size
        self.eps = eps
        self._offset = unit_offset
        self._weight: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        """float32[size], the factor including the offset."""
        return self._weight

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, size] -> [rows, size]. residual: becomes residual + x in place, and that is normalised."""
        return kernels.rms_norm(x, self._weight, self.eps, residual)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads, size], each head normalised alone -> the same shape, contiguous."""
        return kernels.rms_norm(x.reshape(-1, self._size), self._weight, self.eps).view(x.shape)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield self.weight_of("weight", f"{prefix}.weight", (self._size,), "zeros" if self._offset else "ones")

    def changed(self) -> None:
        stored = self.tensors["weight"]
        self._weight = stored + self._offset if self._offset else stored


class LayerNorm(TensorKeeper):
    """(x - mean) / sqrt(variance + eps) * weight (+ bias)."""

    def __init__(self, size: int, eps: float, placement: Placement, *, bias: bool = True) -> None:
        super().__init__(placement)
        self._size = size
        self._eps = eps
        self._has_bias = bias

    @property
    def parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias, float32[size] each."""
        return self.tensors["weight"], self.tensors.get("bias")

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, size] -> [rows, size]. residual: becomes residual + x in place, and that is normalised."""
        return kernels.layer_norm(x, *self.parameters, self._eps, residual)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield self.weight_of("weight", f"{prefix}.weight", (self._size,), "ones")
        if self._has_bias:
            yield self.weight_of("bias", f"{prefix}.bias", (self._size,), "zeros")
