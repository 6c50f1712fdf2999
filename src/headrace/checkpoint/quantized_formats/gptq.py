"""GPTQ checkpoints: E. Frantar et al., "GPTQ" (2022), stored as AutoGPTQ and GPTQModel do, and auto-round's in the same packing.

https://github.com/ModelCloud/GPTQModel (quant_method gptq); https://github.com/intel/auto-round (quant_method auto-round).
"""

from typing import TYPE_CHECKING, Any

from headrace.checkpoint.quantized_formats.awq import AwqFormat
from headrace.checkpoint.quantized_formats.base import (
    Parts,
    QuantizedFormat,
    group_of,
    group_size_of,
    is_kernel_group,
    ordered,
    unpacked,
)
from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

_BITS = (2, 3, 4, 8)
_LAYOUTS = {"gptq": 1, "gptq_v2": 0}
"""What is added to a stored zero point, by checkpoint_format."""


class GptqFormat(QuantizedFormat):
    """qweight int32[k bits / 32, n], consecutive k from the lowest bit of a word on; qzeros int32[groups, n bits / 32]; scales [groups, n]; g_idx
    int32[k], the group of each column. weight = scale * (code - zero).

    Columns of a group that are not side by side (act-order) have no kernel: the matrix is dequantised.
    """

    suffixes = ("qweight", "qzeros", "scales", "g_idx")
    telling = ("qweight",)
    needed = ("qweight", "qzeros", "scales")

    def __init__(self, method: str, config: dict[str, Any], zero_offset: int, varies: bool) -> None:
        """zero_offset: what is added to a stored zero point. varies: layers may have other bits and groups than the config says."""
        self._zero_offset = zero_offset
        self._varies = varies
        bits = config.get("bits")
        if bits not in _BITS:
            raise ModelError(f"{method} checkpoints of {bits!s:.80} bits are not supported; those of 2, 3, 4 and 8 are")
        self._bits, self._group_size = int(bits), group_size_of(method, config.get("group_size"))
        is_ordered = bool(config.get("desc_act")) and self._group_size != -1 and not config.get("static_groups")
        has_kernel = self._bits <= 4 or config.get("sym") is not False
        self.scheme = "none"
        if is_kernel_group(self._group_size) and has_kernel and not is_ordered:
            self.scheme = "int4" if self._bits <= 4 else "int8"
        order = " with columns in the order of their activations" if is_ordered else ""
        self.described = f"{method} weights of {self._bits} bits in groups of {self._group_size}{order}"

    @classmethod
    def gptq(cls, config: dict[str, Any]) -> "GptqFormat":
        layout = config.get("checkpoint_format") or "gptq"
        if layout not in tuple(_LAYOUTS):
            raise ModelError(
                f"gptq checkpoints of checkpoint_format {layout!s:.80} are not supported; {' and '.join(_LAYOUTS)} are"
            )
        return cls("gptq", config, _LAYOUTS[layout], bool(config.get("dynamic")))

    def shape(self, parts: Parts) -> tuple[int, int]:
        rows, n = parts.matrix_shape("qweight")
        bits = self._bits_of(parts)
        if rows * 32 % bits:
            raise parts.fault("qweight", f"has {rows} rows, which are no whole number of codes of {bits} bits")
        return n, rows * 32 // bits

    def read(self, parts: Parts) -> "QuantizedMatrix | torch.Tensor":
        (n, k), bits = self.shape(parts), self._bits_of(parts)
        stated = k // max(1, parts.matrix_shape("scales")[0]) if self._varies else self._group_size
        groups = k // group_of(parts, k, stated)
        if k % 32 or (n % 32 and n * bits % 32):
            raise parts.fault("qweight", f"is of [{n}, {k}] weights, which do not fill words of 32 bits")
        words = parts.tensor("qweight", ("I32",), (k * bits // 32, n))
        codes = unpacked(words.T, bits)
        stored = parts.tensor("qzeros", ("I32",), (groups, n * bits // 32))
        zeros = unpacked(_filled(stored, bits), bits)[:, :n].T.float() + self._zero_offset
        scales = parts.floats("scales", (groups, n)).T.contiguous()
        return ordered(parts, "g_idx", codes, bits, scales, zeros)

    def _bits_of(self, parts: Parts) -> int:
        """Bits of a code: those of the config, or as many as a zero point has."""
        if not self._varies:
            return self._bits
        n, words = parts.matrix_shape("qweight")[1], parts.matrix_shape("qzeros")[1]
        bits = next((bits for bits in _BITS if n * bits == words * 32), 0)
        if not bits:
            raise parts.fault(
                "qzeros", f"is {list(parts.shape('qzeros'))}: not one of 2, 3, 4 or 8 bits for each of {n}"
            )
        return bits


def auto_round(config: dict[str, Any]) -> QuantizedFormat:
    """Of auto-round's own configs: `packing_format` says whose layout the layers have."""
    packing = str(config.get("packing_format", "auto_round:auto_gptq"))
    kind, bits = config.get("data_type", "int"), config.get("act_bits")
    if kind != "int" or (isinstance(bits, int) and bits < 16):
        raise ModelError(
            f"auto-round checkpoints of {kind!s:.80} weights with activations of {bits!s:.80} bits are not supported; "
            "those of int weights alone are"
        )
    varies = bool(config.get("extra_config"))
    if "awq" in packing:
        return AwqFormat({**config, "version": "gemm"}, "auto-round", varies)
    # The packing of AutoGPTQ keeps a zero point less one; auto-round's own and GPTQModel's keep it as it is.
    offset = 1 if "gptq" in packing and "gptqmodel" not in packing else 0
    return GptqFormat("auto-round", config, offset, varies)


def _filled(words: "torch.Tensor", bits: int) -> "torch.Tensor":
    """The words with zeros behind each row, so that a row is whole groups of eight codes."""
    import torch

    return torch.nn.functional.pad(words, (0, -words.shape[-1] % bits)) if bits == 3 else words
