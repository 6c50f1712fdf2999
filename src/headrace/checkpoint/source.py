"""What a path is: a Hugging Face folder, a GGUF file, or a config alone."""

from pathlib import Path
from typing import NoReturn

import msgspec

from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.gguf import GgufFile, gguf_of, is_gguf
from headrace.checkpoint.gguf_checkpoint import GgufCheckpoint, config_of
from headrace.checkpoint.huggingface import HuggingFaceCheckpoint, QuantizedCheckpoint
from headrace.checkpoint.model_config import load_model_config
from headrace.checkpoint.quantized_formats import stored_format
from headrace.errors import ModelError


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

    def shape(self, name: str) -> NoReturn:
        raise ModelError(f"{self.path.name} has a config but no weights, so no tensor {name}")

    tensor = shape


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a Hugging Face folder, a GGUF file of any name, or a folder that holds one `.gguf` file. Only headers are read. Raises ModelError for
    anything else and for files that are missing, cut off or inconsistent."""
    path = Path(path)
    if path.is_dir():
        if (file := gguf_of(path)) is not None:
            return GgufCheckpoint(file)
        if (path / "config.json").is_file():
            stored = stored_format(load_model_config(path).quantization)
            return HuggingFaceCheckpoint(path) if stored is None else QuantizedCheckpoint(path, stored)
        raise ModelError(f"{path.name} holds neither config.json nor a .gguf file")
    if not path.exists():
        raise ModelError(f"there is no checkpoint at {path}")
    if is_gguf(path):
        return GgufCheckpoint(path)
    raise ModelError(
        f"{path.name} is neither a folder nor a GGUF file; for safetensors name the folder with config.json"
    )


def dummy_checkpoint(path: Path | str) -> DummyCheckpoint:
    """A checkpoint of only the config of `path`: a folder with config.json, a config file, or a GGUF file."""
    path = Path(path)
    if path.is_file() and is_gguf(path):
        return DummyCheckpoint(path, msgspec.structs.replace(config_of(GgufFile(path)), quantization=None))
    return DummyCheckpoint(path, load_model_config(path))
