"""What an option of the table is made of: its range, its group in the help, its default and its meaning."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Bounds:
    """Range of a number: least <= value <= most, above < value < below. `filled`: a text must not be blank."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    filled: bool = False


POSITIVE = Bounds(least=1)
COUNT = Bounds(least=0)
SECONDS = Bounds(least=0.0, most=1e9)  # about thirty years: no system clock counts that far
FILLED = Bounds(filled=True)


def group(name: str) -> Callable[..., Any]:
    """What makes the options of a group of the help: fields of the dataclass, each with its default, its meaning and its range."""

    def option(default: Any, help_text: str, bounds: Bounds = Bounds()) -> Any:
        return field(default=default, metadata={"group": name, "help": help_text, "bounds": bounds})

    return option
