"""Releases memory to the system and takes it back.

Weights are written to an unnamed file in the temporary directory (TMPDIR) and restored from it bit for bit. The pages of the KV cache are
dropped; they read as zeros when they are next touched. Files are written and read in the thread of the operation,
beside the steps; `let_go`, and what `read` returns, run between two steps.
"""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from headrace.attention.base import AttentionBackend, KvPool
from headrace.errors import ExecutionError
from headrace.execution.weight_files import bytes_of
from headrace.layers.weight import Keeper, Weight


@dataclass(frozen=True, slots=True)
class Released:
    """Memory that can be released and restored.

    num_bytes: the number of bytes released. let_go: releases them, quickly; raises ExecutionError, then nothing has changed. read: reads what
    is needed to restore them and returns a function that puts it in place; raises ExecutionError, then they are still released.
    """

    num_bytes: int
    let_go: Callable[[], None]
    read: Callable[[], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """What a draft model or head holds beside the model.

    keepers: its layers' weights. attention, pool: its KV cache. bind: lets it fuse its layers with a backend, when its weights have moved.
    facts: what the bits of its KV depend on, beside its weights and the model.
    """

    keepers: Sequence[Keeper]
    attention: AttentionBackend
    pool: KvPool
    bind: Callable[[AttentionBackend], object]
    facts: Mapping[str, object] = field(default_factory=dict)


def keepers_of(weights: Iterable[Weight]) -> list[Keeper]:
    """Every layer that keeps some of these weights, once, in their order."""
    return list({id(keeper): keeper for weight in weights for keeper in weight.keepers}.values())


def release_kv(pools: Sequence[KvPool]) -> Released:
    """The pages of the KV caches, which keep their address ranges. Raises ExecutionError on a GPU."""
    tensors = [tensor for pool in pools for tensor in (*pool.k, *pool.v)]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        raise ExecutionError("the KV cache of a GPU cannot be released")

    def let_go() -> None:
        for tensor in tensors:
            _drop_pages(tensor)

    return Released(sum(pool.num_bytes for pool in pools), let_go, lambda: lambda: None)


def release_weights(keepers: Sequence[Keeper]) -> Released:
    """Write the layers' weights to a file, so that they can be released. Raises ExecutionError if there is no room."""
    kept = [keeper.kept() for keeper in keepers]
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, closed when the weights are back
    try:
        places = [{name: _store(value, file.fileno()) for name, value in one.items()} for one in kept]
    except OSError as error:
        file.close()
        raise ExecutionError(
            f"the weights could not be written to the temporary directory: {error.strerror}"
        ) from error
    num_bytes = os.lseek(file.fileno(), 0, os.SEEK_CUR)

    def let_go() -> None:
        for keeper, one in zip(keepers, kept, strict=True):
            keeper.restore({name: _hollow(value) for name, value in one.items()})
        kept.clear()

    def read() -> Callable[[], None]:
        try:
            again = [{name: _load(place, file.fileno()) for name, place in one.items()} for one in places]
        except OSError as error:
            raise ExecutionError(f"the weights could not be read back: {error.strerror}") from error

        def restore() -> None:
            for keeper, one in zip(keepers, again, strict=True):
                keeper.restore(one)
            again.clear()
            file.close()

        return restore

    return Released(num_bytes, let_go, read)


_Plain = int | str | None


@dataclass(frozen=True, slots=True)
class _Stored:
    offset: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def _hollow(value: torch.Tensor | _Plain) -> torch.Tensor | _Plain:
    return torch.empty(0, dtype=value.dtype, device=value.device) if isinstance(value, torch.Tensor) else value


def _store(value: torch.Tensor | _Plain, fd: int) -> _Stored | _Plain:
    if not isinstance(value, torch.Tensor):
        return value
    place = _Stored(os.lseek(fd, 0, os.SEEK_CUR), value.shape, value.dtype, value.device)
    host = value.cpu().contiguous()
    view = bytes_of(host)
    while view.nbytes:
        view = view[os.write(fd, view) :]
    return place


def _load(place: _Stored | _Plain, fd: int) -> torch.Tensor | _Plain:
    if not isinstance(place, _Stored):
        return place
    host = torch.empty(place.shape, dtype=place.dtype)
    view, offset = bytes_of(host), place.offset
    while view.nbytes:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            raise OSError(0, "the file has become shorter")
        view, offset = view[count:], offset + count
    return host.to(place.device)


def _drop_pages(tensor: torch.Tensor) -> None:
    """Release the pages that belong only to this tensor; they read as zeros afterwards (madvise(2))."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= start:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
    # Shared anonymous memory is released by MADV_REMOVE, which fails for private memory.
    if libc.madvise(address, length, mmap.MADV_REMOVE) and libc.madvise(address, length, mmap.MADV_DONTNEED):
        raise ExecutionError(f"the KV cache could not be released: {os.strerror(ctypes.get_errno())}")
