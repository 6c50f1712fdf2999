"""Integers, floats and named tensors as the little-endian bytes that messages carry. No numpy, no torch: the front end imports this.

Owns writing the safetensors format (https://github.com/huggingface/safetensors#format). Reading is `checkpoint.safetensors_file`. Runs in any
process that sends.
"""

import ctypes
import json
import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from headrace.errors import RequestError

T = TypeVar("T", int, float)


def pack_int32(values: Iterable[int]) -> bytes:
    """int32[n] as bytes. Raises OverflowError for a value that does not fit."""
    return _little(array("i", values)).tobytes()


def pack_float32(values: Iterable[float]) -> bytes:
    """float32[n] as bytes. A value beyond the range becomes infinite."""
    return _little(array("f", values)).tobytes()


def unpack_int32(data: bytes) -> list[int]:
    """Bytes of an int32[n]. Raises ValueError when the length is not a multiple of 4."""
    values = array("i", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def unpack_float32(data: bytes) -> list[float]:
    """Bytes of a float32[n]. Raises ValueError when the length is not a multiple of 4."""
    values = array("f")
    values.frombytes(data)
    return _little(values).tolist()


def _little(values: "array[T]") -> "array[T]":
    if sys.byteorder == "big":
        values.byteswap()
    return values


DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def safetensors_parts(
    named_tensors: Iterable[tuple[str, Any]], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The file's bytes, part by part: its header, then each tensor's own memory (a copy only where it is not contiguous or not on the
    CPU). The tensors are read when their part is requested: do not change them until all parts have been used.

    metadata: of the file. Raises RequestError for a duplicate name, and for a value that is not a tensor of a known dtype.
    """
    tensors = list(named_tensors)
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors:
        shape, dtype = _shape_and_dtype(name, tensor)
        if name in header:
            raise RequestError(f"tensor {name} is given twice", "named_tensors")
        size = math.prod(shape) * _DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps({"__metadata__": dict(metadata), **header} if metadata else header).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned for the largest dtype
    yield len(text).to_bytes(8, "little") + text
    for name, tensor in tensors:
        start, end = header[name]["data_offsets"]
        if end > start:
            yield _memory(tensor, end - start)


def _shape_and_dtype(name: str, tensor: Any) -> tuple[tuple[int, ...], str]:
    try:
        shape, dtype = tuple(int(size) for size in tensor.shape), str(tensor.dtype).removeprefix("torch.")
    except AttributeError:
        raise RequestError(f"{name!r} is {type(tensor).__name__}, not a tensor", "named_tensors") from None
    if dtype not in DTYPE_NAMES:
        raise RequestError(f"tensor {name} has dtype {dtype}; known: {', '.join(DTYPE_NAMES)}", "named_tensors")
    return shape, DTYPE_NAMES[dtype]


def _memory(tensor: Any, num_bytes: int) -> memoryview:
    """The tensor's bytes; the view keeps the tensor alive."""
    if hasattr(tensor, "data_ptr"):
        tensor = tensor.detach().cpu().contiguous()
        address = tensor.data_ptr()
    else:
        tensor = tensor if tensor.flags.c_contiguous else tensor.copy(order="C")
        address = tensor.ctypes.data
    memory = (ctypes.c_char * num_bytes).from_address(address)
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory)
