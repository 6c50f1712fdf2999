"""The ops that layers call, with torch tensors in and out, for any implementation.

This defines each op; `registry` chooses an implementation (`cpu.native_ops`, `torch_fallback`, `triton`). On CPU activations are float32; elsewhere
they keep the dtype of the input. Sizes are checked: ValueError. Zero rows are allowed everywhere. Called by the thread that runs the model.

On CPU `linear`, `moe`, the norms and attention, `paged_attention` and `packed_attention`, are batch-invariant: the bits of a row depend on that
row (for attention: its position and what it sees), never on the other rows, the chunking or the number of threads.
"""

from collections.abc import Mapping
from typing import Literal

import torch

from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import KERNEL_GROUP, WIDE_GROUP
from headrace.kernels.packing import LoraFactors, LoraRows, PackedExperts, PackedLinear
from headrace.kernels.registry import for_layout, select


def pack_linear(
    weight: torch.Tensor | QuantizedMatrix, bias: torch.Tensor | None = None, *, rounded: bool = False
) -> PackedLinear:
    """Prepare a weight [n, k] (bfloat16, float16, float32, or quantised) and a bias [n] for `linear`; once, when the model is loaded.

    The native layout is a copy: the caller may drop `weight`. With a quantised weight, `linear` also quantises its input, see
    `quantize_rows`. It is on the CPU. rounded: a float weight on the CPU is rounded to bfloat16, and `linear` rounds its input to it.
    """
    device = weight.device.type if isinstance(weight, torch.Tensor) else weight.codes.device.type
    return select("pack_linear", device)(weight, bias, rounded)


def linear(
    x: torch.Tensor, packed: PackedLinear, out: torch.Tensor | None = None, *, accumulate: bool = False
) -> torch.Tensor:
    """x [rows, k] @ weight^T (+ bias) -> [rows, n]; into `out` when given, whose rows may be slices of wider ones.

    accumulate: add to what `out` holds. out must not overlap x.
    """
    return for_layout(packed.layout, "linear", x.device.type)(x, packed, out, accumulate)


def quantize_rows(
    x: torch.Tensor, *, group: int, bits: Literal[8, 16] = 8, rotated: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, k] as (values int8 or int16 [rows, k], scales float32[rows, k / group rounded up]).

    group: elements that share a scale; a multiple of 32, or at least k for one scale a row (ValueError otherwise). scale = largest
    magnitude / limit, where limit is 127, or 8191 in 16 bits; values are x / scale to the nearest, -limit .. limit. NaN or infinity
    makes the scale non-finite. rotated: x is rotated first (`checkpoint.quantized_matrix`); groups have 32 or 128 elements. `linear` does this
    first if its weight is quantised; it is an op of its own for tests and calibration.
    """
    if group <= 0 or (group % KERNEL_GROUP and group < x.shape[1]):
        raise ValueError(f"quantize_rows: group must be a multiple of {KERNEL_GROUP} or a whole row, got {group}")
    if rotated and WIDE_GROUP % group:
        raise ValueError(f"quantize_rows: groups of rotated rows divide {WIDE_GROUP}, got {group}")
    return select("quantize_rows", x.device.type)(x, group, bits, rotated)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last of [rows, size] -> [rows, size].

    residual [rows, size]: becomes residual + x in place, and that is normalised. The caller prepares Gemma's (1 + weight).
    """
    return select("rms_norm", x.device.type)(x, weight, eps, residual)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight (+ bias) over the last of [rows, size] -> [rows, size].

    residual as in `rms_norm`.
    """
    return select("layer_norm", x.device.type)(x, weight, bias, eps, residual)


def moe(x: torch.Tensor, expert_ids: torch.Tensor, shares: torch.Tensor, experts: PackedExperts) -> torch.Tensor:
    """Sum over ranks of shares[:, rank] * down(act(gate(x)) * up(x)) of expert expert_ids[:, rank] -> [rows, hidden_size].

    x: [rows, hidden_size]. expert_ids: int64[rows, top_k]. shares: float32[rows, top_k]. Each expert's rows are one product; a row
    adds its experts up by rank. On the CPU an id of -1 adds nothing, and any other that is not an expert's is a ValueError; on a GPU each must be.
    """
    op = for_layout(experts.gate_up[0].layout, "moe", x.device.type)
    return op(x, expert_ids, shares, experts)


def route(logits: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax of logits [rows, num_experts] in float32 and its top_k largest -> (shares float32[rows, top_k], largest first; ids int64[rows, top_k]).

    renormalise: the shares of a row add up to 1.
    """
    return select("route", logits.device.type)(logits, top_k, renormalise)


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate q [tokens, num_q_heads, head_dim] and k [tokens, num_kv_heads, head_dim] in place, halves convention (GPT-NeoX).

    positions: int32[tokens]. cos, sin: float32[max_positions, rotary_dim / 2]; elements beyond rotary_dim stay. q and k may be
    slices of one projection.
    """
    select("rotary", q.device.type)(q, k, positions, cos, sin)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :size]) * x[:, size:] for x [rows, 2 * size] -> [rows, size]."""
    return select("silu_mul", x.device.type)(x)


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(x[:, :size]) * x[:, size:], gelu in its tanh form, for x [rows, 2 * size] -> [rows, size]."""
    return select("gelu_tanh_mul", x.device.type)(x)


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(x[:, :size]) * x[:, size:], gelu as in `gelu`, for x [rows, 2 * size] -> [rows, size]."""
    return select("gelu_mul", x.device.type)(x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x Phi(x) of each element of [rows, size] -> [rows, size], Phi the distribution function of the normal distribution (the erf form)."""
    return select("gelu", x.device.type)(x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """gelu in its tanh form, of each element of [rows, size] -> [rows, size]."""
    return select("gelu_tanh", x.device.type)(x)


def embedding(ids: torch.Tensor, table: torch.Tensor | PackedLinear, scale: float = 1.0) -> torch.Tensor:
    """table[ids] * scale: ids int32 or int64 [tokens], table bfloat16 or float32 [vocab_size, size] -> [tokens, size].

    table: may be the packed weight of an output projection, of floats or blocks of a GGUF file, whose row i is the embedding of token i.
    ValueError for an id outside the table (on CPU).
    """
    if isinstance(table, PackedLinear):
        return for_layout(table.layout, "embedding", ids.device.type)(ids, table, scale)
    return select("embedding", table.device.type)(ids, table, scale)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store k, v [tokens, num_kv_heads, head_dim] in the caches of one layer (`packing.kv_cache_shapes`), rounded to their dtype.

    int8, int16: each head of a token by its own scale, as `quantize_rows` without groups, a NaN or infinity makes that scale
    non-finite. Keys in int8 are rounded as `packing.rotate_heads` gives them, scales of
    values in int16 are rounded up to powers of 2.

    slots: int32[tokens], page * 16 + offset; a negative slot is skipped. A slot must not occur twice. ValueError for a slot
    beyond the cache (on CPU); then nothing is written.
    """
    select("write_kv", k.device.type)(k, v, k_cache, v_cache, slots)


def gather_kv(k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v float32[tokens, num_kv_heads, head_dim] of int32 slots: what `write_kv` stored."""
    return select("gather_kv", v_cache.device.type)(k_cache, v_cache, slots)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_starts: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    rounded: bool = False,
    last_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over the paged KV cache, decode and extend alike -> [tokens, num_q_heads, head_dim].

    q: [tokens, num_q_heads, head_dim]; num_q_heads is a multiple of num_kv_heads, head_dim of 16.
    page_table: int32[num_seqs, max_pages]. seq_lens: int32[num_seqs], keys of each sequence after this step.
    q_starts: int32[num_seqs + 1]: rows q_starts[i] .. q_starts[i + 1] are the last positions of sequence i; may be empty.
    window: a row at position p sees keys p - window + 1 .. p; 0 sees all. Pages wholly before the window of a sequence's first
    row are not read. softcap: scores become softcap * tanh(score / softcap); 0 = no cap.
    rounded: queries and weights are rounded to bfloat16, over a bfloat16 cache only; sums stay float32, and that of the weights is of
    the rounded ones. last_keys: int32[tokens], the last key that each row sees, at or after its position; they do not decrease within a
    sequence. None = its position. ValueError when they, or a size, a start or a page, do not fit.
    """
    return select("paged_attention", q.device.type)(
        q, k_cache, v_cache, page_table, seq_lens, q_starts, scale, window, softcap, rounded, last_keys
    )


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row_starts: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    rounded: bool = False,
) -> torch.Tensor:
    """Attention in both directions within each of the sequences that lie one after the other -> [tokens, num_q_heads, head_dim].

    q: [tokens, num_q_heads, head_dim], k, v: [tokens, num_kv_heads, head_dim]; may be slices of one projection. num_q_heads is a multiple of
    num_kv_heads, head_dim is any. row_starts: int32[num_seqs + 1] on the CPU: sequence i has tokens row_starts[i] .. row_starts[i + 1] - 1; may
    be empty. window: token i sees j where |i - j| <= window; 0 = all. rounded: q, k, v and weights are rounded to bfloat16, and a sum of weights
    is that of the rounded ones. ValueError when a size or a start does not fit.
    """
    return select("packed_attention", q.device.type)(q, k, v, row_starts, scale, window, rounded)


def argmax(x: torch.Tensor) -> torch.Tensor:
    """int64[rows]: index of the largest of each row of float32 [rows, size], the lowest on ties, -1 when the row holds a NaN."""
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"argmax: x must be [rows, size >= 1], got {tuple(x.shape)}")
    return select("argmax", x.device.type)(x)


def lora_delta(y: torch.Tensor, x: torch.Tensor, rows: LoraRows, adapters: Mapping[int, LoraFactors]) -> None:
    """y[row] += (x[row] @ A^T) @ B^T with the factors of the row's adapter, in place; an adapter that is not in `adapters` adds nothing.

    y [rows, n]: the layer's output. x [rows, k]: its input. The delta is summed by itself, then added: on CPU its bits depend on the
    row and the adapter alone, and rows of the base model are not touched. ValueError unless `rows` is of as many rows as x.
    """
    select("lora_delta", x.device.type)(y, x, rows, adapters)


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
    """int64[rows]: an id of each row of float32[rows, V] logits; every implementation gives the same ones (`drawing` defines them).

    temperatures: float32[rows]; 0: the largest logit, the lowest id on ties; negative: the row is not needed. top_k: int64[rows], 0 = off.
    top_p: float64[rows], 1 = off. min_weights: int64[rows], min_p * `drawing.ONE` rounded up. u: float64[rows] in [0, 1). All of
    these on the CPU. -1 for a row that is not needed, holds a NaN or has no finite largest logit.

    masks: int32[n, V / 32 rounded up]. Row r sees only the tokens that row mask_rows[r] of them allows, as if the other logits were -inf, and all
    of them if mask_rows[r] is -1. Bit t % 32 of word t // 32 allows token t; bits beyond V are ignored. mask_rows: int64[rows]. Both are contiguous,
    and on the CPU or on the device of `logits`; from pinned memory they are copied without waiting, and must stay as they are until the copy
    is done. ValueError for a mask that is not there (if mask_rows are on the CPU).
    """
    if masks is not None and mask_rows is not None:
        rows, size = logits.shape
        for name, given, dtype, shape in (
            ("masks", masks, torch.int32, (masks.shape[0], -(-size // 32))),
            ("mask_rows", mask_rows, torch.int64, (rows,)),
        ):
            if given.dtype != dtype or given.shape != shape or not given.is_contiguous():
                raise ValueError(
                    f"draw: {name} must be contiguous {dtype} {shape}, got {given.dtype} {tuple(given.shape)}"
                )
    elif masks is not None or mask_rows is not None:
        raise ValueError("draw: masks and mask_rows go together")
    op = select("draw", logits.device.type)
    return op(logits, temperatures, top_k, top_p, min_weights, u, masks, mask_rows)


def exp_sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(peaks float32[rows], sums int64[rows]) of float32[rows, V]: the largest, NaN when the row holds one, and the sum of the weights
    of `drawing` at temperature 1, which is about 2^40 sum(exp(x - peak)); 0 when the peak is not finite."""
    return select("exp_sums", x.device.type)(x)
