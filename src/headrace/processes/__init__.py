"""Starts, watches, restarts and ends the processes of an engine, and holds what each of them runs."""
