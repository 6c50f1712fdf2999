"""RMSNorm (B. Zhang and R. Sennrich, 2019) and LayerNorm (J. Ba, J. Kiros and G. Hinton, 2016). Run in the thread that runs the model."""

from collections.abc import Iterator
from typing import cast

import torch

from headrace import kernels
from headrace.layers.weight import Kept, Parts, Placement, Weight


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (weight + unit_offset).

    unit_offset: 1 if the checkpoint stores the weight minus one (Gemma).
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
        """float32[size], the factor including the offset."""
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


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight (+ bias)."""

    def __init__(self, size: int, eps: float, placement: Placement, *, bias: bool = True) -> None:
        self._size = size
        self._eps = eps
        self._device = placement.device
        self._has_bias = bias
        self._weight: torch.Tensor
        self._bias: torch.Tensor | None = None

    @property
    def parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias, float32[size] each."""
        return self._weight, self._bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, size] -> [rows, size]. residual: becomes residual + x in place, and that is normalised."""
        return kernels.layer_norm(x, self._weight, self._bias, self._eps, residual)

    def weights(self, prefix: str) -> Iterator[Weight]:
        """`<prefix>.weight`, and `.bias` where there is one."""
        keepers = (self,)
        shape = (self._size,)
        yield Weight(
            f"{prefix}.weight", shape, self._load_weight, lambda: self._weight, "ones", keepers=keepers, part="weight"
        )
        if self._has_bias:
            yield Weight(
                f"{prefix}.bias", shape, self._load_bias, self._read_bias, "zeros", keepers=keepers, part="bias"
            )

    def kept(self) -> Kept:
        """Weight and bias."""
        return {"weight": self._weight, "bias": self._bias}

    def restore(self, kept: Kept) -> None:
        """See `Keeper`."""
        self._weight = cast(torch.Tensor, kept["weight"])
        self._bias = cast("torch.Tensor | None", kept["bias"])

    def staged(self, parts: Parts) -> Kept:
        """See `Keeper`."""
        return {**self.kept(), **{part: self._own(cast(torch.Tensor, tensor)) for part, tensor in parts.items()}}

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self._device, dtype=torch.float32, copy=True)

    def _load_weight(self, tensor: torch.Tensor) -> None:
        self._weight = self._own(tensor)

    def _load_bias(self, tensor: torch.Tensor) -> None:
        self._bias = self._own(tensor)

    def _read_bias(self) -> torch.Tensor:
        assert self._bias is not None
        return self._bias
