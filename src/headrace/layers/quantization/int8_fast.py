"""int8-fast: symmetric, 8 bits, one scale for a whole row. The fastest and the least exact of 8 bits: an outlier widens the steps of its row
and, among activations, of 128 elements of its token. Runs in the thread that loads the model."""

import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.layers.quantization.base import IntegerFormat, register


@register
class Int8Fast(IntegerFormat):
    """See the module."""

    name = "int8-fast"

    def nearest(self, weight: torch.Tensor) -> QuantizedMatrix:
        """See `IntegerFormat`. scale = largest magnitude of a row / 127."""
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        codes = (weight / scales.clamp(min=1e-30)).round_().clamp_(-127, 127).add_(128)
        return QuantizedMatrix(self.name, codes.to(torch.uint8), scales, None, weight.shape[1])
