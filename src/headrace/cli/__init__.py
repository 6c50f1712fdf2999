"""The command line, `headrace`. Commands import what they run only when they run it."""

from headrace.cli.app import main

__all__ = ["main"]
