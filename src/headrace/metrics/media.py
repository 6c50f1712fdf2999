"""Metrics of the media that clients send: what was loaded, refused and kept. Scraped in the event loop of the loader."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.media_kinds import MediaKind
from headrace.messages.media import MediaStats


class LoadedMedia(Collector):
    """Reads the counts of a loader at each scrape. See `watch`."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._read: Callable[[], MediaStats] = MediaStats

    def watch(self, read: Callable[[], MediaStats]) -> None:
        """read: gives the counts so far."""
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Called by the registry."""
        stats = self._read()
        loaded: dict[str, float] = {kind: stats.num_loaded.get(kind, 0) for kind in MediaKind}
        cached = "Media items that had been prepared for an earlier request, or were being prepared for one."
        decoded = "Time spent on decoding and preparing media items, waiting included."
        killed = "Processes that were ended because an item took too much time or memory."
        yield self._counter("media_loaded", "Media items that were given to requests.", loaded, "kind")
        yield self._counter("media_refused", "Media items that were refused, by reason.", stats.num_refused, "reason")
        yield self._counter("media_cache_hits", cached, {"": stats.num_cache_hits})
        yield self._counter(
            "media_fetch_seconds", "Time spent on fetching files, waiting included.", {"": stats.fetch_s}
        )
        yield self._counter("media_decode_seconds", decoded, {"": stats.decode_s})
        yield self._counter("media_processes_killed", killed, {"": stats.num_killed})
        kept = GaugeMetricFamily("headrace:media_cache_bytes", "Bytes of cached media items.", labels=["model_name"])
        kept.add_metric([self._model_name], stats.cache_bytes)
        yield kept

    def _counter(self, name: str, text: str, values: Mapping[str, float], label: str = "") -> CounterMetricFamily:
        """values: by the value of the label, if there is one."""
        family = CounterMetricFamily(f"headrace:{name}", text, labels=["model_name", *([label] if label else [])])
        for key, value in values.items():
            family.add_metric([self._model_name, *([key] if label else [])], value)
        return family
