"""int16: symmetric, 16 bits, one scale for a whole row. Closer to the float weights than bfloat16 is. Runs in the thread that loads the model."""

import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import MAX_WORDS_NORM, WIDE_GROUP
from headrace.layers.quantization.base import IntegerFormat, register

_ROUNDING = WIDE_GROUP**0.5 / 2
"""What rounding to nearest adds to the norm of a group, at most."""


@register
class Int16(IntegerFormat):
    """See the module."""

    name = "int16"

    def nearest(self, weight: torch.Tensor) -> QuantizedMatrix:
        """See `IntegerFormat`. The 128 elements of a row that have the largest norm, sqrt(sum of squares), get MAX_WORDS_NORM of it."""
        k = weight.shape[1]
        groups = torch.nn.functional.pad(weight, (0, -k % WIDE_GROUP)).unflatten(1, (-1, WIDE_GROUP))
        norms = torch.linalg.vector_norm(groups, dim=2).amax(dim=1, keepdim=True)
        scales = norms / (MAX_WORDS_NORM - 2 * _ROUNDING)
        codes = (weight / scales.clamp(min=1e-30)).round_()
        return QuantizedMatrix(self.name, codes.to(torch.int16), scales, None, k)
