"""Outputs cut into pieces in many ways, and what a parser makes of them."""

import itertools
import json
import random
import re
from dataclasses import dataclass

from headrace.parsers.base import Arguments, Piece, Reasoning, Text, ToolCall
from headrace.parsers.registry import choose


@dataclass(frozen=True)
class Parsed:
    """A whole output. calls: (name, JSON text of the arguments)."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    ids: tuple[str, ...] = ()
    num_reasoning_tokens: int = 0

    @property
    def decoded(self):
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def fold(events, num_reasoning_tokens=0):
    """Events as one message. Checks what holds for every list of events."""
    content, reasoning, calls, ids = [], [], [], []
    for event in events:
        match event:
            case Text(text):
                assert text
                content.append(text)
            case Reasoning(text):
                assert text
                reasoning.append(text)
            case ToolCall(index, id, name):
                assert index == len(calls)
                calls.append([name, []])
                ids.append(id)
            case Arguments(index, text):
                assert text
                assert index == len(calls) - 1
                calls[index][1].append(text)
    return Parsed(
        "".join(content),
        "".join(reasoning),
        tuple((name, "".join(parts)) for name, parts in calls),
        tuple(ids),
        num_reasoning_tokens,
    )


def make_format(tool_parser=None, reasoning_parser=None, special=(), template=""):
    return choose(
        template=template,
        special={text: 1000 + i for i, text in enumerate(special)},
        tool_parser=tool_parser or "none",
        reasoning_parser=reasoning_parser or "none",
    )


def tokens_of(text, special, size=4):
    """A text as tokens: added tokens whole, the rest in parts of `size` characters."""
    parts = (
        re.split("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")", text)
        if special
        else [text]
    )
    tokens = []
    for i, part in enumerate(parts):
        if i % 2:
            tokens.append((part, special[part]))
        else:
            tokens += [(part[at : at + size], 1) for at in range(0, len(part), size)]
    return tokens


def pieces_of(tokens, marks):
    return [Piece("" if token_id in marks else text, token_id) for text, token_id in tokens]


def cut(pieces, rng):
    """The same pieces with texts cut anywhere: a part that does not begin with its token continues it."""
    parts = []
    for text, token_id in pieces:
        at = rng.randint(0, len(text)) if text else 0
        parts.append(Piece(text[:at], token_id) if at else Piece(text, token_id))
        if 0 < at < len(text):
            parts.append(Piece(text[at:]))
    return parts


class Output:
    """One output of a format. options: of `OutputFormat.parser`."""

    def __init__(self, format, text, **options):
        self.format = format
        self.options = options
        self.tokens = tokens_of(text, format.special)
        self.pieces = pieces_of(self.tokens, format.mark_ids)

    def parse(self, pushes):
        counter = itertools.count()
        parser = self.format.parser(random=lambda: "abcdefghij"[next(counter) % 10], **self.options)
        events = [event for pieces in pushes for event in parser.push(pieces)]
        events += parser.finish()
        return fold(events, parser.num_reasoning_tokens)

    def whole(self):
        return self.parse([self.pieces])

    def characters(self):
        """Every text as single characters: (piece, whether it begins a token)."""
        return [
            Piece(character, token_id if i == 0 else -1)
            for text, token_id in self.pieces
            for i, character in enumerate(text or [""])
        ]

    def ways(self, num_random=8):
        """The same output, delivered in many ways."""
        characters = self.characters()
        yield "characters", [[piece] for piece in characters]
        for at in range(1, len(characters)):
            yield f"two parts at {at}", [characters[:at], characters[at:]]
        for size in (1, 5):
            yield f"{size} tokens", [self.pieces[at : at + size] for at in range(0, len(self.pieces), size)]
        rng = random.Random(7)
        for number in range(num_random):
            pieces = cut(self.pieces, rng)
            pushes, at = [], 0
            while at < len(pieces):
                size = rng.choice((1, 1, 2, 3, 8))
                pushes.append(pieces[at : at + size])
                at += size
            yield f"random {number}", pushes

    def check(self, num_random=8):
        """Every way gives the same as the whole output at once, which is returned."""
        whole = self.whole()
        for way, pushes in self.ways(num_random):
            assert self.parse(pushes) == whole, way
        return whole
