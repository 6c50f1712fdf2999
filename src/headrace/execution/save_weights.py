"""Writes the current weights to a folder, from which they can be served again.

Owns the files: config.json, and `model-rank-0-part-N.safetensors` as SGLang names them, of whole weights however many ranks there are.
They are written beside the steps under a temporary name, and the folder appears when it is complete. Does not write a tokenizer. Runs in
the thread of the operation.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint.weight_formats import FORMATS, Scheme
from headrace.errors import ExecutionError, RequestError
from headrace.layers.weight import Weight
from headrace.messages.packing import safetensors_parts
from headrace.messages.weights import Prepared

PART_BYTES = 1 << 30
"""Start a new file after this many bytes: the weights of one file are unpacked at a time."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class WeightSaver:
    """save_dir: the operator's folder; None = saving is off. config: of the model, in the form of config.json. quantization: of the weights. stored:
    the name in a checkpoint of a weight of the model."""

    def __init__(
        self,
        save_dir: str | None,
        config: Mapping[str, Any],
        quantization: Scheme,
        stored: Callable[[str], str] = lambda name: name,
    ) -> None:
        self._save_dir = save_dir
        self._config = config
        self._quantization = quantization
        self._stored = stored

    def target(self, name: str) -> Path:
        """The new folder `name` of `save_dir`. Raises RequestError if it cannot be written."""
        if self._save_dir is None:
            raise RequestError("saving weights is off: start the server with --save-dir FOLDER", "path")
        if _NAME.fullmatch(name) is None:
            raise RequestError(
                f"path must be the name of a new folder below --save-dir (letters, digits, '.', '_', '-'), got {name[:100]!r}",
                "path",
            )
        if FORMATS[self._quantization].quantizes:
            raise RequestError(
                f"weights that were quantised to {self._quantization} when they were loaded cannot be saved: quantising what is read "
                "back would not give the same; `headrace quantize` makes a quantised checkpoint"
            )
        target = Path(self._save_dir) / name
        if target.exists():
            raise RequestError(f"{name!r} already exists below --save-dir; choose a new name", "path")
        return target

    def save(
        self,
        weights: Iterable[Weight],
        name: str,
        read: Callable[[Weight], torch.Tensor] = lambda weight: weight.read(),
    ) -> Prepared:
        """Write them to the new folder `name` of `save_dir`. read: returns a whole weight.

        Raises RequestError, and ExecutionError if there is no room.
        """
        target = self.target(name)
        unfinished = target.with_name(f".{name}.unfinished")
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            (unfinished / "config.json").write_text(json.dumps(dict(self._config), indent=2))
            num_bytes, num_files = 0, 0
            for number, part in enumerate(_parts(weights, read, self._stored)):
                num_files = number + 1
                with (unfinished / f"model-rank-0-part-{number}.safetensors").open("xb") as file:
                    for data in safetensors_parts(part):
                        num_bytes += file.write(data)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise ExecutionError(f"the weights could not be written below --save-dir: {error.strerror}") from error

        def appear() -> None:
            try:
                unfinished.rename(target)
            except OSError as error:
                raise ExecutionError(f"the weights could not be written below --save-dir: {error.strerror}") from error

        return Prepared(f"saved {num_bytes} bytes to {name!r} below --save-dir ({num_files} files)", appear)


def _parts(
    weights: Iterable[Weight], read: Callable[[Weight], torch.Tensor], stored: Callable[[str], str]
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The weights in Hugging Face's layout, in the precision in which they are kept, about PART_BYTES at a time."""
    part: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for weight in weights:
        tensor = read(weight).detach().cpu().contiguous()
        if part and num_bytes + tensor.nbytes > PART_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append((stored(weight.name), tensor))
        num_bytes += tensor.nbytes
    if part:
        yield part
