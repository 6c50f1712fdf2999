"""What the kernels of a step share: the plan, the shapes of tiles, how many splits. Nothing here launches a kernel."""

from dataclasses import dataclass

import torch
import triton

DETERMINISTIC_SPLIT = 512
"""Keys of a split when bits must not depend on the batch: splits then begin at multiples of it."""

DETERMINISTIC_ROWS = 64
"""Rows of every tile in that mode: decode and extend must multiply in the same shapes to give the same bits."""

MAX_SPLITS = 64


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
        """Sequences of the step."""
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


def precision(q: torch.Tensor) -> str:
    """float32 products in full, not in TF32."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


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
