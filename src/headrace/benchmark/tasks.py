"""Texts of the presets whose answers matter: code to change, text to correct, to summarise and to extract from, and questions.

How much of an answer is a copy of what was asked decides what guessing tokens saves (docs/speculation.md), so these presets ask a model to do
something, in the form in which it is used to being asked. The code is Python's own and the text that of its help pages, so every machine with the
same version of Python has the same.
"""

import ast
import inspect
import random
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pydoc_data.topics import topics
from typing import Any

_MODULES = (
    "bisect",
    "calendar",
    "colorsys",
    "difflib",
    "fnmatch",
    "heapq",
    "shlex",
    "statistics",
    "string",
    "textwrap",
)
_CODE_CHARS = (300, 1000)
"""Functions of this size are taken: the whole of one fits into an answer."""
_PASSAGE_CHARS = 700
_NAMES = ("Ada", "Bruno", "Chidi", "Dana", "Emeka", "Farah", "Goran", "Hana")
_TOWNS = ("Lagos", "Oslo", "Lima", "Pune", "Turin", "Quito", "Cork", "Kyoto")
_TRADES = ("baker", "nurse", "welder", "teacher", "pilot", "farmer", "painter", "judge")

PERSON_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "age": {"type": "integer"},
                    "town": {"type": "string"},
                    "occupation": {"type": "string"},
                },
                "required": ["name", "age", "town", "occupation"],
                "additionalProperties": False,
            },
            "minItems": 3,
            "maxItems": 3,
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}

_QUESTIONS = (
    "What should I think about before I buy a bicycle?",
    "Why is the sky blue in the day and red in the evening?",
    "Write a short story about a lighthouse keeper.",
    "How do I learn to play the guitar in three months?",
    "Explain what a database index is to a child.",
    "Plan a day in a city by the sea.",
    "What were the causes of the industrial revolution?",
    "Write a letter to a friend who moved away.",
)


def edit_tasks(rng: random.Random, count: int) -> list[str]:
    """Functions without type hints, to which they are to be added."""
    chosen = _drawn(rng, _functions(), count)
    return [f"Add type hints to this function. Return the whole code.\n\n```python\n{code}```" for code in chosen]


def correction_tasks(rng: random.Random, count: int) -> list[str]:
    """Passages with misspelled words, to be repeated without."""
    return [
        f"Correct the spelling of this text. Repeat the whole text and change nothing else.\n\n{_misspelled(rng, passage)}"
        for passage in _drawn(rng, _passages(), count)
    ]


def summary_tasks(rng: random.Random, count: int) -> list[str]:
    """Passages to be summarised."""
    return [f"Summarise this text in a few bullet points.\n\n{text}" for text in _drawn(rng, _passages(), count)]


def extraction_tasks(rng: random.Random, count: int) -> list[str]:
    """Sentences about people, to be written as JSON of `PERSON_SCHEMA`."""

    def sentence() -> str:
        name, town, trade = (rng.choice(words) for words in (_NAMES, _TOWNS, _TRADES))
        return f"{name}, {rng.randint(20, 80)}, works as a {trade} and lives in {town}."

    keys = "with the keys name, age, town and occupation"
    return [
        f"Extract the people of this text as JSON, {keys}.\n\n{' '.join(sentence() for _ in range(3))}"
        for _ in range(count)
    ]


def question_tasks(rng: random.Random, count: int) -> list[str]:
    """Open questions, in whose answers little is a copy."""
    return _drawn(rng, _QUESTIONS, count)


TASKS: Mapping[str, Callable[[random.Random, int], list[str]]] = {
    "E": edit_tasks,
    "R": correction_tasks,
    "F": summary_tasks,
    "G": extraction_tasks,
    "H": question_tasks,
}
"""By preset."""


def _functions() -> list[str]:
    """Sources of the functions of some modules, without type hints."""
    found = []
    for name in _MODULES:
        source = inspect.getsource(import_module(name))
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.returns is None:
                code = (ast.get_source_segment(source, node) or "") + "\n"
                if _CODE_CHARS[0] <= len(code) <= _CODE_CHARS[1]:
                    found.append(code)
    return found


def _passages() -> list[str]:
    """Paragraphs of Python's help pages, some in a row until they are long enough."""
    found = []
    for name in sorted(topics):
        passage = ""
        for paragraph in topics[name].split("\n\n"):
            plain = textwrap.dedent(paragraph).strip()
            if (
                not 100 <= len(plain) <= _PASSAGE_CHARS or "::=" in plain or ">>>" in plain
            ):  # headings, tables, sessions
                continue
            passage = f"{passage}\n\n{plain}" if passage else plain
            if len(passage) >= _PASSAGE_CHARS:
                found.append(passage)
                passage = ""
    return found


def _misspelled(rng: random.Random, text: str) -> str:
    """Every tenth word or so has two of its letters in the wrong order."""
    words = text.split(" ")
    for index, word in enumerate(words):
        if len(word) > 4 and word.isalpha() and rng.random() < 0.15:
            at = rng.randrange(1, len(word) - 2)
            words[index] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


def _drawn(rng: random.Random, items: Sequence[str], count: int) -> list[str]:
    """`count` of the items in random order, again from the beginning when there are not as many."""
    order = rng.sample(items, len(items))
    return [order[index % len(order)] for index in range(count)]
