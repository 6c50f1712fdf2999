"""Matrices in the blocks of GGUF files in the order in which the native kernels read them, and back; every bit is kept.

Owns the table in front of the blocks (csrc/cpu/gguf_blocks.h); the order within a block is the kernels' own. Runs in whatever thread loads, updates
or exports a model.
"""

import contextlib
import mmap
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from headrace.checkpoint.gguf import BLOCK_TYPES, BlockType
from headrace.checkpoint.quantized_matrix import BlockMatrix
from headrace.kernels import cpu
from headrace.kernels.packing import PACKED_COLUMNS, PackedLinear, as_native, check_bias, padded_bias
from headrace.kernels.registry import runs_native

ENTRY_BYTES = 8
"""Of the table: bytes from an entry to its block, times 256, plus the number of the type."""
_HUGE_PAGE = 2 << 20
_NUMBERS = {block.name: number for number, block in BLOCK_TYPES.items()}


def pack_blocks(parts: Sequence[BlockMatrix], bias: torch.Tensor | None) -> PackedLinear:
    """Prepare the rows of all parts, whose rows have one length, for `ops.linear`, which rounds its input to 8 bits in groups of 32.

    native_gguf: uint8, an entry for each 32 rows, then their blocks. Without the native kernels the weights in float32. ValueError where the
    rows of a part, but for the last, do not fill blocks.
    """
    k, sizes = parts[0].shape[1], [part.shape[0] for part in parts]
    n = sum(sizes)
    check_bias(bias, n)
    if any(part.shape[1] != k for part in parts) or any(size % PACKED_COLUMNS for size in sizes[:-1]):
        raise ValueError(f"pack_blocks: parts of {[part.shape for part in parts]} do not make one matrix")
    native = cpu.load() if runs_native() else None
    if native is None:
        weights = torch.cat([part.dequantize() for part in parts])
        return PackedLinear(n, k, "torch_int8", weights, None if bias is None else bias.to(torch.float32))
    counts = [-(-size // PACKED_COLUMNS) for size in sizes]
    block_bytes = [native.gguf_block_bytes(_NUMBERS[part.type.name], k) for part in parts]
    table_bytes = -(-ENTRY_BYTES * sum(counts) // 64) * 64  # the blocks begin on a cache line
    data = _empty(table_bytes + sum(map(int.__mul__, counts, block_bytes)))
    table = data[:table_bytes].zero_().view(torch.int64)  # the same bytes each time, up to the blocks: they are hashed
    first, at = 0, table_bytes
    for part, count, size in zip(parts, counts, block_bytes, strict=True):
        index = torch.arange(first, first + count)
        offsets = at + size * torch.arange(count) - ENTRY_BYTES * index
        table[first : first + count] = offsets * 256 + _NUMBERS[part.type.name]
        rows = part.blocks.contiguous()
        address = as_native(table[first:])[0]
        native.pack_gguf(*as_native(_NUMBERS[part.type.name], rows, rows.shape[1], rows.shape[0], k), address)
        first, at = first + count, at + size * count
    return PackedLinear(n, k, "native_gguf", data, padded_bias(bias, n))


def _empty(num_bytes: int) -> torch.Tensor:
    """uint8[num_bytes], in huge pages where it is large and the system has them, as what `weight_cache.WeightFile.read` gives."""
    if num_bytes < _HUGE_PAGE:
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def stored_parts(packed: PackedLinear) -> list[BlockMatrix]:
    """The matrix as it was packed, in runs of rows that have one type."""
    counts = torch.unique_consecutive(_entries(packed) & 255, return_counts=True)[1]
    ends = [min(end * PACKED_COLUMNS, packed.n) for end in accumulate(counts.tolist())]
    return [stored_rows(packed, slice(begin, end)) for begin, end in pairwise([0, *ends])]


def stored_rows(packed: PackedLinear, rows: slice) -> BlockMatrix:
    """Rows that were packed as one part; they begin a block."""
    native = cpu.load()
    assert native is not None, packed.layout
    assert rows.start % PACKED_COLUMNS == 0, rows
    entries = _entries(packed)[rows.start // PACKED_COLUMNS : -(-rows.stop // PACKED_COLUMNS)]
    numbers = (entries & 255).unique().tolist()
    if len(numbers) > 1:
        raise ValueError(f"rows {rows.start} to {rows.stop} have several types")
    kind = BLOCK_TYPES[numbers[0]]
    blocks = torch.empty(rows.stop - rows.start, row_bytes(kind, packed.k), dtype=torch.uint8)
    native.unpack_gguf(*as_native(entries, len(blocks), packed.k, blocks, blocks.shape[1]))
    return BlockMatrix(kind, blocks)


def _entries(packed: PackedLinear) -> torch.Tensor:
    return packed.data[: ENTRY_BYTES * -(-packed.n // PACKED_COLUMNS)].view(torch.int64)


def row_bytes(kind: BlockType, k: int) -> int:
    return k // kind.block_values * kind.block_bytes
