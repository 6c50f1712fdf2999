"""Metrics that are read when they are scraped, and counters without a lock. All in the event loop of the main process."""

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from headrace.media_kinds import MediaKind
from headrace.messages.media import MediaStats

MAX_KEY_NAMES = 1000
OTHER_KEYS = "others"
"""Name for the keys beyond the first MAX_KEY_NAMES: a key file that changes for ever makes no series for ever."""

Processes = Callable[[], Iterable[tuple[str, int]]]
"""Name and process id of each process that lives now."""

F = TypeVar("F", CounterMetricFamily, GaugeMetricFamily)


def _family(kind: type[F], name: str, text: str, model_name: str, values: Mapping[str, float], label: str = "") -> F:
    """values: by the value of the label, if there is one."""
    family = kind(name, text, labels=["model_name", label] if label else ["model_name"])
    for of_label, value in values.items():
        family.add_metric([model_name, of_label] if label else [model_name], value)
    return family


class _OwnMetric(Collector):
    def __init__(self, name: str, text: str, model_name: str) -> None:
        self._name, self._text, self._model_name = name, text, model_name


class Count(_OwnMetric):
    """A counter for what every step adds to."""

    value = 0

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield _family(CounterMetricFamily, self._name, self._text, self._model_name, {"": self.value})


class CountByKey(_OwnMetric):
    """A counter for each name of a key in the key file. Callers without such a key are not counted."""

    def __init__(self, name: str, text: str, model_name: str) -> None:
        super().__init__(name, text, model_name)
        self._values: dict[str, int] = {}

    def add(self, key_name: str, count: int) -> None:
        """Count for a key; an empty name counts nothing."""
        if key_name:
            if key_name not in self._values and len(self._values) >= MAX_KEY_NAMES:
                key_name = OTHER_KEYS
            self._values[key_name] = self._values.get(key_name, 0) + count

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield _family(CounterMetricFamily, self._name, self._text, self._model_name, self._values, "key_name")


class Tally(_OwnMetric):
    """A histogram for one observation per token: without a walk over the buckets."""

    def __init__(self, name: str, text: str, model_name: str, buckets: Sequence[float]) -> None:
        super().__init__(name, text, model_name)
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        family.add_metric([self._model_name], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


class LoraRequests(_OwnMetric):
    """Which adapters are in use, as labels that routers read. The value is when that was first seen, seconds since 1970."""

    _max_loras = 0
    _seen: tuple[list[str], float] = ([], 0.0)

    def __init__(self, name: str, text: str, model_name: str) -> None:
        super().__init__(name, text, model_name)
        self._read: Callable[[], tuple[Collection[str], Collection[str]]] = lambda: ((), ())

    def watch(self, max_loras: int, read: Callable[[], tuple[Collection[str], Collection[str]]]) -> None:
        """max_loras: most adapters in memory. read: names of the adapters of running samples, and of waiting ones."""
        self._max_loras, self._read = max_loras, read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        family = GaugeMetricFamily(self._name, self._text, labels=labels)
        names = [",".join(sorted(names)) for names in self._read()]
        if names != self._seen[0]:
            self._seen = (names, time.time())
        family.add_metric([self._model_name, str(self._max_loras), *names], self._seen[1])
        yield family


class LoadedMedia(Collector):
    """The media that clients send: what was loaded, refused and kept."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._read: Callable[[], MediaStats] = MediaStats

    def watch(self, read: Callable[[], MediaStats]) -> None:
        """read: gives the counts of a loader so far."""
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        stats = self._read()
        loaded: dict[str, float] = {kind: stats.num_loaded.get(kind, 0) for kind in MediaKind}
        cached = "Media items that had been prepared for an earlier request, or were being prepared for one."
        decoded = "Time spent on decoding and preparing media items, waiting included."
        killed = "Processes that were lost while they prepared an item: it exceeded a limit, or they were killed."
        yield self._counter("loaded", "Media items that were given to requests.", loaded, "kind")
        yield self._counter("refused", "Media items that were refused, by reason.", stats.num_refused, "reason")
        yield self._counter("cache_hits", cached, {"": stats.num_cache_hits})
        yield self._counter("fetch_seconds", "Time spent on fetching files, waiting included.", {"": stats.fetch_s})
        yield self._counter("decode_seconds", decoded, {"": stats.decode_s})
        yield self._counter("processes_killed", killed, {"": stats.num_killed})
        name, text = "headrace:media_cache_bytes", "Bytes of cached media items."
        yield _family(GaugeMetricFamily, name, text, self._model_name, {"": stats.cache_bytes})

    def _counter(self, name: str, text: str, values: Mapping[str, float], label: str = "") -> CounterMetricFamily:
        return _family(CounterMetricFamily, f"headrace:media_{name}", text, self._model_name, values, label)


class ProcessUse(Collector):
    """Processor time, memory and open files of the main process, and of those that `watch` names; as the system tells them.

    The names are the usual ones of Prometheus' clients, without our prefix, with a label `process`.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._sources: list[Processes] = [lambda: [("main", os.getpid())]]

    def watch(self, processes: Processes) -> None:
        """Include these processes. Asked at every scrape; one that has ended is left out."""
        self._sources.append(processes)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        labels = ["model_name", "process"]
        cpu_s = CounterMetricFamily("process_cpu_seconds", "Processor time, user and system.", labels=labels)
        memory = GaugeMetricFamily("process_resident_memory_bytes", "Resident memory.", labels=labels)
        files = GaugeMetricFamily("process_open_fds", "Open file descriptors.", labels=labels)
        started = GaugeMetricFamily("process_start_time_seconds", "Unix time of the start.", labels=labels)
        for name, pid in [each for source in self._sources for each in source()]:
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    times, used, opened = process.cpu_times(), process.memory_info().rss, process.num_fds()
                    began_s = process.create_time()
            except psutil.Error:
                continue  # it has ended meanwhile
            values = [self._model_name, name]
            cpu_s.add_metric(values, times.user + times.system)
            memory.add_metric(values, used)
            files.add_metric(values, opened)
            started.add_metric(values, began_s)
        yield from (cpu_s, memory, files, started)
