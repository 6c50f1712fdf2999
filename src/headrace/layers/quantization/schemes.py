"""Which scheme is which quantiser, and what to do with parts that differ. Runs in the thread that loads the model."""

from collections.abc import Callable, Sequence

import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix, stack
from headrace.checkpoint.weight_formats import FORMATS, Scheme
from headrace.layers.quantization import int4, int8, int8_fast, int16

_QUANTIZERS: dict[Scheme, Callable[[torch.Tensor], QuantizedMatrix]] = {
    "int16": int16.quantize,
    "int8": int8.quantize,
    "int8-fast": int8_fast.quantize,
    "int4": int4.quantize,
}
# Quantised at a time: the temporaries stay in the processor's cache.
_CHUNK_ELEMENTS = 1 << 18
_ROWS_ON_A_GPU = 4096


def quantize(weight: torch.Tensor, scheme: Scheme) -> QuantizedMatrix:
    """Round a weight [n, k] of any float dtype to nearest on the grid of `scheme`, one of codes, on its device."""
    num_rows = max(1, _CHUNK_ELEMENTS // weight.shape[1]) if weight.device.type == "cpu" else _ROWS_ON_A_GPU
    quantizer = _QUANTIZERS[scheme]
    return stack([quantizer(rows.to(torch.float32)) for rows in weight.split(num_rows)])


def join(parts: Sequence[torch.Tensor | QuantizedMatrix], scheme: Scheme) -> QuantizedMatrix:
    """One matrix with the rows of all parts. Float parts are quantised by `scheme`; quantised ones stay as they are, unless their schemes
    differ: then all of them become int8, the finest grid that files have."""
    matrices = [part if isinstance(part, QuantizedMatrix) else quantize(part, scheme) for part in parts]
    if len({matrix.scheme for matrix in matrices}) > 1:
        matrices = [matrix if matrix.scheme == "int8" else quantize(matrix.dequantize(), "int8") for matrix in matrices]
    return stack(matrices)


def bytes_per_weight(scheme: Scheme, itemsize: int) -> float:
    """Bytes that one weight takes, packed; itemsize: bytes of a float one."""
    packed = FORMATS[scheme].bytes_per_weight
    return float(itemsize) if packed is None else packed
