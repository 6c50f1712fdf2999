"""What each process of the engine uses: processor time, memory, open files. Read from the system when metrics are scraped.

Owns the list of processes to look at. The names are the usual ones of Prometheus' clients, without our prefix, with a label `process`.
Used in the event loop of the main process.
"""

import os
from collections.abc import Callable, Iterable, Iterator

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

Processes = Callable[[], Iterable[tuple[str, int]]]
"""Name and process id of each process that lives now."""


class ProcessUse(Collector):
    """Processor time, memory and open files of the main process, and of those that `watch` names."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._sources: list[Processes] = [lambda: [("main", os.getpid())]]

    def watch(self, processes: Processes) -> None:
        """Include these processes. Asked at every scrape; one that has ended is left out."""
        self._sources.append(processes)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Called by the registry."""
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
