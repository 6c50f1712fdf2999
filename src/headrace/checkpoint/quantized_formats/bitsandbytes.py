"""bitsandbytes checkpoints: nf4 and fp4 (T. Dettmers et al., "QLoRA", 2023), int8 (T. Dettmers et al., "LLM.int8()", 2022), as
https://github.com/bitsandbytes-foundation/bitsandbytes stores them in safetensors."""

import json
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.quantized_formats.base import Parts, QuantizedFormat, integers, looked_up
from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

_STATE = "weight.quant_state.bitsandbytes__"
_LONGEST_STATE = 4096
_LIMIT = 127  # of codes: a row's scale is its largest magnitude


class BitsAndBytesFormat(QuantizedFormat):
    """4 bits: weight, bytes of two codes, the first in the high nibble, of a matrix row by row; weight.quant_map float32[16], what the codes stand
    for; weight.absmax, a scale for each block of so many elements, itself in codes of 8 bits if there is weight.nested_absmax;
    weight.quant_state..., JSON. 8 bits: weight int8[n, k], SCB float32[n]: weight = code * SCB / 127."""

    suffixes = (
        *("weight", "SCB", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
        *(f"{_STATE}nf4", f"{_STATE}fp4"),
    )
    telling = ("weight.absmax", "SCB")
    unused = ("weight_format",)

    def __init__(self, config: dict[str, Any]) -> None:
        in_8_bits = bool(config.get("load_in_8bit", config.get("_load_in_8bit")))
        self.scheme = "int8" if in_8_bits else "none"
        kind = "int8" if in_8_bits else str(config.get("bnb_4bit_quant_type", "nf4"))
        self.described = f"bitsandbytes {kind:.20} weights"

    def required(self, parts: Parts) -> tuple[str, ...]:
        return ("weight", "SCB") if "SCB" in parts else ("weight", "weight.quant_map", self._state_name(parts))

    def shape(self, parts: Parts) -> tuple[int, int]:
        if "SCB" in parts:
            return parts.matrix_shape("weight")
        shape = self._state(parts).get("shape")
        if not (isinstance(shape, list) and len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)):
            raise parts.fault(self._state_name(parts), f"says that the matrix is {shape!r:.80}")
        return shape[0], shape[1]

    def read(self, parts: Parts) -> "QuantizedMatrix | torch.Tensor":
        import torch

        n, k = self.shape(parts)
        if "SCB" in parts:
            codes = parts.tensor("weight", ("I8",)).view(torch.uint8) ^ 128
            scales = parts.floats("SCB", (n,), (n, 1)).reshape(n, 1) / _LIMIT
            return integers(codes, 8, scales, 128, k)
        state = self._state(parts)
        packed = parts.tensor("weight", ("U8", "I8", "F16", "BF16", "F32")).contiguous().view(torch.uint8).reshape(-1)
        if packed.numel() != -(-n * k // 2):
            raise parts.fault("weight", f"has {packed.numel()} bytes, expected {-(-n * k // 2)}")
        values = parts.floats("weight.quant_map", (16,))
        scales = self._scales(parts, state, n * k)
        codes = torch.arange(256)
        weights = looked_up(packed, torch.stack((values[codes >> 4], values[codes & 15]), dim=1)).reshape(-1)[: n * k]
        return _by_block(weights, scales, _block(parts, state, "blocksize")).reshape(n, k)

    def _scales(self, parts: Parts, state: dict[str, Any], count: int) -> "torch.Tensor":
        blocks = -(-count // _block(parts, state, "blocksize"))
        if "weight.nested_absmax" not in parts:
            return parts.floats("weight.absmax", (blocks,))
        size = _block(parts, state, "nested_blocksize")
        offset = state.get("nested_offset")
        if not isinstance(offset, int | float):
            raise parts.fault(self._state_name(parts), f"has a nested_offset of {offset!r:.80}")
        nested = parts.floats("weight.nested_absmax", (-(-blocks // size),))
        values = parts.floats("weight.nested_quant_map", (256,))
        return _by_block(values[parts.tensor("weight.absmax", ("U8",), (blocks,)).long()], nested, size) + offset

    def _state_name(self, parts: Parts) -> str:
        return f"{_STATE}fp4" if f"{_STATE}fp4" in parts else f"{_STATE}nf4"

    def _state(self, parts: Parts) -> dict[str, Any]:
        name = self._state_name(parts)
        data = parts.tensor(name, ("U8",))
        if data.numel() > _LONGEST_STATE:
            raise parts.fault(name, f"has {data.numel()} bytes, which is too long")
        try:
            state = json.loads(bytes(data.reshape(-1).tolist()))
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, dict):
            raise parts.fault(name, "is not a JSON object")
        return state


def _block(parts: Parts, state: dict[str, Any], key: str) -> int:
    size = state.get(key)
    if type(size) is not int or size <= 0:
        raise ModelError(f"quantised layer {parts.layer} has a {key} of {size!r:.80}")
    return size


def _by_block(values: "torch.Tensor", scales: "torch.Tensor", size: int) -> "torch.Tensor":
    """values float32[count], each times the scale of its block."""
    return values.mul_(scales.repeat_interleave(size)[: values.numel()])
