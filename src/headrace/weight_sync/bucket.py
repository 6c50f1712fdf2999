"""Flattened buckets: many tensors as one, which is quicker to move than each alone.

Owns the form in which a bucket travels: a safetensors file with one tensor, `flattened_tensor`, and in the file's metadata, under
`metadata`, a JSON list of what is where in it: {name, shape, dtype, start_idx, end_idx}, indices in elements of the flat tensor. These are
the fields that SGLang's trainers have; there they travel pickled. `pack` runs in the trainer's process, `unpack` in the worker's.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import torch

from headrace.errors import ModelError
from headrace.plain_types import plain_reason

TENSOR_NAME = "flattened_tensor"
METADATA_NAME = "metadata"

_Index = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Part(msgspec.Struct, frozen=True):
    """One tensor of a bucket. numel: of the flat tensor, as SGLang has it; it follows from the indices."""

    name: str
    shape: tuple[_Index, ...]
    dtype: str
    start_idx: _Index
    end_idx: _Index
    numel: int | None = None


_PARTS = msgspec.json.Decoder(list[Part])


def pack(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[torch.Tensor, str]:
    """(flat, metadata) for `safetensors.torch.save({"flattened_tensor": flat}, {"metadata": metadata})`: bytes, one after the other."""
    flat: list[torch.Tensor] = []
    parts: list[dict[str, object]] = []
    start = 0
    for name, tensor in named_tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(tensor.dtype).removeprefix("torch.")
        parts.append(
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": dtype,
                "start_idx": start,
                "end_idx": start + len(data),
            }
        )
        flat.append(data)
        start += len(data)
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8), json.dumps(parts)


def unpack(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], dtypes: Mapping[str, torch.dtype]
) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a bucket; a copy where its bytes do not begin at a multiple of the element's size.

    dtypes: those that are known, by name. Raises ModelError naming what does not fit.
    """
    if set(tensors) != {TENSOR_NAME} or tensors[TENSOR_NAME].ndim != 1:
        raise ModelError(f"a flattened bucket must be one tensor with one dimension called {TENSOR_NAME}")
    flat = tensors[TENSOR_NAME]
    try:
        parts = _PARTS.decode(metadata.get(METADATA_NAME, ""))
    except msgspec.DecodeError as error:
        raise ModelError(
            f"a flattened bucket needs {METADATA_NAME} in the file's metadata, a JSON list of name, shape, dtype, start_idx, end_idx: "
            f"{plain_reason(error)}"
        ) from None
    return [(part.name, _tensor(flat, part, dtypes)) for part in parts]


def _tensor(flat: torch.Tensor, part: Part, dtypes: Mapping[str, torch.dtype]) -> torch.Tensor:
    dtype = dtypes.get(part.dtype.removeprefix("torch."))
    if dtype is None:
        raise ModelError(f"tensor {part.name} has dtype {part.dtype}; known: {', '.join(dtypes)}")
    data = flat[part.start_idx : part.end_idx].view(torch.uint8)
    wanted = dtype.itemsize
    for size in part.shape:
        wanted *= size
    if not part.start_idx <= part.end_idx <= len(flat) or len(data) != wanted:
        raise ModelError(
            f"tensor {part.name} of {part.dtype} {list(part.shape)} needs {wanted} bytes, but [{part.start_idx}, {part.end_idx}) of "
            f"{len(flat)} elements are {len(data)}"
        )
    if data.storage_offset() % dtype.itemsize or data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).reshape(part.shape)
