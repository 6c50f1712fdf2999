"""Which attention backend runs: the known ones, what each cannot do, and the making of one.

Does not decide between what the user asked and what is possible (`config.resolve` does, with `reasons_against`).
"""

from importlib.util import find_spec

import torch

from headrace.attention.base import AttentionBackend
from headrace.attention.cpu import CpuAttention
from headrace.attention.torch_native import TorchNativeAttention
from headrace.config.resolve import AttentionNeeds
from headrace.kernels import PAGE_SIZE
from headrace.kernels.cpu import why_not
from headrace.kernels.packing import MAX_INT8_HEAD_DIM
from headrace.kernels.registry import triton_why_not

PREFERENCE = ("cpu", "flashinfer", "triton", "torch_native")
"""Names, best first."""

_TRITON_HEAD_DIMS = (16, 256)
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
_FP8_CAPABILITY = (8, 9)


def reasons_against(name: str, needs: AttentionNeeds) -> list[str]:
    """Why backend `name` cannot serve `needs`; empty when it can."""
    reasons = {
        "torch_native": _reasons_against_torch,
        "cpu": _reasons_against_cpu,
        "triton": _reasons_against_triton,
        "flashinfer": _reasons_against_flashinfer,
    }
    return reasons[name](needs)


def preferred_page_size(name: str) -> int:
    """Page size in tokens that suits backend `name`."""
    return PAGE_SIZE if name in ("cpu", "flashinfer") else 1


def make_backend(name: str, *, deterministic: bool = False) -> AttentionBackend:
    """A backend without a pool yet. deterministic: see `AttentionNeeds`."""
    if name == "cpu":
        return CpuAttention()
    if name == "torch_native":
        return TorchNativeAttention()
    if name == "triton":
        # Imported when it is wanted: its library is, too.
        from headrace.attention.triton import TritonAttention

        return TritonAttention(deterministic=deterministic)
    assert name == "flashinfer", name
    from headrace.attention.flashinfer import FlashInferAttention

    return FlashInferAttention()


def _reasons_against_torch(needs: AttentionNeeds) -> list[str]:
    reasons = []
    if needs.kv_cache_dtype == "int8" and needs.head_dim % 4:
        reasons.append(f"head_dim must be a multiple of 4 for an int8 KV cache, not {needs.head_dim}")
    if needs.kv_cache_dtype == "float8_e4m3fn":
        reasons.append("it has no fp8 KV cache")
    if needs.deterministic and needs.device != "cpu":
        reasons.append(f"on {needs.device} its bits depend on the batch")
    return reasons


def _reasons_against_cpu(needs: AttentionNeeds) -> list[str]:
    reasons = []
    if needs.device != "cpu":
        reasons.append(f"it runs on CPU only, not on {needs.device}")
    elif not needs.native_kernels:
        reasons.append(why_not() or "native kernels are disabled")
    if needs.kv_cache_dtype not in ("bfloat16", "float32", "int8"):
        reasons.append(f"its KV cache is bfloat16, float32 or int8, not {needs.kv_cache_dtype}")
    if needs.head_dim % 16:
        reasons.append(f"head_dim must be a multiple of 16, not {needs.head_dim}")
    if needs.kv_cache_dtype == "int8" and needs.head_dim > MAX_INT8_HEAD_DIM:
        reasons.append(f"head_dim must be at most {MAX_INT8_HEAD_DIM} for an int8 KV cache, not {needs.head_dim}")
    return reasons


def _reasons_against_triton(needs: AttentionNeeds) -> list[str]:
    reason = triton_why_not(needs.device)
    reasons = [reason] if reason else []
    least, most = _TRITON_HEAD_DIMS
    if not least <= needs.head_dim <= most or needs.head_dim % 8:
        reasons.append(f"head_dim must be a multiple of 8 from {least} to {most}, not {needs.head_dim}")
    if needs.kv_cache_dtype == "int8":
        reasons.append("it has no int8 KV cache; fp8_e4m3 is as small")
    if needs.kv_cache_dtype == "float8_e4m3fn":
        reasons += _fp8_reasons(needs.device)
    if needs.device == "cpu" and needs.kv_cache_dtype == "bfloat16":
        reasons.append("its interpreter computes wrong in bfloat16; use --kv-cache-dtype float32")
    return reasons


def captures(name: str) -> bool:
    """Whether `prepare` and `forward` of a decode step can be captured in a CUDA graph: they never wait for the device, take lengths from
    tensors, and the host integers of `StepRows` only as bounds."""
    return name == "triton"


def _reasons_against_flashinfer(needs: AttentionNeeds) -> list[str]:
    reasons = []
    if needs.device != "cuda":
        reasons.append(f"it runs on CUDA only, not on {needs.device}")
    if find_spec("flashinfer") is None:
        reasons.append("the package flashinfer-python is not installed (pip install headrace[flashinfer])")
    if needs.head_dim not in _FLASHINFER_HEAD_DIMS:
        reasons.append(f"head_dim must be one of {_FLASHINFER_HEAD_DIMS}, not {needs.head_dim}")
    if needs.kv_cache_dtype not in ("bfloat16", "float16", "float8_e4m3fn"):
        reasons.append(f"its KV cache is bfloat16, float16 or fp8_e4m3, not {needs.kv_cache_dtype}")
    if needs.kv_cache_dtype == "float8_e4m3fn":
        reasons += _fp8_reasons(needs.device)
    if needs.deterministic:
        reasons.append("its splits depend on the batch")
    return reasons


def _fp8_reasons(device: str) -> list[str]:
    if device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() < _FP8_CAPABILITY:
        return [
            f"the GPU has no fp8: its compute capability {torch.cuda.get_device_capability()} is below {_FP8_CAPABILITY}"
        ]
    return []
