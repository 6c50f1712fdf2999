"""One option of `ServerArgs`: its default, its group in the help, what it means, and its bounds."""

from dataclasses import field
from typing import Any

from headrace.config.bounds import LONGEST_S, Bounds

POSITIVE = Bounds(least=1)
COUNT = Bounds(least=0)
SECONDS = Bounds(least=0.0, most=LONGEST_S)
FILLED = Bounds(filled=True)


def option(default: Any, group: str, help_text: str, bounds: Bounds = Bounds()) -> Any:
    """A field of the dataclass."""
    return field(default=default, metadata={"group": group, "help": help_text, "bounds": bounds})
