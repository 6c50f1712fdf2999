"""bfloat16: weights and what they multiply in bfloat16, sums in float32. Runs in the thread that loads the model."""

from collections.abc import Sequence

import torch

from headrace import kernels
from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.kernels import PackedLinear
from headrace.layers.quantization.base import WeightFormat, register, stack_floats


@register
class Bfloat16(WeightFormat):
    """See the module. A model whose dtype is bfloat16 keeps its weights as they are."""

    name = "bfloat16"

    def pack(
        self, parts: Sequence[torch.Tensor | QuantizedMatrix], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> PackedLinear:
        """See `WeightFormat`."""
        return kernels.pack_linear(stack_floats(parts), bias, rounded=True)
