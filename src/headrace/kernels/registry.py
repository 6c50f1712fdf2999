"""Which implementation runs an op: op name -> implementations, best first, chosen by device.

Owns the choice and its reasons (`report`, for `headrace doctor`). Choices are made at first use, kept, and the same in every thread of the process.
An implementation may have some of the ops only: the next one has the others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from headrace.kernels import cpu, triton

Op = Callable[..., Any]

OPS = {
    "pack_linear": "",
    "linear": "linear",
    "quantize_rows": "",
    "rms_norm": "rows",
    "layer_norm": "rows",
    "moe": "experts",
    "route": "experts",
    "rotary": "rows",
    "silu_mul": "rows",
    "gelu_tanh_mul": "rows",
    "gelu_mul": "",
    "gelu": "",
    "gelu_tanh": "",
    "embedding": "",
    "write_kv": "",
    "gather_kv": "",
    "paged_attention": "",
    "packed_attention": "",
    "argmax": "sampling",
    "draw": "sampling",
    "exp_sums": "sampling",
    "lora_delta": "",
}
"""Every op, and its module in `triton`; those without one are left to torch."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One provider of ops.

    name: what reports say. why_not: "" when it can run on a device type ("cpu", "cuda", ...), otherwise the reason. functions: those it has, by
    op, as "module:function" below `headrace.kernels`; a module is imported only when one of its is chosen.
    """

    name: str
    why_not: Callable[[str], str]
    functions: dict[str, str]


@dataclass(frozen=True, slots=True)
class OpReport:
    """What runs an op on a device: "native (avx512)" or "torch", and why not something faster ("" when nothing is)."""

    op: str
    implementation: str
    reason: str


def _native_why_not(device_type: str) -> str:
    return cpu.why_not() if device_type == "cpu" else f"the native kernels run on CPU, not on {device_type}"


def triton_why_not(device_type: str) -> str:
    """Why Triton's kernels do not run on this device type; "" when they do. On a CPU they do where they are preferred, and interpreted."""
    if device_type == "cpu" and _preferred != "triton":
        return "the Triton kernels run on CUDA; on a CPU they are interpreted, for tests"
    return triton.why_not(device_type)


def _invariant_why_not(device_type: str) -> str:
    if not _batch_invariant:
        return "the vendor's matrix products are faster; these are for batch-invariant bits"
    return triton_why_not(device_type)


IMPLEMENTATIONS = (
    Implementation("native", _native_why_not, {op: f"cpu.native_ops:{op}" for op in OPS if op != "route"}),
    Implementation(
        "triton, batch-invariant",
        _invariant_why_not,
        {"linear": "triton.linear:invariant_linear", "moe": "triton.experts:invariant_moe"},
    ),
    Implementation("triton", triton_why_not, {op: f"triton.{module}:{op}" for op, module in OPS.items() if module}),
    Implementation("torch", lambda device_type: "", {op: f"torch_fallback:{op}" for op in OPS}),
)

_chosen: dict[tuple[str, str], Op] = {}
_preferred: str | None = None
_batch_invariant = False


def select(op: str, device_type: str) -> Op:
    """The function that runs `op` on tensors of this device type."""
    function = _chosen.get((op, device_type))
    if function is None:
        function = _chosen[op, device_type] = _function(_choose(op, device_type)[0], op)
    return function


@contextmanager
def prefer(name: str) -> Iterator[None]:
    """Within the block the implementation `name` runs every op that it can run; for tests and comparisons, not for serving.

    ValueError when there is none of that name. Weights packed inside stay with the implementation that packed them.
    """
    global _preferred
    if name not in [implementation.name for implementation in IMPLEMENTATIONS]:
        raise ValueError(f"no kernel implementation is called {name!r}")
    before, _preferred = _preferred, name
    _chosen.clear()
    try:
        yield
    finally:
        _preferred = before
        _chosen.clear()


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Within the block the bits of a row depend on that row alone on a GPU, too, where that costs speed. On CPU they always do."""
    global _batch_invariant
    before, _batch_invariant = _batch_invariant, True
    _chosen.clear()
    try:
        yield
    finally:
        _batch_invariant = before
        _chosen.clear()


def for_layout(layout: str, op: str, device_type: str) -> Op:
    """The `op` that reads weights of this layout, on activations of this device type."""
    if not layout.startswith("torch"):
        return _function(IMPLEMENTATIONS[0], op)
    key = f"{op} of torch's weights", device_type
    function = _chosen.get(key)
    if function is None:
        function = _chosen[key] = _function(_choose(op, device_type, IMPLEMENTATIONS[1:])[0], op)
    return function


def runs_native() -> bool:
    """Whether the native kernels run the ops on the CPU."""
    return _choose("linear", "cpu")[0].name == "native"


def runs_fused_moe(device_type: str) -> bool:
    """Whether `moe` is something else there than torch's loop over the experts, which waits for the device."""
    return select("moe", device_type).__module__ != "headrace.kernels.torch_fallback"


def report(device_type: str = "cpu") -> list[OpReport]:
    """What runs each op on this device type, and why not something faster."""
    rows = []
    for op in OPS:
        implementation, reason = _choose(op, device_type)
        name = f"native ({cpu.isa()})" if implementation.name == "native" else implementation.name
        rows.append(OpReport(op, name, reason))
    return rows


def set_num_threads(n: int) -> None:
    """Threads of the CPU kernels, the calling one included, and of torch's own ops. ValueError for n < 1."""
    if n < 1:
        raise ValueError(f"kernels need at least 1 thread, got {n}")
    torch.set_num_threads(n)
    native = cpu.load()
    if native is not None:
        native.set_num_threads(n)


def num_threads() -> int:
    """Threads of the CPU kernels; what this process may use unless `set_num_threads` said otherwise."""
    native = cpu.load()
    return cpu.default_num_threads() if native is None else int(native.num_threads())


def _choose(
    op: str, device_type: str, implementations: tuple[Implementation, ...] = IMPLEMENTATIONS
) -> tuple[Implementation, str]:
    """The first implementation that can run the op (the preferred one if it can), and why the ones before it do not."""
    candidates = [implementation for implementation in implementations if op in implementation.functions]
    reasons: list[str] = []
    for implementation in candidates:
        reason = implementation.why_not(device_type)
        if (
            not reason
            and _preferred not in (None, implementation.name)
            and _can_run(_preferred, device_type, candidates)
        ):
            reason = f"{_preferred} is preferred"
        if not reason:
            return implementation, "; ".join(reasons)
        reasons.append(f"{implementation.name}: {reason}")
    raise AssertionError(f"no implementation runs {op} on {device_type}: {reasons}")


def _can_run(name: str | None, device_type: str, candidates: list[Implementation]) -> bool:
    return any(i.name == name and not i.why_not(device_type) for i in candidates)


def _function(implementation: Implementation, op: str) -> Op:
    module, _, name = implementation.functions[op].partition(":")
    return getattr(import_module(f"headrace.kernels.{module}"), name)
