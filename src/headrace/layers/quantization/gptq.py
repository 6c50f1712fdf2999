"""int4 with error feedback: each column's rounding error is made good, as far as the inputs seen allow, by the columns after it.

Source: E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022), algorithm 1, with
the grid of each group found when its turn comes, from the weights as corrected so far. Runs in the thread that quantises a checkpoint.
"""

import torch

from headrace.checkpoint.quantized_matrix import KERNEL_GROUP, QuantizedMatrix
from headrace.layers.quantization.int4 import encode, grid

_DAMPING = 0.01  # of the mean of the diagonal, added to it
_BLOCK = 4 * KERNEL_GROUP  # columns whose corrections of the rest are applied in one product


def quantize(weight: torch.Tensor, hessian: torch.Tensor) -> QuantizedMatrix:
    """float32[n, k] on the grid of int4; k is a multiple of 32.

    hessian: float32[k, k], the sum of x x^T over inputs x of the layer. Inputs that were never seen leave their weights rounded to nearest.
    """
    n, k = weight.shape
    assert k % KERNEL_GROUP == 0, k
    rest = weight.T.contiguous()  # [k, n]: a column of the weight is contiguous
    feedback = _feedback(hessian)
    codes = torch.empty(k, n, dtype=torch.uint8)
    scales, minimums = torch.empty(k // KERNEL_GROUP, n), torch.empty(k // KERNEL_GROUP, n)
    importance = hessian.diagonal().clamp(min=1e-12)
    for begin in range(0, k, _BLOCK):
        end = min(begin + _BLOCK, k)
        errors = torch.empty(end - begin, n)
        for column in range(begin, end):
            group = column // KERNEL_GROUP
            if column % KERNEL_GROUP == 0:
                columns = slice(column, column + KERNEL_GROUP)
                scales[group], minimums[group] = grid(rest[columns].T, importance[columns])
            scale, minimum = scales[group], minimums[group]
            code = encode(rest[column], scale, minimum)
            codes[column] = code
            error = (rest[column] - (code * scale - minimum)) / feedback[column, column]
            errors[column - begin] = error
            rest[column + 1 : end].addr_(feedback[column, column + 1 : end], error, alpha=-1.0)
        rest[end:].addmm_(feedback[begin:end, end:].T, errors, alpha=-1.0)
    return QuantizedMatrix("int4", codes.T.contiguous(), scales.T.contiguous(), minimums.T.contiguous(), KERNEL_GROUP)


def _feedback(hessian: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of the damped Hessian, float32[k, k]."""
    damped = hessian.double()
    diagonal = damped.diagonal()
    # A dead input has a zero row: its damping alone keeps the matrix regular.
    diagonal.add_(_DAMPING * diagonal.mean().clamp(min=1e-12))
    lower = torch.linalg.cholesky(damped)
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).float()
