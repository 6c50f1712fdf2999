"""fp8: weights and activations in float8_e4m3, with a scale a row; on GPUs. Runs in the thread that loads the model."""

from collections.abc import Sequence

import torch

from headrace import kernels
from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.kernels import PackedLinear
from headrace.kernels.torch_quantized import fp8_per_row, pack_fp8, why_not_fp8
from headrace.layers.quantization.base import WeightFormat, register, stack_floats


@register
class Fp8(WeightFormat):
    """See the module. A weight whose sizes the product does not take stays float."""

    name = "fp8"

    def pack(
        self, parts: Sequence[torch.Tensor | QuantizedMatrix], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> PackedLinear:
        """See `WeightFormat`."""
        weight = stack_floats(parts)
        if why_not_fp8(*weight.shape):
            return kernels.pack_linear(weight.to(dtype), bias)
        return pack_fp8(weight, bias, fp8_per_row(weight.device))
