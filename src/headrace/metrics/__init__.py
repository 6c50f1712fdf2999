"""Metrics of the server, their export, and watchdogs of its loops; what happened to a request.

Read first: catalog.py (every metric, once; some are read when they are scraped), timeline.py (a request's, and dumps of them).

export.py (also under other servers' names), watchdog.py, spans.py (OpenTelemetry).
"""
