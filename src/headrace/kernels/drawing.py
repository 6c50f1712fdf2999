"""The definition of the draw: from a row of logits to one id. In torch, for any device; csrc/cpu/sampling.cpp gives the same ids.

Owns the arithmetic. Does not own parameters, penalties, masks or random numbers (`headrace.sampling`). Runs in the caller's thread.

A weight is an integer, the floor of 2^40 exp((logit - peak) / temperature), where the exponential is the one below: Cephes expf
(S. Moshier, Methods and Programs for Mathematical Functions, 1989) in single IEEE operations of float32, each rounded, none
fused, so that every device computes the same bits. Sums of integers do not depend on their order. So a draw does not depend on the
batch, the threads or the machine. A token whose weight is zero (2^40 times less likely than the most likely one) is never drawn.
Vocabularies up to 2^22 ids cannot overflow.

The kept sets, by the usual definitions:
top-k   the k largest logits above -inf, of equal ones the lower ids
top-p   of those, in the order (value descending, id ascending), each whose predecessors weigh less than top_p of the total
        (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020)
min-p   of those, weight >= min_p * largest weight (Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024)
The id is the first, in id order, at which the sum of the kept weights exceeds the floor of u times their total.
"""

from typing import Final

import torch
import torch.nn.functional as F

ONE: Final = 1 << 40
"""Weight of the most likely token."""

MAX_VOCAB: Final = 1 << 22
"""More ids than this could overflow a sum of weights."""

_BLOCK: Final = 512
_LOG2_E: Final = 1.44269502162933349609375
_LN2_HIGH: Final = 0.693359375
_LN2_LOW: Final = -2.12194440e-4
_POLYNOMIAL: Final = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def weights_of(logits: torch.Tensor, peaks: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """int64[rows, V] of float32[rows, V]; peaks, temperatures: float32[rows, 1], what is above 0 and finite. NaN gives anything."""
    z = ((logits - peaks) / temperatures).clamp_(min=-30.0)
    n = (z * _LOG2_E).round_()
    r = z - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = r * _POLYNOMIAL[0]
    for coefficient in _POLYNOMIAL[1:-1]:
        p = (p + coefficient) * r
    p = (p + _POLYNOMIAL[-1]) * (r * r)
    y = (p + r) + 1.0
    power = ((n.nan_to_num_(0.0).to(torch.int32) + (40 + 127)) << 23).view(torch.float32)
    return (y * power).to(torch.int64)


def exp_sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    peaks = x.amax(dim=1)
    ones = torch.ones_like(peaks).unsqueeze(1)
    sums = weights_of(x, peaks.unsqueeze(1), ones).sum(dim=1)
    return peaks, torch.where(peaks.isfinite(), sums, 0)


def check_mask_rows(mask_rows: torch.Tensor, num_masks: int) -> None:
    """ValueError for a mask that is not there, if they are on the CPU."""
    if mask_rows.device.type == "cpu" and mask_rows.numel():
        lowest, highest = int(mask_rows.min()), int(mask_rows.max())
        if lowest < -1 or highest >= num_masks:
            raise ValueError(f"draw: mask {lowest} or {highest} is not in [-1, {num_masks})")


def masked(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor) -> torch.Tensor:
    """float32[rows, V] logits where their masks allow them, -inf elsewhere; see `headrace.kernels.ops.draw`."""
    device = logits.device
    check_mask_rows(mask_rows, len(masks))
    every = torch.full((1, masks.shape[1]), -1, dtype=torch.int32, device=device)
    # Row -1 is the last.
    words = torch.cat((masks.to(device, non_blocking=True), every))[mask_rows.to(device, non_blocking=True)]
    bits = words.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=device) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


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
    """Does not wait for the device. Sorts whole rows when a row has top-k or top-p."""
    if masks is not None and mask_rows is not None:
        logits = masked(logits, masks, mask_rows)
    device, (rows, size) = logits.device, logits.shape
    is_greedy = temperatures == 0.0
    limited = bool((((top_k > 0) & (top_k < size)) | (top_p < 1.0)).any())
    k = torch.where(is_greedy, 1, torch.where(top_k > 0, top_k, size))
    column = [
        values.to(device, non_blocking=True).unsqueeze(1)
        for values in (torch.where(temperatures > 0.0, temperatures, 1.0), k, top_p.double(), min_weights, u.double())
    ]
    temperature, k, p, min_weight, u = column
    peaks = logits.amax(dim=1, keepdim=True)
    weights = weights_of(logits, peaks, temperature)
    if limited or bool(is_greedy.any()):
        order = torch.sort(logits, dim=1, descending=True, stable=True).indices
        ranked = weights.gather(1, order)
        ranked.masked_fill_(torch.arange(size, device=device).unsqueeze(0) >= k, 0)
        limit = p * ranked.sum(dim=1, keepdim=True).double()
        # A row without top-p keeps all ids, regardless of rounding.
        limit.masked_fill_(p >= 1.0, torch.inf)
        ranked.masked_fill_((ranked.cumsum(dim=1) - ranked).double() >= limit, 0)
        weights = torch.zeros_like(weights).scatter_(1, order, ranked)
    weights.masked_fill_(weights < min_weight, 0)

    blocks = F.pad(weights, (0, -size % _BLOCK)).view(rows, -1, _BLOCK)
    sums = blocks.sum(dim=2)
    ends = sums.cumsum(dim=1)
    total = ends[:, -1:]
    target = torch.minimum((u * total.double()).to(torch.int64), total - 1).clamp_(min=0)
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    before = ends.gather(1, block) - sums.gather(1, block)
    inside = blocks.gather(1, block.unsqueeze(2).expand(-1, -1, _BLOCK)).squeeze(1).cumsum(dim=1)
    offset = torch.searchsorted(inside, target - before, right=True)
    ids = (block * _BLOCK + offset).clamp_(max=size - 1).squeeze(1)
    wanted = peaks.squeeze(1).isfinite() & (temperatures >= 0.0).to(device, non_blocking=True)
    return torch.where(wanted, ids, -1)
