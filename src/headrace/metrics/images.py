"""Metrics of the images that clients send: what was loaded, refused and kept. Scraped in the event loop of the loader."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.messages.image_stats import ImageStats


class LoadedImages(Collector):
    """Reads the counts of a loader at each scrape. See `watch`."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._read: Callable[[], ImageStats] = ImageStats

    def watch(self, read: Callable[[], ImageStats]) -> None:
        """read: gives the counts so far."""
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Called by the registry."""
        stats = self._read()
        for name, text, value in (
            ("images_loaded", "Images that were given to requests.", stats.num_loaded),
            ("image_cache_hits", "Images that had been prepared for an earlier request, or were being.", stats.num_cache_hits),
            ("image_fetch_seconds", "Spent on fetching images, waiting for a place included.", stats.fetch_s),
            ("image_decode_seconds", "Spent on decoding and preparing images, waiting included.", stats.decode_s),
            ("image_processes_killed", "Processes that were ended because an image took too long or too much.", stats.num_killed),
        ):  # fmt: skip
            family = CounterMetricFamily(f"headrace:{name}", text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
        refused = CounterMetricFamily(
            "headrace:images_refused",
            "Images that were refused, by the kind of the reason.",
            labels=["model_name", "reason"],
        )
        for reason, count in stats.num_refused.items():
            refused.add_metric([self._model_name, reason], count)
        yield refused
        kept = GaugeMetricFamily("headrace:image_cache_bytes", "Prepared images that are kept.", labels=["model_name"])
        kept.add_metric([self._model_name], stats.cache_bytes)
        yield kept
