"""Metrics in Prometheus' text format. Called by the HTTP server; cheap enough for its event loop."""

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from headrace.metrics.catalog import Metrics
from headrace.metrics.compat import Names, Renamed, Underscored

CONTENT_TYPE = CONTENT_TYPE_LATEST


def render(metrics: Metrics, names: Names = "none") -> bytes:
    """The exposition text of every metric. names: see `Names`."""
    if names == "underscore":
        return _text(Underscored(metrics.registry))
    ours = generate_latest(metrics.registry)
    return ours if names == "none" else ours + _text(Renamed(metrics.registry, names))


def _text(collector: Collector) -> bytes:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)
