"""int8-fast: symmetric, 8 bits, one scale for a whole row of rotated weights. Rotated, neither a row nor 128 elements of a token have outliers
that would widen their steps. Runs in the thread that loads the model."""

import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.rotation import rotated_weights
from headrace.layers.quantization.base import IntegerFormat, register


@register
class Int8Fast(IntegerFormat):
    """See the module."""

    name = "int8-fast"

    def nearest(self, weight: torch.Tensor) -> QuantizedMatrix:
        """See `IntegerFormat`. scale = largest magnitude of a rotated row / 127."""
        rotated = rotated_weights(weight)
        scales = rotated.abs().amax(dim=1, keepdim=True) / 127
        codes = (rotated / scales.clamp(min=1e-30)).round_().clamp_(-127, 127).add_(128)
        return QuantizedMatrix(self.name, codes.to(torch.uint8), scales, None, weight.shape[1])
