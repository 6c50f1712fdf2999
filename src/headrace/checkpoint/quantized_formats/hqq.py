"""HQQ checkpoints: H. Badri, A. Shaji, "Half-Quadratic Quantization" (2023), as https://github.com/mobiusml/hqq stores them in safetensors."""

import math
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.quantized_formats.base import FLOATS, Parts, QuantizedFormat, integers
from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import KERNEL_GROUP
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

_IN_A_WORD = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
"""Codes in a byte, of 3 bits in 32, by bits."""
_INTEGERS = ("U8", "I8", "I16", "I32", "I64", "BOOL")


class HqqFormat(QuantizedFormat):
    """weight = (code - zero) * scale, zero a float. The matrix, row by row, is [groups, group_size] (axis 1) or [group_size, groups] (axis 0);
    W_q packs rows of that far apart, the first in the highest bits of a byte (3 bits: of int32). scale, zero: one a group. shape, nbits,
    group_size, axis: small tensors."""

    suffixes = (
        *("W_q", "scale", "zero", "shape", "axis", "group_size", "nbits"),
        *("quant_scale", "quant_zero", "view_as_float"),
    )
    telling = ("W_q",)
    needed = ("W_q", "scale", "zero", "shape")
    unused = (
        *("packing", "unpack_view_dtype", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config"),
        *("channel_wise", "optimize", "round_zero"),
    )

    def __init__(self, config: dict[str, Any]) -> None:
        own = config.get("quant_config")
        settings = own.get("weight_quant_params", own) if isinstance(own, dict) else None
        self._settings: dict[str, Any] = settings if isinstance(settings, dict) else {}
        bits, size = self._settings.get("nbits", 4), self._settings.get("group_size", 64)
        if bits not in tuple(_IN_A_WORD):
            raise ModelError(
                f"hqq checkpoints of {bits!s:.80} bits are not supported; those of {', '.join(map(str, _IN_A_WORD))} are"
            )
        is_by_row = self._settings.get("axis", 1) == 1 and isinstance(size, int) and size % KERNEL_GROUP == 0
        self.scheme = "int4" if bits <= 4 and is_by_row else "none"
        self.described = f"hqq weights of {bits} bits"

    def shape(self, parts: Parts) -> tuple[int, int]:
        n, k = (int(size) for size in parts.tensor("shape", _INTEGERS, (2,)))
        if n <= 0 or k <= 0:
            raise parts.fault("shape", f"says [{n}, {k}]")
        return n, k

    def read(self, parts: Parts) -> "QuantizedMatrix | torch.Tensor":
        n, k = self.shape(parts)
        bits, axis = self._number(parts, "nbits", 4), self._number(parts, "axis", 1)
        size = self._number(parts, "group_size", 64) or k
        for flag in ("quant_scale", "quant_zero", "view_as_float"):
            if self._number(parts, flag, 0):
                raise ModelError(f"quantised layer {parts.layer}: hqq with {flag} is not supported")
        if bits not in _IN_A_WORD or axis not in (0, 1) or size <= 0 or n * k % size:
            raise ModelError(
                f"quantised layer {parts.layer}: hqq of {bits} bits, axis {axis}, groups of {size} in [{n}, {k}]"
            )
        groups = n * k // size
        rows, columns = (groups, size) if axis == 1 else (size, groups)
        codes = self._codes(parts, bits, rows, columns)
        each = (groups, 1) if axis == 1 else (1, groups)
        scales, zeros = parts.floats("scale", each), parts.floats("zero", each)
        if axis == 1 and k % size == 0:
            by_row = (n, k // size)
            return integers(codes.reshape(n, k), bits, scales.reshape(by_row), zeros.reshape(by_row), size)
        return codes.float().sub_(zeros).mul_(scales).reshape(n, k)

    def _codes(self, parts: Parts, bits: int, rows: int, columns: int) -> "torch.Tensor":
        import torch

        number = _IN_A_WORD[bits]
        stored = (math.ceil(rows / number), columns)
        words = parts.tensor("W_q", ("I32",) if bits == 3 else ("U8",), stored)
        shifts = [bits * (number - 1 - place) for place in range(number)]
        return torch.cat([(words >> shift & 2**bits - 1).to(torch.uint8) for shift in shifts])[:rows]

    def _number(self, parts: Parts, name: str, default: int) -> int:
        """A setting: the layer's own, else the config's."""
        if name in parts:
            found = parts.tensor(name, (*_INTEGERS, *FLOATS))
            return int(found) if found.numel() == 1 else -1
        value = self._settings.get(name, default)
        return int(value) if isinstance(value, int | float) else 0
