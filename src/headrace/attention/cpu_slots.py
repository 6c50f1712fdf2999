"""Page size 1 for kernels that read pages of 16: before a layer attends, the step's tokens are copied to consecutive pages of a workspace.

The values are copied, not computed again, so the kernel gets the same input as with pages of 16, and the bits do not depend on the page
size. It costs a copy of all keys and values of the step per layer. Runs in the thread that runs the model.
"""

import torch

from headrace import kernels
from headrace.attention.base import KvShape, StepRows
from headrace.kernels.packing import int_parts


class CollectedPages:
    """The keys and values of a step in pages of 16, one sequence after the other; one layer at a time.

    k, v: in the layout of `kernels.kv_cache_shapes`. page_table: int32[num_rows, max_pages], into them.
    """

    def __init__(self, shape: KvShape) -> None:
        self._shape = shape
        self.k, self.v = self._pages(0)
        self.page_table = torch.empty(0, 0, dtype=torch.int32)

    def prepare(self, rows: StepRows) -> None:
        """Called once per step: compute the source and destination of each token."""
        page = kernels.PAGE_SIZE
        lengths = [start + count for start, count in zip(rows.starts, rows.counts, strict=True)]
        num_pages = [-(-length // page) for length in lengths]
        if sum(num_pages) > self.k.shape[0]:
            # With some room to grow, so that not every decode step allocates memory.
            self.k, self.v = self._pages(sum(num_pages) * 9 // 8)
        self.page_table = torch.zeros(len(lengths), max(num_pages, default=0), dtype=torch.int32)
        first, put = 0, []
        for row, (length, pages) in enumerate(zip(lengths, num_pages, strict=True)):
            self.page_table[row, :pages] = torch.arange(first, first + pages, dtype=torch.int32)
            put.append(torch.arange(first * page, first * page + length, dtype=torch.int32))
            first += pages
        self._put = torch.cat(put)
        self._taken = torch.cat([rows.slots[row, :length] for row, length in enumerate(lengths)])

    def collect(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Fill `k` and `v` from the caches of a layer, which already contain the step's own tokens."""
        kernels.write_kv(*kernels.gather_kv(k_cache, v_cache, self._taken), self.k, self.v, self._put)
        if not self._shape.dtype.is_floating_point:
            # Copy the bytes: a recomputed scale could differ in its last bit.
            taken, put = _scale_places(self._taken), _scale_places(self._put)
            stored, collected = int_parts(k_cache, v_cache), int_parts(self.k, self.v)
            collected.k_scales[put] = stored.k_scales[taken]
            collected.v_scales[put] = stored.v_scales[taken]

    def _pages(self, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self._shape
        k_size, v_size = kernels.kv_cache_shapes(num_pages, shape.num_kv_heads, shape.head_dim, shape.dtype)
        return torch.zeros(k_size, dtype=shape.dtype), torch.zeros(v_size, dtype=shape.dtype)


def _scale_places(slots: torch.Tensor) -> tuple[torch.Tensor, slice, torch.Tensor]:
    """Index of the slots' scales in the views of `int_parts`."""
    return slots.long() // kernels.PAGE_SIZE, slice(None), slots.long() % kernels.PAGE_SIZE
