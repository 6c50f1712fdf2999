"""Token masks on packed bits, in Triton: rows of logits with -inf where their mask has no bit.

A program writes one block of a row. It reads the logits of the words of the mask that have any bit, and most have none.
"""

import torch
import triton
import triton.language as tl

_BLOCK_WORDS = 64

_WORD = tl.constexpr(32)


@triton.jit
def _mask_kernel(
    logits_ptr, row_stride, rows_ptr, masks_ptr, out_ptr, out_stride, size, num_words, BLOCK_WORDS: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[:, None]
    bits = tl.arange(0, _WORD)[None, :]
    ids = words * _WORD + bits
    inside = ids < size
    row = tl.load(rows_ptr + i)
    mask = tl.load(masks_ptr + i * num_words + words, mask=words < num_words, other=0)
    x = tl.load(logits_ptr + row * row_stride + ids, mask=inside & (mask != 0), other=float("-inf"))
    allowed = ((mask >> bits) & 1) != 0
    tl.store(out_ptr + i * out_stride + ids, tl.where(allowed, x, float("-inf")), mask=inside)


def mask_logits(
    logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """See `headrace.kernels.ops.mask_logits`."""
    if out is None:
        out = torch.empty(len(rows), logits.shape[1], device=logits.device)
    if logits.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"mask_logits: rows must be contiguous, got strides {logits.stride()} and {out.stride()}")
    if out.numel():
        num_words = masks.shape[1]
        _mask_kernel[(len(rows), triton.cdiv(num_words, _BLOCK_WORDS))](
            logits,
            logits.stride(0),
            rows.to(logits.device, non_blocking=True),
            masks.to(logits.device, non_blocking=True),
            out,
            out.stride(0),
            logits.shape[1],
            num_words,
            BLOCK_WORDS=_BLOCK_WORDS,
            num_warps=4,
        )
    return out
