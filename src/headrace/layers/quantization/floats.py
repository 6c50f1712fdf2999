"""none: weights stay floats, in the model's dtype. Runs in the thread that loads the model."""

from collections.abc import Sequence

import torch

from headrace import kernels
from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.kernels import PackedLinear
from headrace.layers.quantization.base import WeightFormat, register, stack_floats


@register
class Floats(WeightFormat):
    """See the module."""

    name = "none"

    def pack(
        self, parts: Sequence[torch.Tensor | QuantizedMatrix], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> PackedLinear:
        """See `WeightFormat`."""
        return kernels.pack_linear(stack_floats(parts).to(dtype), bias)
