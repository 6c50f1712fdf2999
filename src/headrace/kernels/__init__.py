"""Kernels: one function per op, backed by native code or torch, chosen by device and instruction set.

Read first: ops.py (what an op is), registry.py (op -> implementations).

- Everywhere: torch_fallback.py (the ops in plain torch), torch_quantized.py (fp8 and int4 on GPUs), drawing.py (the
  draw, defined)
- Layouts: packing.py (of floats, experts, adapters and the KV cache), quantized_packing.py (of integers, and the way back),
  gguf_packing.py (of blocks of GGUF files)
- Larger than a layer's op: decoder.py and encoder.py (all layers of the common blocks)
"""

from headrace.kernels.decoder import DecoderLayerSpec, DecoderSpec, FusedDecoder
from headrace.kernels.encoder import EncoderLayerSpec, EncoderSpec, FusedEncoder, rounds_attention
from headrace.kernels.gguf_packing import pack_blocks
from headrace.kernels.ops import (
    argmax,
    draw,
    embedding,
    exp_sums,
    gather_kv,
    gelu,
    gelu_mul,
    gelu_tanh,
    gelu_tanh_mul,
    layer_norm,
    linear,
    lora_delta,
    moe,
    pack_linear,
    packed_attention,
    paged_attention,
    quantize_rows,
    rms_norm,
    rotary,
    route,
    silu_mul,
    write_kv,
)
from headrace.kernels.packing import (
    PAGE_SIZE,
    LoraFactors,
    LoraPart,
    LoraRows,
    PackedExperts,
    PackedLinear,
    kv_cache_shapes,
    pack_experts,
)
from headrace.kernels.quantized_packing import packed_rows, unpack_linear
from headrace.kernels.registry import (
    OpReport,
    batch_invariant,
    num_threads,
    prefer,
    report,
    runs_fused_moe,
    set_num_threads,
)
