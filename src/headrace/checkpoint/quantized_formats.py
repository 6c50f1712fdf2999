"""Formats of quantised safetensors checkpoints: how GPTQ, AWQ and our own store a matrix (docs/quantization.md).

GPTQ: E. Frantar et al., "GPTQ" (2022), stored as AutoGPTQ and GPTQModel do. AWQ: J. Lin et al., "AWQ" (2023), stored as AutoAWQ's "gemm" version.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import KERNEL_GROUP, Scheme, codes_of, stored_settings
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

Shape = Callable[[str], tuple[int, ...]]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of nibble i of a word


class QuantizedFormat(ABC):
    """One way to store a matrix as several tensors `<name>.<suffix>`. suffixes: the parts of a quantised linear layer, the codes first. optional:
    those that may be missing."""

    suffixes: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def __init__(self, scheme: Scheme, group_size: int) -> None:
        self.scheme = scheme
        self.group_size = group_size

    @abstractmethod
    def shape(self, name: str, shape: Shape) -> tuple[int, int]:
        """(n, k) of the matrix."""

    @abstractmethod
    def read(self, name: str, tensors: dict[str, "torch.Tensor"]) -> QuantizedMatrix:
        """tensors: by suffix. Raises ModelError when they are not what the format says."""

    def _check(self, name: str, tensors: dict[str, "torch.Tensor"], wanted: dict[str, tuple[int, ...]]) -> None:
        for suffix, size in wanted.items():
            if suffix in tensors and tuple(tensors[suffix].shape) != size:
                raise ModelError(f"tensor {name}.{suffix} is {list(tensors[suffix].shape)}, expected {list(size)}")

    def _group(self, name: str, k: int) -> int:
        size = k if self.group_size == -1 else self.group_size
        if k % size or size % KERNEL_GROUP:
            raise ModelError(
                f"{name}: rows of {k} in groups of {size}: both must be multiples, of the group and of {KERNEL_GROUP}"
            )
        return size


class GptqFormat(QuantizedFormat):
    """qweight int32[k / 8, n], eight consecutive k in a word, the lowest nibble first; qzeros int32[groups, n / 8]; scales [groups, n].

    zero_offset: what is added to a stored zero point: 1 in the original format, 0 in gptq_v2. weight = scale * (code - zero).
    """

    suffixes = ("qweight", "qzeros", "scales", "g_idx")
    optional = ("g_idx",)

    def __init__(self, group_size: int, zero_offset: int) -> None:
        super().__init__("int4", group_size)
        self._zero_offset = zero_offset

    def shape(self, name: str, shape: Shape) -> tuple[int, int]:
        words, n = shape(f"{name}.qweight")
        return n, words * 8

    def read(self, name: str, tensors: dict[str, "torch.Tensor"]) -> QuantizedMatrix:
        import torch

        words, n = tensors["qweight"].shape
        k = words * 8
        size = self._group(name, k)
        self._check(name, tensors, {"qzeros": (k // size, n // 8), "scales": (k // size, n), "g_idx": (k,)})
        if "g_idx" in tensors and not torch.equal(tensors["g_idx"].long(), torch.arange(k) // size):
            raise ModelError(f"{name}: its columns are grouped in another order (desc_act), which is not supported")
        codes = _nibbles(tensors["qweight"].T.contiguous()).reshape(n, k)
        zeros = _nibbles(tensors["qzeros"]).reshape(k // size, n).T.float() + self._zero_offset
        return _with_zeros(codes, tensors["scales"].T.float(), zeros, size)


class AwqFormat(QuantizedFormat):
    """qweight int32[k, n / 8], eight columns in a word in the order 0 2 4 6 1 3 5 7; qzeros int32[groups, n / 8] likewise; scales
    [groups, n]. weight = scale * (code - zero)."""

    suffixes = ("qweight", "qzeros", "scales")

    def __init__(self, group_size: int) -> None:
        super().__init__("int4", group_size)

    def shape(self, name: str, shape: Shape) -> tuple[int, int]:
        k, words = shape(f"{name}.qweight")
        return words * 8, k

    def read(self, name: str, tensors: dict[str, "torch.Tensor"]) -> QuantizedMatrix:
        import torch

        k, words = tensors["qweight"].shape
        n = words * 8
        size = self._group(name, k)
        self._check(name, tensors, {"qzeros": (k // size, words), "scales": (k // size, n)})
        back = torch.tensor([_AWQ_ORDER.index(column) for column in range(8)])
        codes = _nibbles(tensors["qweight"]).reshape(k, words, 8)[:, :, back].reshape(k, n).T.contiguous()
        zeros = _nibbles(tensors["qzeros"]).reshape(-1, words, 8)[:, :, back].reshape(-1, n).T.float()
        return _with_zeros(codes, tensors["scales"].T.float(), zeros, size)


class OwnFormat(QuantizedFormat):
    """codes: int8: uint8[n, k]; int4: uint8[n, k / 2], the even element of a pair in the low nibble. scales, minimums: float [n, k / 32]."""

    suffixes = ("codes", "scales", "minimums")
    optional = ("minimums",)

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(scheme, KERNEL_GROUP)

    def shape(self, name: str, shape: Shape) -> tuple[int, int]:
        n, stored = shape(f"{name}.codes")
        # A checkpoint of int4 keeps some matrices in 8 bits: their scales tell.
        groups = shape(f"{name}.scales")[1]
        return n, stored * 2 if stored * 2 <= groups * KERNEL_GROUP else stored

    def read(self, name: str, tensors: dict[str, "torch.Tensor"]) -> QuantizedMatrix:
        import torch

        codes, scales = tensors["codes"], tensors["scales"].float()
        n, k = self.shape(name, lambda tensor: tuple(tensors[tensor.rpartition(".")[2]].shape))
        groups = (n, -(-k // KERNEL_GROUP))
        self._check(name, tensors, {"scales": groups, "minimums": groups})
        if codes.dtype != torch.uint8:
            raise ModelError(f"tensor {name}.codes is {codes.dtype}, expected uint8")
        minimums = tensors["minimums"].float() if "minimums" in tensors else None
        if codes.shape[1] == k:
            if minimums is not None:
                raise ModelError(f"{name}: 8-bit codes have no minimums")
            return QuantizedMatrix("int8", codes, scales, None, KERNEL_GROUP)
        both = torch.stack((codes & 15, codes >> 4), dim=2).reshape(n, k)
        return QuantizedMatrix("int4", both, scales, minimums, KERNEL_GROUP)


def own_tensors(matrix: QuantizedMatrix) -> dict[str, "torch.Tensor"]:
    """What `OwnFormat` reads, by suffix. Scales are float16 where that is exact to 11 bits, float32 where they are too small or large."""
    import torch

    assert matrix.group_size == KERNEL_GROUP, matrix.group_size
    codes = matrix.codes
    if codes_of(matrix.scheme).bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    parts = {"codes": codes.contiguous()}
    for suffix, values in (("scales", matrix.scales), ("minimums", matrix.minimums)):
        if values is not None:
            sizes = values.abs()
            fits = bool(((sizes == 0) | (sizes >= 2.0**-14)).all() and (sizes < 65504).all())
            parts[suffix] = values.to(torch.float16 if fits else torch.float32).contiguous()
    return parts


def stored_format(quantization: dict[str, Any] | None) -> QuantizedFormat | None:
    """The format of a checkpoint with this `quantization_config`; None for one that is not quantised, or whose matrices are floats
    of 8 bits. Raises ModelError as `stored_settings`."""
    settings = stored_settings(quantization)
    if settings is None or settings.method == "fp8":
        return None
    if settings.method == "headrace":
        return OwnFormat(settings.scheme)
    if settings.method == "awq":
        return AwqFormat(settings.group_size)
    return GptqFormat(settings.group_size, settings.zero_offset)


def _nibbles(words: "torch.Tensor") -> "torch.Tensor":
    """uint8[..., 8] of int32[...], the lowest nibble first."""
    import torch

    if words.dtype != torch.int32:
        raise ModelError(f"packed codes are {words.dtype}, expected int32")
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & 15).to(torch.uint8)


def _with_zeros(codes: "torch.Tensor", scales: "torch.Tensor", zeros: "torch.Tensor", size: int) -> QuantizedMatrix:
    minimums = None if bool((zeros == 8).all()) else (scales * zeros).contiguous()
    return QuantizedMatrix("int4", codes, scales.contiguous(), minimums, size)
