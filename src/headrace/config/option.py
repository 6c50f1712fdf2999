"""One option: its default, its group in the help, what it means, and the values that it may have (type, choices, range). Pure; any process."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from headrace.errors import ConfigError

MAX_INT = 2**63 - 1
LONGEST_S = 1e9
"""About thirty years; longer times are refused, since no system clock counts that far."""


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
SECONDS = Bounds(least=0.0, most=LONGEST_S)
FILLED = Bounds(filled=True)


def option(default: Any, group: str, help_text: str, bounds: Bounds = Bounds()) -> Any:
    """A field of the dataclass."""
    return field(default=default, metadata={"group": group, "help": help_text, "bounds": bounds})


def check_option(option: str, value: object, annotation: Any, bounds: Bounds) -> None:
    """Raises ConfigError, naming the option, unless `value` has the field's type and is within its bounds."""
    if get_origin(annotation) is Literal:
        _check_choice(option, value, get_args(annotation))
        return
    kinds = get_args(annotation) or (annotation,)
    if value is None and NoneType in kinds:
        return
    kind = kinds[0]
    # An int is a fine float; a bool is neither.
    if type(value) is not kind and not (kind is float and type(value) is int):
        what = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
        raise ConfigError(f"{option} must be {what}, got {value!r:.80}")
    if isinstance(value, str) and bounds.filled and not value.strip():
        raise ConfigError(f"{option} must not be empty; leave it out instead")
    if isinstance(value, int | float) and kind is not bool:
        _check_number(option, value, bounds)


def _check_choice(option: str, value: object, choices: Collection[object]) -> None:
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ConfigError(f"{option} must be one of {', '.join(map(str, choices))}, got {value!r:.80}")


def _check_number(option: str, value: float, bounds: Bounds) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{option} must be a finite number, got {value}")
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise ConfigError(f"{option} is too large a number")
    for holds, what in (
        (value >= bounds.least, f"at least {bounds.least:g}"),
        (value <= bounds.most, f"at most {bounds.most:g}"),
        (value > bounds.above, f"above {bounds.above:g}"),
        (value < bounds.below, f"below {bounds.below:g}"),
    ):
        if not holds:
            raise ConfigError(f"{option} must be {what}, got {value}")
