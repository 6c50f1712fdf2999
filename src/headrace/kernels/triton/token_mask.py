"""Token masks on packed bits, in Triton: rows of logits with -inf where their mask, if they have one, has no bit.

A program writes one block of a row. It reads logits only where a word of the mask has any bit set; most words have none.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels.drawing import check_mask_rows

_BLOCK_WORDS = 64

_WORD = tl.constexpr(32)


@triton.jit
def _mask_kernel(
    logits_ptr, row_stride, masks_ptr, mask_rows_ptr, out_ptr, out_stride, size, num_words, BLOCK_WORDS: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[:, None]
    bits = tl.arange(0, _WORD)[None, :]
    ids = words * _WORD + bits
    inside = ids < size
    row = tl.load(mask_rows_ptr + i)
    # Without a mask every bit is set.
    mask = tl.load(masks_ptr + row * num_words + words, mask=(words < num_words) & (row >= 0), other=-1)
    x = tl.load(logits_ptr + i * row_stride + ids, mask=inside & (mask != 0), other=float("-inf"))
    allowed = ((mask >> bits) & 1) != 0
    tl.store(out_ptr + i * out_stride + ids, tl.where(allowed, x, float("-inf")), mask=inside)


def masked(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor) -> torch.Tensor:
    """float32[rows, V] logits where their masks allow them, -inf elsewhere; see `headrace.kernels.ops.draw`."""
    if logits.stride(1) != 1:
        raise ValueError(f"draw: rows of logits must be contiguous, got strides {logits.stride()}")
    check_mask_rows(mask_rows, len(masks))
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if out.numel():
        num_words = masks.shape[1]
        _mask_kernel[(len(logits), triton.cdiv(num_words, _BLOCK_WORDS))](
            logits,
            logits.stride(0),
            masks.to(logits.device, non_blocking=True),
            mask_rows.to(logits.device, non_blocking=True),
            out,
            out.stride(0),
            logits.shape[1],
            num_words,
            BLOCK_WORDS=_BLOCK_WORDS,
            num_warps=4,
        )
    return out
