"""int8: symmetric, 8 bits, one scale for 32 weights of a row; the grid of GGUF's Q8_0. Runs in the thread that loads the model."""

from typing import ClassVar

import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import KERNEL_GROUP, Scheme
from headrace.layers.quantization.base import IntegerFormat, register


@register
class Int8(IntegerFormat):
    """See the module."""

    name: ClassVar[Scheme] = "int8"

    def nearest(self, weight: torch.Tensor) -> QuantizedMatrix:
        """See `IntegerFormat`. scale = largest magnitude of a group / 127."""
        n, k = weight.shape
        groups = -(-k // KERNEL_GROUP)
        padded = torch.nn.functional.pad(weight, (0, groups * KERNEL_GROUP - k)).reshape(n, groups, KERNEL_GROUP)
        scales = padded.abs().amax(dim=2) / 127
        codes = (padded / scales.clamp(min=1e-30)[:, :, None]).round_().clamp_(-127, 127).add_(128)
        return QuantizedMatrix(self.name, codes.to(torch.uint8).reshape(n, -1)[:, :k], scales, None, KERNEL_GROUP)
