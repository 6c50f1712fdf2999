"""A quantised weight in plain form, which readers of checkpoints and quantisers make and kernels pack, and the rotation of those that are rotated.

Owns the meaning of codes, scales and minimums, not a layout of bytes, on disk (the readers) or in memory (`kernels.packing`). Rotated weights went
through a Walsh-Hadamard transform in blocks of a row: what a layer multiplies is rotated alike, so their product stays what it was, while large
elements that would coarsen the steps of a whole group are spread over a block: S. Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated
LLMs" (2024); A. Tseng et al., "QuIP#: Even Better LLM Quantization with Hadamard Incoherence and Lattice Codebooks" (2024). csrc/cpu/rotation.h has
the same operations in the same order, so the bits are the same. torch is imported when it is used. Runs in whichever process loads the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.checkpoint.gguf import BlockType, dequantize
from headrace.checkpoint.weight_formats import KERNEL_GROUP, WIDE_GROUP, Scheme, codes_of
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch


def rotation_block(k: int) -> int:
    """Elements of a row of k that are mixed: the largest power of two up to WIDE_GROUP that divides k; 1, none, below KERNEL_GROUP."""
    power = k & -k
    return 1 if power < KERNEL_GROUP else min(power, WIDE_GROUP)


def walsh_hadamard(x: "torch.Tensor", block: int) -> "torch.Tensor":
    """x float32[..., k] in blocks of `block` elements, each times a matrix of 1 and -1. Twice is times the block.

    block: a power of two that divides k.
    """
    import torch

    # An element of all blocks side by side: the sums run over contiguous memory.
    columns = x.reshape(-1, block).T.contiguous()
    half = 1
    while half < block:
        halves = (block // (2 * half), 2, half, columns.shape[1])
        a, b = columns.view(halves).unbind(1)
        columns = torch.empty_like(columns)
        sums, differences = columns.view(halves).unbind(1)
        torch.add(a, b, out=sums)
        torch.sub(a, b, out=differences)
        half *= 2
    return columns.T.contiguous().view(x.shape)


def rotated_rows(x: "torch.Tensor") -> "torch.Tensor":
    """What weights that were rotated multiply, float32[..., k] as x is."""
    return walsh_hadamard(x, rotation_block(x.shape[-1]))


def rotated_weights(weight: "torch.Tensor") -> "torch.Tensor":
    """The weights whose products with `rotated_rows` are those of `weight`, float32[n, k], with the rows as they were: up to rounding."""
    block = rotation_block(weight.shape[-1])
    return walsh_hadamard(weight, block) / block


def unrotated_weights(rotated: "torch.Tensor") -> "torch.Tensor":
    return rotated_rows(rotated)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """weight[i, j] = scales[i, j // group_size] * codes[i, j] - minimums[i, j // group_size].

    scheme: one that has codes (`weight_formats.Codes`). codes: [n, k], of the dtype that it has. scales, minimums: float32[n, ceil(k / group_size)].
    minimums None: symmetric, scale * (code - zero). group_size: a multiple of 32, or k where a row has one scale. If the scheme's codes are
    rotated, this is a weight that `checkpoint.quantized_matrix` has rotated.
    """

    scheme: Scheme
    codes: "torch.Tensor"
    scales: "torch.Tensor"
    minimums: "torch.Tensor | None"
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> "torch.Tensor":
        values = self.values()
        return unrotated_weights(values) if codes_of(self.scheme).rotated else values

    def values(self) -> "torch.Tensor":
        """What the codes stand for, float32[n, k]: the weights, or the rotated ones."""
        import torch

        k = self.codes.shape[1]
        scales = self.scales.repeat_interleave(self.group_size, dim=1)[:, :k]
        values = self.codes.to(torch.float32)
        if self.minimums is None:
            zero = codes_of(self.scheme).zero
            return (values.sub_(zero) if zero else values).mul_(scales)
        return values.mul_(scales).sub_(self.minimums.repeat_interleave(self.group_size, dim=1)[:, :k])

    def rows(self, begin: int, end: int) -> "QuantizedMatrix":
        minimums = None if self.minimums is None else self.minimums[begin:end]
        return replace(self, codes=self.codes[begin:end], scales=self.scales[begin:end], minimums=minimums)

    def columns(self, begin: int, end: int) -> "QuantizedMatrix":
        """Columns begin .. end - 1. Both are multiples of KERNEL_GROUP, or the ends of the matrix; groups that they cut are made smaller. Raises
        ModelError if they are not."""
        size, k = self.group_size, self.codes.shape[1]
        if (begin, end) == (0, k):
            return self
        if size == k:
            return replace(self, codes=self.codes[:, begin:end], group_size=end - begin)
        if begin % size or (end % size and end != k):
            if size % KERNEL_GROUP == 0 and begin % KERNEL_GROUP == 0 and (end % KERNEL_GROUP == 0 or end == k):
                return self.regrouped(KERNEL_GROUP).columns(begin, end)
            raise ModelError(f"weights in groups of {size} cannot be cut at columns {begin} and {end}")
        groups = slice(begin // size, -(-end // size))
        minimums = None if self.minimums is None else self.minimums[:, groups]
        return replace(self, codes=self.codes[:, begin:end], scales=self.scales[:, groups], minimums=minimums)

    def regrouped(self, group_size: int) -> "QuantizedMatrix":
        """The same weights with smaller groups; group_size divides the present one."""
        if group_size == self.group_size:
            return self
        assert self.group_size % group_size == 0, (self.group_size, group_size)
        times, groups = self.group_size // group_size, -(-self.codes.shape[1] // group_size)
        minimums = None if self.minimums is None else self.minimums.repeat_interleave(times, dim=1)[:, :groups]
        scales = self.scales.repeat_interleave(times, dim=1)[:, :groups]
        return replace(self, scales=scales, minimums=minimums, group_size=group_size)

    def to(self, device: "torch.device") -> "QuantizedMatrix":
        minimums = None if self.minimums is None else self.minimums.to(device)
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), minimums=minimums)

    def with_minimums(self) -> "QuantizedMatrix":
        if self.minimums is not None:
            return self
        return replace(self, minimums=self.scales * codes_of(self.scheme).zero)


def stack(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """The rows of all parts, which have one scheme and one k. Exact."""
    import torch

    if len(parts) == 1:
        return parts[0]
    assert len({part.scheme for part in parts}) == 1, [part.scheme for part in parts]
    if any(part.group_size != parts[0].group_size for part in parts):
        parts = [part.regrouped(KERNEL_GROUP) for part in parts]
    minimums = None
    if any(part.minimums is not None for part in parts):
        parts = [part.with_minimums() for part in parts]
        minimums = torch.cat([part.minimums for part in parts if part.minimums is not None])
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    return QuantizedMatrix(parts[0].scheme, codes, scales, minimums, parts[0].group_size)


def in_one_grid(parts: Sequence[QuantizedMatrix]) -> list[QuantizedMatrix] | None:
    """The same weights in one scheme: as they are, or symmetric ones of fewer bits in the most that any has. None if that is not exact."""
    widest = max(parts, key=lambda part: codes_of(part.scheme).bits).scheme
    if all(part.scheme == widest for part in parts):
        return list(parts)
    grid = codes_of(widest)
    if grid.scale_per_row or grid.rotated or any(part.minimums is not None for part in parts):
        return None
    return [replace(part, scheme=widest, codes=part.codes + (grid.zero - codes_of(part.scheme).zero)) for part in parts]


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A matrix in the blocks of a GGUF file. blocks: uint8[n, bytes of a row], on the CPU."""

    type: BlockType
    blocks: "torch.Tensor"

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], self.blocks.shape[1] // self.type.block_bytes * self.type.block_values

    def dequantize(self) -> "torch.Tensor":
        """float32[n, k], the values of ggml bit for bit; of F16 and BF16 in the dtype that they are."""
        import torch

        if self.type.name in ("F16", "BF16"):
            return self.blocks.view(torch.float16 if self.type.name == "F16" else torch.bfloat16)
        return torch.from_numpy(dequantize(self.blocks.numpy(), self.type.name))

    def rows(self, begin: int, end: int) -> "BlockMatrix":
        return replace(self, blocks=self.blocks[begin:end])

    def columns(self, begin: int, end: int) -> "BlockMatrix | torch.Tensor":
        """Columns begin .. end - 1; dequantised, unless they are whole blocks."""
        size = self.type.block_values
        if begin % size or end % size:
            return self.dequantize()[:, begin:end].contiguous()
        places = [column // size * self.type.block_bytes for column in (begin, end)]
        return replace(self, blocks=self.blocks[:, places[0] : places[1]].contiguous())

    def to(self, device: "torch.device") -> "BlockMatrix":
        assert device.type == "cpu", device
        return self


StoredMatrix = QuantizedMatrix | BlockMatrix
"""A matrix as a checkpoint has it."""
