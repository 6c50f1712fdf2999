"""Quantised safetensors checkpoints: which are served, by their `quantization_config`, and how GPTQ, AWQ and our own store a matrix.

Does not own the weight formats (`weight_formats`) nor files (`source`). Settings are read in any process, without torch (docs/quantization.md).

GPTQ: E. Frantar et al., "GPTQ" (2022), stored as AutoGPTQ and GPTQModel do. AWQ: J. Lin et al., "AWQ" (2023), stored as AutoAWQ's
"gemm" version does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import KERNEL_GROUP, STORED, Scheme, codes_of
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

OWN_METHOD = "headrace"


@dataclass(frozen=True, slots=True)
class StoredSettings:
    """Of a quantised checkpoint. group_size: -1 = a whole row. zero_offset: what GPTQ adds to a stored zero point.

    block: of fp8, (rows, columns) of the weights that share a scale; (0, 0) = all of a matrix do.
    """

    method: Literal["headrace", "gptq", "awq", "fp8"]
    scheme: Scheme
    group_size: int
    zero_offset: int = 0
    block: tuple[int, int] = (0, 0)


def stored_settings(quantization: dict[str, Any] | None) -> StoredSettings | None:
    """What a checkpoint says with this `quantization_config`; None for one that is not quantised.

    Raises ModelError naming the setting that is not supported.
    """
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    bits = quantization.get("bits", quantization.get("w_bit"))
    group_size = quantization.get("group_size", quantization.get("q_group_size"))
    if method == OWN_METHOD:
        scheme = quantization.get("scheme")
        if scheme not in STORED or group_size != KERNEL_GROUP:
            raise ModelError(
                f"a headrace checkpoint of scheme {scheme} with groups of {group_size} is not known to this version"
            )
        return StoredSettings("headrace", scheme, KERNEL_GROUP)
    if method == "fp8":
        return _fp8_settings(quantization)
    if method not in ("gptq", "awq"):
        raise ModelError(
            f"quantised checkpoints of quant_method {method} are not supported; gptq, awq, fp8 and headrace are"
        )
    if bits != 4:
        raise ModelError(f"{method} checkpoints of {bits} bits are not supported; those of 4 are")
    if not isinstance(group_size, int) or (group_size != -1 and (group_size <= 0 or group_size % KERNEL_GROUP)):
        raise ModelError(
            f"{method} checkpoints with group_size {group_size} are not supported; -1 and multiples of {KERNEL_GROUP} are"
        )
    if method == "awq":
        version = str(quantization.get("version", "gemm")).lower()
        if version != "gemm":
            raise ModelError(f"awq checkpoints of version {version} are not supported; gemm is")
        return StoredSettings("awq", "int4", group_size)
    layout = quantization.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise ModelError(f"gptq checkpoints of checkpoint_format {layout} are not supported; gptq and gptq_v2 are")
    return StoredSettings("gptq", "int4", group_size, 1 if layout == "gptq" else 0)


def _fp8_settings(quantization: dict[str, Any]) -> StoredSettings:
    activations = quantization.get("activation_scheme", "dynamic")
    if activations != "dynamic":
        raise ModelError(f"fp8 checkpoints with activation_scheme {activations} are not supported; dynamic is")
    block = quantization.get("weight_block_size")
    if block is None:
        return StoredSettings("fp8", "fp8", -1)
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)):
        raise ModelError(f"fp8 checkpoints with weight_block_size {block} are not supported; two positive sizes are")
    return StoredSettings("fp8", "fp8", -1, block=(block[0], block[1]))


def stored_scheme(quantization: dict[str, Any] | None) -> Scheme:
    """How a model of this `quantization_config` computes: "none" when it is not quantised. Raises ModelError as `stored_settings`."""
    found = stored_settings(quantization)
    return "none" if found is None else found.scheme


Shape = Callable[[str], tuple[int, ...]]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of nibble i of a word


class QuantizedFormat(ABC):
    """One way to store a matrix as several tensors `<name>.<suffix>`.

    suffixes: the parts of a quantised linear layer, the codes first. optional: those that may be missing.
    """

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
