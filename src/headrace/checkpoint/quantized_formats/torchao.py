"""torchao checkpoints in safetensors: https://github.com/pytorch/ao (prototype/safetensors). The metadata of a file says which kind of tensor a
weight is. Those in pickles are not read."""

import json
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.quantized_formats.base import FLOAT8, Parts, QuantizedFormat, integers, unpacked
from headrace.checkpoint.quantized_formats.scaled import by_group, bytes_of
from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import Scheme
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

_KINDS = ("Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")
_Q, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"


class TorchAoFormat(QuantizedFormat):
    """<layer>._weight_qdata, ._weight_scale, ._weight_zero_point.

    Int4Tensor: int8[n, k / 2], the even element in the low nibble, two's complement, [groups, n]: weight = scale * code + zero_point, a float.
    Int8Tensor, IntxUnpackedToInt8Tensor: int8[n, k], [n, groups]: weight = scale * (code - zero_point). Float8Tensor: weight = scale * value.
    """

    suffixes = (_Q, _SCALE, _ZERO)
    telling = (_Q,)
    needed = (_Q, _SCALE)
    unused = ("_weight_act_quant_scale", "_weight_act_quant_zero_point")

    def __init__(self, config: dict[str, Any]) -> None:
        kind = _kind(config.get("quant_type"))
        known: tuple[tuple[str, Scheme], ...] = (("Int4", "int4"), ("Int", "int8"), ("Float8", "fp8"))
        self.scheme = next((scheme for start, scheme in known if kind.startswith(start)), "none")
        self.described = f"torchao {kind} weights"

    def shape(self, parts: Parts) -> tuple[int, int]:
        n, k = parts.matrix_shape(_Q)
        return (n, 2 * k) if self._type(parts) == "Int4Tensor" else (n, k)

    def read(self, parts: Parts) -> "QuantizedMatrix | torch.Tensor":
        import torch

        (n, k), kind = self.shape(parts), self._type(parts)
        if kind == "Float8Tensor":
            values = parts.tensor(_Q, FLOAT8).float()
            scales = by_group(parts, _SCALE, n, k)
            return values.mul_(scales.repeat_interleave(k // scales.shape[1], dim=1))
        if kind == "Int4Tensor":
            packed = parts.tensor(_Q, ("I8", "U8"))
            groups = parts.shape(_SCALE)[0] if len(parts.shape(_SCALE)) == 2 else 0
            if not groups or k % groups:
                raise parts.fault(_SCALE, f"is {list(parts.shape(_SCALE))}, expected one for each group of {k} and row")
            scales = parts.floats(_SCALE, (groups, n)).T.contiguous()
            added = parts.floats(_ZERO, (groups, n)).T if _ZERO in parts else torch.zeros_like(scales)
            # As unsigned codes: 8 more.
            codes = unpacked(packed, 4) ^ 8
            if not bool(added.any()):
                return integers(codes, 4, scales, 8, k // groups)
            size, minimums = k // groups, (8 * scales - added).contiguous()
            if size % 32 == 0:
                return QuantizedMatrix("int4", codes, scales, minimums, size)
            spread = [values.repeat_interleave(size, dim=1) for values in (scales, minimums)]
            return codes.float().mul_(spread[0]).sub_(spread[1])
        return bytes_of(parts, _Q, _SCALE, _ZERO)

    def _type(self, parts: Parts) -> str:
        stated = parts.metadata(_Q).get(f"{parts.layer}.weight")
        try:
            found = json.loads(stated or "null")
        except (ValueError, RecursionError):
            found = None
        kind = found.get("_type") if isinstance(found, dict) else None
        if kind not in _KINDS:
            raise parts.fault(_Q, f"is a torchao tensor of type {kind!r:.80}; supported: {', '.join(_KINDS)}")
        return str(kind)


def _kind(config: Any) -> str:
    """The name of torchao's config, which transformers wraps in {"default": {"_type": name, ...}}."""
    while isinstance(config, dict) and "_type" not in config:
        config = next(iter(config.values()), None)
    name = config.get("_type") if isinstance(config, dict) else config
    if not isinstance(name, str):
        raise ModelError("torchao checkpoints whose config does not say their quant_type are not supported")
    return f"{name.removesuffix('Config'):.80}"
