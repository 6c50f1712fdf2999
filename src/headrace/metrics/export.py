"""Metrics in Prometheus' text format. Called by the HTTP server; cheap enough for its event loop."""

from typing import Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from headrace.metrics.catalog import Metrics
from headrace.metrics.compat import Renamed

CONTENT_TYPE = CONTENT_TYPE_LATEST


def render(metrics: Metrics, dialect: Literal["none", "vllm", "sglang"] = "none") -> bytes:
    """The exposition text of every metric. dialect: another server whose names are exported as well."""
    text = generate_latest(metrics.registry)
    if dialect == "none":
        return text
    others = CollectorRegistry()
    others.register(Renamed(metrics.registry, dialect))
    return text + generate_latest(others)
