"""Loads the native CPU kernels, `headrace.kernels.cpu._native`. native_ops.py calls them.

Owns the choice of the instruction set, or the reason why there is none, and the default number of threads. Importing this package never
fails: a missing or broken extension is a reason, reported by `why_not`. Runs in any thread of a process that computes.
"""

import math
import os
from importlib import import_module
from types import ModuleType

from headrace import cgroup
from headrace.errors import ConfigError
from headrace.log import get_logger

ISA_VARIABLE = "HEADRACE_CPU_ISA"
"""Environment variable that overrides the instruction set: baseline, avx2, avxvnni, avx512, avx512vnni, avx512bf16 or
amx; on ARM neon, neon_dotprod or neon_i8mm."""

_logger = get_logger(__name__)
_loaded: ModuleType | None = None
_reason = ""


def load() -> ModuleType | None:
    """The extension (typed by `_native.pyi`), its instruction set and threads set up; None if it cannot be loaded (see `why_not`).

    ConfigError when HEADRACE_CPU_ISA names an instruction set that this build or this processor lacks.
    """
    global _loaded
    if _loaded is not None or _reason:
        return _loaded
    try:
        module = import_module("headrace.kernels.cpu._native")
    except ImportError as error:
        _do_without(f"the native extension does not load: {error}")
        return None
    wanted = os.environ.get(ISA_VARIABLE, "")
    if wanted:
        try:
            module.select_isa(wanted)
        except ValueError as error:
            raise ConfigError(f"{ISA_VARIABLE}={wanted}: {error}") from error
    try:
        module.isa()
    except RuntimeError as error:
        _do_without(f"the native kernels are for another processor ({error}); scripts/setup compiles them for this one")
        return None
    module.set_num_threads(default_num_threads())
    _loaded = module
    return module


def _do_without(reason: str) -> None:
    global _reason
    _reason = reason
    _logger.warning("%s; torch runs every op instead, several times slower", reason)


def why_not() -> str:
    """Why `load` returns None, or "" if it does not."""
    load()
    return _reason


def isa() -> str:
    """The instruction set of the kernels; "" if the extension cannot be loaded."""
    native = load()
    return "" if native is None else str(native.isa())


def multiplies_bf16() -> bool:
    """Whether the instruction set of the kernels has products of bfloat16, which are twice as fast as those of floats."""
    return isa() in ("amx", "avx512bf16")


def isas() -> list[tuple[str, str]]:
    """(instruction set, reason why it does not run here or ""), best first; empty if the extension cannot be loaded."""
    native = load()
    return [] if native is None else [(isa, native.why_not_isa(isa)) for isa in native.known_isas()]


def select_isa(isa: str) -> None:
    """Run on `isa` from now on, in the whole process. ConfigError names what the build or the processor lacks."""
    native = load()
    if native is None:
        raise ConfigError(f"instruction set {isa}: {_reason}")
    try:
        native.select_isa(isa)
    except ValueError as error:
        raise ConfigError(f"instruction set {isa}: {error}") from error


def default_num_threads() -> int:
    """Processors that this process may use: its affinity mask, limited by the CPU quota of its control groups, at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota = cgroup.quota_cpus()
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))
