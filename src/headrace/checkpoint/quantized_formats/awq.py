"""AWQ checkpoints: J. Lin et al., "AWQ" (2023), stored as AutoAWQ does (https://github.com/casper-hansen/AutoAWQ), in its versions gemm, gemv and
gemv_fast."""

from typing import TYPE_CHECKING, Any

from headrace.checkpoint.quantized_formats.base import (
    Parts,
    QuantizedFormat,
    group_of,
    group_size_of,
    integers,
    is_kernel_group,
    unpacked,
)
from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import KERNEL_GROUP
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds column i
_VERSIONS = ("gemm", "gemv", "gemv_fast")
_ROWS, _COLUMNS = 4, 64  # of a tile of gemv_fast


class AwqFormat(QuantizedFormat):
    """weight = scale * (code - zero), 4 bits. version:

    gemm: qweight int32[k, n / 8], eight columns in a word in the order 0 2 4 6 1 3 5 7; qzeros int32[groups, n / 8] likewise; scales [groups, n].
    gemv: qweight int32[n, k / 8], qzeros int32[n, w], eight k or groups in a word; scales [n, 8 w]; w: enough for the groups, rounded up.
    gemv_fast: qweight int16[n / 4, k], tiles of 4 rows and 64 columns; scales and qzeros half[8 w, n], qzeros = -scale * zero.
    """

    suffixes = ("qweight", "qzeros", "scales")
    telling = ("qweight",)
    needed = ("qweight", "qzeros", "scales")

    def __init__(self, config: dict[str, Any], method: str = "awq", varies: bool = False) -> None:
        """varies: layers may have other groups than the config says."""
        self._varies = varies
        bits = config.get("bits", config.get("w_bit"))
        self._group_size = group_size_of(method, config.get("group_size", config.get("q_group_size")))
        self._version = str(config.get("version", "gemm")).lower()
        if bits != 4:
            raise ModelError(f"{method} checkpoints of {bits!s:.80} bits are not supported; those of 4 are")
        if self._version not in _VERSIONS:
            raise ModelError(
                f"awq checkpoints of version {self._version:.80} are not supported; {', '.join(_VERSIONS)} are"
            )
        self.scheme = "int4" if is_kernel_group(self._group_size) else "none"
        self.described = f"{method} weights of 4 bits in groups of {self._group_size}"

    def shape(self, parts: Parts) -> tuple[int, int]:
        rows, columns = parts.matrix_shape("qweight")
        if self._version == "gemm":
            return columns * 8, rows
        return (rows, columns * 8) if self._version == "gemv" else (rows * _ROWS, columns)

    def read(self, parts: Parts) -> "QuantizedMatrix | torch.Tensor":
        n, k = self.shape(parts)
        stated = k // max(1, parts.matrix_shape("scales")[0]) if self._varies else self._group_size
        size = group_of(parts, k, stated)
        if self._version == "gemm":
            return self._gemm(parts, n, k, size)
        groups = k // size
        # AutoAWQ keeps room for a multiple of so many words of zero points.
        unit = {64: 2, 32: 4}.get(size, 1)
        width = -(-groups // (8 * unit)) * unit
        return (self._gemv if self._version == "gemv" else self._gemv_fast)(parts, n, k, size, width)

    def _gemm(self, parts: Parts, n: int, k: int, size: int) -> "QuantizedMatrix | torch.Tensor":
        scales = parts.floats("scales", (k // size, n)).T
        codes, zeros = columns_of(parts, "qweight", k, n, ORDER), columns_of(parts, "qzeros", k // size, n, ORDER)
        return integers(codes, 4, scales, zeros.float(), size)

    def _gemv(self, parts: Parts, n: int, k: int, size: int, width: int) -> "QuantizedMatrix | torch.Tensor":
        groups = k // size
        codes = unpacked(parts.tensor("qweight", ("I32",)), 4)
        zeros = unpacked(parts.tensor("qzeros", ("I32",), (n, width)), 4)[:, :groups]
        return integers(codes, 4, parts.floats("scales", (n, width * 8))[:, :groups], zeros.float(), size)

    def _gemv_fast(self, parts: Parts, n: int, k: int, size: int, width: int) -> "QuantizedMatrix | torch.Tensor":
        import torch

        if k % _COLUMNS or size % KERNEL_GROUP:
            raise ModelError(f"{parts.layer}: awq of version gemv_fast with rows of {k} in groups of {size}")
        words = parts.tensor("qweight", ("I16",)).view(n // _ROWS, k // _COLUMNS, _COLUMNS)
        # The nibbles of a tile go row by row.
        shifts = torch.arange(0, 16, 4, dtype=torch.int16)
        nibbles = (words.unsqueeze(-1) >> shifts & 15).to(torch.uint8).reshape(-1, k // _COLUMNS, _ROWS, _COLUMNS)
        rows = nibbles.permute(0, 2, 1, 3).reshape(n, k // 32, 4, 2, 4)
        # In 32 of a row: first the even and odd elements of 8 apart, then pairs of the four eights in turns.
        pairs = rows.transpose(3, 4).reshape(n, k // 32, 4, 4, 2).transpose(2, 3)
        codes = pairs.reshape(n, k).contiguous()
        shape, groups = (width * 8, n), k // size
        scales = parts.floats("scales", shape)[:groups].T.contiguous()
        minimums = -parts.floats("qzeros", shape)[:groups].T
        return QuantizedMatrix("int4", codes, scales, minimums.contiguous(), size)


def columns_of(parts: Parts, suffix: str, rows: int, n: int, order: tuple[int, ...]) -> "torch.Tensor":
    """Codes uint8[n, rows] of int32[rows, n / 8]: words of eight columns. order: the nibble of each."""
    nibbles = unpacked(parts.tensor(suffix, ("I32",), (rows, -(-n // 8))), 4).reshape(rows, -1, 8)
    return nibbles[:, :, list(order)].flatten(-2)[:, :n].T.contiguous()
