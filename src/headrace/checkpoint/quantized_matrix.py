"""A quantised weight in plain form: what readers of checkpoints and quantisers make, and kernels pack.

Owns the meaning of codes, scales and minimums. Does not own a layout of bytes, on disk (the readers) or in memory (`kernels.packing`).
torch is imported when a matrix is used. Runs in whichever process loads the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.checkpoint.rotation import unrotated_weights
from headrace.checkpoint.weight_formats import KERNEL_GROUP, Scheme, codes_of
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """weight[i, j] = scales[i, j // group_size] * codes[i, j] - minimums[i, j // group_size].

    scheme: one that has codes (`weight_formats.Codes`). codes: [n, k], of the dtype that it has. scales, minimums: float32[n, ceil(k / group_size)].
    minimums None: symmetric, scale * (code - zero). group_size: a multiple of 32, or k where a row has one scale. If the scheme's codes are
    rotated, this is a weight that `checkpoint.rotation` has rotated.
    """

    scheme: Scheme
    codes: "torch.Tensor"
    scales: "torch.Tensor"
    minimums: "torch.Tensor | None"
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> "torch.Tensor":
        """The weights, float32[n, k]."""
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
        """Rows begin .. end - 1."""
        minimums = None if self.minimums is None else self.minimums[begin:end]
        return QuantizedMatrix(self.scheme, self.codes[begin:end], self.scales[begin:end], minimums, self.group_size)

    def columns(self, begin: int, end: int) -> "QuantizedMatrix":
        """Columns begin .. end - 1. Both are multiples of group_size, or the ends of the matrix. Raises ModelError if they are not."""
        size, k = self.group_size, self.codes.shape[1]
        if (begin, end) == (0, k):
            return self
        if size == k:
            return QuantizedMatrix(self.scheme, self.codes[:, begin:end], self.scales, self.minimums, end - begin)
        if begin % size or (end % size and end != k):
            raise ModelError(f"weights in groups of {size} cannot be cut at columns {begin} and {end}")
        groups = slice(begin // size, -(-end // size))
        minimums = None if self.minimums is None else self.minimums[:, groups]
        return QuantizedMatrix(self.scheme, self.codes[:, begin:end], self.scales[:, groups], minimums, size)

    def regrouped(self, group_size: int) -> "QuantizedMatrix":
        """The same weights with smaller groups; group_size divides the present one."""
        if group_size == self.group_size:
            return self
        assert self.group_size % group_size == 0, (self.group_size, group_size)
        times, groups = self.group_size // group_size, -(-self.codes.shape[1] // group_size)
        minimums = None if self.minimums is None else self.minimums.repeat_interleave(times, dim=1)[:, :groups]
        scales = self.scales.repeat_interleave(times, dim=1)[:, :groups]
        return QuantizedMatrix(self.scheme, self.codes, scales, minimums, group_size)

    def to(self, device: "torch.device") -> "QuantizedMatrix":
        """The same on a device."""
        minimums = None if self.minimums is None else self.minimums.to(device)
        return QuantizedMatrix(self.scheme, self.codes.to(device), self.scales.to(device), minimums, self.group_size)

    def with_minimums(self) -> "QuantizedMatrix":
        """The same weights with minimums spelled out. Exact."""
        if self.minimums is not None:
            return self
        minimums = self.scales * codes_of(self.scheme).zero
        return QuantizedMatrix(self.scheme, self.codes, self.scales, minimums, self.group_size)


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
