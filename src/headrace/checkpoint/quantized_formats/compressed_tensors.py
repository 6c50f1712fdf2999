"""compressed-tensors checkpoints (llm-compressor's): https://github.com/vllm-project/compressed-tensors. The tensors tell which layers are
quantised, and how; the config only which kinds there are."""

from typing import TYPE_CHECKING, Any

from headrace.checkpoint.quantized_formats.base import Parts, QuantizedFormat, ordered, unpacked
from headrace.checkpoint.quantized_formats.scaled import ACTIVATION_SCALES, by_group, mxfp4_blocks, scaled, scaled_shape
from headrace.checkpoint.quantized_matrix import BlockMatrix, QuantizedMatrix
from headrace.checkpoint.weight_formats import KERNEL_GROUP, Scheme
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

_KINDS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_MIXED = "mixed-precision"


class CompressedTensorsFormat(QuantizedFormat):
    """pack-quantized: weight_packed int32[n, k bits / 32], codes from the lowest bit on, across words, of integers + 2^(bits - 1); weight_scale
    [n, 1] or [n, groups]; weight_zero_point int32[n bits / 32, groups] packed along n; weight_g_idx int32[k]; weight_shape, (n, k).
    The others: `scaled`."""

    suffixes = (
        *("weight", "weight_packed", "weight_scale", "weight_shape"),
        *("weight_zero_point", "weight_g_idx", "weight_global_scale"),
    )
    telling = ("weight_packed", "weight_scale")
    unused = ACTIVATION_SCALES

    def __init__(self, config: dict[str, Any]) -> None:
        groups = config.get("config_groups")
        kind = config.get("format")
        if not isinstance(groups, dict) or not groups:
            raise ModelError("compressed-tensors checkpoints without config_groups are not supported")
        for key in ("sparsity_config", "transform_config"):
            found = config.get(key)
            if isinstance(found, dict) and found and found.get("format", key) != "dense":
                raise ModelError(f"compressed-tensors checkpoints with a {key} are not supported")
        kinds = {self._kind(name, group, kind) for name, group in groups.items()}
        schemes = {self._scheme(group["weights"]) for group in groups.values()}
        self._bits = {int(group["weights"].get("num_bits", 8)) for group in groups.values()}
        blocks = {tuple(group["weights"].get("block_structure") or ()) for group in groups.values()} - {()}
        if len(blocks) > 1:
            raise ModelError("compressed-tensors checkpoints of several block sizes are not supported")
        self._block: tuple[int, int] = next(iter(blocks), (0, 0))
        if len(schemes) > 1:  # MXFP4 is exact in codes of int8, too
            schemes = {"int8" if scheme == "gguf" else scheme for scheme in schemes}
        self.scheme = next((scheme for scheme in ("int4", "int8") if scheme in schemes), "none")
        if schemes in ({"fp8"}, {"gguf"}):
            [self.scheme] = schemes
        self.described = f"compressed-tensors {', '.join(sorted(kinds))} weights of {_listed(self._bits)} bits"

    def _kind(self, name: str, group: Any, kind: Any) -> str:
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise ModelError(f"compressed-tensors: config_groups.{name:.80} has no weights")
        own = group.get("format") or kind
        if own == _MIXED or own not in _KINDS:
            raise ModelError(
                f"compressed-tensors checkpoints of format {own!s:.80} are not supported; {', '.join(_KINDS)} are"
            )
        bits, block = weights.get("num_bits", 8), weights.get("block_structure")
        if not isinstance(bits, int) or not 2 <= bits <= 8:
            raise ModelError(f"compressed-tensors weights of {bits!s:.80} bits are not supported; those of 2 to 8 are")
        if block is not None and not (
            isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)
        ):
            raise ModelError(f"compressed-tensors: block_structure {block!s:.80} is not two positive sizes")
        return str(own)

    def _scheme(self, weights: dict[str, Any]) -> Scheme:
        """How a model computes with weights of this group of the config."""
        bits, size, strategy = weights.get("num_bits", 8), weights.get("group_size"), weights.get("strategy")
        if weights.get("type", "int") != "int":
            is_mx = size == KERNEL_GROUP
            return "gguf" if bits == 4 and is_mx else "fp8" if bits == 8 and not is_mx else "none"
        is_cut = isinstance(size, int) and size % KERNEL_GROUP != 0
        is_ordered = weights.get("actorder") in ("group", "dynamic", True)
        if strategy == "block" or (strategy == "group" and (is_cut or is_ordered)):
            return "none"
        if bits <= 4:
            return "int4"
        return "int8" if weights.get("symmetric", True) else "none"

    def required(self, parts: Parts) -> tuple[str, ...]:
        return ("weight_packed" if "weight_packed" in parts else "weight"), "weight_scale"

    def shape(self, parts: Parts) -> tuple[int, int]:
        if "weight_packed" not in parts:
            return scaled_shape(parts, "weight")
        if parts.dtype("weight_packed") != "I32":
            return scaled_shape(parts, "weight_packed")
        n, words = parts.matrix_shape("weight_packed")
        if "weight_shape" in parts:
            n, k = (int(size) for size in parts.tensor("weight_shape", ("I32", "I64"), (2,)))
            if k > 0 and parts.shape("weight_packed") == (n, -(-k * self._bits_of(words, k) // 32)):
                return n, k
            raise parts.fault(
                "weight_packed", f"is {list(parts.shape('weight_packed'))}, but weight_shape says [{n}, {k}]"
            )
        if len(self._bits) > 1:
            raise ModelError(f"quantised layer {parts.layer} has no weight_shape")
        return n, words * 32 // next(iter(self._bits))

    def _bits_of(self, words: int, k: int) -> int:
        return next((bits for bits in sorted(self._bits) if words == -(-k * bits // 32)), 0)

    def blocks(self, parts: Parts) -> BlockMatrix | None:
        return mxfp4_blocks(parts, "weight_packed", "weight_scale") if "weight_packed" in parts else None

    def read(self, parts: Parts) -> "QuantizedMatrix | torch.Tensor":
        if "weight_packed" not in parts:
            return scaled(parts, "weight", "weight_scale", self._block)
        if parts.dtype("weight_packed") != "I32":
            return scaled(parts, "weight_packed", "weight_scale")
        return self._packed(parts)

    def _packed(self, parts: Parts) -> "QuantizedMatrix | torch.Tensor":
        n, k = self.shape(parts)
        bits = self._bits_of(parts.shape("weight_packed")[1], k)
        if not bits:
            raise parts.fault("weight_packed", f"does not hold {k} codes of {_listed(self._bits)} bits a row")
        codes = _codes(parts.tensor("weight_packed", ("I32",)), bits, k)
        scales = by_group(parts, "weight_scale", n, k)
        groups = scales.shape[1]
        zeros: torch.Tensor | int = 2 ** (bits - 1)
        if "weight_zero_point" in parts and parts.dtype("weight_zero_point") == "I32":
            stored = parts.tensor("weight_zero_point", ("I32",), (-(-n * bits // 32), groups))
            zeros = _codes(stored.T, bits, n).T.float()
        elif "weight_zero_point" in parts:
            zeros = by_group(parts, "weight_zero_point", n, k, ("I8",)).expand(scales.shape) + 2 ** (bits - 1)
        return ordered(parts, "weight_g_idx", codes, bits, scales, zeros, lowest=-1)


def _codes(words: "torch.Tensor", bits: int, k: int) -> "torch.Tensor":
    """uint8[n, k] of int32[n, ceil(k bits / 32)]."""
    import torch

    padded = torch.nn.functional.pad(words, (0, -words.shape[1] % bits)) if 8 % bits else words
    return unpacked(padded, bits)[:, :k].contiguous()


def _listed(bits: set[int]) -> str:
    return " or ".join(map(str, sorted(bits)))
