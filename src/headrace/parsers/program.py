"""A format bound to a tokenizer: which terminals are one token and match by id, and which match by text."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import regex

from headrace.parsers.table import Go, Kind, ReasoningTable, State, Table

_SHORTEST_PART = 3
"""Added tokens with fewer characters are no part of a terminal worth a mark: line breaks, runs of blanks, single brackets."""


@dataclass(frozen=True, slots=True)
class Found:
    start: int
    end: int
    go: Go
    captures: Mapping[str, str]


@dataclass(slots=True)
class BoundState:
    """A state as the machine runs it. marks: terminals by token id. texts: terminals by text; pattern finds the first, the longest of several."""

    name: str
    kind: Kind
    table: State
    marks: dict[int, Go] = field(default_factory=dict)
    texts: dict[str, Go] = field(default_factory=dict)
    pattern: re.Pattern[str] | None = None
    longest: int = 0
    beginnings: frozenset[str] = frozenset()
    first: tuple[str, ...] = ()
    patterns: list[tuple["regex.Pattern[str]", Go]] = field(default_factory=list)

    def find(self, text: str, at: int, is_end: bool) -> tuple["Found | None", int]:
        """The first terminal in `text` from `at` on that is certain, and the end of what is certain if there is none."""
        stop = len(text) if is_end or not self.texts else self.settled_end(text, at)
        found = self.pattern.search(text, at) if self.pattern else None
        best = None
        if found is not None and found.start() < stop:
            best = Found(found.start(), found.end(), self.texts[found[0]], {})
        for pattern, go in self.patterns:
            match = pattern.search(text, at, partial=not is_end)
            if match is None or (is_end and match.end() == match.start()):
                continue
            if not is_end and (match.partial or match.end() == len(text)):
                stop = min(stop, match.start())
            elif best is None or (match.start(), -match.end()) < (best.start, -best.end):
                captures = {name: group for name, group in match.groupdict().items() if group is not None}
                best = Found(match.start(), match.end(), go, captures)
        return (best, stop) if best is not None and best.start < stop else (None, stop)

    def settle(self) -> None:
        if not self.texts:
            return
        texts = sorted(self.texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, texts)))
        self.longest = len(texts[0])
        self.beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self.first = tuple({text[0] for text in texts})

    def settled_end(self, text: str, at: int) -> int:
        """The end of what is certain in `text` from `at` on: from there to the end it could begin a terminal, or one longer than it is."""
        size = len(text)
        at = max(at, size - self.longest + 1)
        starts = [start for character in self.first if (start := text.find(character, at)) >= 0]
        if not starts:
            return size
        return next((start for start in range(min(starts), size) if text[start:] in self.beginnings), size)


@dataclass(frozen=True, slots=True)
class Program:
    """What the machine runs.

    states: by name. start: the first. texts: the text of each mark. live: marks that are terminals of some state; the others are read as their
    text.
    """

    states: Mapping[str, BoundState]
    start: str
    texts: Mapping[int, str]
    live: frozenset[int]


def terminals(table: Table, reasoning: ReasoningTable | None) -> list[str]:
    states = table.states.values()
    found = [*table.opens, *(text for state in states for text in state.on), *table.parts]
    # A token's text in a regular expression is the text, apart from what is escaped.
    found += [pattern.replace("\\", "") for state in states for pattern, _ in state.patterns]
    if reasoning is not None:
        found += [*reasoning.opens, *reasoning.closes]
    return list(dict.fromkeys(found))


def marks(texts: Iterable[str], special: Mapping[str, int]) -> dict[int, str]:
    """The added tokens that these terminals consist of, or contain: id -> text."""
    found: dict[int, str] = {}
    for text in texts:
        if text in special:
            found[special[text]] = text
        else:
            found.update(
                (token_id, part)
                for part, token_id in special.items()
                if len(part) >= _SHORTEST_PART and part in text and part.strip()
            )
    return found


def bind(
    table: Table,
    reasoning: ReasoningTable | None,
    special: Mapping[str, int],
    known: Mapping[int, str],
    by_text: bool = False,
) -> Program:
    """A program of the given tables. special: texts of added tokens and their ids. known: all marks that may come (`marks`).
    by_text: terminals that are added tokens match as text, too."""
    tables: dict[str, State] = {"content": State(Kind.CONTENT), **table.states}
    tables["content"] = _with(tables["content"], table.opens)
    if reasoning is not None:
        into = {text: Go("reasoning") for text in reasoning.opens}
        out = {text: Go(table.start, closes=True) for text in reasoning.closes}
        # A model that begins a call has ended its reasoning; only a special token says so for certain.
        ended = {text: go for text, go in table.opens.items() if text in special}
        tables["reasoning"] = State(Kind.REASONING, {**ended, **out})
        tables["content"] = _with(tables["content"], into)
    bound_to = {} if table.is_text else special
    states = {name: _bound(name, state, bound_to, by_text) for name, state in tables.items()}
    live = frozenset(token_id for state in states.values() for token_id in state.marks)
    return Program(states, table.start, known, live)


def without_calls(table: Table) -> Table:
    """A table of whole messages whose calls, where they are between terminals, stay in the content."""
    calls = {name for name, state in table.states.items() if state.kind in (Kind.REGION, Kind.READER)}
    states = {
        name: replace(
            state,
            on={text: go for text, go in state.on.items() if go.to not in calls},
            patterns=[(pattern, go) for pattern, go in state.patterns if go.to not in calls],
        )
        for name, state in table.states.items()
    }
    opens = {text: go for text, go in table.opens.items() if go.to not in calls}
    return replace(table, states=states, opens=opens)


def _with(state: State, on: Mapping[str, Go]) -> State:
    return replace(state, on={**on, **state.on})


def _bound(name: str, table: State, special: Mapping[str, int], by_text: bool) -> BoundState:
    state = BoundState(name, table.kind, table)
    for text, go in table.on.items():
        if text in special:
            state.marks[special[text]] = go
        if by_text or text not in special:
            state.texts[text] = go
    state.patterns = [(regex.compile(pattern, regex.DOTALL), go) for pattern, go in table.patterns]
    state.settle()
    return state
