"""One safetensors file: its checked header, and the bytes of its tensors. torch is imported when a tensor is requested.

The header is read by ourselves so that a broken file is refused naming the tensor before anything is mapped into a model. Format:
https://github.com/huggingface/safetensors#format (8-byte length, JSON header, data; offsets without holes).
"""

import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.checkpoint.files import json_fault, map_regular
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""Names of torch, and bytes of an element."""
DTYPE_BYTES = {name: num_bytes for name, (_, num_bytes) in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """One tensor: dtype by its safetensors name, offset in bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsFile:
    """A mapped file. entries: by name, in the order of the data.

    `buffer` is a private copy-on-write mapping: writing to a tensor made over it never reaches the file.
    """

    def __init__(self, path: Path) -> None:
        """Map and check the file. Raises ModelError naming the file, and the tensor where there is one."""
        self.path = path
        self.buffer = map_regular(path, mmap.ACCESS_COPY)
        self.entries: dict[str, SafetensorsEntry] = {}
        self.metadata: dict[str, str] = {}
        self._read_header()

    def tensor(self, name: str) -> "torch.Tensor":
        """A view of the mapping; a copy where it does not begin at a multiple of its element's size."""
        import torch

        entry = self.entries[name]
        dtype: torch.dtype = getattr(torch, DTYPES[entry.dtype][0])
        if not entry.num_bytes:
            return torch.empty(entry.shape, dtype=dtype)
        data: mmap.mmap | bytearray = self.buffer
        offset, itemsize = entry.offset, DTYPE_BYTES[entry.dtype]
        if offset % itemsize:
            data, offset = bytearray(data[offset : offset + entry.num_bytes]), 0
        return torch.frombuffer(data, dtype=dtype, count=entry.num_bytes // itemsize, offset=offset).reshape(
            entry.shape
        )

    def _broken(self, why: str) -> ModelError:
        return ModelError(f"{self.path.name} is not a usable safetensors file: {why}")

    def _read_header(self) -> None:
        size = len(self.buffer)
        if size < 8:
            raise self._broken(f"it has {size} bytes")
        (length,) = struct.unpack_from("<Q", self.buffer, 0)
        if length > _MAX_HEADER_BYTES:
            raise self._broken(f"its header claims {length} bytes")
        if 8 + length > size:
            raise self._broken(f"its header of {length} bytes is cut off; the file has {size} bytes")
        try:
            header = json.loads(self.buffer[8 : 8 + length], object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as err:
            raise self._broken(f"its header is not JSON ({json_fault(err)})") from None
        if not isinstance(header, dict):
            raise self._broken("its header is not a JSON object")
        self.metadata = header.pop("__metadata__", None) or {}
        entries = [self._entry(name, fields, 8 + length) for name, fields in header.items()]
        end, before = 8 + length, "the header"
        for entry in sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes)):
            if entry.offset != end:
                raise self._broken(f"tensor {entry.name} does not start where {before} ends")
            end, before = entry.offset + entry.num_bytes, f"tensor {entry.name}"
            if end > size:
                raise self._broken(
                    f"tensor {entry.name} lacks {end - size} of its {entry.num_bytes} bytes; the file is truncated"
                )
            self.entries[entry.name] = entry
        if end != size:
            raise self._broken(f"{size - end} bytes follow its last tensor")

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            twice = next(key for key in fields if sum(key == other for other, _ in pairs) > 1)
            raise self._broken(f"tensor {twice} is listed twice")
        return fields

    def _entry(self, name: str, fields: Any, data_start: int) -> SafetensorsEntry:
        match fields:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
                pass
            case _:
                raise self._broken(f"tensor {name} has a malformed header entry")
        if dtype not in DTYPE_BYTES:
            raise self._broken(f"tensor {name} has dtype {dtype}; supported: {', '.join(DTYPE_BYTES)}")
        if any(isinstance(dim, bool) or not isinstance(dim, int) or dim < 0 for dim in shape):
            raise self._broken(f"tensor {name} has shape {shape}")
        num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
        if start < 0 or end - start != num_bytes:
            raise self._broken(f"tensor {name} of {dtype} {shape} needs {num_bytes} bytes but has {end - start}")
        return SafetensorsEntry(name, dtype, tuple(shape), data_start + start, num_bytes)
