"""Maps the tensors of a GGUF file to Hugging Face's names, and undoes the changes of llama.cpp's converter to some weights.

What is an architecture's own is in its family (`family.Gguf`). torch is imported when a tensor is requested.
"""

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.checkpoint.families import all_families
from headrace.checkpoint.gguf import BlockType, Bytes, GgufFile, GgufTensor, dequantize
from headrace.checkpoint.gguf_names import architecture, head_count
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
HALVES = ("F16", "BF16")  # types of 16 bits, which tensors keep
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# Derived from the config, so no weight of the model: the rotary factors of llama 3.
DERIVED_TENSORS = frozenset({"rope_freqs.weight"})


@dataclass(frozen=True, slots=True)
class GgufSource:
    """The source of one Hugging Face tensor in a GGUF file.

    stored: where it is. expert: index into its first dimension, None when the whole tensor is meant.
    row_order: heads whose rows must be reordered (`hf_rows`), None when the order is the same.
    subtract_one: the file stores weight + 1.
    """

    file: GgufFile
    stored: GgufTensor
    shape: tuple[int, ...]
    expert: int | None = None
    row_order: int | None = None
    subtract_one: bool = False

    @property
    def is_half(self) -> bool:
        """Whether `tensor` has 16 bits, and not float32."""
        return self.stored.type.name in HALVES

    def rows(self) -> Bytes:
        """The stored bytes, uint8[rows, row_bytes], in Hugging Face row order."""
        rows = self.file.raw(self.stored.name)
        if self.expert is not None:
            num_rows = math.prod(self.shape[:-1])
            rows = rows[self.expert * num_rows : (self.expert + 1) * num_rows]
        return hf_rows(rows, self.shape[0], self.row_order)

    def tensor(self) -> "torch.Tensor":
        values = values_of(self.rows(), self.stored.type, self.shape)
        return values.sub_(1) if self.subtract_one else values


@dataclass(frozen=True, slots=True)
class EncoderSource:
    """The tensors that make one of Hugging Face's. row_order: see `hf_rows`; the others: see `Projector`."""

    file: GgufFile
    parts: list[GgufTensor]
    row_order: int | None = None
    subtract_one: bool = False
    three_dimensions: bool = False

    @property
    def is_half(self) -> bool:
        """Whether its type has 16 bits; else its values are float32, quantised ones dequantised."""
        return {part.type.name for part in self.parts} in ({"F16"}, {"BF16"})

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        if self.are_frames:
            return (*first[:2], len(self.parts), *first[2:])
        rows = (sum(part.shape[0] for part in self.parts), *first[1:])
        return (1,) * (3 - len(rows)) + rows if self.three_dimensions else rows

    @property
    def are_frames(self) -> bool:
        """Whether the parts are those of a convolution over frames."""
        return len(self.parts) > 1 and len(self.parts[0].shape) == 4

    def tensor(self) -> "torch.Tensor":
        import torch

        parts = []
        for part in self.parts:
            rows = hf_rows(self.file.raw(part.name), part.shape[0], self.row_order)
            values = values_of(rows, part.type, part.shape)
            parts.append(values if self.is_half else values.float())
        tensor = torch.stack(parts, dim=2) if self.are_frames else torch.cat(parts)
        return (tensor.sub_(1) if self.subtract_one else tensor).reshape(self.shape)


def values_of(rows: Bytes, kind: BlockType, shape: tuple[int, ...]) -> "torch.Tensor":
    """The tensor of stored rows: float types as stored, quantised ones as float32."""
    import torch

    if kind.name in HALVES:
        dtype = torch.float16 if kind.name == "F16" else torch.bfloat16
        return torch.from_numpy(np.array(rows)).view(dtype).reshape(shape)
    return torch.from_numpy(dequantize(rows, kind.name)).reshape(shape)


def map_tensors(file: GgufFile) -> dict[str, GgufSource]:
    """Hugging Face name -> source, in the order of the file. Raises ModelError for an unknown tensor."""
    arch = architecture(file)
    own = all_families().gguf[arch]
    if own.name is not None:
        names = [(tensor, own.name(file, tensor.name)) for tensor in file.tensors.values()]
        return {name: GgufSource(file, tensor, tensor.shape) for tensor, name in names}
    num_q_heads = int(head_count(file, arch, "head_count"))
    num_kv_heads = int(head_count(file, arch, "head_count_kv"))
    layer_names = _LAYER | dict(own.layer_names)
    sources: dict[str, GgufSource] = {}
    for tensor in file.tensors.values():
        if tensor.name in DERIVED_TENSORS:
            continue
        block = _BLOCK_NAME.fullmatch(tensor.name)
        if block is None:
            if tensor.name not in _GLOBAL:
                raise ModelError(f"{file.path.name}: tensor {tensor.name} is unknown for architecture {arch}")
            subtract = own.norms_plus_one and tensor.name == "output_norm.weight"
            sources[_GLOBAL[tensor.name]] = GgufSource(file, tensor, tensor.shape, subtract_one=subtract)
            continue
        layer, part, kind = block.groups()
        prefix = f"model.layers.{layer}."
        if part in _EXPERTS:
            for expert in range(tensor.shape[0]):
                name = f"{prefix}mlp.experts.{expert}.{_EXPERTS[part]}.{kind}"
                sources[name] = GgufSource(file, tensor, tensor.shape[1:], expert=expert)
        elif part in layer_names:
            heads = {"attn_q": num_q_heads, "attn_k": num_kv_heads}.get(part) if own.interleaved else None
            check_pairs(file, tensor, heads)
            sources[f"{prefix}{layer_names[part]}.{kind}"] = GgufSource(
                file,
                tensor,
                tensor.shape,
                row_order=heads,
                subtract_one=own.norms_plus_one and part.endswith("norm"),
            )
        else:
            raise ModelError(f"{file.path.name}: tensor {tensor.name} is unknown for architecture {arch}")
    return sources


def check_pairs(file: GgufFile, tensor: GgufTensor, num_heads: int | None) -> None:
    """Raises ModelError unless `hf_rows` can reorder the rows of the tensor."""
    if num_heads is not None and tensor.shape[0] % (2 * num_heads):
        raise ModelError(
            f"{file.path.name}: tensor {tensor.name} has {tensor.shape[0]} rows, not a whole number "
            f"of rotary pairs for each of {num_heads} heads"
        )


def hf_rows(rows: Bytes, num_rows: int, num_heads: int | None) -> Bytes:
    """The stored rows of a q or k projection of the `llama` architecture, or of its bias, in Hugging Face's order. num_heads None: as they are.

    llama.cpp rotates neighbouring pairs, Hugging Face the two halves of a head, so its converter interleaves the
    halves: stored row 2j + h of a head is Hugging Face row h * head_dim / 2 + j. This is the inverse.
    """
    if num_heads is None:
        return rows
    stored = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    return rows.reshape(num_rows, -1)[stored.swapaxes(1, 2).reshape(num_rows)]  # a bias is stored as one row of values
