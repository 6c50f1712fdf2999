"""int4: 4 bits, a scale and a minimum for 32 weights of a row; the grid of GGUF's Q4_1. Runs in the thread that loads the model."""

import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import KERNEL_GROUP
from headrace.layers.quantization import gptq
from headrace.layers.quantization.base import Calibrator, IntegerFormat, register
from headrace.layers.quantization.int4_grid import encode, grid


@register
class Int4(IntegerFormat):
    """See the module."""

    name = "int4"

    def nearest(self, weight: torch.Tensor) -> QuantizedMatrix:
        """See `IntegerFormat`. The grid of each group is the one that `grid` finds."""
        n, k = weight.shape
        groups = -(-k // KERNEL_GROUP)
        padded = torch.nn.functional.pad(weight, (0, groups * KERNEL_GROUP - k)).reshape(n, groups, KERNEL_GROUP)
        scales, minimums = grid(padded)
        codes = encode(padded, scales[..., None], minimums[..., None])
        return QuantizedMatrix(self.name, codes.to(torch.uint8).reshape(n, -1)[:, :k], scales, minimums, KERNEL_GROUP)

    @property
    def calibrator(self) -> Calibrator:
        """Error feedback: 4 bits to nearest cost too much."""
        return gptq.quantize
