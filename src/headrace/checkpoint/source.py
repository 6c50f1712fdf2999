"""What a path is: a Hugging Face folder, a GGUF file, or a config alone."""

from pathlib import Path
from typing import NoReturn

import msgspec

from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.gguf import gguf_file
from headrace.checkpoint.gguf_mmproj import AUTO, NONE, gguf_config, open_gguf
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


def open_checkpoint(path: Path | str, mmproj: str = AUTO) -> Checkpoint:
    """Open a Hugging Face folder, a GGUF file of any name, or a folder that holds one `.gguf` file. Only headers are read. mmproj: the vision encoder
    of a GGUF file, see `find_mmproj`. Raises ModelError for anything else and for files that are missing, cut off or inconsistent."""
    path = Path(path)
    file = _gguf_file(path, mmproj)
    if file is not None:
        return open_gguf(file, mmproj)
    if path.is_dir():
        if (path / "config.json").is_file():
            stored = stored_format(load_model_config(path).quantization)
            return HuggingFaceCheckpoint(path) if stored is None else QuantizedCheckpoint(path, stored)
        raise ModelError(f"{path.name} holds neither config.json nor a .gguf file")
    if not path.exists():
        raise ModelError(f"there is no checkpoint at {path}")
    raise ModelError(
        f"{path.name} is neither a folder nor a GGUF file; for safetensors name the folder with config.json"
    )


def dummy_checkpoint(path: Path | str, mmproj: str = AUTO) -> DummyCheckpoint:
    """A checkpoint of only the config of `path`: a folder with config.json, a config file, or a GGUF file with its vision encoder."""
    path = Path(path)
    file = _gguf_file(path, mmproj)
    if file is None:
        return DummyCheckpoint(path, load_model_config(path))
    checkpoint = DummyCheckpoint(file, msgspec.structs.replace(gguf_config(file, mmproj), quantization=None))
    checkpoint.file_format = "gguf"
    return checkpoint


def _gguf_file(path: Path, mmproj: str) -> Path | None:
    """See `gguf_file`; raises ModelError if a vision encoder is named beside another checkpoint."""
    file = gguf_file(path)
    if file is None and mmproj not in (AUTO, NONE):
        raise ModelError(f"--mmproj is for GGUF files, which {path.name} is not: leave the option out")
    return file
