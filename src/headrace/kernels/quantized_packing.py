"""Layouts of integer weights on CPU: codes and scales in the order in which the native kernels read them; and the way back from every layout.

Owns the packing of a `QuantizedMatrix`, and which function reads a layout. Does not own the table of layouts (`packing`), those of GPUs
(`torch_quantized`), the rounding (`headrace.layers.quantization`) nor what a format is (`headrace.checkpoint.weight_formats`). Runs in whatever
thread loads, updates or exports a model.
"""

import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix, StoredMatrix, unrotated_weights
from headrace.checkpoint.weight_formats import FORMATS, KERNEL_GROUP, WIDE_GROUP, codes_of
from headrace.kernels.gguf_packing import stored_parts, stored_rows
from headrace.kernels.packing import (
    NATIVE_FLOATS,
    PACKED_COLUMNS,
    QUANTIZED_LAYOUTS,
    ROUNDINGS,
    PackedLinear,
    check_bias,
    padded_bias,
)
from headrace.kernels.torch_quantized import unpack_fp8, unpack_int4

QUANT_LIMITS = {8: 127, 16: 8191}
"""Largest magnitude of an activation as an integer, by its bits."""

MAX_QUANTIZED_K = 65536
"""Longest row of a quantised linear: sums of its products fit 32 bits."""

_LAYOUTS = {(quantized.scheme, quantized.minimums): layout for layout, quantized in QUANTIZED_LAYOUTS.items()}
"""The layout of a matrix, by its format and whether it has minimums."""


def check_quantized(matrix: QuantizedMatrix, bias: torch.Tensor | None) -> None:
    """ValueError unless the matrix' parts fit one another and bias is [n] or None."""
    grid = codes_of(matrix.scheme)
    (n, k), size = matrix.shape, matrix.group_size
    wanted = (n, -(-k // size))
    for what, tensor in (("scales", matrix.scales), ("minimums", matrix.minimums)):
        if tensor is not None and (tuple(tensor.shape) != wanted or tensor.dtype != torch.float32):
            raise ValueError(
                f"pack_linear: {what} must be float32 {list(wanted)}, got {tensor.dtype} {list(tensor.shape)}"
            )
    if matrix.codes.dtype != getattr(torch, grid.dtype):
        raise ValueError(f"pack_linear: codes must be torch.{grid.dtype}, got {matrix.codes.dtype}")
    if matrix.minimums is not None and not grid.minimums:
        raise ValueError(f"pack_linear: {matrix.scheme} has no minimums")
    if size != k if grid.scale_per_row else size % KERNEL_GROUP and size < k:
        raise ValueError(f"pack_linear: {matrix.scheme} with groups of {size} in rows of {k}")
    if k > MAX_QUANTIZED_K:
        raise ValueError(f"pack_linear: a quantised row has at most {MAX_QUANTIZED_K} elements, got {k}")
    if grid.max_norm is not None and _largest_norm(matrix.codes) > grid.max_norm:
        raise ValueError(
            f"pack_linear: {matrix.scheme} codes of a row have a norm of at most {grid.max_norm} in each {WIDE_GROUP} elements"
        )
    check_bias(bias, n)


def _largest_norm(codes: torch.Tensor) -> float:
    groups = torch.nn.functional.pad(codes, (0, -codes.shape[1] % WIDE_GROUP)).unflatten(1, (-1, WIDE_GROUP))
    return max((float(part.double().square().sum(dim=2).amax()) for part in groups.split(256)), default=0.0) ** 0.5


def pack_native_quantized(matrix: QuantizedMatrix, bias: torch.Tensor | None) -> PackedLinear:
    """Pack for the native kernel; k is padded to a multiple of 32 (groups = k / 32), n to one of 32 (blocks = n / 32).

    native_int8, native_int8_rotated: uint8[blocks, groups, 1088], a record of [8][32][4] codes and 32 half scales; native_int4:
    [.., 576], [4][32][4] bytes (element 8 i + j in the low, 8 i + 4 + j in the high nibble of byte j) and 32 half scales;
    native_int4_min: [.., 640], 32 half minimums more; native_int8_fast: [blocks, k / 4, 32, 4] codes; native_int16:
    int16[blocks, k / 2, 32, 2]. See `half_scales` for the scales.
    """
    n, k = matrix.shape
    grid, more = codes_of(matrix.scheme), -n % PACKED_COLUMNS
    zero = grid.zero if matrix.minimums is None else 0
    padding = (0, -k % KERNEL_GROUP, 0, more)
    codes = torch.nn.functional.pad(matrix.codes, padding, value=zero) if any(padding) else matrix.codes
    if grid.scale_per_row:
        data, columns = _interleaved(codes, 32 // grid.bits), matrix.scales[:, 0]
    else:
        data, columns = _records(codes, grid.bits, matrix)
    columns = torch.nn.functional.pad(columns, (0, more)).contiguous()
    layout = _LAYOUTS[matrix.scheme, matrix.minimums is not None]
    return PackedLinear(n, k, layout, data, padded_bias(bias, n), columns)


def _interleaved(codes: torch.Tensor, run: int) -> torch.Tensor:
    """[blocks, k / run, 32, run] of codes [32 blocks, k]: runs of a row, those of the 32 rows of a block side by side."""
    return codes.reshape(-1, PACKED_COLUMNS, codes.shape[1] // run, run).permute(0, 2, 1, 3).contiguous()


def _records(codes: torch.Tensor, bits: int, matrix: QuantizedMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """(uint8[blocks, groups, bytes], float32[n]): records of codes [32 blocks, 32 groups] and half scales, and the factor of each row."""
    blocks, groups = codes.shape[0] // PACKED_COLUMNS, codes.shape[1] // KERNEL_GROUP
    if bits == 8:
        ordered = codes.reshape(blocks, PACKED_COLUMNS, groups, 8, 4).permute(0, 2, 3, 1, 4)
    else:
        nibbles = codes.reshape(blocks, PACKED_COLUMNS, groups, 4, 2, 4)
        ordered = (nibbles[..., 0, :] | nibbles[..., 1, :] << 4).permute(0, 2, 3, 1, 4)
    record = [ordered.reshape(blocks, groups, -1)]
    scales, minimums, columns = half_scales(matrix)
    for half in [scales] if minimums is None else [scales, minimums]:
        padded = torch.nn.functional.pad(half, (0, 0, 0, -len(half) % PACKED_COLUMNS))
        by_group = padded.reshape(blocks, PACKED_COLUMNS, groups).permute(0, 2, 1)
        record.append(by_group.contiguous().view(torch.uint8))
    return torch.cat(record, dim=2), columns


def pack_torch_quantized(matrix: QuantizedMatrix, bias: torch.Tensor | None) -> PackedLinear:
    """Keep the weights in float32, four to eight times the bytes: this is the reference, not the route to a small model."""
    n, k = matrix.shape
    weights = quantized_matrix(pack_native_quantized(matrix, None)).values().contiguous()
    bias = None if bias is None else bias.to(torch.float32)
    layout = next(name for name, rounding in ROUNDINGS.items() if rounding == FORMATS[matrix.scheme].activations)
    return PackedLinear(n, k, layout, weights, bias)


def half_scales(matrix: QuantizedMatrix) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(scales, minimums) float16[n, k / 32] and a factor for each row, float32[n], that multiplies both.

    The factor is a power of two that brings the largest of a row to 2^14 .. 2^15, so no scale is subnormal unless it is 2^28 times smaller than
    that. A scale that was a float16 stays exact; others round to 11 bits. But of a row without minimums whose scales are all the same, the factor
    is that scale, exactly.
    """
    matrix = matrix.regrouped(KERNEL_GROUP) if matrix.group_size % KERNEL_GROUP == 0 else matrix
    largest = matrix.scales.abs().amax(dim=1)
    if matrix.minimums is not None:
        largest = torch.maximum(largest, matrix.minimums.abs().amax(dim=1))
    mantissas, exponents = torch.frexp(largest)
    # One that rounds up to a power of two counts as that power: it does when what was packed is packed again.
    exponents = (exponents + ((mantissas * 2**11).round() == 2**11)).clamp(min=-100) - 15
    columns = torch.ldexp(torch.ones_like(largest), exponents)
    scales = torch.ldexp(matrix.scales, -exponents[:, None]).to(torch.float16)
    if matrix.minimums is not None:
        return scales, torch.ldexp(matrix.minimums, -exponents[:, None]).to(torch.float16), columns
    were_same = (matrix.scales == matrix.scales[:, :1]).all(dim=1)
    are_same = (scales == scales[:, :1]).all(dim=1)
    one = torch.where(were_same, matrix.scales[:, 0], scales[:, 0].float() * columns)
    return scales.masked_fill_(are_same[:, None], 1), None, torch.where(are_same, one, columns)


def quantized_matrix(packed: PackedLinear) -> QuantizedMatrix:
    """What was packed in one of the native_int layouts: the same codes, and scales as the kernels use them. Packing it again is exact."""
    assert packed.column_scales is not None, packed.layout
    quantized, columns = QUANTIZED_LAYOUTS[packed.layout], packed.column_scales[: packed.n, None]
    grid = codes_of(quantized.scheme)
    if grid.scale_per_row:
        codes = packed.data.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[: packed.n, : packed.k].contiguous()
        return QuantizedMatrix(quantized.scheme, codes, columns, None, packed.k)
    num_code_bytes = PACKED_COLUMNS * KERNEL_GROUP * grid.bits // 8
    codes = _codes_of_records(packed.data[..., :num_code_bytes], grid.bits)[: packed.n, : packed.k].contiguous()
    halves = packed.data[..., num_code_bytes:].contiguous().view(torch.float16)
    blocks, groups = packed.data.shape[:2]
    scales = halves.reshape(blocks, groups, -1, PACKED_COLUMNS).permute(2, 0, 3, 1)
    scales = scales.reshape(-1, blocks * PACKED_COLUMNS, groups)[:, : packed.n].to(torch.float32) * columns
    minimums = scales[1] if quantized.minimums else None
    return QuantizedMatrix(quantized.scheme, codes, scales[0], minimums, KERNEL_GROUP)


def _codes_of_records(record: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes uint8[32 blocks, 32 groups] that `_records` put into uint8[blocks, groups, bytes]."""
    blocks, groups = record.shape[:2]
    if bits == 8:
        codes = record.reshape(blocks, groups, 8, PACKED_COLUMNS, 4).permute(0, 3, 1, 2, 4)
    else:
        nibbles = record.reshape(blocks, groups, 4, PACKED_COLUMNS, 4).permute(0, 3, 1, 2, 4)
        codes = torch.stack((nibbles & 15, nibbles >> 4), dim=4)
    return codes.reshape(blocks * PACKED_COLUMNS, groups * KERNEL_GROUP)


def unpack_linear(packed: PackedLinear) -> torch.Tensor:
    """The weight [n, k] that was packed, as the kernels compute with it."""
    if packed.layout in QUANTIZED_LAYOUTS:
        return quantized_matrix(packed).dequantize().contiguous()
    if packed.layout == "native_gguf":
        return torch.cat([matrix.dequantize() for matrix in stored_parts(packed)])
    if packed.layout == "native_bf16":
        return packed.data.permute(0, 3, 2, 1).reshape(-1, packed.k)[: packed.n]
    if packed.layout == "native_bf16_pairs":
        return packed.data.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[: packed.n, : packed.k]
    if packed.layout in NATIVE_FLOATS:
        return packed.data.permute(0, 2, 1).reshape(-1, packed.k)[: packed.n]
    if packed.layout == "torch_fp8":
        return unpack_fp8(packed)
    if packed.layout == "torch_int4":
        return unpack_int4(packed)
    if packed.layout in ROUNDINGS and ROUNDINGS[packed.layout].rotated:
        return unrotated_weights(packed.data)
    return packed.data


def packed_rows(packed: PackedLinear, rows: slice) -> torch.Tensor | StoredMatrix | None:
    """Rows of the weight in a form that packs to the same bits again; None if the layout does not allow that.

    Integer weights are returned as codes, because rounding them again might give other codes.
    """
    if packed.layout == "torch_int4":
        return None
    if packed.layout == "native_gguf":
        return stored_rows(packed, rows)
    if packed.layout in QUANTIZED_LAYOUTS:
        return quantized_matrix(packed).rows(rows.start, rows.stop)
    return unpack_linear(packed)[rows]
