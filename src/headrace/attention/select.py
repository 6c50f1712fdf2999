"""The list of attention backends. To add one, add its file with its facts, and its line in `BACKENDS`.

Does not choose one (`config.resolve` does).
"""

from headrace.attention.base import AttentionBackend
from headrace.attention.cpu import CpuAttention
from headrace.attention.flashinfer import FlashInferAttention
from headrace.attention.torch_native import TorchNativeAttention
from headrace.attention.triton import TritonAttention

BACKENDS: tuple[type[AttentionBackend], ...] = (
    CpuAttention,
    FlashInferAttention,
    TritonAttention,
    TorchNativeAttention,
)
"""The fastest first."""


def make_backend(name: str, *, deterministic: bool = False, rounded: bool = False) -> AttentionBackend:
    """The backend of that name, without a pool yet. deterministic, rounded: see `AttentionBackend`."""
    return backend_named(name)(deterministic=deterministic, rounded=rounded)


def backend_named(name: str) -> type[AttentionBackend]:
    """Raises AssertionError for an unknown name: the command line has already checked it."""
    named = [backend for backend in BACKENDS if backend.name == name]
    assert named, name
    return named[0]
