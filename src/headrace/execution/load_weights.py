"""Fills a model with weights: a checkpoint's tensors, each exactly once, or seeded random ones.

Owns the matching of names and shapes. Does not read files (`headrace.checkpoint`) and does not convert (the layers do). Runs in the
thread that builds the worker, and in `LoadThreads`.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.quantized_matrix import StoredMatrix
from headrace.checkpoint.weight_formats import FORMATS, Scheme
from headrace.errors import ModelError
from headrace.execution.memory import available_bytes
from headrace.execution.released import keepers_of
from headrace.execution.weight_files import Progress, WeightCache
from headrace.layers.weight import Placement, Weight
from headrace.models.spec import FamilySpec, M

_MEMORY_SHARE = 8
"""Jobs that run at the same time take at most this part of the free memory, unless one alone takes more."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Job(Generic[_Result]):
    """work: run in one of the threads. num_bytes: of its temporaries, about."""

    work: Callable[[], _Result]
    num_bytes: int


class LoadThreads:
    """Runs jobs, each of which reads, checks, quantises and packs one tensor: by default in the calling thread, else in up to `num` threads of
    `pool`. max_bytes: of the jobs that run at once.

    Torch's own threads do not help: loading is thousands of short operations, at the end of each of which OpenMP's threads spin, so on busy cores two
    of them take many times as long as one. Here each thread runs its operations alone, and waits without spinning; the results have the same bits.
    """

    def __init__(self, pool: Executor | None = None, num: int = 1, max_bytes: int = 0) -> None:
        self._pool = pool
        self._num = num
        self._max_bytes = max_bytes

    def run(self, jobs: Iterable[Job[_Result]]) -> Iterator[_Result]:
        """Run the jobs and give their results in the order in which they end; raises what a job raises.

        The calling thread makes the jobs, each only when the ones before it leave a thread and memory for it.
        """
        if self._pool is None:
            for job in jobs:
                yield job.work()
            return
        running: dict[Future[_Result], int] = {}
        for job in jobs:
            while running and sum(running.values()) + job.num_bytes > self._max_bytes:
                yield from _ended(running)
            running[self._pool.submit(job.work)] = job.num_bytes
            while len(running) >= self._num:
                yield from _ended(running)
        while running:
            yield from _ended(running)


IN_THIS_THREAD = LoadThreads()


@contextmanager
def load_threads(num: int) -> Iterator[LoadThreads]:
    """`num` threads, which end with the context. Torch computes with one thread in each of them, and in the calling thread meanwhile."""
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if num == 1:
            yield LoadThreads()
            return
        max_bytes = available_bytes(torch.device("cpu")) // _MEMORY_SHARE
        with ThreadPoolExecutor(num, "load", initializer=partial(torch.set_grad_enabled, False)) as pool:
            yield LoadThreads(pool, num, max_bytes)
    finally:
        torch.set_num_threads(torch_threads)


def _ended(running: dict[Future[_Result], int]) -> Iterator[_Result]:
    """Wait until at least one has ended, and take those that have."""
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        del running[future]
        yield future.result()


_CPU = torch.device("cpu")
_DUMMY_STD = 0.02
_NAMES_IN_A_MESSAGE = 4


def load_model(
    checkpoint: Checkpoint,
    spec: FamilySpec[M],
    placement: Placement,
    *,
    config: ModelConfig | None = None,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
    cache: WeightCache | None = None,
    threads: LoadThreads = IN_THIS_THREAD,
) -> M:
    """Build the model of `config` (default: the checkpoint's own) and fill it.

    A checkpoint of kind `dummy` gives random weights from `seed`. cache: weights found in it are not read from the checkpoint.
    threads: convert the weights; the bits do not depend on them.
    Raises ModelError that lists missing, unexpected or misshaped tensors.
    """
    model = spec.build(config or checkpoint.config, placement)
    if checkpoint.kind == "dummy":
        fill_random(model.weights(), seed, placement.device, threads)
    else:
        restored = frozenset[str]() if cache is None else cache.restore(model.weights(), progress)
        fill_from_checkpoint(model.weights(), checkpoint, spec, progress, placement.quantization, restored, threads)
    spec.check(model)
    return model


def fill_from_checkpoint(
    weights: Iterable[Weight],
    checkpoint: Checkpoint,
    spec: FamilySpec[Any],
    progress: Progress = lambda done, total: None,
    quantization: Scheme = "none",
    restored: Collection[str] = (),
    threads: LoadThreads = IN_THIS_THREAD,
) -> None:
    """Stream the checkpoint into `weights`. Names and shapes are checked before the first byte is read.

    quantization: of the model. A matrix that is stored in this format is used as it is stored. restored: names of weights
    that are already loaded. What other ranks keep is not read. Loaded weights do not refer to the files, which may change afterwards.
    """
    wanted = {weight.name: weight for weight in weights}
    rename = spec.renaming(checkpoint.config)
    names = {name: rename(name) for name in checkpoint.tensor_names()}
    _check(wanted, names, checkpoint, spec)
    sizes = {stored: math.prod(checkpoint.shape(stored)) for stored in names}
    others = {name for name, weight in wanted.items() if weight.is_elsewhere}
    here = {stored: name for stored, name in names.items() if name not in others}
    share = sum(sizes[stored] for stored in here) / max(1, sum(sizes.values()))
    done, total = 0, round(checkpoint.total_bytes * share)
    if not restored:
        progress(done, total)
    jobs = (
        Job(partial(_load, wanted.get(name), checkpoint, stored, quantization), 4 * sizes[stored])
        for stored, name in here.items()
        if name not in restored
    )
    for num_bytes in threads.run(jobs):
        done += num_bytes
        if not restored:  # the rest is small, and the progress bar has already moved
            progress(min(done, total), total)
    _leave_files(wanted.values(), checkpoint)


def _load(weight: Weight | None, checkpoint: Checkpoint, name: str, quantization: Scheme) -> int:
    """Read and check the tensor `name`, and load it into `weight`. Returns its bytes, as `total_bytes` counts them."""
    matrix = _as_stored(weight, checkpoint, name, quantization)
    if weight is not None and weight.load_quantized is not None and matrix is not None:
        weight.load_quantized(matrix)
        return math.prod(matrix.shape) * 4  # in float32
    tensor = checkpoint.checked_tensor(name, check_finite=True)
    if weight is not None:
        weight.load(tensor)
    return tensor.numel() * tensor.element_size()


def _leave_files(weights: Iterable[Weight], checkpoint: Checkpoint) -> None:
    """Copy tensors that layers kept as views of the mapped files: overwriting the checkpoint must not change the current weights."""
    spans = [(memory.ctypes.data, memory.ctypes.data + memory.nbytes) for memory in checkpoint.mapped_memory()]

    def owned(value: torch.Tensor | int | str | None) -> torch.Tensor | int | str | None:
        if isinstance(value, torch.Tensor) and any(begin <= value.data_ptr() < end for begin, end in spans):
            return value.clone()
        return value

    for keeper in keepers_of(weights):
        kept = keeper.kept()
        own = {name: owned(value) for name, value in kept.items()}
        if any(own[name] is not kept[name] for name in kept):
            keeper.restore(own)


def _as_stored(weight: Weight | None, checkpoint: Checkpoint, name: str, quantization: Scheme) -> StoredMatrix | None:
    """The matrix `name` as it is stored, if `quantization` can use its format; else None."""
    facts = FORMATS[quantization]
    takes = facts.takes
    if weight is None or weight.load_quantized is None or not (takes or facts.blocks):
        return None
    if facts.blocks:
        return checkpoint.blocks(name)
    matrix = checkpoint.quantized(name)
    return matrix if matrix is not None and matrix.scheme in takes else None


def straddled(weights: Iterable[Weight], checkpoint: Checkpoint, spec: FamilySpec[Any]) -> Counter[str]:
    """How many matrices of each type are dequantised, because this rank's part of their rows begins or ends within a block of their file."""
    inputs = {one.name: one.own[1] for one in weights if one.load_quantized is not None and len(one.own) == 2}
    rename, found = spec.renaming(checkpoint.config), Counter[str]()
    for stored in checkpoint.tensor_names():
        block, own = checkpoint.block_type(stored), inputs.get(rename(stored))
        if block is not None and own is not None and (own.start % block.block_values or own.stop % block.block_values):
            found[block.name] += 1
    return found


def fill_random(
    weights: Iterable[Weight], seed: int, device: torch.device = _CPU, threads: LoadThreads = IN_THIS_THREAD
) -> None:
    """Small normal matrices, neutral norms and zero biases; the same for the same seed. On a GPU they are generated there, in seconds."""
    generator = torch.Generator(device).manual_seed(seed)

    def jobs() -> Iterator[Job[None]]:
        for weight in weights:
            if weight.init == "normal":
                tensor = torch.randn(weight.shape, generator=generator, device=device).mul_(_DUMMY_STD)
            else:
                tensor = torch.ones(weight.shape) if weight.init == "ones" else torch.zeros(weight.shape)
            yield Job(partial(weight.load, tensor), tensor.nbytes)

    for _ in threads.run(jobs()):
        pass


def _check(wanted: dict[str, Weight], names: dict[str, str], checkpoint: Checkpoint, spec: FamilySpec[Any]) -> None:
    stored: dict[str, str] = {}
    for stored_name, name in names.items():
        if name in stored:
            raise ModelError(f"tensors {stored[name]} and {stored_name} are both for {name} of the model")
        stored[name] = stored_name
    missing = [name for name in wanted if name not in stored]
    # A tied output projection is the embedding, but checkpoints may contain a copy.
    tied = {weight.tied_name for weight in wanted.values()}
    extra = [
        name
        for name in stored
        if name not in wanted and name not in tied and not any(part in name for part in spec.ignored)
    ]
    misshaped = [
        f"{name} is {list(checkpoint.shape(stored[name]))} but the config makes it {list(weight.shape)}"
        for name, weight in wanted.items()
        if name in stored and tuple(checkpoint.shape(stored[name])) != weight.shape
    ]
    faults = [
        f"{len(found)} {label}: {', '.join(found[:_NAMES_IN_A_MESSAGE])}{', ...' if len(found) > _NAMES_IN_A_MESSAGE else ''}"
        for label, found in (
            ("missing", missing),
            (f"that model type {checkpoint.config.model_type} has no place for", extra),
            ("of the wrong shape", misshaped),
        )
        if found
    ]
    if faults:
        raise ModelError(f"{checkpoint.path.name}: tensors do not fit the model ({spec.name}): {'; '.join(faults)}")
