"""GPTQ checkpoints: E. Frantar et al., "GPTQ" (2022), stored as AutoGPTQ and GPTQModel do, and auto-round's in the same packing.

https://github.com/ModelCloud/GPTQModel (quant_method gptq); https://github.com/intel/auto-round (quant_method auto-round).
"""

import re
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.quantized_formats.awq import AwqFormat
from headrace.checkpoint.quantized_formats.base import (
    Parts,
    QuantizedFormat,
    group_of,
    group_size_of,
    grouped,
    integers,
    is_kernel_group,
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

    def __init__(self, method: str, config: dict[str, Any], zero_offset: int, overrides: dict[str, Any]) -> None:
        self._method = method
        self._zero_offset = zero_offset
        self._overrides = overrides
        self._bits, self._group_size = _checked(method, config)
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
        dynamic = config.get("dynamic")
        overrides = dynamic if isinstance(dynamic, dict) else {}
        patterns = {f"re:{name.removeprefix('+:')}": value for name, value in overrides.items()}
        return cls("gptq", config, _LAYOUTS[layout], patterns)

    def required(self, parts: Parts) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales"

    def shape(self, parts: Parts) -> tuple[int, int]:
        rows, n = parts.matrix_shape("qweight")
        bits, _ = self._settings(parts.layer)
        if rows * 32 % bits:
            raise parts.fault("qweight", f"has {rows} rows, which are no whole number of codes of {bits} bits")
        return n, rows * 32 // bits

    def read(self, parts: Parts) -> "QuantizedMatrix | torch.Tensor":
        import torch

        (n, k), (bits, group_size) = self.shape(parts), self._settings(parts.layer)
        size = group_of(parts, k, group_size)
        groups = k // size
        if k % 32 or (n % 32 and n * bits % 32):
            raise parts.fault("qweight", f"is of [{n}, {k}] weights, which do not fill words of 32 bits")
        words = parts.tensor("qweight", ("I32",), (k * bits // 32, n))
        codes = unpacked(words.T, bits)
        stored = parts.tensor("qzeros", ("I32",), (groups, n * bits // 32))
        zeros = unpacked(_filled(stored, bits), bits)[:, :n].T.float() + self._zero_offset
        scales = parts.floats("scales", (groups, n)).T.contiguous()
        if "g_idx" in parts:
            order = parts.tensor("g_idx", ("I32", "I64"), (k,))
            if int(order.min()) < 0 or int(order.max()) >= groups:
                raise parts.fault("g_idx", f"names groups beyond the {groups} that there are")
            if not torch.equal(order.long(), torch.arange(k) // size):
                return grouped(codes, scales, zeros, order)
        return integers(codes, bits, scales, zeros, size)

    def _settings(self, layer: str) -> tuple[int, int]:
        """(bits, group size) of a layer."""
        for name, changes in self._overrides.items():
            if isinstance(changes, dict) and names_layer(name, layer):
                return _checked(self._method, {"bits": self._bits, "group_size": self._group_size, **changes})
        return self._bits, self._group_size


class AutoRound:
    """auto-round's own configs: `packing_format` says whose layout the layers have."""

    @classmethod
    def of(cls, config: dict[str, Any]) -> QuantizedFormat:
        packing = str(config.get("packing_format", "auto_round:auto_gptq"))
        kind = config.get("data_type", "int")
        if kind != "int" or (config.get("act_bits") or 16) < 16:
            raise ModelError(
                f"auto-round checkpoints of {kind!s:.80} weights are not supported; those of int weights are"
            )
        extra = config.get("extra_config")
        overrides = extra if isinstance(extra, dict) else {}
        patterns = {(name if _is_name(name) else f"re:{name}"): value for name, value in overrides.items()}
        if "awq" in packing:
            if any(isinstance(value, dict) and value.get("bits", 4) == 4 for value in overrides.values()):
                raise ModelError(
                    "auto-round checkpoints in the packing of awq with layers of their own group sizes are not supported"
                )
            return AwqFormat({**config, "version": "gemm"}, "auto-round")
        # The packing of AutoGPTQ keeps a zero point less one; auto-round's own and GPTQModel's keep it as it is.
        offset = 1 if "gptq" in packing and "gptqmodel" not in packing else 0
        return GptqFormat("auto-round", config, offset, patterns)


def names_layer(pattern: str, layer: str) -> bool:
    """Whether a name of a layer, or `re:` and a regular expression, means this layer. Raises ModelError for an expression that is none."""
    if not pattern.startswith("re:"):
        return pattern == layer
    try:
        return re.match(pattern[3:], layer) is not None
    except re.error:
        raise ModelError(f"quantization_config: {pattern[3:]!r:.80} is not a regular expression") from None


def _is_name(name: str) -> bool:
    return re.fullmatch(r"[\w.]+", name) is not None


def _checked(method: str, config: dict[str, Any]) -> tuple[int, int]:
    bits = config.get("bits")
    if bits not in _BITS:
        raise ModelError(f"{method} checkpoints of {bits!s:.80} bits are not supported; those of 2, 3, 4 and 8 are")
    return int(bits), group_size_of(method, config.get("group_size"))


def _filled(words: "torch.Tensor", bits: int) -> "torch.Tensor":
    """The words with zeros behind each row, so that a row is whole groups of eight codes."""
    import torch

    return torch.nn.functional.pad(words, (0, -words.shape[-1] % bits)) if bits == 3 else words
