"""int8-rotated: int8 of rotated weights, what `int8` rounds to. Activations have no large elements then that coarsen their group. Runs in the
thread that loads the model."""

import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.rotation import rotated_weights
from headrace.layers.quantization.base import register
from headrace.layers.quantization.int8 import Int8


@register
class Int8Rotated(Int8):
    """See the module."""

    name = "int8-rotated"

    def nearest(self, weight: torch.Tensor) -> QuantizedMatrix:
        """See `IntegerFormat`. scale = largest magnitude of a group of a rotated row / 127."""
        return super().nearest(rotated_weights(weight))
