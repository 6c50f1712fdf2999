"""Matrices of 8-bit integers, float8 or FP4 in a tensor `weight` (`weight_packed`) with `weight_scale` beside it, as most tools for GPUs store
them: the tensors' dtypes and shapes say what they are.

compressed-tensors: https://github.com/vllm-project/compressed-tensors (int-quantized, float-quantized, nvfp4- and mxfp4-pack-quantized).
modelopt: https://github.com/NVIDIA/TensorRT-Model-Optimizer (FP8, NVFP4, MXFP4, W8A8, W4A16_AWQ). fp8: P. Micikevicius et al., "FP8 Formats for
Deep Learning" (2022), stored as transformers (`fp8`, `fbgemm_fp8`) does. FP4: OCP Microscaling Formats 1.0; NVFP4 adds a float32 scale for all
of a matrix.
"""

from typing import TYPE_CHECKING, Any

from headrace.checkpoint.gguf import MXFP4
from headrace.checkpoint.quantized_formats.base import (
    FLOAT8,
    FLOATS,
    POWERS,
    Parts,
    QuantizedFormat,
    doubled_fp4,
    integers,
    power_scales,
)
from headrace.checkpoint.quantized_matrix import BlockMatrix, QuantizedMatrix
from headrace.checkpoint.weight_formats import KERNEL_GROUP
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

ACTIVATION_SCALES = (
    *("input_scale", "output_scale", "input_zero_point", "output_zero_point", "input_global_scale", "input_scale_ub"),
    *("q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale", "attn.k_scale", "attn.v_scale"),
    *("k_zero_point", "v_zero_point", "k_proj.output_scale", "v_proj.output_scale"),
)
"""Scales of activations and of a KV cache: ours are rounded with scales of their own, by token and by group."""

_MX_GROUP, _NV_GROUP = 32, 16
_LARGEST_EXPONENT = 252
"""Of E8M0: 2^125, whose product with 6, the largest value of E2M1, is finite."""


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


def scaled(parts: Parts, weight: str, scale: str, block: tuple[int, int] = (0, 0)) -> "QuantizedMatrix | torch.Tensor":
    """The matrix of the tensors with these suffixes. block: (rows, columns) that share a scale; (0, 0) = the scales' shape tells."""
    dtype = parts.dtype(weight)
    if dtype == "I8":
        return bytes_of(parts, weight, scale, f"{weight}_zero_point")
    if dtype in FLOAT8:
        return _float8(parts, weight, scale, block)
    if dtype == "U8":
        return _fp4(parts, weight, scale)
    raise parts.fault(weight, f"is {dtype}, expected I8, U8 or a float8")


def scaled_shape(parts: Parts, weight: str) -> tuple[int, int]:
    n, k = parts.matrix_shape(weight)
    return (n, 2 * k) if parts.dtype(weight) == "U8" else (n, k)


def bytes_of(parts: Parts, weight: str, scale: str, zero: str) -> "QuantizedMatrix | torch.Tensor":
    """scale * (code - zero), int8[n, k], a scale for the matrix, a row or a group of a row. zero: of a tensor that need not be there."""
    import torch

    n, k = parts.matrix_shape(weight)
    scales = by_group(parts, scale, n, k)
    # As unsigned codes: 128 more.
    codes = parts.tensor(weight, ("I8",)).view(torch.uint8) ^ 128
    zeros: torch.Tensor | int = 128
    if zero in parts:
        zeros = by_group(parts, zero, n, k, ("I8", "I32", "I64", *FLOATS)).expand(scales.shape) + 128
    return integers(codes, 8, scales, zeros, k // scales.shape[1])


def by_group(parts: Parts, suffix: str, n: int, k: int, dtypes: tuple[str, ...] = FLOATS) -> "torch.Tensor":
    """float32[n, groups] of one value, one a row, or [n, groups]. Raises ModelError for other shapes."""
    shape = parts.shape(suffix)
    values = parts.tensor(suffix, dtypes).float()
    if values.numel() == 1:
        return values.reshape(1, 1).expand(n, 1)
    if shape in ((n,), (n, 1)):
        return values.reshape(n, 1)
    if len(shape) == 2 and shape[0] == n and shape[1] and k % shape[1] == 0:
        return values
    raise parts.fault(
        suffix, f"is {list(shape)}: not one value, one for each of {n} rows, or one for each group of {k}"
    )


def _float8(parts: Parts, weight: str, scale: str, block: tuple[int, int]) -> "torch.Tensor":
    values, are_powers = parts.tensor(weight, FLOAT8).float(), parts.dtype(scale) in POWERS
    read = power_scales if are_powers else Parts.floats
    if block[0]:
        n, k = parts.matrix_shape(weight)
        rows, columns = block
        blocks = (-(-n // rows), -(-k // columns))
        scales = read(parts, scale, blocks, (blocks[0], 1, blocks[1], 1)).reshape(blocks)
        return values.mul_(scales.repeat_interleave(rows, dim=0)[:n].repeat_interleave(columns, dim=1)[:, :k])
    if not are_powers and parts.tensor(scale, FLOATS).numel() == 1:
        return values.mul_(parts.floats(scale).reshape(()))
    n, k = parts.matrix_shape(weight)
    scales = read(parts, scale, (n, k // _MX_GROUP)) if are_powers else by_group(parts, scale, n, k)
    if k % scales.shape[1]:
        raise parts.fault(scale, f"does not divide rows of {k} into groups")
    return values.mul_(scales.repeat_interleave(k // scales.shape[1], dim=1))


def mxfp4_blocks(parts: Parts, weight: str, scale: str) -> BlockMatrix | None:
    """MXFP4 in blocks of GGUF's type of that name: its codes and its scale, but for their order; None for other matrices."""
    import torch

    if parts.dtype(weight) != "U8" or parts.dtype(scale) not in POWERS:
        return None
    (n, _), groups = scaled_shape(parts, weight), _mx_groups(parts, weight)
    exponents = parts.tensor(scale, POWERS, (n, groups)).view(torch.uint8)
    if bool((exponents > _LARGEST_EXPONENT).any()):
        raise parts.fault(scale, "contains NaN or infinity")
    pairs = parts.tensor(weight, ("U8",)).reshape(n, groups, _MX_GROUP // 2)
    # Bytes of elements 2 i and 2 i + 1 become bytes of elements i and i + 16.
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).reshape(n, groups, 2, _MX_GROUP // 2)
    blocks = torch.cat((exponents.unsqueeze(-1), codes[:, :, 0] | codes[:, :, 1] << 4), dim=-1)
    return BlockMatrix(MXFP4, blocks.reshape(n, -1))


def _mx_groups(parts: Parts, weight: str) -> int:
    k = scaled_shape(parts, weight)[1]
    if k % _MX_GROUP:
        raise parts.fault(weight, f"has rows of {k}, which groups of {_MX_GROUP} do not divide")
    return k // _MX_GROUP


def _fp4(parts: Parts, weight: str, scale: str) -> "QuantizedMatrix | torch.Tensor":
    """MXFP4 (scales are powers of two) in 8-bit codes, exactly; NVFP4 (scales are float8, and one for all) in float32."""
    import torch

    n, k = scaled_shape(parts, weight)
    doubled = doubled_fp4(parts.tensor(weight, ("U8",)))
    if parts.dtype(scale) in POWERS:
        scales = power_scales(parts, scale, (n, _mx_groups(parts, weight))) * 0.5
        return integers(doubled.view(torch.uint8) ^ 128, 8, scales, 128, KERNEL_GROUP)
    if k % _NV_GROUP:
        raise parts.fault(weight, f"has rows of {k}, which groups of {_NV_GROUP} do not divide")
    scales = parts.tensor(scale, FLOAT8, (n, k // _NV_GROUP)).float()
    if "weight_global_scale" in parts:  # compressed-tensors has its inverse
        scales = scales / parts.scalar("weight_global_scale")
    elif "weight_scale_2" in parts:
        scales = scales * parts.scalar("weight_scale_2")
    else:
        raise parts.fault(weight, "has scales of float8, but no scale of those")
    return (doubled.float() * 0.5).mul_(scales.repeat_interleave(_NV_GROUP, dim=1))
