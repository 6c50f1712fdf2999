"""modelopt checkpoints (NVIDIA TensorRT Model Optimizer, https://github.com/NVIDIA/TensorRT-Model-Optimizer): `quantization_config`, or
hf_quant_config.json beside config.json. The tensors tell which layers are quantised, and how."""

from typing import TYPE_CHECKING, Any

from headrace.checkpoint.quantized_formats.base import Parts, QuantizedFormat, integers
from headrace.checkpoint.quantized_formats.scaled import ACTIVATION_SCALES, by_group, mxfp4_blocks, scaled, scaled_shape
from headrace.checkpoint.quantized_matrix import BlockMatrix, QuantizedMatrix
from headrace.checkpoint.weight_formats import Scheme
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

_SCHEMES: dict[str, Scheme] = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8",
    "NVFP4": "none",
    "NVFP4_AWQ": "none",
    "W4A8_NVFP4_FP8": "none",
    "MXFP4": "gguf",
    "W4A8_MXFP4_FP8": "gguf",
    "W4A16_AWQ": "int4",
    "W4A8_AWQ": "int4",
    "W8A16": "int8",
    "W8A8_SQ_PER_CHANNEL": "int8",
    "MIXED_PRECISION": "none",
}
"""How a model of this `quant_algo` computes."""
_AWQ = ("W4A16_AWQ", "W4A8_AWQ")


class ModelOptFormat(QuantizedFormat):
    """`scaled`; W4A16_AWQ: weight uint8[n / 2, k], the even row in the low nibble, two's complement, weight_scale [n, groups].

    pre_quant_scale [k] multiplies what the layer takes: here the columns of its weights, which are dequantised then.
    """

    suffixes = ("weight", "weight_scale", "weight_scale_2", "pre_quant_scale")
    telling = ("weight_scale",)
    needed = ("weight", "weight_scale")
    unused = ACTIVATION_SCALES

    def __init__(self, config: dict[str, Any]) -> None:
        algorithm = config.get("quant_algo")
        if not isinstance(algorithm, str) or algorithm not in _SCHEMES:
            raise ModelError(
                f"modelopt checkpoints of quant_algo {algorithm!s:.80} are not supported; {', '.join(_SCHEMES)} are"
            )
        self.scheme = _SCHEMES[algorithm]
        self._is_awq = algorithm in _AWQ
        self.described = f"modelopt {algorithm} weights"

    def shape(self, parts: Parts) -> tuple[int, int]:
        if self._is_awq and parts.dtype("weight") == "U8":
            pairs, k = parts.matrix_shape("weight")
            return 2 * pairs, k
        return scaled_shape(parts, "weight")

    def blocks(self, parts: Parts) -> BlockMatrix | None:
        return None if "pre_quant_scale" in parts else mxfp4_blocks(parts, "weight", "weight_scale")

    def read(self, parts: Parts) -> "QuantizedMatrix | torch.Tensor":
        import torch

        n, k = self.shape(parts)
        if self._is_awq and parts.dtype("weight") == "U8":
            packed = parts.tensor("weight", ("U8",))
            # As unsigned codes: 8 more.
            codes = torch.stack((packed & 15, packed >> 4), dim=1).reshape(n, k) ^ 8
            scales = by_group(parts, "weight_scale", n, k)
            matrix = integers(codes, 4, scales, 8, k // scales.shape[1])
        else:
            matrix = scaled(parts, "weight", "weight_scale", self._block(parts, n, k))
        if "pre_quant_scale" not in parts:
            return matrix
        weights = matrix.dequantize() if isinstance(matrix, QuantizedMatrix) else matrix
        return weights * parts.floats("pre_quant_scale", (k,))

    def _block(self, parts: Parts, n: int, k: int) -> tuple[int, int]:
        """(rows, columns), powers of two, that share one of the scales [blocks of n, 1, blocks of k, 1]."""
        shape = parts.shape("weight_scale")
        if len(shape) != 4 or not parts.dtype("weight").startswith("F8"):
            return 0, 0
        sizes = [
            next((2**power for power in range(17) if -(-size // 2**power) == blocks), 0)
            for size, blocks in ((n, shape[0]), (k, shape[2]))
        ]
        if 0 in sizes:
            raise parts.fault("weight_scale", f"is {list(shape)}, which does not divide [{n}, {k}] into blocks")
        return sizes[0], sizes[1]
