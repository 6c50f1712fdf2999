"""The workloads that every published figure is taken with, and the prompts they are made of.

Owns the presets and how their prompts are drawn. Does not send anything. Runs in the benchmark client's process.

The text is the English of Python's own help pages (`pydoc_data.topics`), cut at random places, so nothing has to be
downloaded and any two machines with the same tokenizer get the same prompts. Two prompts differ in their first tokens, so
a prefix cache helps in preset C only, which is about it.

The presets whose answers matter ask a model to do something, in the form in which it is used to being asked: how much of an answer is a copy of what
was asked decides what guessing tokens saves (docs/speculation.md). Their code is Python's own, their text that of its help pages.
"""

import ast
import inspect
import random
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pydoc_data.topics import topics
from typing import Any

from headrace.errors import ConfigError

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

_PERSON = {"name": "string", "age": "integer", "town": "string", "occupation": "string"}

PERSON_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {name: {"type": kind} for name, kind in _PERSON.items()},
                "required": list(_PERSON),
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

TokenIds = list[int]
SEED = 1234
_B_CONCURRENCIES = (1, 8, 32)
_B_REQUESTS = 64
_B_SHORTEST_TOKENS, _B_LONGEST_TOKENS = 128, 512
_SINGLE_STREAM_REQUESTS = 5
_C_SUFFIXES = 128
_C_REQUESTS = 64
_C_PREFIX_TOKENS, _C_SUFFIX_TOKENS = 1024, 32
_SHORT_REQUESTS, _SHORT_TOKENS = 32, 16
_LONG_REQUESTS, _LONG_TOKENS = 8, 8000
_TASKS = 32
_EMBEDDINGS = 1024


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


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request asks for: output of exactly max_new_tokens tokens (the end-of-sequence token is ignored), or of at most as many, if the model
    may end it (`ends`). schema: JSON schema that it must match. is_embedding: it asks for the prompt's embedding instead, and there is no output."""

    max_new_tokens: int
    ends: bool = False
    schema: Mapping[str, Any] | None = None
    is_embedding: bool = False


EMBEDDING = Answer(0, is_embedding=True)


@dataclass(frozen=True, slots=True)
class Preset:
    """What one named workload asks for.

    answer: of each request. concurrency: requests in flight in the closed loop. primed: send the shared prefix once before the clock starts.
    start_gap_s: between the first requests, one of each that is in flight; 0 = all at once.
    """

    name: str
    description: str
    answer: Answer
    concurrency: int
    primed: bool = False
    start_gap_s: float = 0.0


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("A", "one stream, 128 tokens in, 256 out", Answer(256), 1),
        Preset("B1", "64 requests, 128-512 in, 128 out, one at a time", Answer(128), 1),
        Preset("B8", "64 requests, 128-512 in, 128 out, 8 at a time", Answer(128), 8),
        Preset("B32", "64 requests, 128-512 in, 128 out, 32 at a time", Answer(128), 32),
        Preset(
            "C",
            "64 requests, 1,024 shared tokens + 32 in, 32 out, 16 at a time, prefix cached",
            Answer(32),
            16,
            primed=True,
        ),
        Preset("Ccold", "the same, prefix not cached when the clock starts; the first 16 at once", Answer(32), 16),
        Preset("Cspaced", "as Ccold, the first 16 arrive 20 ms apart", Answer(32), 16, start_gap_s=0.02),
        Preset("D", "prefill of one 2,048-token prompt", Answer(1), 1),
        Preset("D8k", "prefill of one 8,000-token prompt", Answer(1), 1),
        Preset("LS", "32 requests, 16 in, 8 out, one at a time, beside 8,000-token prompts", Answer(8), 1),
        Preset("E", "32 chats that change code, up to 256 out", Answer(256, ends=True), 1),
        Preset("R", "32 chats that repeat a text with corrections, up to 256 out", Answer(256, ends=True), 1),
        Preset("F", "32 chats that summarise, up to 128 out", Answer(128, ends=True), 1),
        Preset("G", "32 chats that extract JSON, with a schema, up to 192 out", Answer(192, True, PERSON_SCHEMA), 1),
        Preset("H", "32 chats with open questions, up to 128 out", Answer(128, ends=True), 1),
        Preset("EMB", "1,024 embeddings of 128 tokens, 32 at a time", EMBEDDING, 32),
        Preset("EMB32", "2,048 embeddings of 32 tokens, 32 at a time", EMBEDDING, 32),
    )
}


@dataclass(frozen=True, slots=True)
class Workload:
    """A preset with its prompts. priming: sent one after the other before the clock starts. beside: sent one after the other while `prompts` are, for
    one token each; figures are those of `prompts`, except their own times to the first token."""

    preset: Preset
    prompts: list[TokenIds]
    priming: list[TokenIds]
    beside: list[TokenIds] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkloadSet:
    """Everything one repetition sends. warm_up: requests that are not reported."""

    warm_up: list[TokenIds]
    workloads: dict[str, Workload]


def corpus(encode: Callable[[str], TokenIds]) -> TokenIds:
    """Token ids of the whole text. encode: text -> ids, adding no special tokens."""
    return encode("\n".join(topics[name] for name in sorted(topics)))


def preset_names(text: str) -> list[str]:
    """Names of a comma-separated list, in order. Raises ConfigError for one that is unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in PRESETS]
    if unknown or not names:
        raise ConfigError(f"--presets takes any of {', '.join(PRESETS)}, got {text!r}")
    if len({PRESETS[name].answer.is_embedding for name in names}) > 1:
        raise ConfigError(
            f"--presets {text}: no server both generates and makes embeddings; measure one after the other"
        )
    return names


def make_workloads(
    text_ids: Sequence[int],
    ask: Callable[[str], TokenIds],
    seed: int = SEED,
    max_requests: int | None = None,
    rounds: int | None = None,
) -> WorkloadSet:
    """Draw the prompts of every preset from `text_ids`, and the tasks. ask: the prompt that asks a model to do what a text says.

    All presets are drawn each time, in one order, so that a preset has the same prompts whichever others are selected.
    max_requests: keep at most this many requests of each preset. rounds: at most this many per request in flight.
    """
    rng = random.Random(seed)

    def cut(num_tokens: int) -> TokenIds:
        start = rng.randrange(len(text_ids) - num_tokens)
        return list(text_ids[start : start + num_tokens])

    def shared() -> list[TokenIds]:
        prefix = cut(_C_PREFIX_TOKENS)
        return [prefix + cut(_C_SUFFIX_TOKENS) for _ in range(_C_SUFFIXES)]

    warm_up = [cut(200) for _ in range(8)]
    prompts = {"A": [cut(128) for _ in range(_SINGLE_STREAM_REQUESTS)]}
    for concurrency in _B_CONCURRENCIES:
        prompts[f"B{concurrency}"] = [
            cut(rng.randint(_B_SHORTEST_TOKENS, _B_LONGEST_TOKENS)) for _ in range(_B_REQUESTS)
        ]
    warm, cold = shared(), shared()
    prompts["C"], prompts["Ccold"] = warm[:_C_REQUESTS], cold[:_C_REQUESTS]
    prompts["D"] = [cut(2048) for _ in range(_SINGLE_STREAM_REQUESTS)]
    prompts["Cspaced"] = shared()[:_C_REQUESTS]
    prompts["D8k"] = [cut(8000) for _ in range(_SINGLE_STREAM_REQUESTS)]
    for name, tasks in TASKS.items():
        prompts[name] = [ask(text) for text in tasks(rng, _TASKS)]
    prompts["EMB"] = [cut(128) for _ in range(_EMBEDDINGS)]
    prompts["EMB32"] = [cut(32) for _ in range(2 * _EMBEDDINGS)]
    prompts["LS"] = [cut(_SHORT_TOKENS) for _ in range(_SHORT_REQUESTS)]
    beside = {"LS": [cut(_LONG_TOKENS) for _ in range(_LONG_REQUESTS)]}

    def kept(preset: Preset) -> list[TokenIds]:
        chosen = prompts[preset.name][:max_requests]
        return chosen if rounds is None else chosen[: rounds * preset.concurrency]

    workloads = {
        name: Workload(preset, kept(preset), [warm[-1]] if preset.primed else [], beside.get(name, []))
        for name, preset in PRESETS.items()
    }
    return WorkloadSet(warm_up, workloads)
