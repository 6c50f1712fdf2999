"""What the kernels of a step share: the plan, the shapes of tiles, how many splits; and on the device the scan over a range of keys, and the merge of
splits. Nothing here launches a kernel.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.triton.launch import precision

DETERMINISTIC_SPLIT = 512
"""Keys of a split when bits must not depend on the batch: splits then begin at multiples of it."""

DETERMINISTIC_ROWS = 64
"""Rows of every tile in that mode: decode and extend must multiply in the same shapes to give the same bits."""

MAX_SPLITS = 64

LOWEST = tl.constexpr(-1e30)  # finite: a block without a visible key leaves exp2(-inf - lowest) == 0, not NaN


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of a kernel's tiles and how it is compiled. rows: query rows. keys: keys of a block."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What the layers of a step share.

    table: int32[num_rows, columns], see the module. seq_lens: int32[num_rows], keys with this step's; row_starts: int32[num_rows + 1].
    num_tokens: rows of q. max_keys: no sequence is longer. has_single, has_longer: whether a row computes one position, or more.
    num_processors: of the device.
    """

    table: torch.Tensor
    page_size: int
    seq_lens: torch.Tensor
    row_starts: torch.Tensor
    num_tokens: int
    max_keys: int
    has_single: bool
    has_longer: bool
    deterministic: bool
    num_processors: int

    @property
    def num_rows(self) -> int:
        return self.seq_lens.shape[0]

    def fills(self, num_kv_heads: int) -> bool:
        """Whether a program for each row and KV head fills the device."""
        return self.num_rows * num_kv_heads >= 2 * self.num_processors

    @property
    def split(self) -> int:
        """Keys of a split when bits must not depend on the batch; 0 = as many as suits the step."""
        return DETERMINISTIC_SPLIT if self.deterministic else 0


def decode_tile(group: int, head_dim: int, itemsize: int, *, deterministic: bool, fills: bool = True) -> Tile:
    """A decode tile: the group's query heads, padded to what a matrix product takes, against as many keys as fill the copies.

    fills: there are enough rows to fill the device with one split each; without, longer blocks are faster. Measured on an H100 (docs/gpu.md).
    """
    if deterministic:
        return _deterministic_tile(group, head_dim, itemsize)
    keys = _keys(head_dim, itemsize)
    return Tile(max(16, triton.next_power_of_2(group)), keys if fills or head_dim > 128 else 2 * keys, 4, 2)


def extend_tile(group: int, head_dim: int, itemsize: int, *, deterministic: bool) -> Tile:
    """An extend tile. In deterministic mode of decode's shape; else larger, as the products and not the copies take the time."""
    if deterministic:
        return _deterministic_tile(group, head_dim, itemsize)
    rows = 64 if itemsize > 2 or head_dim > 128 else 128
    keys = _keys(head_dim, itemsize)
    rows = max(rows, triton.next_power_of_2(group))
    return Tile(rows, keys, 8 if head_dim > 128 else 4, _stages(head_dim, keys, itemsize))


def _deterministic_tile(group: int, head_dim: int, itemsize: int) -> Tile:
    keys = _keys(head_dim, itemsize)
    return Tile(max(DETERMINISTIC_ROWS, triton.next_power_of_2(group)), keys, 4, _stages(head_dim, keys, itemsize))


def num_splits(plan: Plan, num_kv_heads: int, keys: int, window: int) -> int:
    """Into how many splits decode cuts each sequence: enough to fill the device, or (deterministic) as many as the longest may need."""
    longest = min(plan.max_keys, window + keys) if window else plan.max_keys
    if plan.deterministic:
        # A window may begin within a split.
        return triton.cdiv(longest, plan.split) + (1 if window else 0)
    wanted = triton.cdiv(2 * plan.num_processors, max(plan.num_rows * num_kv_heads, 1))
    return max(1, min(wanted, MAX_SPLITS, triton.cdiv(longest, keys)))


def padded(head_dim: int) -> int:
    """Width of a head in a tile: a power of two that a matrix product takes."""
    return max(16, triton.next_power_of_2(head_dim))


def scan_options(
    q: torch.Tensor, num_kv_heads: int, plan: Plan, tile: Tile, window: int, soft_cap: float
) -> dict[str, Any]:
    """Of the launch of a kernel that calls `scan_keys`."""
    num_q_heads, head_dim = q.shape[1:]
    return {
        "GROUP": num_q_heads // num_kv_heads,
        "NUM_Q_HEADS": num_q_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "PAGE_SIZE": plan.page_size,
        "SPLIT": plan.split,
        "HAS_WINDOW": window > 0,
        "HAS_SOFT_CAP": soft_cap > 0.0,
        "PRECISION": precision(q),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": not plan.deterministic,
    }


def check_heads(*tensors: torch.Tensor) -> None:
    """Raises ValueError unless each is [tokens, heads, head_dim] with the heads of a token side by side."""
    for x in tensors:
        if x.dim() != 3 or x.stride(2) != 1 or x.stride(1) != x.shape[2]:
            raise ValueError(f"attention: heads must lie side by side in a row, got {tuple(x.shape)} by {x.stride()}")


def _keys(head_dim: int, itemsize: int) -> int:
    """Keys of a block: K and V of two or three blocks must fit in shared memory."""
    keys = 128 if head_dim <= 64 else 64 if head_dim <= 128 else 32
    return keys if itemsize <= 2 else keys // 2


def _stages(head_dim: int, keys: int, itemsize: int) -> int:
    """Blocks in flight: three where shared memory of the smallest supported GPU (99 KiB) holds them, else two."""
    block_bytes = 2 * keys * padded(head_dim) * itemsize
    return 3 if 3 * block_bytes <= 96 << 10 else 2


@triton.jit
def scan_keys(
    q,
    top,
    total,
    acc,
    k_ptr,
    v_ptr,
    table_ptr,
    query_positions,
    begin,
    end,
    slot_stride,
    scale,
    soft_cap,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys begin .. end - 1 join the softmax (top, total, acc) of q [rows, BLOCK_D]. MASKED: some are not for every row."""
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        inside = positions < end
        # Slots beyond a sequence are junk and what they hold may be NaN: neither is read.
        if MASKED:
            entry = tl.load(table_ptr + positions // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            entry = tl.load(table_ptr + positions // PAGE_SIZE).to(tl.int64)
        offsets = (entry * PAGE_SIZE + positions % PAGE_SIZE) * slot_stride
        k_places = k_ptr + offsets[None, :] + d[:, None]
        v_places = v_ptr + offsets[:, None] + d[None, :]
        if HEAD_DIM == BLOCK_D and not MASKED:
            k = tl.load(k_places)
            v = tl.load(v_places)
        else:
            k = tl.load(k_places, mask=inside[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_places, mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
        if HAS_SOFT_CAP:
            scores = scores * (scale / soft_cap)
            scores = (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores))) * (soft_cap * 1.4426950408889634)
        else:
            scores = scores * (scale * 1.4426950408889634)
        if MASKED:
            seen = inside[None, :] & (positions[None, :] <= query_positions[:, None])
            if HAS_WINDOW:
                seen = seen & (positions[None, :] > query_positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        factor = tl.exp2(top - new_top)
        total = total * factor + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * factor[:, None], input_precision=PRECISION)
        top = new_top
    return top, total, acc


@triton.jit
def merge(top, total, acc, part_top, part):
    """Merge the split (part, with log-sum-exp part_top in base 2) into the splits before it."""
    new_top = tl.maximum(top, part_top)
    factor = tl.exp2(top - new_top)
    share = tl.exp2(part_top - new_top)
    return new_top, total * factor + share, acc * factor[:, None] + part * share[:, None]


@triton.jit
def finished(top, total, acc):
    """A split's result and its log-sum-exp in base 2; zeros and -inf of a row that saw no key."""
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    return acc / divisor[:, None], tl.where(empty, float("-inf"), top + tl.log2(divisor))


@triton.jit
def first_key(seq_len, window, HAS_WINDOW: tl.constexpr):
    """The first key that the last position of a sequence sees."""
    if HAS_WINDOW:
        return tl.maximum(seq_len - window, 0)
    return 0
