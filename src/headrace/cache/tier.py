"""A tier behind the tree: pages of KV that are kept in files or in the host's memory, and come back.

Owns the thread that copies pages between the pool and what keeps them (`PageTransfer`; `PageFiles`, `HostPages`), and the order of what it does. Does
not decide what is stored or loaded, and owns no page: who asks for a copy holds the pages until it is done. Nothing here fails a request: what goes
wrong is a miss, or is not stored, and is counted.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from headrace.cache.base import Lease
from headrace.cache.host_pages import HostPages
from headrace.cache.page_files import PageFiles, Run
from headrace.log import get_logger
from headrace.messages import namespaces
from headrace.messages.step import PageTransfer

_logger = get_logger(__name__)

_PART_BYTES = 4 << 20
"""Copied at a time; between two parts the thread looks whether it is still wanted, and whether someone waits for a load."""

_PAUSE_S = 10.0
"""How long nothing is stored after the folder could not be written."""


@dataclass(eq=False, slots=True)
class Load:
    """What the files have of a prefix behind its first `num_known` pages.

    num_found: pages with the known ones, -1 while they are being looked up. pages: where to put those behind the known ones, given by who asked
    once they are found. known_pages: those of the known ones, in the pool. num_loaded: pages that are in the pool, with the known ones. is_wanted:
    set to False to end it (`DiskTier.withdraw`). is_done: it has ended by itself.
    """

    tokens: bytes
    namespace: str
    num_known: int
    num_found: int = -1
    pages: list[int] = field(default_factory=list)
    known_pages: list[int] = field(default_factory=list)
    num_loaded: int = 0
    is_wanted: bool = True
    is_done: bool = False
    keys: list[bytes] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Store:
    """A prefix to be kept. pages: of all its whole pages. lease: what holds them meanwhile. is_wanted, is_done: see `Load`."""

    tokens: bytes
    namespace: str
    pages: list[int]
    lease: Lease | None
    is_wanted: bool = True
    is_done: bool = False


def pages_at_once(page_bytes: int) -> int:
    """How many pages are copied at a time."""
    return max(1, _PART_BYTES // page_bytes)


class DiskTier:
    """The tier of a folder, of the host's memory, or of both. open_files: what keeps pages for a fingerprint; called in the thread, for each state of
    the weights. hash_s: what the fingerprint should take.

    paused_until_s: nothing is stored before that, by `time.monotonic`. seconds_per_page: what loading took, on average of late; 0 = nothing was
    loaded yet. Counts since the start: num_stored and num_loaded pages, num_damaged files.
    """

    def __init__(
        self, transfer: PageTransfer, open_files: Callable[[str], PageFiles | HostPages], hash_s: float = 0.0
    ) -> None:
        self._transfer = transfer
        self._open_files = open_files
        self.hash_s = hash_s
        self._files: PageFiles | HostPages | None = None
        self._loads: deque[Load] = deque()
        self._stores: deque[Store] = deque()
        self._todo: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._copying = threading.Lock()
        self._is_closed = False
        self.paused_until_s = 0.0
        self.seconds_per_page = 0.0
        self.num_stored = self.num_loaded = 0
        self._num_damaged_before = 0
        self._thread = threading.Thread(target=self._run, name="kv-tier", daemon=True)
        self.weights_changed()

    def start(self) -> None:
        self._thread.start()

    @property
    def num_damaged(self) -> int:
        files = self._files
        return self._num_damaged_before + (files.num_damaged if files is not None else 0)

    @property
    def num_bytes(self) -> int:
        """Of all files of the folder, as far as is known."""
        return self._files.num_bytes if self._files is not None else 0

    @property
    def opens_in_s(self) -> float:
        """How long it should take until the weights' fingerprint is known: 0 if it is, infinite if nothing can be kept."""
        if self._files is not None:
            return 0.0
        return max(0.0, self._opened_s - time.monotonic())

    def weights_changed(self) -> None:
        """KV from now on is of the weights as they are now. Loads and stores before that must be withdrawn."""
        self._num_damaged_before = self.num_damaged
        self._files = None
        self._opened_s = time.monotonic() + self.hash_s
        self._do(self._open)

    def look_up(self, load: Load) -> None:
        """Find what there is of a prefix."""
        with self._wake:
            self._loads.append(load)
            self._wake.notify()

    load = look_up
    """Fill the pages of a `Load` that was found."""

    def store(self, store: Store) -> None:
        with self._wake:
            self._stores.append(store)
            self._wake.notify()

    def forget(self) -> None:
        """Remove all files of these weights, after what was asked before."""

        def remove() -> None:
            if self._files is not None:
                self._files.forget()

        self._do(remove)

    def withdraw(self, jobs: Iterable[Load | Store]) -> None:
        """When this returns, the pages of these are not touched any more. It waits for a copy at most, never for the disk."""
        with self._copying:
            for job in jobs:
                job.is_wanted = False

    def close(self) -> None:
        """Store what is still to be stored, and end the thread."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def work(self) -> bool:
        """Do one of the things that were asked; in the thread. False: there was none."""
        with self._wake:
            act = self._todo.popleft() if self._todo else None
            store = self._stores.popleft() if act is None and not self._loads and self._stores else None
        try:
            if act is not None:
                act()
            elif store is not None:
                self._keep(store)
            elif self._loads:
                self._serve_loads()
            else:
                return False
        except Exception:
            _logger.exception("--kv-cache-dir: what was asked of it failed")
        return True

    # -- in the thread

    @property
    def _pages_at_once(self) -> int:
        return pages_at_once(self._transfer.page_bytes)

    def _do(self, act: Callable[[], None]) -> None:
        with self._wake:
            self._todo.append(act)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._todo or self._loads or self._stores or self._is_closed):
                    self._wake.wait()
            if not self.work() and self._is_closed:
                # They hold the model, and the tree's callbacks hold this: a circle that the interpreter would not free at its end.
                del self._transfer, self._open_files
                return

    def _open(self) -> None:
        begin = time.perf_counter()
        try:
            self._files = self._open_files(self._transfer.fingerprint())
        except Exception:
            self._opened_s = math.inf
            _logger.exception("--kv-cache-dir is not used")
            return
        _logger.info("KV is kept behind the pool (%.2f s for the hash of the weights)", time.perf_counter() - begin)

    def _serve_loads(self) -> None:
        while self._loads:
            load = self._loads.popleft()
            if load.num_found < 0:
                self._find(load)
                continue
            try:
                if load.is_wanted and self._files is not None:
                    self._fill(load, self._files)
            finally:
                load.is_done = True

    def _find(self, load: Load) -> None:
        found = 0
        try:
            if load.is_wanted and self._files is not None:
                load.keys = self._keys(self._files, load)
                load.runs = self._files.find(load.keys, load.tokens)
                found = load.runs[-1].first + load.runs[-1].count if load.runs else 0
        finally:
            load.is_done = found <= load.num_known
            load.num_found = found  # last: who asked may act on it at once

    def _keys(self, files: PageFiles | HostPages, job: Load | Store) -> list[bytes]:
        """Of its pages; none if its adapter has gone."""
        namespace = namespaces.lasting(job.namespace, self._transfer.adapter)
        return [] if namespace is None else files.keys(namespace, job.tokens)

    def _fill(self, load: Load, files: PageFiles | HostPages) -> None:
        load.num_loaded = load.num_known
        for run in load.runs:
            before = max(0, load.num_loaded - run.first)
            if before >= run.count:
                continue
            if run.first + before != load.num_loaded:
                return
            rest = Run(run.path, run.first + before, run.count - before, before, run.data_start, run.crcs)
            begin = time.perf_counter()
            for first, part in files.read(rest, load.keys, self._pages_at_once):
                count = len(part) // self._transfer.page_bytes
                place = first - load.num_known
                with self._copying:
                    if not load.is_wanted:
                        return
                    self._transfer.write(load.pages[place : place + count], part)
                    load.num_loaded += count
                self.num_loaded += count
                took, begin = time.perf_counter() - begin, time.perf_counter()
                self._learn(took / count)

    def _learn(self, seconds: float) -> None:
        self.seconds_per_page = 0.75 * self.seconds_per_page + 0.25 * seconds if self.seconds_per_page else seconds

    def _keep(self, store: Store) -> None:
        files = self._files
        try:
            if not store.is_wanted or files is None or time.monotonic() < self.paused_until_s:
                return
            keys = self._keys(files, store)
            runs = files.find(keys, store.tokens)
            first = runs[-1].first + runs[-1].count if runs else 0
            if first < len(keys) - 1:
                files.write(keys, store.tokens, first, self._parts(store, first))
        except OSError as error:
            self.paused_until_s = time.monotonic() + _PAUSE_S
            _logger.warning("KV is not kept for %.0f s: --kv-cache-dir: %s", _PAUSE_S, error.strerror)
        finally:
            store.is_done = True

    def _parts(self, store: Store, first: int) -> Iterator[memoryview]:
        for start in range(first, len(store.pages), self._pages_at_once):
            self._serve_loads()
            pages = store.pages[start : start + self._pages_at_once]
            with self._copying:
                if not store.is_wanted:
                    return
                copied = self._transfer.read(pages)
            yield copied
            self.num_stored += len(pages)
