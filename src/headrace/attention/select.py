"""Which attention backend runs: the known ones, what each cannot do, and the making of one.

Does not decide between what the user asked and what is possible (`config.resolve` does, with `reasons_against`).
"""

from headrace.attention.base import AttentionBackend
from headrace.attention.cpu import CpuAttention
from headrace.attention.torch_native import TorchNativeAttention
from headrace.config.resolve import AttentionNeeds
from headrace.kernels import PAGE_SIZE
from headrace.kernels.cpu import why_not
from headrace.kernels.packing import MAX_INT8_HEAD_DIM

PREFERENCE = ("cpu", "torch_native")
"""Names, best first."""


def reasons_against(name: str, needs: AttentionNeeds) -> list[str]:
    """Why backend `name` cannot serve `needs`; empty when it can."""
    if name == "torch_native":
        if needs.kv_cache_dtype == "int8" and needs.head_dim % 4:
            return [f"head_dim must be a multiple of 4 for an int8 KV cache, not {needs.head_dim}"]
        return []
    assert name == "cpu", name
    reasons = []
    if needs.device != "cpu":
        reasons.append(f"it runs on CPU only, not on {needs.device}")
    elif not needs.native_kernels:
        reasons.append(why_not() or "native kernels are disabled")
    if needs.page_size not in (None, PAGE_SIZE):
        reasons.append(f"its pages are of {PAGE_SIZE} tokens, not {needs.page_size}")
    if needs.kv_cache_dtype not in ("bfloat16", "float32", "int8"):
        reasons.append(f"its KV cache is bfloat16, float32 or int8, not {needs.kv_cache_dtype}")
    if needs.head_dim % 16:
        reasons.append(f"head_dim must be a multiple of 16, not {needs.head_dim}")
    if needs.kv_cache_dtype == "int8" and needs.head_dim > MAX_INT8_HEAD_DIM:
        reasons.append(f"head_dim must be at most {MAX_INT8_HEAD_DIM} for an int8 KV cache, not {needs.head_dim}")
    return reasons


def preferred_page_size(name: str) -> int:
    """Page size in tokens that suits backend `name`."""
    return PAGE_SIZE if name == "cpu" else 1


def captures(name: str) -> bool:
    """Whether `prepare` and `forward` of a decode step can be captured in a CUDA graph: they never wait for the device, take lengths from
    tensors, and the host integers of `StepRows` only as bounds."""
    return name == "triton"


def make_backend(name: str) -> AttentionBackend:
    """A backend without a pool yet."""
    return CpuAttention() if name == "cpu" else TorchNativeAttention()
