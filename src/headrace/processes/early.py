"""How the process of a child is started, with what of our environment; and the scheduler of `headrace serve`, which is started before the options are
read: while the main process imports the command line, it imports torch (`child_main`).

Runs in the parent, and imports nothing that takes long.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a child ignores, because its parent drains and tells it to leave. Blocked when it starts, so that none ends its imports."""

PROGRAM = (sys.executable, "-m", "headrace.processes.child_main")
"""The command of every child, before its kind."""


class Started(NamedTuple):
    """A process that waits on stdin for what it is to do. reports_fd: where its reports are read; report_fd: where it writes them, in the process."""

    popen: subprocess.Popen[bytes]
    environment: dict[str, str]
    reports_fd: int
    report_fd: int


def started(command: Sequence[str], environment: dict[str, str], passed: Sequence[int] = ()) -> Started:
    """passed: descriptors that it gets, too."""
    reports_fd, report_fd = os.pipe()
    with signals_held():
        popen = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[report_fd, *passed], env=environment)
    os.close(report_fd)
    return Started(popen, environment, reports_fd, report_fd)


_waiting: list[Started] = []


def begin() -> Started:
    """Start the scheduler. Followed by `end`, whatever happens."""
    own = {name: value for name, value in os.environ.items() if name != LIFELINE}
    _waiting.append(started([*PROGRAM, "scheduler", IS_EARLY], ENGINE_DEFAULTS | child_environment(own)))
    return _waiting[0]


def take(environment: Mapping[str, str]) -> Started | None:
    """What `begin` has started, if it has this environment."""
    if not _waiting or _waiting[0].environment != environment:
        return None
    return _waiting.pop()


def end() -> None:
    """End what was started and nobody took. Idempotent."""
    while _waiting:
        popen, _, reports_fd, _ = _waiting.pop()
        popen.kill()
        popen.communicate()
        os.close(reports_fd)


IS_EARLY = "early"
"""Behind the kind of a child that is started before it is known what it will do."""

LIFELINE = "HEADRACE_LIFELINE"
"""The variable of a server with an owner (`lifeline`), which is not that of its children."""


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """What is started within is not reached by IGNORED until it has said that it ignores them (`child_main`)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# Which variables of the environment children get: what the libraries that they use read, and nothing that may be a secret. A server is often
# started from a shell or a container that holds keys of all kinds, and the engine's processes run code that is not ours: a model's libraries and
# the operator's logit processors. So a variable is passed on only when a rule here, or --child-env, names it.
_NAMES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TMP", "TEMP", "TZ", "LANG", "LANGUAGE", "TERM", "HOSTNAME", "VIRTUAL_ENV",
    "CONDA_PREFIX", "CC", "CXX", "CFLAGS", "CXXFLAGS", "LIBRARY_PATH", "CPATH", "HF_HOME", "NO_COLOR",
})  # fmt: skip
"""Passed on as they are."""

PREFIXES = (
    "HEADRACE_", "PYTHON", "LC_", "LD_", "XDG_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "ONEDNN_", "DNNL_", "MALLOC_",
    "GLIBC_", "NUMEXPR_", "CUDA", "CUBLAS_", "CUDNN_", "NVIDIA_", "NV_", "NCCL_", "GLOO_", "UCX_", "TORCH", "PYTORCH_", "TRITON_",
    "FLASHINFER_", "HF_HUB_", "TRANSFORMERS_", "TOKENIZERS_", "SAFETENSORS_", "ASAN_", "UBSAN_", "TSAN_", "LSAN_", "COVERAGE_",
)  # fmt: skip
"""Variables that begin so are passed on, too: compilers' and libraries' threads, devices, caches and debugging."""

SECRET_WORDS = frozenset({
    "KEY", "KEYS", "APIKEY", "TOKEN", "TOKENS", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS",
    "AUTH", "COOKIE",
})  # fmt: skip
"""A variable with one of these words in its name is passed on by no rule, but HEADRACE_DIST_SECRET to ranks, which need it."""


ENGINE_DEFAULTS = {"MALLOC_ARENA_MAX": "1"}
"""For processes with a model. Threads come and go there with updates, adapters and grammars, and malloc makes a pool of memory (an arena) for each,
up to 8 a core, of which `malloc_trim` leaves the ends: they add up to the size of a small model. mallopt(3) is too late, after the first thread."""


def child_environment(own: Mapping[str, str], more: str = "") -> dict[str, str]:
    """Those of `own` that a child gets. more: names of --child-env, comma-separated; they are passed on whatever they are called."""
    named = {name.strip() for name in more.split(",")}
    return {name: value for name, value in own.items() if name in named or _is_passed_on(name)}


def _is_passed_on(name: str) -> bool:
    if not SECRET_WORDS.isdisjoint(name.upper().split("_")):
        return False
    return name in _NAMES or name.startswith(PREFIXES)
