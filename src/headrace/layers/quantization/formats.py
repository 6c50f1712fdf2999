"""The weight formats: a class each, which registers itself. Runs in the thread that loads the model."""

from collections.abc import Sequence
from typing import ClassVar

import torch

from headrace import kernels
from headrace.checkpoint.quantized_matrix import BlockMatrix, QuantizedMatrix, rotated_weights
from headrace.checkpoint.weight_formats import KERNEL_GROUP, MAX_WORDS_NORM, WIDE_GROUP, Scheme
from headrace.kernels import PackedLinear
from headrace.kernels.packing import PACKED_COLUMNS
from headrace.kernels.torch_quantized import fp8_per_row, pack_fp8, why_not_fp8
from headrace.layers.quantization import gptq
from headrace.layers.quantization.base import Calibrator, IntegerFormat, Part, WeightFormat, register, stack_floats
from headrace.layers.quantization.gptq import encode, grid


def _in_groups(weight: torch.Tensor, size: int) -> torch.Tensor:
    """[n, k] -> [n, groups, size], filled up with zeros."""
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))


@register
class Floats(WeightFormat):
    """none: weights stay floats, in the model's dtype."""

    name = "none"

    def pack(self, parts: Sequence[Part], bias: torch.Tensor | None, dtype: torch.dtype) -> PackedLinear:
        return kernels.pack_linear(stack_floats(parts).to(dtype), bias)


@register
class Bfloat16(WeightFormat):
    """bfloat16: weights and what they multiply in bfloat16, sums in float32. A model whose dtype is bfloat16 keeps its weights as they are."""

    name = "bfloat16"

    def pack(self, parts: Sequence[Part], bias: torch.Tensor | None, dtype: torch.dtype) -> PackedLinear:
        return kernels.pack_linear(stack_floats(parts), bias, rounded=True)


@register
class Fp8(WeightFormat):
    """fp8: weights and activations in float8_e4m3, with a scale a row; on GPUs. A weight whose sizes the product does not take stays float."""

    name = "fp8"

    def pack(self, parts: Sequence[Part], bias: torch.Tensor | None, dtype: torch.dtype) -> PackedLinear:
        weight = stack_floats(parts)
        if why_not_fp8(*weight.shape):
            return kernels.pack_linear(weight.to(dtype), bias)
        return pack_fp8(weight, bias, fp8_per_row(weight.device))


@register
class Gguf(WeightFormat):
    """gguf: every matrix in the bits in which its GGUF file has it. Parts of one product may have different types, but not blocks and floats: then
    all are float32, and none is rounded. Tensors alone are in the model's dtype, as in `none`."""

    name = "gguf"

    def pack(self, parts: Sequence[Part], bias: torch.Tensor | None, dtype: torch.dtype) -> PackedLinear:
        blocks = [part for part in parts if isinstance(part, BlockMatrix)]
        fill_blocks = all(part.shape[0] % PACKED_COLUMNS == 0 for part in parts[:-1])
        if fill_blocks and len(blocks) == len(parts) and all(part.type.block_values > 1 for part in blocks):
            return kernels.pack_blocks(blocks, bias)
        # Parts that an earlier product has in float32 keep that beside new ones in the model's dtype.
        weight = torch.cat([part if isinstance(part, torch.Tensor) else part.dequantize() for part in parts])
        return kernels.pack_linear(weight, bias)


_ROUNDING = WIDE_GROUP**0.5 / 2  # what rounding to nearest adds to the norm of a group, at most


@register
class Int16(IntegerFormat):
    """int16: symmetric, 16 bits, one scale for a whole row. Closer to the float weights than bfloat16 is."""

    name = "int16"

    def nearest(self, weight: torch.Tensor) -> QuantizedMatrix:
        """The 128 elements of a row that have the largest norm, sqrt(sum of squares), get MAX_WORDS_NORM of it."""
        k = weight.shape[1]
        norms = torch.linalg.vector_norm(_in_groups(weight, WIDE_GROUP), dim=2).amax(dim=1, keepdim=True)
        scales = norms / (MAX_WORDS_NORM - 2 * _ROUNDING)
        codes = (weight / scales.clamp(min=1e-30)).round_()
        return QuantizedMatrix(self.name, codes.to(torch.int16), scales, None, k)


@register
class Int8(IntegerFormat):
    """int8: symmetric, 8 bits, one scale for 32 weights of a row; the grid of GGUF's Q8_0."""

    name: ClassVar[Scheme] = "int8"

    def nearest(self, weight: torch.Tensor) -> QuantizedMatrix:
        """scale = largest magnitude of a group / 127."""
        n, k = weight.shape
        padded = _in_groups(weight, KERNEL_GROUP)
        scales = padded.abs().amax(dim=2) / 127
        codes = (padded / scales.clamp(min=1e-30)[:, :, None]).round_().clamp_(-127, 127).add_(128)
        return QuantizedMatrix(self.name, codes.to(torch.uint8).reshape(n, -1)[:, :k], scales, None, KERNEL_GROUP)


@register
class Int8Rotated(Int8):
    """int8-rotated: int8 of rotated weights, what `int8` rounds to. Activations have no large elements then that coarsen their group."""

    name = "int8-rotated"

    def nearest(self, weight: torch.Tensor) -> QuantizedMatrix:
        return super().nearest(rotated_weights(weight))


@register
class Int8Fast(IntegerFormat):
    """int8-fast: symmetric, 8 bits, one scale for a whole row of rotated weights. Rotated, neither a row nor 128 elements of a token have outliers
    that would widen their steps."""

    name = "int8-fast"

    def nearest(self, weight: torch.Tensor) -> QuantizedMatrix:
        """scale = largest magnitude of a rotated row / 127."""
        rotated = rotated_weights(weight)
        scales = rotated.abs().amax(dim=1, keepdim=True) / 127
        codes = (rotated / scales.clamp(min=1e-30)).round_().clamp_(-127, 127).add_(128)
        return QuantizedMatrix(self.name, codes.to(torch.uint8), scales, None, weight.shape[1])


@register
class Int4(IntegerFormat):
    """int4: 4 bits, a scale and a minimum for 32 weights of a row; the grid of GGUF's Q4_1."""

    name = "int4"

    def nearest(self, weight: torch.Tensor) -> QuantizedMatrix:
        n, k = weight.shape
        padded = _in_groups(weight, KERNEL_GROUP)
        scales, minimums = grid(padded)
        codes = encode(padded, scales[..., None], minimums[..., None])
        return QuantizedMatrix(self.name, codes.to(torch.uint8).reshape(n, -1)[:, :k], scales, minimums, KERNEL_GROUP)

    @property
    def calibrator(self) -> Calibrator:
        return gptq.quantize
