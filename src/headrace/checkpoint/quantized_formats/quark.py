"""Quark checkpoints (AMD, https://quark.docs.amd.com): int8, float8 and MXFP4 as `scaled`, 4-bit integers packed as AWQ does."""

from typing import TYPE_CHECKING, Any

from headrace.checkpoint.quantized_formats.awq import ORDER, columns_of
from headrace.checkpoint.quantized_formats.base import (
    Parts,
    QuantizedFormat,
    group_of,
    group_size_of,
    integers,
    is_kernel_group,
)
from headrace.checkpoint.quantized_formats.scaled import ACTIVATION_SCALES, mxfp4_blocks, scaled, scaled_shape
from headrace.checkpoint.quantized_matrix import BlockMatrix, QuantizedMatrix
from headrace.checkpoint.weight_formats import Scheme
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

_SCHEMES: dict[str, Scheme] = {"int8": "int8", "fp8_e4m3": "fp8", "fp4": "gguf", "int4": "int4", "uint4": "int4"}
"""How a model of weights of this dtype computes."""


class QuarkFormat(QuantizedFormat):
    """int4, uint4, a scale a group: weight int32[k, n / 8], weight_zero_point int32[groups, n / 8], weight_scale [groups, n]; int4 in two's
    complement. The eight columns of a word are in the order of AWQ, or in their own (pack_method order). Other dtypes: `scaled`."""

    suffixes = ("weight", "weight_scale", "weight_zero_point")
    telling = ("weight_scale",)
    needed = ("weight", "weight_scale")
    unused = (*ACTIVATION_SCALES, "bias_scale", "bias_zero_point")

    def __init__(self, config: dict[str, Any]) -> None:
        whole = config.get("global_quant_config")
        weight = whole.get("weight") if isinstance(whole, dict) else None
        if not isinstance(weight, dict):
            raise ModelError(
                "quark checkpoints whose global_quant_config does not say how weights are stored are not supported"
            )
        self._dtype, scheme = weight.get("dtype"), weight.get("qscheme")
        if self._dtype not in tuple(_SCHEMES):
            raise ModelError(
                f"quark checkpoints of {self._dtype!s:.40} weights are not supported; those of {', '.join(_SCHEMES)} are"
            )
        others = config.get("layer_quant_config")
        for name, other in others.items() if isinstance(others, dict) else ():
            own = other.get("weight") if isinstance(other, dict) else None
            if own is not None and own != weight:
                raise ModelError(f"quark checkpoints with other weights in {name!r:.80} are not supported")
        self.scheme = _SCHEMES[self._dtype]
        self._is_packed, self._group_size = self.scheme == "int4", -1
        if self._dtype != "fp4" and self._is_packed != (scheme == "per_group") and self._dtype != "fp8_e4m3":
            raise ModelError(
                f"quark checkpoints of {self._dtype} weights with qscheme {scheme!s:.40} are not supported"
            )
        if self._is_packed:
            self._group_size = group_size_of("quark", weight.get("group_size"))
        if not is_kernel_group(self._group_size) or (self._dtype == "int8" and weight.get("symmetric") is False):
            self.scheme = "none"
        export = config.get("export")
        method = export.get("pack_method", "reorder") if isinstance(export, dict) else "reorder"
        self._order = ORDER if method == "reorder" else tuple(range(8))
        self.described = f"quark {self._dtype} weights"

    def shape(self, parts: Parts) -> tuple[int, int]:
        if not self._is_packed:
            return scaled_shape(parts, "weight")
        return parts.matrix_shape("weight_scale")[1], parts.matrix_shape("weight")[0]

    def blocks(self, parts: Parts) -> BlockMatrix | None:
        return mxfp4_blocks(parts, "weight", "weight_scale")

    def read(self, parts: Parts) -> "QuantizedMatrix | torch.Tensor":
        if not self._is_packed:
            return scaled(parts, "weight", "weight_scale")
        n, k = self.shape(parts)
        size = group_of(parts, k, self._group_size)
        zeros: torch.Tensor | int = 8
        if "weight_zero_point" in parts:
            zeros = self._columns(parts, "weight_zero_point", k // size, n).float()
        scales = parts.floats("weight_scale", (k // size, n)).T
        return integers(self._columns(parts, "weight", k, n), 4, scales, zeros, size)

    def _columns(self, parts: Parts, suffix: str, rows: int, n: int) -> "torch.Tensor":
        """Codes uint8[n, rows]; of int4, 8 more."""
        codes = columns_of(parts, suffix, rows, n, self._order)
        return codes ^ 8 if self._dtype == "int4" else codes
