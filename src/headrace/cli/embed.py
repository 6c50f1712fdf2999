"""`headrace embed`: vectors of texts, or how similar the texts are. Owns what it prints."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

_SHOWN = 40
"""Characters of a text in the table."""


def print_vectors(answers: Sequence[dict[str, Any]]) -> None:
    """One JSON list of numbers a line, in the order of the texts."""
    for answer in answers:
        print(json.dumps(answer["embedding"]))


def print_similarities(texts: Sequence[str], answers: Sequence[dict[str, Any]], console: Console) -> None:
    """The cosine of each text with each, as a table."""
    vectors = [answer["embedding"] for answer in answers]
    table = Table("text", *(str(number) for number in range(1, len(texts) + 1)))
    for number, (text, vector) in enumerate(zip(texts, vectors, strict=True), start=1):
        shown = text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
        table.add_row(f"{number} {shown}", *(f"{cosine(vector, other):.3f}" for other in vectors))
    console.print(table)


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """The cosine of the angle between two vectors; 0 if one of them is 0."""
    lengths = (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0
