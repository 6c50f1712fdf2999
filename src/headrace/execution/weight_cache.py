"""The packed weights of one model, taken from a file when there is one, and written to it otherwise.

Owns what is kept (the layers that convert what they load: `layers.weight.Keeper`) and what a file depends on. Does not own the format
(`checkpoint.weight_cache`). Nothing in here fails a start: a file that is missing or damaged, or a disk that is full, is logged and the
weights are converted from the checkpoint. Runs in the thread that builds the worker; files are written in a thread of their own.
"""

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from headrace.checkpoint import weight_cache as files
from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.weight_cache import (
    StoredLayer,
    StoredTensor,
    TensorBytes,
    WeightCacheError,
    WeightFile,
)
from headrace.kernels import cpu as native_cpu
from headrace.layers.weight import Keeper, Kept, Placement, Weight
from headrace.log import get_logger

_logger = get_logger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each tensor."""


class WeightCache:
    """The cache of one model at one precision."""

    def __init__(self, identity: str, model: str, precision: str) -> None:
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
            file = WeightFile(files.path_of(self._identity))
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
            kept = [_tensors(layer, data) for layer in file.header.layers]
        except WeightCacheError as error:
            return self._refuse(error.message)
        finally:
            file.close()
        for keeper, fields in zip(keepers.values(), kept, strict=True):
            keeper.restore(fields)
        self.outcome = f"{len(data) / 2**20:.0f} MiB read in {time.perf_counter() - begin:.2f} s"
        return frozenset(weight.name for weight in weights if weight.keepers)

    def measured(self, name: str) -> float | None:
        """What is kept under this name of a measurement of these weights."""
        return files.read_measured(self._identity).get(name)

    def keep_measured(self, name: str, value: float) -> None:
        """Keep it for the next start; log why when that fails."""
        try:
            files.keep_measured(self._identity, name, value)
        except WeightCacheError as error:
            _logger.warning("what was measured is not kept for the next start: %s", error.message)

    @property
    def needs_writing(self) -> bool:
        """Whether `restore` found no usable file."""
        return not self.outcome.endswith(" s")

    def write(self, weights: Iterable[Weight]) -> None:
        """Write what the layers keep; log why when that fails."""
        self._write({name: keeper.kept() for name, keeper in _keepers(weights).items()})

    def _write(self, kept: dict[str, Kept]) -> None:
        begin = time.perf_counter()
        layers = {name: _stored(one) for name, one in kept.items()}
        try:
            path = files.write(self._identity, self._model, self._precision, layers)
        except WeightCacheError as error:
            _logger.warning("the packed weights are not kept for the next start: %s", error.message)
            return
        size = path.stat().st_size / 2**20
        _logger.info("kept %.0f MiB of packed weights for the next start (%.1f s)", size, time.perf_counter() - begin)

    def write_in_background(self, weights: Iterable[Weight]) -> Callable[[], None]:
        """`write` in a thread; call what is returned to wait for its end.

        What is kept is taken now: the weights may be replaced before the thread comes to them.
        """
        kept = {name: keeper.kept() for name, keeper in _keepers(weights).items()}
        thread = threading.Thread(target=self._write, args=(kept,), name="weight cache")
        thread.start()
        return thread.join

    def _refuse(self, why: str) -> frozenset[str]:
        _logger.warning("packing the weights again: %s", why)
        self.outcome = "packed again"
        return frozenset()


def open_cache(checkpoint: Checkpoint, model_class: str, placement: Placement) -> WeightCache | None:
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
    return WeightCache(identity, checkpoint.path.name, precision)


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
            data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            fields[name] = TensorBytes(str(value.dtype).removeprefix("torch."), tuple(value.shape), data)
        else:
            fields[name] = value
    return fields


def _tensors(layer: StoredLayer, data: object) -> Kept:
    """The layer's fields, its tensors views of `data`."""
    kept: dict[str, torch.Tensor | int | str | None] = {}
    for name, field in layer.fields.items():
        kept[name] = _tensor(field, data) if isinstance(field, StoredTensor) else field
    return kept


def _tensor(stored: StoredTensor, data: object) -> torch.Tensor:
    dtype = getattr(torch, stored.dtype)
    if not stored.num_bytes:
        return torch.empty(stored.shape, dtype=dtype)
    count = stored.num_bytes // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=count, offset=stored.offset).reshape(stored.shape)
