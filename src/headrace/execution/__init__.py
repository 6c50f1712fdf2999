"""Runs a model: loading, memory, the step, and the worker that the scheduler uses."""
