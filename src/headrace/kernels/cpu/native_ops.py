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
from headrace.kernels.packing import (
    FLOAT_TYPES,
    KV_TYPES,
    NATIVE_FLOATS,
    QUANT_SCHEMES,
    PackedExperts,
    PackedLinear,
    as_native,
    check_linear,
    check_packed,
    check_rotation,
    kv_cache_geometry,
    kv_type,
    pack_native,
    pack_native_pairs,
)
from headrace.kernels.quantized_packing import check_quantized, pack_native_quantized
from headrace.kernels.torch_fallback import lora_delta

# Its products are native if the factors are packed for these kernels; the rest is an addition.
__all__ = ["lora_delta"]

_TABLE_ORDERS = {**dict.fromkeys(NATIVE_FLOATS, 1), "native_bf16_pairs": 2, "native_gguf": 3}
"""TableOrder of csrc/cpu/ops.h, by layout of a packed table; 0 is that of plain rows."""


def pack_linear(weight: torch.Tensor | QuantizedMatrix, bias: torch.Tensor | None, rounded: bool) -> PackedLinear:
    if isinstance(weight, QuantizedMatrix):
        check_quantized(weight, bias)
        return pack_native_quantized(weight, bias)
    check_linear(weight, bias)
    return pack_native_pairs(weight, bias) if rounded else pack_native(weight, bias)


def linear(x: torch.Tensor, packed: PackedLinear, out: torch.Tensor | None, accumulate: bool) -> torch.Tensor:
    rows, x_stride = _rows("linear", "x", x, packed.k)
    if out is None:
        if accumulate:
            raise ValueError("linear: accumulate needs out")
        out = torch.empty(rows, packed.n)
        y_stride = packed.n
    else:
        out_rows, y_stride = _rows("linear", "out", out, packed.n)
        if out_rows != rows:
            raise ValueError(f"linear: out has {out_rows} rows, x has {rows}")
    y = packed.bias, out, y_stride, rows, packed.n, packed.k, accumulate
    scheme = QUANT_SCHEMES.get(packed.layout)
    if scheme is None:
        _native.linear(*as_native(x, x_stride, packed.data, FLOAT_TYPES[packed.data.dtype], *y))
    else:
        _native.linear_quantized(*as_native(x, x_stride, scheme, packed.data, packed.column_scales, *y))
    return out


def quantize_rows(x: torch.Tensor, group: int, bits: int, rotated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, x_stride = _rows("quantize_rows", "x", x, x.shape[-1])
    k = x.shape[1]
    values = torch.empty(rows, -(-k // KERNEL_GROUP) * KERNEL_GROUP, dtype=torch.int8 if bits == 8 else torch.int16)
    scales = torch.empty(rows, -(-k // group))
    _native.quantize_rows(*as_native(x, x_stride, values, scales, rows, k, group, bits // 8, rotated))
    return values[:, :k], scales


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    rows, x_stride, out = _normed("rms_norm", x, weight, residual)
    _native.rms_norm(*as_native(x, x_stride, residual, weight, out, rows, weight.numel(), eps))
    return out


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, residual: torch.Tensor | None
) -> torch.Tensor:
    rows, x_stride, out = _normed("layer_norm", x, weight, residual)
    if bias is not None:
        _flat("layer_norm", "bias", bias, torch.float32)
        if bias.numel() != weight.numel():
            raise ValueError(f"layer_norm: bias has {bias.numel()} elements, weight {weight.numel()}")
    _native.layer_norm(*as_native(x, x_stride, residual, weight, bias, out, rows, weight.numel(), eps))
    return out


def _normed(
    op: str, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
) -> tuple[int, int, torch.Tensor]:
    """(rows, stride between rows, a tensor for the result), once what both norms take is checked."""
    rows, x_stride = _rows(op, "x", x, weight.numel())
    _flat(op, "weight", weight, torch.float32)
    if residual is not None:
        _flat(op, "residual", residual, torch.float32)
        if tuple(residual.shape) != tuple(x.shape):
            raise ValueError(f"{op}: residual is {tuple(residual.shape)}, x is {tuple(x.shape)}")
    return rows, x_stride, torch.empty(rows, weight.numel())


def moe(x: torch.Tensor, expert_ids: torch.Tensor, shares: torch.Tensor, experts: PackedExperts) -> torch.Tensor:
    rows, x_stride = _rows("moe", "x", x, experts.hidden_size)
    assert experts.table is not None, experts.gate_up[0].layout
    _flat("moe", "expert_ids", expert_ids, torch.int64)
    _flat("moe", "shares", shares, torch.float32)
    if expert_ids.dim() != 2 or expert_ids.shape[0] != rows or shares.shape != expert_ids.shape:
        raise ValueError(
            f"moe: {rows} rows, expert_ids {tuple(expert_ids.shape)}, shares {tuple(shares.shape)}: not [rows, top_k]"
        )
    top_k = expert_ids.shape[1]
    if top_k == 0 or rows * top_k >= 2**31:
        raise ValueError(f"moe: {rows} rows of {top_k} experts each")
    out = torch.empty(rows, experts.hidden_size)
    sizes = rows, top_k, len(experts.gate_up), experts.hidden_size, experts.intermediate_size
    gelu = experts.activation == "gelu_tanh"
    _native.moe(*as_native(x, x_stride, expert_ids, shares, experts.table, out, *sizes, gelu))
    return out


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    tokens, num_q_heads, head_dim, q_stride = _heads("rotary", "q", q)
    k_tokens, num_kv_heads, k_head_dim, k_stride = _heads("rotary", "k", k)
    _int32("rotary", "positions", positions, tokens)
    _flat("rotary", "cos", cos, torch.float32)
    _flat("rotary", "sin", sin, torch.float32)
    max_positions, half = cos.shape
    if k_tokens != tokens or k_head_dim != head_dim:
        raise ValueError(f"rotary: q is {tuple(q.shape)}, k is {tuple(k.shape)}")
    check_rotation(cos, sin, head_dim)
    heads = q, q_stride, num_q_heads, k, k_stride, num_kv_heads
    _native.rotary(*as_native(*heads, positions, cos, sin, tokens, head_dim, 2 * half, max_positions))


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    return _gate("silu_mul", x)


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    return _gate("gelu_tanh_mul", x)


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    return _gate("gelu_mul", x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return _activate("gelu", x, x.shape[-1])


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return _activate("gelu_tanh", x, x.shape[-1])


def _gate(op: str, x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"{op}: x must be [rows, 2 * size], got {tuple(x.shape)}")
    return _activate(op, x, x.shape[1] // 2)


def _activate(op: str, x: torch.Tensor, size: int) -> torch.Tensor:
    """float32[rows, size] by the kernel of this name."""
    rows, stride = _rows(op, "x", x, x.shape[-1])
    out = torch.empty(rows, size)
    getattr(_native, op)(x.data_ptr(), stride, out.data_ptr(), rows, size)
    return out


def embedding(ids: torch.Tensor, table: torch.Tensor | PackedLinear, scale: float) -> torch.Tensor:
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous():
        raise ValueError(f"embedding: ids must be contiguous int32 or int64 [n], got {ids.dtype} {tuple(ids.shape)}")
    order = 0
    if isinstance(table, PackedLinear):
        if table.layout not in _TABLE_ORDERS:
            raise ValueError(f"embedding: a table of layout {table.layout} cannot be looked up")
        order = _TABLE_ORDERS[table.layout]
        data, vocab_size, hidden_size = table.data, table.n, table.k
    else:
        if table.dim() != 2 or table.dtype not in FLOAT_TYPES or not table.is_contiguous():
            raise ValueError(
                f"embedding: table must be contiguous floats [n, size], got {table.dtype} {tuple(table.shape)}"
            )
        data, (vocab_size, hidden_size) = table, table.shape
    tokens = ids.numel()
    out = torch.empty(tokens, hidden_size)
    rows = data, FLOAT_TYPES.get(data.dtype, 0), order, ids, ids.dtype == torch.int64
    _native.embedding(*as_native(*rows, out, tokens, vocab_size, hidden_size, scale))
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
    tokens, num_q_heads, head_dim, q_stride = _heads("paged_attention", "q", q)
    _, num_pages, num_kv_heads = _cache("paged_attention", k_cache, v_cache, head_dim)
    if num_q_heads % num_kv_heads:
        raise ValueError(f"paged_attention: {num_q_heads} query heads do not share {num_kv_heads} KV heads evenly")
    if page_table.dim() != 2 or page_table.dtype != torch.int32 or not page_table.is_contiguous():
        raise ValueError(
            f"paged_attention: page_table must be contiguous int32 [num_seqs, max_pages], "
            f"got {page_table.dtype} {tuple(page_table.shape)}"
        )
    num_seqs, max_pages = page_table.shape
    _int32("paged_attention", "seq_lens", seq_lens, num_seqs)
    _int32("paged_attention", "q_starts", q_starts, num_seqs + 1)
    if last_keys is not None:
        _int32("paged_attention", "last_keys", last_keys, tokens)
    if window < 0 or softcap < 0:
        raise ValueError(f"paged_attention: window {window} and softcap {softcap} must not be negative")
    out = torch.empty(tokens, num_q_heads, head_dim)
    cache = k_cache, v_cache, kv_type(k_cache, rounded), num_pages, num_kv_heads, head_dim
    sequences = page_table, max_pages, seq_lens, q_starts, num_seqs, tokens
    _native.paged_attention(
        *as_native(q, q_stride, out, *cache, *sequences, num_q_heads, scale, window, softcap, last_keys)
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
    tokens, num_q_heads, head_dim, q_stride = _heads("packed_attention", "q", q)
    _, num_kv_heads, _, k_stride = _heads("packed_attention", "k", k)
    *_, v_stride = _heads("packed_attention", "v", v)
    check_packed(q, k, v, window)
    _int32("packed_attention", "row_starts", row_starts, max(1, row_starts.numel()))
    out = torch.empty(tokens, num_q_heads, head_dim)
    rows = q, q_stride, k, k_stride, v, v_stride, out, row_starts, row_starts.numel() - 1
    sizes = tokens, num_q_heads, num_kv_heads, head_dim
    _native.packed_attention(*as_native(*rows, *sizes, scale, window, rounded))
    return out


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    tokens, num_kv_heads, head_dim, k_stride = _heads("write_kv", "k", k)
    v_tokens, v_heads, v_head_dim, v_stride = _heads("write_kv", "v", v)
    cache_type, num_pages, cache_heads = _cache("write_kv", k_cache, v_cache, head_dim)
    if (v_tokens, v_heads, v_head_dim) != (tokens, num_kv_heads, head_dim) or cache_heads != num_kv_heads:
        raise ValueError(
            f"write_kv: k {tuple(k.shape)}, v {tuple(v.shape)} and {cache_heads} KV heads of the cache differ"
        )
    _int32("write_kv", "slots", slots, tokens)
    cache = k_cache, v_cache, cache_type, num_pages, num_kv_heads, head_dim
    _native.write_kv(*as_native(k, k_stride, v, v_stride, *cache, slots, tokens))


def gather_kv(k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_pages, num_kv_heads, head_dim = kv_cache_geometry("gather_kv", k_cache, v_cache)
    tokens = slots.numel()
    _int32("gather_kv", "slots", slots, tokens)
    k = torch.empty(tokens, num_kv_heads, head_dim)
    v = torch.empty(tokens, num_kv_heads, head_dim)
    cache = k_cache, v_cache, KV_TYPES[k_cache.dtype], num_pages, num_kv_heads, head_dim
    _native.gather_kv(*as_native(k, v, *cache, slots, tokens))
    return k, v


def argmax(x: torch.Tensor) -> torch.Tensor:
    rows, stride = _rows("argmax", "x", x, x.shape[1])
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
    num_masks = 0 if masks is None else masks.shape[0]
    columns = temperatures, top_k, top_p, min_weights, u
    _native.draw(*as_native(logits, stride, *columns, masks, mask_rows, num_masks, out, rows, size))
    return out


def exp_sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, stride, size = _logits("exp_sums", x)
    peaks, sums = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    _native.exp_sums(x.data_ptr(), stride, peaks.data_ptr(), sums.data_ptr(), rows, size)
    return peaks, sums


def _logits(op: str, x: torch.Tensor) -> tuple[int, int, int]:
    """(rows, stride, V) of a float32 [rows, V >= 1]."""
    if x.dim() != 2 or not 1 <= x.shape[1] <= MAX_VOCAB:
        raise ValueError(f"{op}: logits must be [rows, 1 .. {MAX_VOCAB}], got {tuple(x.shape)}")
    return *_rows(op, "logits", x, x.shape[1]), x.shape[1]


def _rows(op: str, what: str, x: torch.Tensor, size: int) -> tuple[int, int]:
    """(rows, stride between rows) of a float32 [rows, size] whose rows are contiguous."""
    if x.dim() != 2 or x.shape[1] != size or x.dtype != torch.float32 or (size > 1 and x.stride(1) != 1):
        raise ValueError(
            f"{op}: {what} must be float32 [rows, {size}] with contiguous rows, "
            f"got {x.dtype} {tuple(x.shape)} with strides {x.stride()}"
        )
    return x.shape[0], x.stride(0)


def _heads(op: str, what: str, x: torch.Tensor) -> tuple[int, int, int, int]:
    """(tokens, heads, head_dim, stride between tokens) of a float32 [tokens, heads, head_dim] with contiguous tokens."""
    if x.dim() == 3 and x.dtype == torch.float32:
        tokens, heads, head_dim = x.shape
        stride = x.stride()
        if (stride[2] == 1 or head_dim == 1) and (stride[1] == head_dim or heads == 1):
            return tokens, heads, head_dim, stride[0]
    raise ValueError(
        f"{op}: {what} must be float32 [tokens, heads, head_dim] with contiguous heads, "
        f"got {x.dtype} {tuple(x.shape)} with strides {x.stride()}"
    )


def _flat(op: str, what: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype or not x.is_contiguous():
        raise ValueError(f"{op}: {what} must be contiguous {dtype}, got {x.dtype} with strides {x.stride()}")


def _int32(op: str, what: str, x: torch.Tensor, size: int) -> None:
    if x.dtype != torch.int32 or x.dim() != 1 or x.shape[0] != size or not x.is_contiguous():
        raise ValueError(f"{op}: {what} must be contiguous int32 [{size}], got {x.dtype} {tuple(x.shape)}")


def _cache(op: str, k_cache: torch.Tensor, v_cache: torch.Tensor, head_dim: int) -> tuple[int, int, int]:
    """(KvType, num_pages, num_kv_heads) of a pair of caches for this head_dim."""
    num_pages, num_kv_heads, cache_head_dim = kv_cache_geometry(op, k_cache, v_cache)
    if cache_head_dim != head_dim:
        raise ValueError(
            f"{op}: heads have {head_dim} elements, the kv_cache_shapes of the cache are for {cache_head_dim}"
        )
    return KV_TYPES[k_cache.dtype], num_pages, num_kv_heads
