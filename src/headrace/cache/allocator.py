"""Hands out KV pages. Owns the free list and nothing else; runs in the scheduler."""

from collections.abc import Iterable


class PageAllocator:
    """Pages first .. first + num_pages - 1 of `page_size` tokens each; slot of a token = page * page_size + offset."""

    def __init__(self, num_pages: int, page_size: int, first: int = 0) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.first = first
        self._free = self._all()

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """Take `num_pages` pages from the free list. The caller has checked `num_free`."""
        assert 0 <= num_pages <= len(self._free), (num_pages, len(self._free))
        if num_pages == 0:
            return []
        taken = self._free[-num_pages:]
        del self._free[-num_pages:]
        taken.reverse()
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. A page that is freed twice is noticed by the accounting, not here."""
        self._free.extend(pages)
        assert len(self._free) <= self.num_pages, (len(self._free), self.num_pages)

    def reset(self) -> None:
        """Mark every page as free."""
        self._free = self._all()

    def _all(self) -> list[int]:
        # Popped from the end: low pages first, so that a lightly used pool touches little memory.
        return list(range(self.first + self.num_pages - 1, self.first - 1, -1))
