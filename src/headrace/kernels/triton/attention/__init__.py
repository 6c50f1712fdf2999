"""Attention over a KV pool addressed by slot, in Triton.

Read first: plan.py (what the kernels of a step share), then decode.py (one query a row, its keys in splits), extend.py
(many queries of a row over a prefix and each other). write.py puts K and V into the pools before them.

Sources: the tiling and the online softmax are FlashAttention-2's (T. Dao, 2023) as Triton's tutorial "Fused Attention" shows them; the
split keys of decode and their merge by log-sum-exp are Flash-Decoding's (T. Dao, D. Haziza, F. Massa and G. Sizov, 2023); pages are
PagedAttention's (W. Kwon et al., 2023). The query heads of one KV head share a tile, so that a key is read once for all of them
(J. Ainslie et al., "GQA", 2023).

K and V of a layer: [num_slots, num_kv_heads, head_dim], the last dimension contiguous; bfloat16, float16, float32 or float8_e4m3fn. The slot of
position p of row r is table[r, p // page_size] * page_size + p % page_size: with page_size 1 the table holds slots.

All lengths are read on the device; grids follow from sizes that the host knows, so a launch can be captured in a CUDA graph.
"""

import torch

from headrace.kernels.packing import check_rotation
from headrace.kernels.triton.attention.decode import decode_attention
from headrace.kernels.triton.attention.extend import extend_attention
from headrace.kernels.triton.attention.plan import DETERMINISTIC_SPLIT, Plan, check_heads
from headrace.kernels.triton.attention.write import NewKeys, rotate_write_kv, write_kv

__all__ = ["DETERMINISTIC_SPLIT", "NewKeys", "Plan", "attend", "rotate_write_kv", "write_kv"]


def attend(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    plan: Plan,
    scale: float,
    *,
    window: int,
    soft_cap: float,
    new: NewKeys | None = None,
) -> torch.Tensor:
    """Causal attention of q [num_tokens, num_q_heads, head_dim] over the pools -> [num_tokens, num_q_heads, head_dim], contiguous.

    Tokens are in the order of the plan's rows; their K and V are in the pools already, or (`new`, in a step of one position of each of several
    sequences) are rotated and written by the way, as is q rotated, not in place. window, soft_cap: 0 = none.
    Deterministic: the bits of a token depend on its position, its own sequence, and nothing else.
    """
    check_heads(q)
    if new is not None:
        check_heads(new.k, new.v)
        check_rotation(new.cos, new.sin, q.shape[2])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if plan.has_single:
        decode_attention(q, k_pool, v_pool, plan, scale, window, soft_cap, out, new)
    if plan.has_longer:
        extend_attention(q, k_pool, v_pool, plan, scale, window, soft_cap, out)
    return out
