"""Folders with config.json and safetensors files, including quantised ones. Runs in the process that loads the model."""

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.files import read_json_object
from headrace.checkpoint.gguf import Bytes
from headrace.checkpoint.model_config import load_model_config
from headrace.checkpoint.pooling import dense_folders
from headrace.checkpoint.quantized_formats import Parts, QuantizedFormat
from headrace.checkpoint.quantized_formats.base import FLOATS
from headrace.checkpoint.quantized_matrix import BlockMatrix, QuantizedMatrix
from headrace.checkpoint.safetensors_file import DTYPE_BYTES, SafetensorsEntry, SafetensorsFile
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
_COMPARED_BYTES = 16 << 20
_HEADS = frozenset({"lm_head", "embed_out", "output_projection"})
_TABLES = frozenset({"embed_tokens", "embed_in", "tokens_embed", "word_embeddings", "wte"})
"""Names of modules in checkpoints: output projections that may be tied, and the embeddings to which they are."""


class HuggingFaceCheckpoint(Checkpoint):
    """A folder with config.json and one or more safetensors files. Dense modules of sentence-transformers have a folder each; their tensors are
    named `<folder>.linear.weight`, `.bias`."""

    kind = "huggingface"

    def __init__(self, path: Path) -> None:
        super().__init__(path, load_model_config(path))
        self._files: dict[str, SafetensorsFile] = {}
        index = path / INDEX_NAME
        stated = _weight_map(index) if index.is_file() else {}
        for file in _shards(path, stated):
            opened = SafetensorsFile(file)
            for name in opened.entries:
                if name in self._files:
                    raise ModelError(f"tensor {name} is in both {self._files[name].path.name} and {file.name}")
                self._files[name] = opened
        # Tensors that are not in the index are read anyway.
        for name, file_name in stated.items():
            held = self._files[name].path.name if name in self._files else None
            if held != file_name:
                where = "" if held is None else f"; {held} holds it"
                raise ModelError(f"{file_name} has no tensor {name}, though {INDEX_NAME} says so{where}")
        self._names_in_file: dict[str, str] = {}
        for folder in dense_folders(path):
            opened = SafetensorsFile(_dense_file(path / folder))
            for name in opened.entries:
                self._files[f"{folder}.{name}"], self._names_in_file[f"{folder}.{name}"] = opened, name
        if not self._files:
            raise ModelError(f"{path.name} contains no tensors")
        own = self._own_head() if self.config.tie_word_embeddings else ""
        if own:
            untied = {"tie_word_embeddings": False}
            self.config = msgspec.structs.replace(self.config, raw=self.config.raw | untied, **untied)
            self.notes = (f"output projection {own}: the file's own, not the embedding, though the config ties them",)

    def _own_head(self) -> str:
        """The output projection if there is one that is not the embedding; else "". transformers goes by the tensors, too, where they contradict the
        config; and what is true of a model around a text model whose config says nothing has changed from one of its releases to the next."""
        modules = [name.rpartition(".")[::2] for name in self._files]
        heads = {module for module, part in modules if part != "bias" and module.rpartition(".")[2] in _HEADS}
        tables = {module for module, part in modules if part == "weight" and module.rpartition(".")[2] in _TABLES}
        if not heads or not tables:
            return ""
        # Those of layers that predict further tokens lie deeper.
        head, table = (min(sorted(names), key=lambda name: name.count(".")) for names in (heads, tables))
        if head.count(".") > table.count("."):
            return ""
        # The parts of a quantised matrix have other names.
        is_copy = f"{head}.weight" in self._files and self._same(f"{head}.weight", f"{table}.weight")
        return "" if is_copy else head

    def _same(self, name: str, other: str) -> bool:
        if self._entry(name).shape != self._entry(other).shape:
            return False
        if self._entry(name).dtype == self._entry(other).dtype:
            one, two = self._bytes(name), self._bytes(other)
            pieces = range(0, len(one), _COMPARED_BYTES)
            return all(np.array_equal(one[at : at + _COMPARED_BYTES], two[at : at + _COMPARED_BYTES]) for at in pieces)
        ours, theirs = (HuggingFaceCheckpoint.tensor(self, each) for each in (name, other))
        step = max(1, _COMPARED_BYTES // (8 * max(1, math.prod(ours.shape[1:]))))
        return all(
            bool((ours[at : at + step].double() == theirs[at : at + step].double()).all())
            for at in range(0, len(ours), step)
        )

    def _bytes(self, name: str) -> Bytes:
        entry = self._entry(name)
        return np.frombuffer(self._files[name].buffer, np.uint8, entry.num_bytes, entry.offset)

    @property
    def total_bytes(self) -> int:
        return sum(math.prod(self.shape(name)) * self._itemsize(name) for name in self.tensor_names())

    def _itemsize(self, name: str) -> int:
        """Bytes of an element as `tensor` gives it."""
        return DTYPE_BYTES[self._entry(name).dtype]

    def files(self) -> list[Path]:
        return list({opened.path: None for opened in self._files.values()})

    def tensor_names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def tensor(self, name: str) -> "torch.Tensor":
        entry = self._entry(name)
        return self._files[name].tensor(entry.name)

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
        return self._files[name].entries[self._names_in_file.get(name, name)]


class QuantizedCheckpoint(HuggingFaceCheckpoint):
    """A folder whose linear layers are quantised. A layer's parts (`.qweight`, `.scales`, ...) show as one `.weight`."""

    def __init__(self, path: Path, stored: QuantizedFormat) -> None:
        super().__init__(path)
        self._stored = stored
        ends = [f".{suffix}" for suffix in stored.telling]
        layers = {name.removesuffix(end): None for name in self._files for end in ends if name.endswith(end)}
        self._layers = {layer: self._parts(layer) for layer in layers}
        self._shapes: dict[str, tuple[int, int]] = {}
        parts = {name: layer for layer, found in self._layers.items() for name in found.names.values()}
        dropped = tuple(f".{suffix}" for suffix in stored.unused)
        # A layer's weight has the place of the first of its parts.
        names = (
            f"{parts[name]}.weight" if name in parts else name for name in self._files if not name.endswith(dropped)
        )
        self._names = list(dict.fromkeys(names))
        for layer, found in self._layers.items():
            missing = [suffix for suffix in stored.required(found) if suffix not in found]
            if missing:
                raise ModelError(f"{path.name}: quantised layer {layer} has no {', '.join(missing)}")
            self._shapes[layer] = stored.shape(found)
            if min(self._shapes[layer]) == 0:
                raise ModelError(f"{path.name}: quantised layer {layer} is empty")
        for name in self._names:
            if name.endswith(".weight") and name[: -len(".weight")] not in self._layers:
                self._check_float(name)
        if not self._layers:
            raise ModelError(
                f"{path.name}: its config says that it is quantised, but it has no {' or '.join(stored.telling)} tensors"
            )

    def _parts(self, layer: str) -> Parts:
        names = {suffix: f"{layer}.{suffix}" for suffix in self._stored.suffixes if f"{layer}.{suffix}" in self._files}
        return Parts(layer, names, self)

    def _check_float(self, name: str) -> None:
        if self._entry(name).dtype not in (*FLOATS, "F64") and len(self._entry(name).shape) > 1:
            raise ModelError(
                f"{self.path.name}: tensor {name} is {self._entry(name).dtype} without the scales that it needs"
            )

    def _itemsize(self, name: str) -> int:
        return super()._itemsize(name) if self._layer(name) is None else 4

    def tensor_names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        layer = self._layer(name)
        return super().shape(name) if layer is None else self._shapes[layer.layer]

    def stored_shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def stored_dtype(self, name: str) -> str:
        return self._entry(name).dtype

    def stored_tensor(self, name: str) -> "torch.Tensor":
        return super().tensor(name)

    def metadata(self, name: str) -> Mapping[str, str]:
        return self._files[name].metadata

    def tensor(self, name: str) -> "torch.Tensor":
        layer = self._layer(name)
        if layer is None:
            return super().tensor(name)
        found = self._stored.read(layer)
        return self._check_matrix(name, found).dequantize() if isinstance(found, QuantizedMatrix) else found

    def quantized(self, name: str) -> QuantizedMatrix | None:
        layer = self._layer(name)
        if layer is None:
            return None
        found = self._stored.read(layer)
        return self._check_matrix(name, found) if isinstance(found, QuantizedMatrix) else None

    def blocks(self, name: str) -> BlockMatrix | None:
        layer = self._layer(name)
        return None if layer is None else self._stored.blocks(layer)

    def file_of(self, name: str) -> str:
        layer = self._layer(name)
        return super().file_of(name if layer is None else next(iter(layer.names.values())))

    def _layer(self, name: str) -> Parts | None:
        return self._layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None


def _shards(path: Path, stated: dict[str, str]) -> list[Path]:
    """The safetensors files to read: those in the index, else the only one, else all that are not adapters."""
    if (path / INDEX_NAME).is_file():
        files = [path / name for name in dict.fromkeys(stated.values())]
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
        raise ModelError(f"{path.name} contains no safetensors file{hint}")
    return found


def _dense_file(folder: Path) -> Path:
    file = folder / "model.safetensors"
    if not file.is_file():
        raise ModelError(
            f"{folder.name} contains no model.safetensors; pickled weights are not read, convert them to safetensors"
        )
    return file


def _weight_map(index_file: Path) -> dict[str, str]:
    shards = weight_map(read_json_object(index_file))
    if shards is None:
        raise ModelError(f"{index_file.name} has no usable weight_map")
    for name in shards.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index_file.name} names {name!r}, which is not a safetensors file of the folder")
    return shards


def weight_map(index: dict[str, Any]) -> dict[str, str] | None:
    """The shard of each tensor, by a decoded index; None if it does not say."""
    shards = index.get("weight_map")
    return shards if isinstance(shards, dict) and all(isinstance(shard, str) for shard in shards.values()) else None
