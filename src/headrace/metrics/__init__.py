"""Metrics of the server, their export, and watchdogs of its loops."""
