"""Metrics of the media that clients send: what was loaded, refused and kept. Scraped in the event loop of the loader."""

from collections.abc import Callable, Iterator

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
        for name, text, value in (
            ("media_cache_hits", "Items that had been prepared for an earlier request, or were being.", stats.num_cache_hits),
            ("media_fetch_seconds", "Spent on fetching files, waiting for a place included.", stats.fetch_s),
            ("media_decode_seconds", "Spent on decoding and preparing items, waiting included.", stats.decode_s),
            ("media_processes_killed", "Processes that were ended because an item took too long or too much.", stats.num_killed),
        ):  # fmt: skip
            family = CounterMetricFamily(f"headrace:{name}", text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
        loaded = CounterMetricFamily(
            "headrace:media_loaded",
            "Images, audio clips and videos that were given to requests.",
            labels=["model_name", "kind"],
        )
        for kind in MediaKind:
            loaded.add_metric([self._model_name, kind], stats.num_loaded.get(kind, 0))
        yield loaded
        refused = CounterMetricFamily(
            "headrace:media_refused",
            "Items that were refused, by the kind of the reason.",
            labels=["model_name", "reason"],
        )
        for reason, count in stats.num_refused.items():
            refused.add_metric([self._model_name, reason], count)
        yield refused
        kept = GaugeMetricFamily("headrace:media_cache_bytes", "Prepared items that are kept.", labels=["model_name"])
        kept.add_metric([self._model_name], stats.cache_bytes)
        yield kept
