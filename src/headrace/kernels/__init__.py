"""Kernels: one function per op, backed by native code or torch, chosen by device and instruction set."""

from headrace.kernels.decoder import DecoderLayerSpec, DecoderSpec, FusedDecoder
from headrace.kernels.experts import PackedExperts, pack_experts
from headrace.kernels.lora import LoraFactors, LoraPart, LoraRows
from headrace.kernels.ops import (
    argmax,
    draw,
    embedding,
    exp_sums,
    gather_kv,
    gelu_tanh_mul,
    layer_norm,
    linear,
    lora_delta,
    moe,
    pack_linear,
    paged_attention,
    quantize_rows,
    rms_norm,
    rotary,
    silu_mul,
    write_kv,
)
from headrace.kernels.packing import PAGE_SIZE, PackedLinear, kv_cache_shapes
from headrace.kernels.registry import OpReport, batch_invariant, num_threads, prefer, report, set_num_threads

__all__ = [
    "PAGE_SIZE",
    "DecoderLayerSpec",
    "DecoderSpec",
    "FusedDecoder",
    "LoraFactors",
    "LoraPart",
    "LoraRows",
    "OpReport",
    "PackedExperts",
    "PackedLinear",
    "argmax",
    "batch_invariant",
    "draw",
    "embedding",
    "exp_sums",
    "gather_kv",
    "gelu_tanh_mul",
    "kv_cache_shapes",
    "layer_norm",
    "linear",
    "lora_delta",
    "moe",
    "num_threads",
    "pack_experts",
    "pack_linear",
    "paged_attention",
    "prefer",
    "quantize_rows",
    "report",
    "rms_norm",
    "rotary",
    "set_num_threads",
    "silu_mul",
    "write_kv",
]
