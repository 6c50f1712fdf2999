"""Which variables of the environment child processes get: what the libraries that they use read, and nothing that may be a secret.

A server is often started from a shell or a container that holds keys of all kinds, and the engine's processes run code that is not
ours: a model's libraries and the operator's logit processors. So a variable is passed on only when a rule here, or --child-env, names it.
"""

from collections.abc import Mapping

from headrace.config.nodes import SECRET_VARIABLE
from headrace.config.server_args import ServerArgs
from headrace.processes.handshake import Kind

NAMES = frozenset({
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


def environment(own: Mapping[str, str], kind: Kind, args: ServerArgs, index: int) -> dict[str, str]:
    """Ours without what may be secret. A replica sees as many GPUs as it has ranks: its own of those that we may use."""
    given = child_environment(own, args.child_env)
    if kind in ("scheduler", "follower") and args.num_nodes > 1 and SECRET_VARIABLE in own:
        given[SECRET_VARIABLE] = own[SECRET_VARIABLE]
    if kind != "scheduler" or args.num_replicas == 1 or args.device == "cpu":
        return given
    visible = [name.strip() for name in own.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    own_places = range(index * args.tp_size, (index + 1) * args.tp_size)
    if visible:
        # Beyond the last one it sees none, and `of_all_replicas` refuses.
        return {**given, "CUDA_VISIBLE_DEVICES": ",".join(visible[own_places.start : own_places.stop])}
    return {**given, "CUDA_VISIBLE_DEVICES": ",".join(map(str, own_places))}


def child_environment(own: Mapping[str, str], more: str = "") -> dict[str, str]:
    """Those of `own` that a child gets. more: names of --child-env, comma-separated; they are passed on whatever they are called."""
    named = {name.strip() for name in more.split(",")}
    return {name: value for name, value in own.items() if name in named or _is_passed_on(name)}


def _is_passed_on(name: str) -> bool:
    if not SECRET_WORDS.isdisjoint(name.upper().split("_")):
        return False
    return name in NAMES or name.startswith(PREFIXES)
