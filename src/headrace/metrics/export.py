"""Metrics as the text that Prometheus reads. Called by the HTTP server; cheap enough for its event loop."""

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from headrace.metrics.catalog import Metrics

CONTENT_TYPE = CONTENT_TYPE_LATEST


def render(metrics: Metrics) -> bytes:
    """The exposition text of every metric."""
    return generate_latest(metrics.registry)
