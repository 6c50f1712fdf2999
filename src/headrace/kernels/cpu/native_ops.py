"""The ops of `headrace.kernels.ops` on the native CPU kernels: check sizes and dtypes, pass addresses.

Import only after `headrace.kernels.cpu.load` has returned the extension. Activations are float32 and may be rows of a wider
tensor; outputs are float32 and contiguous. Every function returns when the kernel is done, and releases the GIL
meanwhile.
"""

import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import KERNEL_GROUP
from headrace.kernels.cpu import _native
from headrace.kernels.drawing import MAX_VOCAB
from headrace.kernels.experts import PackedExperts
from headrace.kernels.packing import (
    KV_TYPES,
    QUANT_SCHEMES,
    PackedLinear,
    check_linear,
    kv_cache_geometry,
    kv_type,
    pack_native,
    pack_native_pairs,
)
from headrace.kernels.quantized_packing import check_quantized, pack_native_quantized
from headrace.kernels.torch_fallback import lora_delta

# Its products are native if the factors are packed for these kernels; the rest is an addition.
__all__ = ["lora_delta"]

_TABLE_ORDERS = {"native_bf16": 1, "native_f32": 1, "native_bf16_pairs": 2}
"""TableOrder of csrc/cpu/ops.h, by layout of a packed table; 0 is that of plain rows."""


def pack_linear(weight: torch.Tensor | QuantizedMatrix, bias: torch.Tensor | None, rounded: bool) -> PackedLinear:
    """See `headrace.kernels.ops.pack_linear`."""
    if isinstance(weight, QuantizedMatrix):
        check_quantized(weight, bias)
        return pack_native_quantized(weight, bias)
    check_linear(weight, bias)
    return pack_native_pairs(weight, bias) if rounded else pack_native(weight, bias)


def linear(x: torch.Tensor, packed: PackedLinear, out: torch.Tensor | None, accumulate: bool) -> torch.Tensor:
    """See `headrace.kernels.ops.linear`."""
    rows, x_stride = _rows("linear: x", x, packed.k)
    if out is None:
        if accumulate:
            raise ValueError("linear: accumulate needs out")
        out = torch.empty(rows, packed.n)
        y_stride = packed.n
    else:
        out_rows, y_stride = _rows("linear: out", out, packed.n)
        if out_rows != rows:
            raise ValueError(f"linear: out has {out_rows} rows, x has {rows}")
    scheme = QUANT_SCHEMES.get(packed.layout)
    if scheme is not None:
        _native.linear_quantized(
            x.data_ptr(),
            x_stride,
            scheme,
            packed.data.data_ptr(),
            0 if packed.column_scales is None else packed.column_scales.data_ptr(),
            0 if packed.bias is None else packed.bias.data_ptr(),
            out.data_ptr(),
            y_stride,
            rows,
            packed.n,
            packed.k,
            accumulate,
        )
        return out
    _native.linear(
        x.data_ptr(),
        x_stride,
        packed.data.data_ptr(),
        packed.layout == "native_bf16",
        0 if packed.bias is None else packed.bias.data_ptr(),
        out.data_ptr(),
        y_stride,
        rows,
        packed.n,
        packed.k,
        accumulate,
    )
    return out


def quantize_rows(x: torch.Tensor, group: int, bits: int, rotated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See `headrace.kernels.ops.quantize_rows`."""
    rows, x_stride = _rows("quantize_rows: x", x, x.shape[-1])
    k = x.shape[1]
    values = torch.empty(rows, -(-k // KERNEL_GROUP) * KERNEL_GROUP, dtype=torch.int8 if bits == 8 else torch.int16)
    scales = torch.empty(rows, -(-k // group))
    _native.quantize_rows(
        x.data_ptr(), x_stride, values.data_ptr(), scales.data_ptr(), rows, k, group, bits // 8, rotated
    )
    return values[:, :k], scales


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    """See `headrace.kernels.ops.rms_norm`."""
    size = weight.numel()
    rows, x_stride = _rows("rms_norm: x", x, size)
    _flat("rms_norm: weight", weight, torch.float32)
    if residual is not None:
        _flat("rms_norm: residual", residual, torch.float32)
        if tuple(residual.shape) != tuple(x.shape):
            raise ValueError(f"rms_norm: residual is {tuple(residual.shape)}, x is {tuple(x.shape)}")
    out = torch.empty(rows, size)
    _native.rms_norm(
        x.data_ptr(),
        x_stride,
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        size,
        eps,
    )
    return out


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, residual: torch.Tensor | None
) -> torch.Tensor:
    """See `headrace.kernels.ops.layer_norm`."""
    size = weight.numel()
    rows, x_stride = _rows("layer_norm: x", x, size)
    _flat("layer_norm: weight", weight, torch.float32)
    if bias is not None:
        _flat("layer_norm: bias", bias, torch.float32)
        if bias.numel() != size:
            raise ValueError(f"layer_norm: bias has {bias.numel()} elements, weight {size}")
    if residual is not None:
        _flat("layer_norm: residual", residual, torch.float32)
        if tuple(residual.shape) != tuple(x.shape):
            raise ValueError(f"layer_norm: residual is {tuple(residual.shape)}, x is {tuple(x.shape)}")
    out = torch.empty(rows, size)
    _native.layer_norm(
        x.data_ptr(),
        x_stride,
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        size,
        eps,
    )
    return out


def moe(x: torch.Tensor, expert_ids: torch.Tensor, shares: torch.Tensor, experts: PackedExperts) -> torch.Tensor:
    """See `headrace.kernels.ops.moe`."""
    rows, x_stride = _rows("moe: x", x, experts.hidden_size)
    assert experts.table is not None, experts.gate_up[0].layout
    _flat("moe: expert_ids", expert_ids, torch.int64)
    _flat("moe: shares", shares, torch.float32)
    if expert_ids.dim() != 2 or expert_ids.shape[0] != rows or shares.shape != expert_ids.shape:
        raise ValueError(
            f"moe: {rows} rows, expert_ids {tuple(expert_ids.shape)}, shares {tuple(shares.shape)}: not [rows, top_k]"
        )
    if expert_ids.shape[1] == 0 or rows * expert_ids.shape[1] >= 2**31:
        raise ValueError(f"moe: {rows} rows of {expert_ids.shape[1]} experts each")
    out = torch.empty(rows, experts.hidden_size)
    _native.moe(
        x.data_ptr(),
        x_stride,
        expert_ids.data_ptr(),
        shares.data_ptr(),
        experts.table.data_ptr(),
        out.data_ptr(),
        rows,
        expert_ids.shape[1],
        len(experts.gate_up),
        experts.hidden_size,
        experts.intermediate_size,
        experts.activation == "gelu_tanh",
    )
    return out


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See `headrace.kernels.ops.rotary`."""
    tokens, num_q_heads, head_dim, q_stride = _heads("rotary: q", q)
    k_tokens, num_kv_heads, k_head_dim, k_stride = _heads("rotary: k", k)
    _int32("rotary: positions", positions, tokens)
    _flat("rotary: cos", cos, torch.float32)
    _flat("rotary: sin", sin, torch.float32)
    max_positions, half = cos.shape
    if k_tokens != tokens or k_head_dim != head_dim:
        raise ValueError(f"rotary: q is {tuple(q.shape)}, k is {tuple(k.shape)}")
    if cos.shape != sin.shape or 2 * half > head_dim:
        raise ValueError(f"rotary: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit head_dim {head_dim}")
    _native.rotary(
        q.data_ptr(),
        q_stride,
        num_q_heads,
        k.data_ptr(),
        k_stride,
        num_kv_heads,
        positions.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        tokens,
        head_dim,
        2 * half,
        max_positions,
    )


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """See `headrace.kernels.ops.silu_mul`."""
    rows, stride, size = _gated("silu_mul", x)
    out = torch.empty(rows, size)
    _native.silu_mul(x.data_ptr(), stride, out.data_ptr(), rows, size)
    return out


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    """See `headrace.kernels.ops.gelu_tanh_mul`."""
    rows, stride, size = _gated("gelu_tanh_mul", x)
    out = torch.empty(rows, size)
    _native.gelu_tanh_mul(x.data_ptr(), stride, out.data_ptr(), rows, size)
    return out


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """See `headrace.kernels.ops.gelu_mul`."""
    rows, stride, size = _gated("gelu_mul", x)
    out = torch.empty(rows, size)
    _native.gelu_mul(x.data_ptr(), stride, out.data_ptr(), rows, size)
    return out


def gelu(x: torch.Tensor) -> torch.Tensor:
    """See `headrace.kernels.ops.gelu`."""
    rows, stride = _rows("gelu: x", x, x.shape[-1])
    out = torch.empty(rows, x.shape[1])
    _native.gelu(x.data_ptr(), stride, out.data_ptr(), rows, x.shape[1])
    return out


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """See `headrace.kernels.ops.gelu_tanh`."""
    rows, stride = _rows("gelu_tanh: x", x, x.shape[-1])
    out = torch.empty(rows, x.shape[1])
    _native.gelu_tanh(x.data_ptr(), stride, out.data_ptr(), rows, x.shape[1])
    return out


def embedding(ids: torch.Tensor, table: torch.Tensor | PackedLinear, scale: float) -> torch.Tensor:
    """See `headrace.kernels.ops.embedding`."""
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous():
        raise ValueError(f"embedding: ids must be contiguous int32 or int64 [n], got {ids.dtype} {tuple(ids.shape)}")
    order = 0
    if isinstance(table, PackedLinear):
        if table.layout not in _TABLE_ORDERS:
            raise ValueError(f"embedding: a table of layout {table.layout} cannot be looked up")
        order = _TABLE_ORDERS[table.layout]
        data, vocab_size, hidden_size = table.data, table.n, table.k
    else:
        if table.dim() != 2 or table.dtype not in (torch.bfloat16, torch.float32) or not table.is_contiguous():
            raise ValueError(
                f"embedding: table must be contiguous bfloat16 or float32 [n, size], got {table.dtype} {tuple(table.shape)}"
            )
        data, (vocab_size, hidden_size) = table, table.shape
    tokens = ids.numel()
    out = torch.empty(tokens, hidden_size)
    _native.embedding(
        data.data_ptr(),
        data.dtype == torch.bfloat16,
        order,
        ids.data_ptr(),
        ids.dtype == torch.int64,
        out.data_ptr(),
        tokens,
        vocab_size,
        hidden_size,
        scale,
    )
    return out


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_starts: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    rounded: bool,
    last_keys: torch.Tensor | None,
) -> torch.Tensor:
    """See `headrace.kernels.ops.paged_attention`."""
    tokens, num_q_heads, head_dim, q_stride = _heads("paged_attention: q", q)
    _, num_pages, num_kv_heads = _cache("paged_attention", k_cache, v_cache, head_dim)
    if num_q_heads % num_kv_heads:
        raise ValueError(f"paged_attention: {num_q_heads} query heads do not share {num_kv_heads} KV heads evenly")
    if page_table.dim() != 2 or page_table.dtype != torch.int32 or not page_table.is_contiguous():
        raise ValueError(
            f"paged_attention: page_table must be contiguous int32 [num_seqs, max_pages], "
            f"got {page_table.dtype} {tuple(page_table.shape)}"
        )
    num_seqs, max_pages = page_table.shape
    _int32("paged_attention: seq_lens", seq_lens, num_seqs)
    _int32("paged_attention: q_starts", q_starts, num_seqs + 1)
    if last_keys is not None:
        _int32("paged_attention: last_keys", last_keys, tokens)
    if window < 0 or softcap < 0:
        raise ValueError(f"paged_attention: window {window} and softcap {softcap} must not be negative")
    out = torch.empty(tokens, num_q_heads, head_dim)
    _native.paged_attention(
        q.data_ptr(),
        q_stride,
        out.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        kv_type(k_cache, rounded),
        num_pages,
        num_kv_heads,
        head_dim,
        page_table.data_ptr(),
        max_pages,
        seq_lens.data_ptr(),
        q_starts.data_ptr(),
        num_seqs,
        tokens,
        num_q_heads,
        scale,
        window,
        softcap,
        0 if last_keys is None else last_keys.data_ptr(),
    )
    return out


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row_starts: torch.Tensor,
    scale: float,
    window: int,
    rounded: bool,
) -> torch.Tensor:
    """See `headrace.kernels.ops.packed_attention`."""
    tokens, num_q_heads, head_dim, q_stride = _heads("packed_attention: q", q)
    k_tokens, num_kv_heads, k_head_dim, k_stride = _heads("packed_attention: k", k)
    *v_shape, v_stride = _heads("packed_attention: v", v)
    if (k_tokens, k_head_dim) != (tokens, head_dim) or v_shape != [k_tokens, num_kv_heads, k_head_dim]:
        raise ValueError(
            f"packed_attention: q is {tuple(q.shape)}, k is {tuple(k.shape)}, v is {tuple(v.shape)}: not [tokens, heads, head_dim]"
        )
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(f"packed_attention: {num_q_heads} query heads do not share {num_kv_heads} KV heads evenly")
    if window < 0:
        raise ValueError(f"packed_attention: the window must not be negative, got {window}")
    _int32("packed_attention: row_starts", row_starts, max(1, row_starts.numel()))
    out = torch.empty(tokens, num_q_heads, head_dim)
    _native.packed_attention(
        q.data_ptr(),
        q_stride,
        k.data_ptr(),
        k_stride,
        v.data_ptr(),
        v_stride,
        out.data_ptr(),
        row_starts.data_ptr(),
        row_starts.numel() - 1,
        tokens,
        num_q_heads,
        num_kv_heads,
        head_dim,
        scale,
        window,
        rounded,
    )
    return out


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """See `headrace.kernels.ops.write_kv`."""
    tokens, num_kv_heads, head_dim, k_stride = _heads("write_kv: k", k)
    v_tokens, v_heads, v_head_dim, v_stride = _heads("write_kv: v", v)
    cache_type, num_pages, cache_heads = _cache("write_kv", k_cache, v_cache, head_dim)
    if (v_tokens, v_heads, v_head_dim) != (tokens, num_kv_heads, head_dim) or cache_heads != num_kv_heads:
        raise ValueError(
            f"write_kv: k {tuple(k.shape)}, v {tuple(v.shape)} and {cache_heads} KV heads of the cache differ"
        )
    _int32("write_kv: slots", slots, tokens)
    _native.write_kv(
        k.data_ptr(),
        k_stride,
        v.data_ptr(),
        v_stride,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        cache_type,
        num_pages,
        num_kv_heads,
        head_dim,
        slots.data_ptr(),
        tokens,
    )


def gather_kv(k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `headrace.kernels.ops.gather_kv`."""
    num_pages, num_kv_heads, head_dim = kv_cache_geometry("gather_kv", k_cache, v_cache)
    tokens = slots.numel()
    _int32("gather_kv: slots", slots, tokens)
    k = torch.empty(tokens, num_kv_heads, head_dim)
    v = torch.empty(tokens, num_kv_heads, head_dim)
    _native.gather_kv(
        k.data_ptr(),
        v.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        KV_TYPES[k_cache.dtype],
        num_pages,
        num_kv_heads,
        head_dim,
        slots.data_ptr(),
        tokens,
    )
    return k, v


def argmax(x: torch.Tensor) -> torch.Tensor:
    """See `headrace.kernels.ops.argmax`."""
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"argmax: x must be [rows, size >= 1], got {tuple(x.shape)}")
    rows, stride = _rows("argmax: x", x, x.shape[1])
    out = torch.empty(rows, dtype=torch.int64)
    _native.argmax(x.data_ptr(), stride, out.data_ptr(), rows, x.shape[1])
    return out


def draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_weights: torch.Tensor,
    u: torch.Tensor,
    masks: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `headrace.kernels.ops.draw`."""
    rows, stride, size = _logits("draw", logits)
    parameters = (
        ("temperatures", temperatures, torch.float32),
        ("top_k", top_k, torch.int64),
        ("top_p", top_p, torch.float64),
        ("min_weights", min_weights, torch.int64),
        ("u", u, torch.float64),
    )
    for name, values, dtype in parameters:
        if values.dtype != dtype or tuple(values.shape) != (rows,) or not values.is_contiguous():
            raise ValueError(
                f"draw: {name} must be contiguous {dtype} [{rows}], got {values.dtype} {tuple(values.shape)}"
            )
    out = torch.empty(rows, dtype=torch.int64)
    _native.draw(
        logits.data_ptr(),
        stride,
        temperatures.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        min_weights.data_ptr(),
        u.data_ptr(),
        0 if masks is None else masks.data_ptr(),
        0 if mask_rows is None else mask_rows.data_ptr(),
        0 if masks is None else masks.shape[0],
        out.data_ptr(),
        rows,
        size,
    )
    return out


def exp_sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `headrace.kernels.ops.exp_sums`."""
    rows, stride, size = _logits("exp_sums", x)
    peaks, sums = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    _native.exp_sums(x.data_ptr(), stride, peaks.data_ptr(), sums.data_ptr(), rows, size)
    return peaks, sums


def _logits(op: str, x: torch.Tensor) -> tuple[int, int, int]:
    """(rows, stride, V) of a float32 [rows, V >= 1]."""
    if x.dim() != 2 or not 1 <= x.shape[1] <= MAX_VOCAB:
        raise ValueError(f"{op}: logits must be [rows, 1 .. {MAX_VOCAB}], got {tuple(x.shape)}")
    return *_rows(f"{op}: logits", x, x.shape[1]), x.shape[1]


def _rows(what: str, x: torch.Tensor, size: int) -> tuple[int, int]:
    """(rows, stride between rows) of a float32 [rows, size] whose rows are contiguous."""
    if x.dim() != 2 or x.shape[1] != size or x.dtype != torch.float32 or (size > 1 and x.stride(1) != 1):
        raise ValueError(
            f"{what} must be float32 [rows, {size}] with contiguous rows, "
            f"got {x.dtype} {tuple(x.shape)} with strides {x.stride()}"
        )
    return x.shape[0], x.stride(0)


def _gated(op: str, x: torch.Tensor) -> tuple[int, int, int]:
    """(rows, stride, size) of a float32 [rows, 2 * size]."""
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"{op}: x must be [rows, 2 * size], got {tuple(x.shape)}")
    return *_rows(f"{op}: x", x, x.shape[1]), x.shape[1] // 2


def _heads(what: str, x: torch.Tensor) -> tuple[int, int, int, int]:
    """(tokens, heads, head_dim, stride between tokens) of a float32 [tokens, heads, head_dim] with contiguous tokens."""
    if x.dim() == 3 and x.dtype == torch.float32:
        tokens, heads, head_dim = x.shape
        stride = x.stride()
        if (stride[2] == 1 or head_dim == 1) and (stride[1] == head_dim or heads == 1):
            return tokens, heads, head_dim, stride[0]
    raise ValueError(
        f"{what} must be float32 [tokens, heads, head_dim] with contiguous heads, "
        f"got {x.dtype} {tuple(x.shape)} with strides {x.stride()}"
    )


def _flat(what: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype or not x.is_contiguous():
        raise ValueError(f"{what} must be contiguous {dtype}, got {x.dtype} with strides {x.stride()}")


def _int32(what: str, x: torch.Tensor, size: int) -> None:
    if x.dtype != torch.int32 or x.dim() != 1 or x.shape[0] != size or not x.is_contiguous():
        raise ValueError(f"{what} must be contiguous int32 [{size}], got {x.dtype} {tuple(x.shape)}")


def _cache(op: str, k_cache: torch.Tensor, v_cache: torch.Tensor, head_dim: int) -> tuple[int, int, int]:
    """(KvType, num_pages, num_kv_heads) of a pair of caches for this head_dim."""
    num_pages, num_kv_heads, cache_head_dim = kv_cache_geometry(op, k_cache, v_cache)
    if cache_head_dim != head_dim:
        raise ValueError(
            f"{op}: heads have {head_dim} elements, the kv_cache_shapes of the cache are for {cache_head_dim}"
        )
    return KV_TYPES[k_cache.dtype], num_pages, num_kv_heads
