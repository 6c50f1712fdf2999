"""fp8 checkpoints (P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022), as transformers and DeepSeek store them, and fbgemm_fp8's."""

from typing import TYPE_CHECKING, Any

from headrace.checkpoint.quantized_formats.base import Parts, QuantizedFormat
from headrace.checkpoint.quantized_formats.scaled import ACTIVATION_SCALES, scaled, scaled_shape
from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch


class Fp8Format(QuantizedFormat):
    """X.weight is weight * scale: X.weight_scale_inv has one for each block of (rows, columns), X.weight_scale one for the matrix or a row. They
    are dequantised; a GPU rounds them again, with a scale a row."""

    suffixes = ("weight", "weight_scale_inv", "weight_scale")
    telling = ("weight_scale_inv", "weight_scale")
    unused = (*ACTIVATION_SCALES, "activation_scale")
    scheme = "fp8"

    def __init__(self, config: dict[str, Any]) -> None:
        self.described = "fp8 weights"
        scheme = config.get("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            raise ModelError(
                f"fp8 checkpoints with activation_scheme {scheme!s:.80} are not supported; dynamic and static are"
            )
        block = config.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)
        ):
            raise ModelError(
                f"fp8 checkpoints with weight_block_size {block!s:.80} are not supported; two positive sizes are"
            )
        self._block = (block[0], block[1]) if block else (0, 0)

    def required(self, parts: Parts) -> tuple[str, ...]:
        return "weight", self._scale(parts)

    def _scale(self, parts: Parts) -> str:
        return "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"

    def shape(self, parts: Parts) -> tuple[int, int]:
        return scaled_shape(parts, "weight")

    def read(self, parts: Parts) -> "QuantizedMatrix | torch.Tensor":
        return scaled(parts, "weight", self._scale(parts), self._block)
