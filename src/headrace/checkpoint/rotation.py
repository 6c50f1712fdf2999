"""The rotation of weights that are rounded to 8 bits: a Walsh-Hadamard transform in blocks of a row.

What a layer multiplies is rotated as its weights were, so their product stays what it was, while the large elements that would coarsen
the steps of a whole group are spread over a block: S. Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (2024);
A. Tseng et al., "QuIP#: Even Better LLM Quantization with Hadamard Incoherence and Lattice Codebooks" (2024). Owns the transform in
torch; csrc/cpu/rotation.h has the same operations in the same order, so the bits are the same. torch is imported when it is used.
Runs in whichever process loads the model.
"""

from typing import TYPE_CHECKING

from headrace.checkpoint.weight_formats import KERNEL_GROUP, WIDE_GROUP

if TYPE_CHECKING:
    import torch


def rotation_block(k: int) -> int:
    """Elements of a row of k that are mixed: the largest power of two up to WIDE_GROUP that divides k; 1, none, below KERNEL_GROUP."""
    power = k & -k
    return 1 if power < KERNEL_GROUP else min(power, WIDE_GROUP)


def walsh_hadamard(x: "torch.Tensor", block: int) -> "torch.Tensor":
    """x float32[..., k] in blocks of `block` elements, each times a matrix of 1 and -1. Twice is times the block.

    block: a power of two that divides k.
    """
    import torch

    # An element of all blocks side by side: the sums run over contiguous memory.
    columns = x.reshape(-1, block).T.contiguous()
    half = 1
    while half < block:
        halves = (block // (2 * half), 2, half, columns.shape[1])
        a, b = columns.view(halves).unbind(1)
        columns = torch.empty_like(columns)
        sums, differences = columns.view(halves).unbind(1)
        torch.add(a, b, out=sums)
        torch.sub(a, b, out=differences)
        half *= 2
    return columns.T.contiguous().view(x.shape)


def rotated_rows(x: "torch.Tensor") -> "torch.Tensor":
    """What weights that were rotated multiply, float32[..., k] as x is."""
    return walsh_hadamard(x, rotation_block(x.shape[-1]))


def rotated_weights(weight: "torch.Tensor") -> "torch.Tensor":
    """The weights whose products with `rotated_rows` are those of `weight`, float32[n, k], with the rows as they were: up to rounding."""
    block = rotation_block(weight.shape[-1])
    return walsh_hadamard(weight, block) / block


def unrotated_weights(rotated: "torch.Tensor") -> "torch.Tensor":
    """The weights that `rotated_weights` rotated, up to rounding."""
    return rotated_rows(rotated)
