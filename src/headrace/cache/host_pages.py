"""Pages of KV in the host's memory, behind the pool of a GPU and before the files: what is stored stays there while it fits.

Owns one piece of memory, pinned, and which page of which prefix lies where in it; what was not used for longest goes first. Pages are found by
the keys that they have in files. Used by the tier's thread alone.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from headrace.cache.page_files import PageFiles, Run, page_keys

IN_MEMORY = Path()
"""Path of a `Run` here."""


class HostPages:
    """As `PageFiles`, which documents the methods. memory: for at least 2 * at_once pages. files: behind it; None = there are none."""

    def __init__(
        self,
        memory: memoryview,
        fingerprint: str,
        page_size: int,
        page_bytes: int,
        at_once: int,
        files: PageFiles | None = None,
    ) -> None:
        pages = [memory[start : start + page_bytes] for start in range(0, len(memory) - page_bytes + 1, page_bytes)]
        self._read_into = memory[: at_once * page_bytes]  # so that what goes to the device is pinned, too
        self._free = pages[at_once:]
        self._fingerprint = fingerprint
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._files = files
        self._pages: OrderedDict[bytes, memoryview] = OrderedDict()

    @property
    def num_damaged(self) -> int:
        return 0 if self._files is None else self._files.num_damaged

    @property
    def num_bytes(self) -> int:
        """Of the files."""
        return 0 if self._files is None else self._files.num_bytes

    def keys(self, namespace: str, tokens: bytes) -> list[bytes]:
        return page_keys(self._fingerprint, namespace, tokens, self._page_size)

    def find(self, keys: Sequence[bytes], tokens: bytes) -> list[Run]:
        found = 0
        while found + 1 < len(keys) and keys[found + 1] in self._pages:
            found += 1
        for key in reversed(keys[1 : found + 1]):  # the end of a prefix goes before its beginning
            self._pages.move_to_end(key)
        runs = [Run(IN_MEMORY, 0, found, 0, 0, b"")] if found else []
        if self._files is not None and found + 1 < len(keys):
            runs += [run for run in self._files.find(keys, tokens) if run.first + run.count > found]
        return runs

    def read(self, run: Run, keys: Sequence[bytes], at_once: int) -> Iterator[tuple[int, memoryview]]:
        if run.path is not IN_MEMORY:
            assert self._files is not None, run
            for first, part in self._files.read(run, keys, at_once):
                self._keep(keys[first + 1 :], part)
                yield first, part
            return
        for start in range(run.first, run.first + run.count, at_once):
            wanted = keys[start + 1 : min(start + at_once, run.first + run.count) + 1]
            size = self._page_bytes
            for place, key in enumerate(wanted):
                if key not in self._pages:  # gone since it was found
                    wanted = wanted[:place]
                    break
                self._read_into[place * size : (place + 1) * size] = self._pages[key]
            if wanted:
                yield start, self._read_into[: len(wanted) * size]
            if len(wanted) < min(at_once, run.first + run.count - start):
                return

    def write(self, keys: Sequence[bytes], tokens: bytes, first: int, parts: Iterable[memoryview]) -> None:
        kept = self._kept(keys[first + 1 :], parts)
        if self._files is not None:
            self._files.write(keys, tokens, first, kept)
        for _ in kept:
            pass

    def forget(self) -> None:
        self._free += self._pages.values()
        self._pages.clear()
        if self._files is not None:
            self._files.forget()

    def _kept(self, keys: Sequence[bytes], parts: Iterable[memoryview]) -> Iterator[memoryview]:
        """The parts, when they have been copied."""
        place = 0
        for part in parts:
            self._keep(keys[place:], part)
            place += len(part) // self._page_bytes
            yield part

    def _keep(self, keys: Sequence[bytes], part: memoryview) -> None:
        """Copy the pages of a part, which have the first of these keys."""
        for place, key in zip(range(0, len(part), self._page_bytes), keys, strict=False):
            if key not in self._pages:
                into = self._free.pop() if self._free else self._pages.popitem(last=False)[1]
                into[:] = part[place : place + self._page_bytes]
                self._pages[key] = into
