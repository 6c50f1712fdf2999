"""Quantised linear layers of a GPU.

Owns the two layouts, their packing and their products in torch:
torch_fp8   float8_e4m3fn weights, a scale a row or one in all, through `torch._scaled_mm`; activations are rounded as they come
torch_int4  4-bit weights, a bfloat16 scale and offset for a group of a row; Triton reads them (`triton.linear`), torch unpacks them first
Does not own the rounding of weights to 4 bits (`headrace.layers.quantization`) nor what checkpoints hold. Both products run on the
CPU too, which is how they are tested; they are not served there. Runs in the thread that loads or runs the model.

fp8: P. Micikevicius et al., "FP8 Formats for Deep Learning" (2022).
"""

from collections.abc import Callable

import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import codes_of
from headrace.kernels.packing import Layout, PackedLinear, pack_torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_FP8_MULTIPLE = 16
"""Of both sizes of an fp8 product."""

_INT4_UNIT = 32
"""Codes in the four words that hold them together."""

SMALLEST_SCALE = 2.0**-60
"""Below this a row counts as zeros: its inverse, times anything finite in bfloat16, stays finite."""


def why_not_fp8(n: int, k: int) -> str:
    """Why a weight [n, k] cannot be torch_fp8; "" when it can."""
    if n % _FP8_MULTIPLE or k % _FP8_MULTIPLE:
        return f"fp8 products take sizes that are multiples of {_FP8_MULTIPLE}, not [{n}, {k}]"
    return ""


def fp8_per_row(device: torch.device) -> bool:
    """Whether the product takes a scale for each row: on Hopper and later, and on the CPU."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def pack_fp8(weight: torch.Tensor, bias: torch.Tensor | None, per_row: bool) -> PackedLinear:
    """Round a float weight [n, k] on its device. Scales are rounded to bfloat16, so that packing what was unpacked gives the same bits.

    column_scales: float32[n], or [1] unless per_row.
    """
    n, k = weight.shape
    assert not why_not_fp8(n, k), (n, k)
    wide = weight.float()
    largest = wide.abs().amax(dim=1, keepdim=True) if per_row else wide.abs().amax().view(1, 1)
    scales = (largest / FP8_MAX).clamp_(min=SMALLEST_SCALE).to(torch.bfloat16).float()
    return PackedLinear(n, k, "torch_fp8", (wide / scales).to(FP8), bias, scales.view(-1))


def unpack_fp8(packed: PackedLinear) -> torch.Tensor:
    """The weights float32[n, k]."""
    assert packed.column_scales is not None, packed.layout
    return packed.data.float() * packed.column_scales.view(-1, 1)


def fp8_product(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """x [rows, k] @ weight^T -> [rows, n], without the bias. x is rounded with a scale a row, or one in all where the weight has one."""
    assert packed.column_scales is not None, packed.layout
    if not len(x):
        return x.new_empty(0, packed.n)
    wide = x.float()
    largest = wide.abs().amax(dim=1, keepdim=True) if packed.column_scales.numel() > 1 else wide.abs().amax()
    scale = (largest / FP8_MAX).clamp_(min=SMALLEST_SCALE)
    return scaled_product((wide / scale).to(FP8), scale, packed).to(x.dtype)


def scaled_product(values: torch.Tensor, scale: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """(values * scale) @ weight^T -> bfloat16[rows, n]. values: fp8[rows, k]. scale: float32[rows, 1], or one in all where the weight has one."""
    assert packed.column_scales is not None, packed.layout
    per_row = packed.column_scales.numel() > 1
    weight_scale = packed.column_scales.view(1, -1) if per_row else packed.column_scales.view(())
    # Scales by row come out in bfloat16 only.
    return torch._scaled_mm(
        values, packed.data.t(), scale_a=scale, scale_b=weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def why_not_int4(n: int, k: int, group_size: int) -> str:
    """Why a weight [n, k] in groups of group_size cannot be torch_int4; "" when it can."""
    if k % _INT4_UNIT or group_size % _INT4_UNIT or k % group_size:
        return (
            f"int4 products take rows of groups in multiples of {_INT4_UNIT}, not groups of {group_size} in rows of {k}"
        )
    return ""


def pack_codes(matrix: QuantizedMatrix, bias: torch.Tensor | None) -> PackedLinear:
    """Pack integer weights on their device; as bfloat16 where no product takes their codes."""
    n, k = matrix.shape
    if codes_of(matrix.scheme).bits == 4 and not why_not_int4(n, k, matrix.group_size):
        return pack_int4(matrix, bias)
    return pack_torch(matrix.dequantize().to(torch.bfloat16), bias)


def pack_int4(matrix: QuantizedMatrix, bias: torch.Tensor | None) -> PackedLinear:
    """Pack 4-bit codes on their device. weight = code * scale + offset; both round to bfloat16.

    data: int32[n, k / 8]. Four words hold 32 codes: word j has those of 4 i + j, i = 0 .. 7, from its lowest bits on. column_scales:
    bfloat16[n, k / group, 2], scale and offset.
    """
    n, k = matrix.shape
    grid = codes_of(matrix.scheme)
    assert grid.bits == 4, matrix.scheme
    scales = matrix.scales.to(torch.bfloat16)
    # An offset of the rounded scale keeps the code that means zero at zero.
    offsets = -grid.zero * scales.float() if matrix.minimums is None else -matrix.minimums
    nibbles = matrix.codes.reshape(n, k // _INT4_UNIT, 8, 4).to(torch.int64)
    shifts = torch.arange(0, 32, 4, device=nibbles.device).view(8, 1)
    words = (nibbles << shifts).sum(dim=2).reshape(n, k // 8)
    data = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    pairs = torch.stack((scales, offsets.to(torch.bfloat16)), dim=2).contiguous()
    return PackedLinear(n, k, "torch_int4", data, bias, pairs)


def int4_codes(packed: PackedLinear) -> torch.Tensor:
    """The codes int32[n, k], 0 .. 15."""
    shifts = torch.arange(0, 32, 4, device=packed.data.device).view(8, 1)
    words = packed.data.view(packed.n, -1, 1, 4)
    return (words >> shifts & 15).reshape(packed.n, packed.k)


def unpack_int4(packed: PackedLinear) -> torch.Tensor:
    """The weights bfloat16[n, k], as products of several rows see them."""
    assert packed.column_scales is not None, packed.layout
    group = packed.k // packed.column_scales.shape[1]
    scales, offsets = packed.column_scales.float().repeat_interleave(group, dim=1).unbind(2)
    return (int4_codes(packed) * scales + offsets).to(torch.bfloat16)


def int4_product(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """x [rows, k] @ weight^T -> [rows, n], without the bias."""
    return x @ unpack_int4(packed).to(x.dtype).t()


PRODUCTS: dict[Layout, Callable[[torch.Tensor, PackedLinear], torch.Tensor]] = {
    "torch_fp8": fp8_product,
    "torch_int4": int4_product,
}
"""Products by layout: x [rows, k] @ weight^T -> [rows, n], without the bias."""
