"""Reads GGUF blocks as quantised matrices, without converting to floats: Q8_0, Q4_0, Q4_1 and Q4_K.

Owns unpacking their codes. Block layouts: the `block_*` structs of ggml-common.h. Runs in the process that loads the model.
"""

from dataclasses import dataclass

import numpy as np

from headrace.checkpoint.gguf import Bytes, half, k_scales
from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import KERNEL_GROUP, Scheme

# type name -> (scheme, bytes of a block)
_TYPES: dict[str, tuple[Scheme, int]] = {
    "Q8_0": ("int8", 34),
    "Q4_0": ("int4", 18),
    "Q4_1": ("int4", 20),
    "Q4_K": ("int4", 144),
}


@dataclass(frozen=True, slots=True)
class RawBlocks:
    """The stored blocks of a quantised matrix, in the row order of the Hugging Face tensor.

    type_name: of gguf.BLOCK_TYPES. data: uint8[rows, row_bytes]. shape: of the values, (rows, columns).
    """

    type_name: str
    data: Bytes
    shape: tuple[int, ...]


def quantized_matrix(raw: RawBlocks) -> QuantizedMatrix | None:
    """The matrix in the blocks, with the same weights as `gguf.dequantize`; None for a type that no kernel supports."""
    import torch

    if raw.type_name not in _TYPES:
        return None
    scheme, block_bytes = _TYPES[raw.type_name]
    n, k = raw.shape
    blocks: Bytes = np.ascontiguousarray(raw.data).reshape(-1, block_bytes)
    minimums = None
    if raw.type_name == "Q4_K":
        scales, minimums = k_scales(blocks)
        # [n, 4, 32] bytes: the low nibbles are sub-block 2i, the high ones 2i + 1
        packed = blocks[:, 16:].reshape(-1, 4, 1, 32)
        codes = packed >> np.array([0, 4], np.uint8)[:, None] & 15
    elif raw.type_name == "Q8_0":
        scales, codes = half(blocks, 0), blocks[:, 2:] ^ 0x80
    else:
        packed = blocks[:, -16:]
        scales, codes = half(blocks, 0), np.concatenate([packed & 15, packed >> 4], axis=1)
        if raw.type_name == "Q4_1":
            minimums = -half(blocks, 2)

    def by_group(values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).reshape(n, k // KERNEL_GROUP)

    return QuantizedMatrix(
        scheme,
        torch.from_numpy(np.ascontiguousarray(codes)).reshape(n, k),
        by_group(scales),
        None if minimums is None else by_group(minimums),
        KERNEL_GROUP,
    )
