"""Every implementation of the kernels that this machine can run, as a fixture."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from headrace import kernels
from headrace.kernels import cpu, triton


def runnable_isas() -> list[str]:
    return [isa for isa, reason in cpu.isas() if not reason]


def _best_isa() -> str:
    return runnable_isas()[0]


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """The references are small: torch's own threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


IMPLEMENTATIONS = ["torch", *runnable_isas()]
"""The torch fallback, then each instruction set of the native kernels."""


@contextmanager
def _running(name: str) -> Iterator[None]:
    torch.manual_seed(0)
    if name == "torch":
        with kernels.prefer("torch"):
            yield
        return
    cpu.select_isa(name)
    try:
        yield
    finally:
        cpu.select_isa(_best_isa())


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, one_torch_thread: None) -> Iterator[str]:
    """Runs the test once per implementation."""
    with _running(request.param):
        yield request.param


@pytest.fixture
def implementations(one_torch_thread: None) -> Iterator[Iterator[str]]:
    """One after the other within the test, which computes only once what it compares them with."""

    def each() -> Iterator[str]:
        for name in IMPLEMENTATIONS:
            with _running(name):
                yield name

    names = each()
    yield names
    names.close()


@pytest.fixture
def native(one_torch_thread: None) -> Iterator[None]:
    """The native kernels on their best instruction set; the number of threads is put back afterwards."""
    if cpu.load() is None:
        pytest.skip(cpu.why_not())
    torch.manual_seed(0)
    threads = kernels.num_threads()
    yield
    cpu.select_isa(_best_isa())
    kernels.set_num_threads(threads)


@pytest.fixture
def triton_device(one_torch_thread: None) -> torch.device:
    """Where Triton's kernels run: compiled on a GPU, else interpreted on the CPU."""
    if find_spec("triton") is None:
        pytest.skip("the package triton is not installed")
    torch.manual_seed(0)
    if triton.is_interpreted():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("Triton was told to compile (TRITON_INTERPRET is not 1), and there is no GPU")
    return torch.device("cuda")


@pytest.fixture
def ordered_dots(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sum of an interpreted `tl.dot` runs over k in order, as it does on a GPU.

    The interpreter multiplies with np.matmul. On some processors NumPy's BLAS gives equal rows of one matrix different bits, which would
    hide what the kernels promise. Nothing changes where the kernels are compiled.
    """
    if not triton.is_interpreted():
        return
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.np, "matmul", _matmul_in_order)


def _matmul_in_order(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """a[..., m, k] @ b[..., k, n], its products added one k after the other."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
    for k in range(a.shape[-1]):
        total += a[..., :, k, None].astype(dtype) * b[..., None, k, :].astype(dtype)
    return total
