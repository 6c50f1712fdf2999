"""Files of weights that this server writes: the packed weights of one model, for its next start, and saved ones, which can be served again.

The cache (`WeightCache`) owns what is kept (the layers that convert what they load: `layers.weight.Keeper`) and what a file depends on, not the
format (`checkpoint.weight_cache`). Nothing in it fails a start: a file that is missing or damaged, or a disk that is full, is logged and the weights
are converted from the checkpoint. It runs in the thread that builds the worker; files are written in a thread of their own.

`WeightSaver` owns a folder of config.json, and `model-rank-0-part-N.safetensors` as SGLang names them, of whole weights however many ranks there
are. They are written beside the steps under a temporary name, and the folder appears when it is complete. It writes no tokenizer, and runs in the
thread of the operation.
"""

import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from headrace.checkpoint import weight_cache as files
from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.weight_cache import (
    StoredLayer,
    StoredTensor,
    TensorBytes,
    WeightCacheError,
)
from headrace.checkpoint.weight_formats import FORMATS, Scheme
from headrace.errors import ExecutionError, RequestError
from headrace.kernels import cpu as native_cpu
from headrace.layers.weight import Keeper, Kept, Placement, Weight
from headrace.log import get_logger
from headrace.messages.packing import safetensors_parts
from headrace.messages.weights import Prepared

_logger = get_logger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each tensor."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def tensor_at(data: object, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    """The tensor that begins at this byte of a buffer, without a copy."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).reshape(shape)


class Digests:
    """The SHA-256 of tensors. What a file says of those that are its own is known as long as they live, since they are never written
    (`layers.weight.Keeper`)."""

    def __init__(self) -> None:
        self._known: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()

    def add(self, tensor: torch.Tensor, digest: str) -> None:
        self._known[tensor] = digest

    def of(self, tensor: torch.Tensor) -> str:
        """In hexadecimal."""
        known = self._known.get(tensor)
        return hashlib.sha256(bytes_of(tensor.cpu().contiguous())).hexdigest() if known is None else known


class WeightCache:
    """The cache of one model at one precision. digests: of what was restored, as the file has them; its bytes have been checked."""

    def __init__(self, identity: str, model: str, precision: str, ahead: files.ReadAhead = files.NOTHING_AHEAD) -> None:
        self.digests = Digests()
        self._ahead = ahead
        self._identity = identity
        self._model = model
        self._precision = precision
        self.outcome = "not used"

    def restore(self, weights: Iterable[Weight], progress: Progress) -> frozenset[str]:
        """Give the layers what the file holds. Returns the names of the weights that need not be loaded any more: none without a file.

        The file is checked as a whole before the first layer takes anything.
        """
        begin = time.perf_counter()
        weights = list(weights)
        try:
            file = self._ahead.open(self._identity)
        except FileNotFoundError:
            self.outcome = "no file yet"
            return frozenset()
        except WeightCacheError as error:
            return self._refuse(error.message)
        try:
            keepers = _keepers(weights)
            if file.header.identity != self._identity or [layer.name for layer in file.header.layers] != list(keepers):
                return self._refuse("it is of another model")
            data = file.read(progress)
            kept = [_tensors(layer, data, self.digests) for layer in file.header.layers]
        except WeightCacheError as error:
            return self._refuse(error.message)
        finally:
            file.close()
        for keeper, fields in zip(keepers.values(), kept, strict=True):
            keeper.restore(fields)
        self.outcome = f"{len(data) / 2**20:.0f} MiB read in {time.perf_counter() - begin:.2f} s"
        return frozenset(weight.name for weight in weights if weight.keepers)

    def measured(self, name: str) -> float | None:
        return files.read_measured(self._identity).get(name)

    def keep_measured(self, values: Mapping[str, float]) -> None:
        """Keep these, by name, for the next start; log why when that fails."""
        if not values:
            return
        try:
            files.keep_measured(self._identity, values)
        except WeightCacheError as error:
            _logger.warning("what was measured is not kept for the next start: %s", error.message)

    @property
    def needs_writing(self) -> bool:
        """Whether `restore` found no usable file."""
        return not self.outcome.endswith(" s")

    def write(self, weights: Iterable[Weight]) -> None:
        self._write({name: keeper.kept() for name, keeper in _keepers(weights).items()}, lambda worked_s: None)

    def _write(self, kept: dict[str, Kept], rest: Callable[[float], object]) -> None:
        begin = time.perf_counter()
        layers = {name: _stored(one) for name, one in kept.items()}
        try:
            path = files.write(self._identity, self._model, self._precision, layers, rest)
        except WeightCacheError as error:
            _logger.warning("the packed weights are not kept for the next start: %s", error.message)
            return
        size = path.stat().st_size / 2**20
        _logger.info("kept %.0f MiB of packed weights for the next start (%.1f s)", size, time.perf_counter() - begin)

    def write_in_background(self, weights: Iterable[Weight]) -> Callable[[], None]:
        """`write` in a thread that works a third of the time; call what is returned to wait for its end, without rests.

        It has the priority of all threads: one of a lower priority that holds the interpreter's lock stops everybody on a busy machine. What is kept
        is taken now: the weights may be replaced before the thread comes to them.
        """
        kept = {name: keeper.kept() for name, keeper in _keepers(weights).items()}
        hurry = threading.Event()
        thread = threading.Thread(
            target=self._write, args=(kept, lambda worked_s: hurry.wait(2 * worked_s)), name="weight cache"
        )
        thread.start()

        def finish() -> None:
            hurry.set()
            thread.join()

        return finish

    def _refuse(self, why: str) -> frozenset[str]:
        _logger.warning("packing the weights again: %s", why)
        self.outcome = "packed again"
        return frozenset()


def open_cache(
    checkpoint: Checkpoint, model_class: str, placement: Placement, ahead: files.ReadAhead = files.NOTHING_AHEAD
) -> WeightCache | None:
    """The cache for this model; None where there is nothing to identify it by or to keep: random weights, another device than the CPU,
    layers of the torch fallbacks."""
    native = native_cpu.load()
    if checkpoint.kind == "dummy" or placement.device.type != "cpu" or native is None:
        return None
    precision = str(placement.weight_dtype).removeprefix("torch.")
    if placement.format.facts.quantizes:
        precision = placement.quantization
    try:
        assert native.__file__ is not None, native
        extension = Path(native.__file__).stat()
        facts = {
            "config": checkpoint.config.as_file(),
            "model_class": model_class,
            "dtype": str(placement.weight_dtype),
            "quantization": placement.quantization,
            "rank": [placement.shard.rank, placement.shard.size],
            "whole_experts": placement.whole_experts,
            "whole_attention": placement.whole_attention,
            "stage": [placement.stage.index, placement.stage.count],
            "isa": native.isa(),
            "extension": [extension.st_size, extension.st_mtime_ns],
            "code": files.code_digest(Path(__file__).parents[1]),
        }
        identity = files.identity(checkpoint.files(), facts)
    except OSError as error:
        _logger.warning("packed weights are not cached: %s", error.strerror)
        return None
    return WeightCache(identity, checkpoint.path.name, precision, ahead)


def _keepers(weights: Iterable[Weight]) -> dict[str, Keeper]:
    """Every keeper once, named by the first weight that it takes part in."""
    found: dict[int, tuple[str, Keeper]] = {}
    for weight in weights:
        for number, keeper in enumerate(weight.keepers):
            found.setdefault(id(keeper), (f"{weight.name}#{number}", keeper))
    return dict(found.values())


def _stored(kept: Kept) -> dict[str, TensorBytes | int | str | None]:
    fields: dict[str, TensorBytes | int | str | None] = {}
    for name, value in kept.items():
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            fields[name] = TensorBytes(dtype, tuple(value.shape), bytes_of(value.contiguous()))
        else:
            fields[name] = value
    return fields


def _tensors(layer: StoredLayer, data: object, digests: Digests) -> Kept:
    """The layer's fields, its tensors views of `data`."""
    kept: dict[str, torch.Tensor | int | str | None] = {}
    for name, field in layer.fields.items():
        if isinstance(field, StoredTensor):
            tensor = kept[name] = tensor_at(data, getattr(torch, field.dtype), field.shape, field.offset)
            digests.add(tensor, field.sha256)
        else:
            kept[name] = field
    return kept


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
        if FORMATS[self._quantization].quantizes or FORMATS[self._quantization].blocks:
            raise RequestError(
                f"weights that were quantised to {self._quantization} when they were loaded cannot be saved: quantising what is read "
                "back would not give the same; `headrace quantize` makes a quantised checkpoint"
            )
        target = Path(self._save_dir) / name
        if os.path.lexists(target):  # a link that leads nowhere, too
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
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

        def appear() -> None:
            try:
                unfinished.rename(target)
            except OSError as error:
                shutil.rmtree(unfinished, ignore_errors=True)
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
