"""Metrics of the server, their export, and watchdogs of its loops; what happened to a request.

Read first: catalog.py (every metric, once), timeline.py (a request's).

export.py, process_use.py, media.py (those of the loader), compat.py (other servers' names), watchdog.py, spans.py (OpenTelemetry), crash_dump.py.
"""
