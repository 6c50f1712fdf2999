"""GGUF files (versions 2 and 3): metadata, tensor index, raw blocks and dequantisation; what tensors mean to a model is in `gguf_tensors.py`.

The file is mapped, never read whole, and metadata arrays are decoded on demand, so that opening takes a fraction of a second. numpy, no torch.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Block layouts: the `block_*` structs of ggml-common.h.
"""

import contextlib
import functools
import math
import mmap
import os
import struct
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.files import first_part, gguf_parts, is_mmproj, map_regular, open_regular
from headrace.checkpoint.gguf_strings import Strings, text_of
from headrace.errors import ModelError

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_DEQUANT_CHUNK_BYTES = 1 << 20  # of blocks at a time: the temporaries stay in cache
_MAX_ARRAY_DEPTH = 4
_MAX_PARTS = 99_999

# metadata value type -> struct format; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class BlockType:
    name: str
    block_values: int
    block_bytes: int


MXFP4 = BlockType("MXFP4", 32, 17)
BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
    # These are dequantised by the gguf library.
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: MXFP4,
    40: BlockType("NVFP4", 64, 36),
}
_UNSUPPORTED = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Index entry of one tensor.

    shape: outermost dimension first, as numpy and torch have it (the file stores it reversed).
    offset: bytes from the start of the file. num_bytes: of the stored blocks.
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Array:
    """A metadata array not decoded yet: its element type, count and place in the file; of strings also where each begins, and the last one ends."""

    kind: int
    count: int
    offset: int
    starts: "array[int]"


class GgufFile:
    """One open GGUF file, or the parts of one. version; alignment in bytes; tensors by their GGUF names in the order of the index. others: the
    parts after the first, whose tensors are here, too; metadata are those of the first."""

    def __init__(self, path: Path, is_part: bool = False) -> None:
        """Map the file and read header, metadata keys and tensor index. Raises ModelError if any of it is invalid, or a part is missing.

        is_part: without the other parts.
        """
        self.path = path
        self.others: tuple[GgufFile, ...] = ()
        self._part_of: dict[str, GgufFile] = {}
        self._map = map_regular(
            path, mmap.ACCESS_COPY
        )  # which nobody writes: torch warns of memory that cannot be written
        self._size = len(self._map)
        self._values: dict[str, Any] = {}
        self._arrays: dict[str, _Array] = {}
        self._cursor = 0
        try:
            self._read_header()
        # A length of 2**63 or more is no offset at all.
        except (struct.error, OverflowError):
            raise self._broken("it ends inside the header") from None
        except UnicodeDecodeError:
            raise self._broken("a name in the header is not UTF-8") from None
        if not is_part and self._split("split.count", 1) > 1:
            self._open_others()

    def _split(self, key: str, default: int) -> int:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_PARTS:
            raise self._broken(f"metadata key {key} is {value!r:.80}; expected a number of parts")
        return value

    def _open_others(self) -> None:
        names, count = gguf_parts(self.path.name), self._split("split.count", 1)
        if len(names) != count:
            raise self._broken(
                f"it is one of {count} parts of a model, which are called NAME-00001-of-{count:05}.gguf and so on"
            )
        if self.path.name != names[0] or self._split("split.no", 0) != 0:
            raise self._broken(f"it is not the first of {count} parts; name {names[0]}")
        others = []
        for number, name in enumerate(names[1:], 1):
            path = self.path.with_name(name)
            if not path.exists():
                raise self._broken(f"of its {count} parts {path.name} is missing")
            part = GgufFile(path, is_part=True)
            if "split.no" not in part or "split.count" not in part:
                raise part._broken(f"it does not say that it is one of {count} parts (split.no and split.count)")
            if (part._split("split.no", 0), part._split("split.count", 1)) != (number, count):
                raise part._broken(f"it says that it is another one of {count} parts")
            others.append(part)
            for tensor in part.tensors.values():
                if tensor.name in self.tensors:
                    raise part._broken(f"tensor {tensor.name} is in another part, too")
                self.tensors[tensor.name], self._part_of[tensor.name] = tensor, part
        self.others = tuple(others)
        total = self._values.get("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise self._broken(f"its parts have {len(self.tensors)} tensors, and it says {total!r:.20}")

    # --- metadata

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def metadata_keys(self) -> Iterator[str]:
        return iter(self._values)

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value of `key`: a Python scalar, str, or list; `default` when absent."""
        value = self._values.get(key, default)
        if isinstance(value, _Array):
            value = self._values[key] = self._decode_array(value)
        return value

    def require(self, key: str) -> Any:
        if key not in self._values:
            raise self._broken(f"metadata key {key} is missing")
        return self.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        """The positive whole number of `key`. Raises ModelError if it is another value, or is absent without a default."""
        value = self.require(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self._broken(f"metadata key {key} is {value!r:.80}; expected a positive whole number")
        return value

    def decimal(self, key: str, default: float | None = None) -> float:
        """The finite number of `key`, as the shortest decimal of its float32. Raises ModelError like `count`."""
        value = self.require(key) if default is None else self.get(key, default)
        return self._decimal(key, value)

    def decimals(self, key: str) -> list[float]:
        """The finite numbers of a list, like `decimal`."""
        return [self._decimal(key, value) for value in self.listed(key, float)]

    def _decimal(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e38:
            raise self._broken(f"metadata key {key} is {value!r:.80}; expected a number")
        return float(str(np.float32(value)))

    def listed(self, key: str, kind: type[T]) -> list[T]:
        """The list of `key`, all of type `kind`. Raises ModelError when it is another value, or absent."""
        value = self.require(key)
        if not isinstance(value, list) or not set(map(type, value)) <= {kind}:
            raise self._broken(f"metadata key {key} is {value!r:.80}; expected a list of {kind.__name__}")
        return value

    def strings(self, key: str) -> Strings:
        """The list of strings of `key`. Raises as `listed`."""
        stored = self._arrays.get(key)
        if stored is None or stored.kind != _STRING:
            self.listed(key, str)
            return Strings(b"", array("q", [0]))
        return Strings(self._map[stored.starts[0] : stored.starts[-1]], stored.starts)

    def integers(self, key: str) -> npt.NDArray[np.int64]:
        """The list of integers of `key`. Raises as `listed`."""
        stored = self._arrays.get(key)
        if stored is None or _SCALARS.get(stored.kind, "?") in "f?dQ":
            return np.array(self.listed(key, int), np.int64)
        return self._numbers(stored).astype(np.int64)

    def rows(self, name: str) -> int:
        """Rows of a tensor. Raises ModelError if it is missing."""
        if name not in self.tensors:
            raise ModelError(f"{self.path.name}: tensor {name} is missing")
        return self.tensors[name].shape[0]

    # --- tensors

    def raw(self, name: str) -> Bytes:
        """The stored blocks of a tensor: uint8[rows, row_bytes], a read-only view of the mapped file. Rows are all dimensions but the last,
        flattened; a vector is one row."""
        tensor = self.tensors[name]
        rows = math.prod(tensor.shape[:-1])
        flat: Bytes = np.frombuffer(
            self.part_of(name)._map, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset
        )
        return flat.reshape(rows, tensor.num_bytes // rows)

    def part_of(self, name: str) -> "GgufFile":
        """The part that holds a tensor."""
        return self._part_of.get(name, self)

    @property
    def parts(self) -> "tuple[GgufFile, ...]":
        return (self, *self.others)

    def mapped_memory(self) -> list[Bytes]:
        return [np.frombuffer(part._map, dtype=np.uint8) for part in self.parts]

    def release(self) -> None:
        for part in self.parts:
            part._map.madvise(mmap.MADV_DONTNEED)

    def dequantize(self, name: str) -> Floats:
        tensor = self.tensors[name]
        return dequantize(self.raw(name), tensor.type.name).reshape(tensor.shape)

    # --- reading

    def _broken(self, why: str) -> ModelError:
        return ModelError(f"{self.path.name} is not a usable GGUF file: {why}")

    def _take(self, fmt: str) -> Any:
        (value,) = struct.unpack_from("<" + fmt, self._map, self._cursor)
        self._cursor += struct.calcsize("<" + fmt)
        return value

    def _take_string(self) -> str:
        length = self._take("Q")
        start, self._cursor = self._cursor, self._cursor + length
        if self._cursor > self._size:
            raise self._broken("a string runs past the end of the file")
        return self._map[start : self._cursor].decode()

    def _read_header(self) -> None:
        magic = self._map[:4]
        if magic != b"GGUF":
            hint = "; it looks like a Git LFS pointer: fetch the file itself" if magic == b"vers" else ""
            raise self._broken(f"it does not start with the letters GGUF{hint}")
        self._cursor = 4
        self.version: int = self._take("I")
        if self.version not in (2, 3):
            hint = " (a big-endian file?)" if self.version & 0xFFFF == 0 else ""
            raise self._broken(f"version {self.version} is not supported, only 2 and 3{hint}")
        num_tensors, num_keys = self._take("Q"), self._take("Q")
        # An index entry takes at least 24 bytes, a metadata entry 13: a larger count is invalid.
        if num_tensors * 24 + num_keys * 13 > self._size:
            raise self._broken(f"it claims {num_tensors} tensors and {num_keys} metadata keys in {self._size} bytes")
        for _ in range(num_keys):
            key = self._take_string()
            value = self._values[key] = self._take_value(self._take("I"), key)
            if isinstance(value, _Array):
                self._arrays[key] = value
        self.alignment: int = self._values.get("general.alignment", 32)
        if not isinstance(self.alignment, int) or self.alignment <= 0 or self.alignment % 8:
            raise self._broken(f"general.alignment is {self.alignment!r}; expected a multiple of 8")
        index = [self._take_index_entry() for _ in range(num_tensors)]
        data_start = -(-self._cursor // self.alignment) * self.alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in index:
            self._add_tensor(name, shape, kind, data_start + offset)
        self._check_overlap()

    def _take_value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])
        if kind == _STRING:
            return self._take_string()
        if kind == _ARRAY:
            return self._skip_array(key, 0)
        raise self._broken(f"metadata key {key} has the unknown type {kind}")

    def _skip_array(self, key: str, depth: int) -> _Array:
        kind, count = self._take("I"), self._take("Q")
        stored = _Array(kind, count, self._cursor, array("q"))
        if kind in _SCALARS:
            self._cursor += count * struct.calcsize("<" + _SCALARS[kind])
        elif kind == _STRING:
            if count * 8 > self._size:
                raise self._broken(f"metadata array {key} claims {count} strings")
            read_length = struct.Struct("<Q").unpack_from
            at, data, add = self._cursor, self._map, stored.starts.append
            for _ in range(count):
                add(at)
                at += 8 + read_length(data, at)[0]
            add(at)
            self._cursor = at
        elif kind == _ARRAY and depth < _MAX_ARRAY_DEPTH:
            if count * 12 > self._size:
                raise self._broken(f"metadata array {key} claims {count} arrays")
            for _ in range(count):
                self._skip_array(key, depth + 1)
        else:
            raise self._broken(f"metadata array {key} has the unknown element type {kind}")
        if self._cursor > self._size:
            raise self._broken(f"metadata array {key} runs past the end of the file")
        return stored

    def _decode_array(self, stored: _Array) -> list[Any]:
        if stored.kind in _SCALARS:
            return list(self._numbers(stored).tolist())
        if stored.kind == _ARRAY:
            self._cursor = stored.offset
            return [self._decode_array(self._skip_array("", 0)) for _ in range(stored.count)]
        data = self._map
        return [text_of(data[begin + 8 : end]) for begin, end in pairwise(stored.starts)]

    def _numbers(self, stored: _Array) -> npt.NDArray[Any]:
        return np.frombuffer(self._map, dtype="<" + _SCALARS[stored.kind], count=stored.count, offset=stored.offset)

    def _take_index_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._take_string()
        num_dims = self._take("I")
        if not 1 <= num_dims <= 4:
            raise self._broken(f"tensor {name} has {num_dims} dimensions")
        dims = tuple(self._take("Q") for _ in range(num_dims))
        return name, dims[::-1], self._take("I"), self._take("Q")

    def _add_tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> None:
        if name in self.tensors:
            raise self._broken(f"tensor {name} is listed twice")
        block = BLOCK_TYPES.get(kind)
        if block is None:
            known = ", ".join(block.name for block in BLOCK_TYPES.values())
            raise self._broken(f"tensor {name} has type {_UNSUPPORTED.get(kind, kind)}; supported: {known}")
        if min(shape) < 1:
            raise self._broken(f"tensor {name} has shape {list(shape)}")
        if shape[-1] % block.block_values:
            raise self._broken(
                f"tensor {name} has rows of {shape[-1]}, not whole {block.name} blocks of {block.block_values}"
            )
        num_bytes = math.prod(shape) // block.block_values * block.block_bytes
        if offset % self.alignment:
            raise self._broken(f"tensor {name} starts at byte {offset}, which is not aligned to {self.alignment}")
        if offset + num_bytes > self._size:
            missing = offset + num_bytes - self._size
            raise self._broken(
                f"tensor {name} lacks {missing} of its {num_bytes} bytes; the file is truncated or corrupt"
            )
        self.tensors[name] = GgufTensor(name, shape, block, offset, num_bytes)

    def _check_overlap(self) -> None:
        end, before = 0, ""
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise self._broken(f"tensors {before} and {tensor.name} overlap")
            end, before = tensor.offset + tensor.num_bytes, tensor.name


def opened(path: Path) -> GgufFile:
    """The file, which the parts of a process that ask for it one after the other share as long as it does not change. Raises as `GgufFile`."""
    files = [path.with_name(name) for name in gguf_parts(path.name)]
    return _opened(path, tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in map(_status, files) if stat))


@functools.lru_cache(maxsize=1)
def _opened(path: Path, stamp: object) -> GgufFile:
    return GgufFile(path)


def _status(path: Path) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return path.stat()
    return None


def is_gguf(path: Path) -> bool:
    """Whether a file is GGUF: by its first four bytes, whatever its name (Ollama's blobs have no suffix), or by `.gguf`. Raises ModelError if it
    cannot be opened or is not a regular file."""
    try:
        with open_regular(path) as file:
            magic = file.read(4)
    except OSError as err:
        raise ModelError(f"{path.name} cannot be opened: {err.strerror}") from err
    return magic == b"GGUF" or path.suffix == ".gguf"


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path means: a file of any name, or the one of a folder; None for any other model. Raises ModelError."""
    if path.is_dir():
        return gguf_of(path)
    return path if path.exists() and is_gguf(path) else None


def gguf_of(folder: Path) -> Path | None:
    """The GGUF file of a folder; None if there is none, or if the folder has a config.json and safetensors.

    Files for other parts of a model (`mmproj-*.gguf`, which sees images) do not count; of a file in parts it is the first.
    Raises ModelError listing them if there are several.
    """
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return None
    found = sorted(
        file for file in folder.glob("*.gguf") if not is_mmproj(file.name) and file.name == first_part(file.name)
    )
    if len(found) > 1:
        listed = ", ".join(file.name for file in found[:20])
        raise ModelError(f"{folder.name} holds {len(found)} GGUF files; name one of them: {listed}")
    return found[0] if found else None


# --- dequantisation
#
# Every function takes whole blocks, uint8[n, block_bytes], and writes float32[n, block_values]. The order of the float32
# operations is that of ggml's dequantize_row_*, so the values are the same bit for bit. Ours are those of the common types,
# and several times faster than the library's.


def dequantize(raw: Bytes, type_name: str) -> Floats:
    """Values of stored rows: uint8[rows, row_bytes] -> float32[rows, row_values]. type_name: a name of BLOCK_TYPES. Raises KeyError for another."""
    block = next(block for block in BLOCK_TYPES.values() if block.name == type_name)
    rows = raw.shape[0]
    if type_name == "F32":
        return np.ascontiguousarray(raw).view("<f4").astype(np.float32)
    if type_name == "F16":
        return np.ascontiguousarray(raw).view("<f2").astype(np.float32)
    if type_name == "BF16":
        return (np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << 16).view(np.float32)
    blocks = np.ascontiguousarray(raw).reshape(-1, block.block_bytes)
    out = np.empty((blocks.shape[0], block.block_values), np.float32)
    unpack = _UNPACK.get(type_name) or functools.partial(_by_library, type_name)
    step = _DEQUANT_CHUNK_BYTES // block.block_bytes
    # A scale of a corrupt file may be infinite or NaN; the loader's check reports that, not numpy.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, blocks.shape[0], step):
            unpack(blocks[start : start + step], out[start : start + step])
    return out.reshape(rows, -1)


def _by_library(type_name: str, blocks: Bytes, out: Floats) -> None:
    import gguf  # slow to import, and most models do without

    # As one row: the library takes rows in groups of 16.
    values = gguf.quants.dequantize(blocks.reshape(1, -1), gguf.GGMLQuantizationType[type_name])
    out[:] = values.reshape(out.shape)


def half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, float32[n, 1]."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, out: Floats) -> None:
    """Low nibbles of uint8[n, m] into out[:, :m], high ones into out[:, m:]."""
    half = packed.shape[1]
    out[:, :half] = packed & 0x0F
    out[:, half:] = packed >> 4


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Bit j of the little-endian uint32 at byte `at` of each block, times 16: uint8[n, 32]."""
    bits: Bytes = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    bits *= 16
    return bits


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= half(blocks, 0)
    out += half(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 6:], out)
    out += _fifth_bits(blocks, 2)
    out -= 16
    out *= half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 8:], out)
    out += _fifth_bits(blocks, 4)
    out *= half(blocks, 0)
    out += half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), half(blocks, 0), out=out)


def k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of the 8 sub-blocks of a Q4_K or Q5_K block: float32[n, 8, 1] each. Twelve bytes hold sixteen 6-bit numbers: the first four
    of each kind whole, the last four split in nibble and top bits."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 0x3F, (third >> 4) | (second >> 6 << 4)], axis=1)
    d, d_min = half(blocks, 0), half(blocks, 2)
    return (d * scales)[:, :, None], (d_min * minima)[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    scale, minimum = k_scales(blocks)
    # [n, 4, 32] bytes: the low nibbles are sub-block 2i, the high ones 2i + 1
    packed = blocks[:, 16:].reshape(-1, 4, 1, 32)
    values = out.reshape(-1, 8, 32)
    values[:] = (packed >> np.array([0, 4], np.uint8)[:, None] & 0x0F).reshape(-1, 8, 32)
    values *= scale
    values -= minimum


def _q5_k(blocks: Bytes, out: Floats) -> None:
    scale, minimum = k_scales(blocks)
    packed = blocks[:, 48:].reshape(-1, 4, 1, 32)
    low = (packed >> np.array([0, 4], np.uint8)[:, None] & 0x0F).reshape(-1, 8, 32)
    # bit i of each of the 32 bytes belongs to sub-block i
    high = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & 1
    values = out.reshape(-1, 8, 32)
    values[:] = low | high << 4
    values *= scale
    values -= minimum


def _q6_k(blocks: Bytes, out: Floats) -> None:
    # two halves of 128 values, each four runs of 32: nibbles of 64 bytes, two upper bits of 32 bytes
    low = blocks[:, 0:128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 0x0F
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = blocks[:, 192:208].view(np.int8)
    values = out.reshape(-1, 16, 16)
    values[:] = (low.reshape(-1, 2, 4, 32) | high << 4).reshape(-1, 16, 16)
    values -= 32
    values *= (half(blocks, 208) * scales)[:, :, None]


_UNPACK: dict[str, Callable[[Bytes, Floats], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
