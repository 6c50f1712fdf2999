"""Kernels: one function per op, backed by native code or torch, chosen by device and instruction set."""

from headrace.kernels.decoder import DecoderLayerSpec, DecoderSpec, FusedDecoder
from headrace.kernels.lora import LoraFactors, LoraPart, LoraRows
from headrace.kernels.ops import (
    argmax,
    embedding,
    gather_kv,
    gelu_tanh_mul,
    linear,
    lora_delta,
    pack_linear,
    paged_attention,
    quantize_rows,
    rms_norm,
    rotary,
    silu_mul,
    write_kv,
)
from headrace.kernels.packing import PAGE_SIZE, PackedLinear, kv_cache_shapes
from headrace.kernels.registry import OpReport, num_threads, prefer, report, set_num_threads

__all__ = [
    "PAGE_SIZE",
    "DecoderLayerSpec",
    "DecoderSpec",
    "FusedDecoder",
    "LoraFactors",
    "LoraPart",
    "LoraRows",
    "OpReport",
    "PackedLinear",
    "argmax",
    "embedding",
    "gather_kv",
    "gelu_tanh_mul",
    "kv_cache_shapes",
    "linear",
    "lora_delta",
    "num_threads",
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
