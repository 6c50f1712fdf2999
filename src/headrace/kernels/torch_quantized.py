"""Quantised linear layers of a GPU, computed by torch's own kernels.

Owns the two layouts, their packing and their products:
torch_fp8   float8_e4m3fn weights, a scale a row or one in all, through `torch._scaled_mm`; activations are rounded as they come
torch_int4  4-bit weights, a bfloat16 scale and zero for a group of a row, through `torch._weight_int4pack_mm` (bfloat16 only)
Does not own the rounding of weights to 4 bits (`headrace.layers.quantization`) nor what checkpoints hold. Torch has both products on the
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

INT4_GROUPS = (256, 128, 64, 32)
_INT4_ROWS = 8
_INT4_TILE = 16

_SMALLEST_SCALE = 2.0**-60
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
    scales = (largest / FP8_MAX).clamp_(min=_SMALLEST_SCALE).to(torch.bfloat16).float()
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
    per_row = packed.column_scales.numel() > 1
    wide = x.float()
    largest = wide.abs().amax(dim=1, keepdim=True) if per_row else wide.abs().amax()
    scale = (largest / FP8_MAX).clamp_(min=_SMALLEST_SCALE)
    values = (wide / scale).to(FP8)
    weight_scale = packed.column_scales.view(1, -1) if per_row else packed.column_scales.view(())
    # Scales by row come out in bfloat16 only.
    out = torch._scaled_mm(
        values, packed.data.t(), scale_a=scale, scale_b=weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return out.to(x.dtype)


def why_not_int4(n: int, k: int, group_size: int) -> str:
    """Why a weight [n, k] in groups of group_size cannot be torch_int4; "" when it can."""
    if n % _INT4_ROWS or k % (2 * _INT4_TILE):
        return f"int4 products take rows in multiples of {_INT4_ROWS} and columns of {2 * _INT4_TILE}, not [{n}, {k}]"
    if int4_group(k, group_size) == 0:
        return f"int4 products take groups of {', '.join(map(str, INT4_GROUPS))}, not {group_size} of {k}"
    return ""


def int4_group(k: int, group_size: int) -> int:
    """The largest group that the product takes and that divides this one; 0 when there is none."""
    return next((size for size in INT4_GROUPS if group_size % size == 0 and k % size == 0), 0)


def pack_codes(matrix: QuantizedMatrix, bias: torch.Tensor | None) -> PackedLinear:
    """Pack integer weights on their device; as bfloat16 where no product takes their codes."""
    n, k = matrix.shape
    if codes_of(matrix.scheme).bits == 4 and not why_not_int4(n, k, matrix.group_size):
        return pack_int4(matrix, bias)
    return pack_torch(matrix.dequantize().to(torch.bfloat16), bias)


def pack_int4(matrix: QuantizedMatrix, bias: torch.Tensor | None) -> PackedLinear:
    """Pack 4-bit codes on their device. weight = (code - 8) * scale + zero, where zero = 8 * scale - minimum; both round to bfloat16.

    data: what torch packs, in a layout of its own. column_scales: bfloat16[k / group, n, 2], scale and zero.
    """
    n, k = matrix.shape
    assert codes_of(matrix.scheme).bits == 4, matrix.scheme
    matrix = matrix.regrouped(int4_group(k, matrix.group_size))
    zeros = torch.zeros_like(matrix.scales) if matrix.minimums is None else 8 * matrix.scales - matrix.minimums
    scales = torch.stack((matrix.scales, zeros), dim=2).transpose(0, 1).to(torch.bfloat16).contiguous()
    inner = next(tiles for tiles in (8, 4, 2) if k % (tiles * _INT4_TILE) == 0)
    if matrix.codes.device.type == "cpu":
        data = torch._convert_weight_to_int4pack_for_cpu(matrix.codes.to(torch.int32), inner)
    else:
        data = torch._convert_weight_to_int4pack(int4_bytes(matrix.codes), inner)
    return PackedLinear(n, k, "torch_int4", data, bias, scales)


def int4_bytes(codes: torch.Tensor) -> torch.Tensor:
    """uint8[n, k / 2] of codes uint8[n, k]: the even element of a pair in the high nibble, as torch packs on a GPU."""
    return (codes[:, 0::2] << 4 | codes[:, 1::2]).contiguous()


def int4_product(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """x [rows, k] @ weight^T -> [rows, n], without the bias; computed in bfloat16."""
    assert packed.column_scales is not None, packed.layout
    if not len(x):
        return x.new_empty(0, packed.n)
    product = torch._weight_int4pack_mm_for_cpu if x.device.type == "cpu" else torch._weight_int4pack_mm
    group = packed.k // packed.column_scales.shape[0]
    return product(x.to(torch.bfloat16).contiguous(), packed.data, group, packed.column_scales).to(x.dtype)


def unpack_int4(packed: PackedLinear) -> torch.Tensor:
    """The weights bfloat16[n, k], as the product sees them: those of a product with the identity."""
    identity = torch.eye(packed.k, dtype=torch.bfloat16, device=packed.data.device)
    return int4_product(identity, packed).t().contiguous()


PRODUCTS: dict[Layout, Callable[[torch.Tensor, PackedLinear], torch.Tensor]] = {
    "torch_fp8": fp8_product,
    "torch_int4": int4_product,
}
"""Products by layout: x [rows, k] @ weight^T -> [rows, n], without the bias."""
