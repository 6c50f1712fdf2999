"""Headrace: an LLM serving runtime. See docs/architecture.md for the rooms of the house."""

__version__ = "0.1.0"
