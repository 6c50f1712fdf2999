"""Checkpoints as one thing: a config, and a stream of named torch tensors.

Owns the detection of what a path is (a Hugging Face folder, a GGUF file, a config alone) and the checks of weights on
their way in. Does not place tensors in a model and does not shard them. Runs in whichever process loads the model; torch
is imported when the first tensor is asked for, so reading a config stays cheap.
"""

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from headrace.checkpoint.gguf import Bytes, GgufFile, dequantize
from headrace.checkpoint.gguf_names import GgufSource, hf_config, hf_row_order, map_tensors
from headrace.checkpoint.gguf_quantized import quantized_matrix
from headrace.checkpoint.model_config import ModelConfig, load_model_config, parse_hf_config, read_json_object
from headrace.checkpoint.quantization_settings import stored_settings
from headrace.checkpoint.quantized_formats import QuantizedFormat, stored_format
from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.regular_file import open_regular
from headrace.checkpoint.safetensors_file import DTYPE_BYTES, SafetensorsEntry, SafetensorsFile
from headrace.checkpoint.sampling_defaults import from_gguf
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

CheckpointKind = Literal["huggingface", "gguf", "dummy"]

INDEX_NAME = "model.safetensors.index.json"
_TORCH_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True, slots=True)
class RawBlocks:
    """The stored blocks of a quantised matrix, in the row order of the Hugging Face tensor.

    type_name: of gguf.BLOCK_TYPES. data: uint8[rows, row_bytes]. shape: of the values, (rows, columns).
    """

    type_name: str
    data: Bytes
    shape: tuple[int, ...]


class Checkpoint(ABC):
    """One model on disk. `tensor_names`, `shape` and `total_bytes` answer from the headers alone."""

    kind: CheckpointKind

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self.path = path
        self.config = config

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """Bytes of all tensors as `iter_tensors` gives them."""

    @abstractmethod
    def files(self) -> list[Path]:
        """The files that hold the tensors."""

    @abstractmethod
    def tensor_names(self) -> list[str]:
        """Hugging Face names in the order of `iter_tensors`."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises ModelError for a name that is not here."""

    @abstractmethod
    def tensor(self, name: str) -> "torch.Tensor":
        """One tensor. Raises ModelError for a name that is not here.

        Safetensors: a view of the mapped file, copied only where written. GGUF: float types as stored, quantised ones as
        float32.
        """

    def iter_tensors(self, check_finite: bool = False, check_zero: bool = True) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Every tensor exactly once, in file order, read as it is asked for.

        check_finite: refuse a tensor that holds NaN or infinity (one pass over its values).
        check_zero: refuse a matrix that holds only zeros, which is what a hole in a file reads as.
        Raises ModelError naming the file and the tensor.
        """
        for name in self.tensor_names():
            yield name, self.checked_tensor(name, check_finite, check_zero)

    def checked_tensor(self, name: str, check_finite: bool = False, check_zero: bool = True) -> "torch.Tensor":
        """`tensor`, refused as `iter_tensors` says."""
        tensor = self.tensor(name)
        if check_finite:
            self._check_finite(name, tensor)
        if check_zero:
            self._check_zero(name, tensor)
        return tensor

    def raw_blocks(self, name: str) -> RawBlocks | None:
        """The blocks of a quantised GGUF matrix for kernels that use them as they are; None for any other tensor."""
        return None

    def quantized(self, name: str) -> QuantizedMatrix | None:
        """A matrix as it is stored, where that is something the kernels compute with; None for any other tensor.

        Raises ModelError for one whose scales are not finite, or that holds only zeros.
        """
        return None

    @abstractmethod
    def release(self) -> None:
        """Let go of the memory that reading took: pages of the mapped files, which come back when they are read again. What was written
        to a tensor of a mapped file is lost."""

    def mapped_memory(self) -> list[Bytes]:
        """The mapped files, whose bytes change with them: nothing that is served may lie here."""
        return []

    def file_of(self, name: str) -> str:
        """Name of the file that holds a tensor, for messages."""
        return self.path.name

    def _check_finite(self, name: str, tensor: "torch.Tensor") -> None:
        import torch

        if not tensor.is_floating_point() or not tensor.numel():
            return
        values = tensor.float() if tensor.element_size() == 1 else tensor
        # NaN and infinity show in the sum, which is quick. So does the overflow of finite values: then the extremes decide.
        if bool(torch.isfinite(values.sum(dtype=torch.float32))):
            return
        if not all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(values)):
            raise ModelError(f"{self.file_of(name)}: tensor {name} holds NaN or infinity")

    def _check_zero(self, name: str, tensor: "torch.Tensor") -> None:
        if tensor.ndim < 2 or not tensor.numel():
            return
        values = tensor.float() if tensor.element_size() == 1 and tensor.is_floating_point() else tensor
        if not bool(values[0].any()) and not bool(values.any()):
            raise ModelError(f"{self.file_of(name)}: tensor {name} {list(tensor.shape)} is zero-filled")

    def _check_matrix(self, name: str, matrix: QuantizedMatrix) -> QuantizedMatrix:
        self._check_finite(name, matrix.scales)
        if matrix.minimums is not None:
            self._check_finite(name, matrix.minimums)
        if not bool(matrix.scales.any()) and (matrix.minimums is None or not bool(matrix.minimums.any())):
            raise ModelError(f"{self.file_of(name)}: tensor {name} {list(matrix.shape)} is zero-filled")
        return matrix


class HuggingFaceCheckpoint(Checkpoint):
    """A folder with config.json and one or more safetensors files."""

    kind = "huggingface"

    def __init__(self, path: Path) -> None:
        super().__init__(path, load_model_config(path))
        self._files: dict[str, SafetensorsFile] = {}
        for file in _shards(path):
            opened = SafetensorsFile(file)
            for name in opened.entries:
                if name in self._files:
                    raise ModelError(f"tensor {name} is in both {self._files[name].path.name} and {file.name}")
                self._files[name] = opened
        _check_index(path, {name: opened.path.name for name, opened in self._files.items()})
        if not self._files:
            raise ModelError(f"{path.name} holds no tensors")

    @property
    def total_bytes(self) -> int:
        return sum(self._entry(name).num_bytes for name in self._files)

    def files(self) -> list[Path]:
        return list({opened.path: None for opened in self._files.values()})

    def tensor_names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def tensor(self, name: str) -> "torch.Tensor":
        import torch

        entry = self._entry(name)
        dtype: torch.dtype = getattr(torch, _TORCH_DTYPES[entry.dtype])
        count = entry.num_bytes // DTYPE_BYTES[entry.dtype]
        if not count:
            return torch.empty(entry.shape, dtype=dtype)
        if entry.offset % DTYPE_BYTES[entry.dtype]:
            data = bytearray(self._files[name].buffer[entry.offset : entry.offset + entry.num_bytes])
            return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)
        buffer = self._files[name].buffer
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=entry.offset).reshape(entry.shape)

    def release(self) -> None:
        for opened in set(self._files.values()):
            opened.buffer.madvise(mmap.MADV_DONTNEED)

    def mapped_memory(self) -> list[Bytes]:
        return [np.frombuffer(opened.buffer, dtype=np.uint8) for opened in set(self._files.values())]

    def file_of(self, name: str) -> str:
        return self._files[name].path.name

    def _entry(self, name: str) -> SafetensorsEntry:
        if name not in self._files:
            raise ModelError(f"{self.path.name} has no tensor {name}")
        return self._files[name].entries[name]


class QuantizedCheckpoint(HuggingFaceCheckpoint):
    """A folder whose linear layers are quantised. A layer's parts (`.qweight`, `.scales`, ...) show as one `.weight`."""

    def __init__(self, path: Path, stored: QuantizedFormat) -> None:
        super().__init__(path)
        self._stored = stored
        main = "." + stored.suffixes[0]
        self._layers = {name.removesuffix(main): name for name in self._files if name.endswith(main)}
        self._names: list[str] = []
        self._parts: dict[str, list[str]] = {layer: [] for layer in self._layers}
        for name in self._files:
            layer, _, suffix = name.rpartition(".")
            if layer not in self._layers or suffix not in stored.suffixes:
                self._names.append(name)
                continue
            self._parts[layer].append(suffix)
            if suffix == stored.suffixes[0]:
                self._names.append(f"{layer}.weight")
        for layer, suffixes in self._parts.items():
            missing = [name for name in stored.suffixes if name not in suffixes and name not in stored.optional]
            if missing:
                raise ModelError(f"{path.name}: quantised layer {layer} has no {', '.join(missing)}")
        if not self._layers:
            raise ModelError(f"{path.name}: its config says that it is quantised, but it holds no {main[1:]} tensors")

    @property
    def total_bytes(self) -> int:
        return sum(
            math.prod(self.shape(name)) * (4 if self._layer(name) is not None else DTYPE_BYTES[self._entry(name).dtype])
            for name in self._names
        )

    def tensor_names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        layer = self._layer(name)
        return super().shape(name) if layer is None else self._stored.shape(layer, super().shape)

    def tensor(self, name: str) -> "torch.Tensor":
        matrix = self.quantized(name)
        return super().tensor(name) if matrix is None else matrix.dequantize()

    def quantized(self, name: str) -> QuantizedMatrix | None:
        layer = self._layer(name)
        if layer is None:
            return None
        parts = {suffix: super(QuantizedCheckpoint, self).tensor(f"{layer}.{suffix}") for suffix in self._parts[layer]}
        return self._check_matrix(name, self._stored.read(layer, parts))

    def file_of(self, name: str) -> str:
        layer = self._layer(name)
        return super().file_of(name if layer is None else self._layers[layer])

    def _layer(self, name: str) -> str | None:
        """The quantised layer whose weight `name` is."""
        layer = name.removesuffix(".weight")
        return layer if layer != name and layer in self._layers else None


class Fp8Checkpoint(HuggingFaceCheckpoint):
    """A folder whose linear layers are float8 with scales beside them: X.weight is weight * scale, widened when it is read.

    block: (rows, columns) that share a scale of `X.weight_scale_inv`; (0, 0): `X.weight_scale` is one for the matrix.
    """

    def __init__(self, path: Path, block: tuple[int, int]) -> None:
        super().__init__(path)
        self._block = block
        suffix = "_scale_inv" if block[0] else "_scale"
        self._scales = {name.removesuffix(suffix): name for name in self._files if name.endswith(f".weight{suffix}")}
        for name, scale in self._scales.items():
            if name not in self._files:
                raise ModelError(f"{path.name}: {scale} has no weight beside it")
            self._check_scale(name, scale)
        for name in self._files:
            if self._entry(name).dtype.startswith("F8") and name not in self._scales:
                raise ModelError(f"{path.name}: the float8 tensor {name} has no {name}{suffix}")

    @property
    def total_bytes(self) -> int:
        return sum(
            math.prod(self.shape(name)) * (4 if name in self._scales else DTYPE_BYTES[self._entry(name).dtype])
            for name in self.tensor_names()
        )

    def tensor_names(self) -> list[str]:
        scales = set(self._scales.values())
        return [name for name in self._files if name not in scales]

    def tensor(self, name: str) -> "torch.Tensor":
        if name not in self._scales:
            return super().tensor(name)
        values, scales = super().tensor(name).float(), super().tensor(self._scales[name]).float()
        if self._block[0]:
            n, k = values.shape
            rows, columns = self._block
            scales = scales.repeat_interleave(rows, dim=0)[:n].repeat_interleave(columns, dim=1)[:, :k]
        return values.mul_(scales)

    def _check_scale(self, name: str, scale: str) -> None:
        shape, found = self.shape(name), self.shape(scale)
        rows, columns = self._block
        wanted = (-(-shape[0] // rows), -(-shape[1] // columns)) if rows and len(shape) == 2 else (1,)
        if math.prod(found) != 1 if not rows else found != wanted:
            raise ModelError(f"tensor {scale} is {list(found)}, expected {list(wanted)}")


class GgufCheckpoint(Checkpoint):
    """A GGUF file. `file` gives its metadata (tokenizer, chat template)."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        super().__init__(path, _gguf_config(self.file))
        self._sources = map_tensors(self.file)

    @property
    def total_bytes(self) -> int:
        return sum(
            math.prod(source.shape) * (2 if self.file.tensors[source.gguf_name].type.name in ("F16", "BF16") else 4)
            for source in self._sources.values()
        )

    def files(self) -> list[Path]:
        return [self.path]

    def mapped_memory(self) -> list[Bytes]:
        return [self.file.mapped_memory]

    def tensor_names(self) -> list[str]:
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source(name).shape

    def tensor(self, name: str) -> "torch.Tensor":
        import torch

        source = self._source(name)
        rows, kind = self._rows(source), self.file.tensors[source.gguf_name].type.name
        if kind in ("F16", "BF16"):
            dtype = torch.float16 if kind == "F16" else torch.bfloat16
            tensor = torch.from_numpy(np.array(rows)).view(dtype).reshape(source.shape)
        else:
            tensor = torch.from_numpy(dequantize(rows, kind)).reshape(source.shape)
        return tensor.sub_(1) if source.subtract_one else tensor

    def raw_blocks(self, name: str) -> RawBlocks | None:
        source = self._source(name)
        kind = self.file.tensors[source.gguf_name].type
        if kind.block_values == 1 or len(source.shape) != 2 or source.subtract_one:
            return None
        return RawBlocks(kind.name, self._rows(source), source.shape)

    def quantized(self, name: str) -> QuantizedMatrix | None:
        raw = self.raw_blocks(name)
        matrix = None if raw is None else quantized_matrix(raw)
        return None if matrix is None else self._check_matrix(name, matrix)

    def release(self) -> None:
        self.file.release()

    def _rows(self, source: GgufSource) -> Bytes:
        """The stored bytes of a tensor, uint8[rows, row_bytes], in Hugging Face row order."""
        rows = self.file.raw(source.gguf_name)
        if source.expert is not None:
            num_rows = math.prod(source.shape[:-1])
            rows = rows[source.expert * num_rows : (source.expert + 1) * num_rows]
        if source.row_order is not None:
            if len(source.shape) == 1:  # a bias is stored as one row of values
                rows = rows.reshape(source.shape[0], -1)
            rows = rows[hf_row_order(source.shape[0], source.row_order)]
        return rows

    def _source(self, name: str) -> GgufSource:
        if name not in self._sources:
            raise ModelError(f"{self.path.name} has no tensor {name}")
        return self._sources[name]


class DummyCheckpoint(Checkpoint):
    """A config without weights; the model loader fills the model with random ones."""

    kind = "dummy"

    @property
    def total_bytes(self) -> int:
        return 0

    def files(self) -> list[Path]:
        return []

    def release(self) -> None:
        pass

    def tensor_names(self) -> list[str]:
        return []

    def shape(self, name: str) -> tuple[int, ...]:
        raise ModelError(f"{self.path.name} has a config but no weights, so no tensor {name}")

    def tensor(self, name: str) -> "torch.Tensor":
        raise ModelError(f"{self.path.name} has a config but no weights, so no tensor {name}")


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a Hugging Face folder, a `.gguf` file, or a folder that holds one `.gguf` file.

    Only headers are read. Raises ModelError for anything else and for files that are missing, cut off or inconsistent.
    """
    path = Path(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            quantization = load_model_config(path).quantization
            settings, stored = stored_settings(quantization), stored_format(quantization)
            if settings is not None and settings.method == "fp8":
                return Fp8Checkpoint(path, settings.block)
            return HuggingFaceCheckpoint(path) if stored is None else QuantizedCheckpoint(path, stored)
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return GgufCheckpoint(found[0])
        if found:
            raise ModelError(f"{path.name} holds {len(found)} GGUF files; name one of them")
        raise ModelError(f"{path.name} holds neither config.json nor a .gguf file")
    if not path.exists():
        raise ModelError(f"there is no checkpoint at {path}")
    try:
        with open_regular(path) as file:
            magic = file.read(4)
    except OSError as err:
        raise ModelError(f"{path.name} cannot be opened: {err.strerror}") from err
    if magic == b"GGUF" or path.suffix == ".gguf":
        return GgufCheckpoint(path)
    raise ModelError(
        f"{path.name} is neither a folder nor a GGUF file; for safetensors name the folder with config.json"
    )


def dummy_checkpoint(path: Path | str) -> DummyCheckpoint:
    """A checkpoint of only the config of `path`: a folder with config.json, a config file, or a GGUF file."""
    path = Path(path)
    if path.suffix == ".gguf":
        return DummyCheckpoint(path, _gguf_config(GgufFile(path)))
    return DummyCheckpoint(path, load_model_config(path))


def _gguf_config(file: GgufFile) -> ModelConfig:
    general = {key: file.get(key) for key in file.metadata_keys() if key.startswith("general.")}
    return msgspec.structs.replace(
        parse_hf_config(hf_config(file), origin=file.path.name),
        sampling_defaults=from_gguf(general, file.path.name),
    )


def _shards(path: Path) -> list[Path]:
    """The safetensors files to read: those the index names, else the single one, else all that are not adapters."""
    index_file = path / INDEX_NAME
    if index_file.is_file():
        files = [path / name for name in dict.fromkeys(_weight_map(index_file).values())]
        for file in files:
            if not file.is_file():
                raise ModelError(f"{file.name} is missing; {INDEX_NAME} names it")
        return files
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    found = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("adapter"))
    numbered = [file for file in found if "-of-" in file.name]
    if numbered:
        raise ModelError(f"{INDEX_NAME} is missing; without it the {len(numbered)} shards cannot be checked")
    if not found:
        other = next((kind for kind in ("*.bin", "*.pt", "*.pth") if any(path.glob(kind))), None)
        hint = "; its pickled weights are not read, convert them to safetensors" if other else ""
        raise ModelError(f"{path.name} holds no safetensors file{hint}")
    return found


def _weight_map(index_file: Path) -> dict[str, str]:
    weight_map = read_json_object(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index_file.name} has no usable weight_map")
    for name in weight_map.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index_file.name} names {name!r}, which is no safetensors file of the folder")
    return weight_map


def _check_index(path: Path, found: dict[str, str]) -> None:
    """Every tensor that the index promises is where it says. A tensor it leaves out is read all the same."""
    index_file = path / INDEX_NAME
    if not index_file.is_file():
        return
    stated = _weight_map(index_file)
    for name, file in stated.items():
        if found.get(name) != file:
            held = f"; {found[name]} holds it" if name in found else ""
            raise ModelError(f"{file} has no tensor {name}, though {INDEX_NAME} says so{held}")
