"""Unpacks weights from the layouts in which they were packed.

Owns the choice of the function that reads a layout. Does not own the layouts (`packing`, `quantized_packing`, `torch_quantized`). Runs in the
thread that loads, updates or exports a model.
"""

import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix, unrotated_weights
from headrace.kernels.packing import QUANTIZED_LAYOUTS, ROUNDINGS, PackedLinear
from headrace.kernels.quantized_packing import quantized_matrix, unpack_quantized
from headrace.kernels.torch_quantized import unpack_fp8, unpack_int4


def unpack_linear(packed: PackedLinear) -> torch.Tensor:
    """The weight [n, k] that was packed, as the kernels compute with it."""
    if packed.layout in QUANTIZED_LAYOUTS:
        return unpack_quantized(packed)
    if packed.layout == "native_bf16":
        return packed.data.permute(0, 3, 2, 1).reshape(-1, packed.k)[: packed.n]
    if packed.layout == "native_bf16_pairs":
        return packed.data.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[: packed.n, : packed.k]
    if packed.layout == "native_f32":
        return packed.data.permute(0, 2, 1).reshape(-1, packed.k)[: packed.n]
    if packed.layout == "torch_fp8":
        return unpack_fp8(packed)
    if packed.layout == "torch_int4":
        return unpack_int4(packed)
    if packed.layout in ROUNDINGS and ROUNDINGS[packed.layout].rotated:
        return unrotated_weights(packed.data)
    return packed.data


def packed_rows(packed: PackedLinear, rows: slice) -> torch.Tensor | QuantizedMatrix | None:
    """Rows of the weight in a form that packs to the same bits again; None if the layout does not allow that.

    Integer weights are returned as codes, because rounding them again might give other codes.
    """
    if packed.layout == "torch_int4":
        return None
    if packed.layout in QUANTIZED_LAYOUTS:
        return quantized_matrix(packed).rows(rows.start, rows.stop)
    return unpack_linear(packed)[rows]
