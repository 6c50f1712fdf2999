"""How texts are normalised and cut where the `tokenizers` library has no exact model.

Owns parts that the library calls, in any thread: a normalizer (`Charsmap`) and pre-tokenizers (`Cutter`), which cannot be saved as tokenizer.json;
and what finds the pieces of a text.
"""

import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count
from math import inf

from tokenizers import AddedToken, NormalizedString, PreTokenizedString, decoders, normalizers, pre_tokenizers

from headrace.checkpoint.gguf_strings import Strings

Span = tuple[int, int]
_SLICES = 32
_PLAIN = [chr(code) for code in range(32, 127)]


class TextFinder:
    """Finds texts in a string: leftmost first, and of those the longest, as the library finds special tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(text for text in texts if text)
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(of_first, reverse=True) for first, of_first in lengths.items()}
        firsts = "".join(re.escape(first) for first in sorted(self._lengths))
        self._start = re.compile(f"[{firsts}]") if firsts else None
        # A special token that a user wrote has one of these at its ends.
        self.edges = frozenset(edge for text in self._texts for edge in (text[0], text[-1]))

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """(start, end) of every text found, in order, not overlapping. Time is linear in the text."""
        if self._start is None:
            return
        at = 0
        while found := self._start.search(text, at):
            start = found.start()
            at = start + 1
            for length in self._lengths[text[start]]:
                found_text = text[start : start + length]
                if found_text in self._texts:
                    at = start + len(found_text)
                    yield start, at
                    break


@dataclass(frozen=True, slots=True)
class TokenList:
    """What finds and decodes tokens of a `tokenizers.Tokenizer`, in its words: a tenth of its memory and time, since the texts stay as they are
    stored. added: by id."""

    tokens: Strings
    added: dict[int, AddedToken]
    decoder: decoders.Decoder

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        return len(self.tokens)

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.added

    def id_to_token(self, token_id: int) -> str | None:
        return self.tokens[token_id] if 0 <= token_id < len(self.tokens) else None

    def token_to_id(self, token: str) -> int | None:
        return self.tokens.find(token)


class Cutter:
    """A pre-tokenizer of which each piece is a token. cut: (start, end) of the pieces of a text, in order; what is between them is left out."""

    def __init__(self, cut: Callable[[str], list[Span]]) -> None:
        self._cut = cut

    def part(self) -> pre_tokenizers.PreTokenizer:
        """As the library takes it."""
        return pre_tokenizers.PreTokenizer.custom(self)

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        text.split(lambda _, part: _slices(part, self._cut(part.normalized), 0))


def _slices(text: NormalizedString, spans: list[Span], begin: int) -> list[NormalizedString]:
    """The spans, counted from `begin`. A slice takes time in proportion to what it is cut from: by halves."""
    if len(spans) <= _SLICES:
        return [_slice(text, start - begin, end - begin) for start, end in spans]
    half = len(spans) // 2
    middle, end = spans[half][0], spans[-1][1]
    return [
        *_slices(_slice(text, 0, middle - begin), spans[:half], begin),
        *_slices(_slice(text, middle - begin, end - begin), spans[half:], middle),
    ]


def _slice(text: NormalizedString, start: int, end: int) -> NormalizedString:
    part = text[start:end]
    assert part is not None, (start, end)
    return part


class BestPieces:
    """Cuts a text into the pieces whose scores have the greatest sum: Viterbi's algorithm for unigram models (Kudo, 2018,
    https://arxiv.org/abs/1804.10959).

    unknown: the score of a character that is no piece. falls_back: it becomes bytes; otherwise the first of a run of such characters stands for all.
    Among equal sums the last piece is as long as it can be, then the one before it and so on.
    """

    def __init__(self, scores: Mapping[str, float], unknown: float, falls_back: bool = False) -> None:
        self._scores = scores
        self._unknown = unknown
        self._falls_back = falls_back
        lengths: dict[str, set[int]] = {}
        for piece in scores:
            if piece:
                lengths.setdefault(piece[-1], set()).add(len(piece))
        self._lengths = {last: sorted(of_last, reverse=True) for last, of_last in lengths.items()}

    def cut(self, text: str) -> list[Span]:
        sums, starts = [0.0], [0]
        for end in range(1, len(text) + 1):
            best, begin = -inf, end - 1
            for length in self._lengths.get(text[end - 1], ()):
                score = None if length > end else self._scores.get(text[end - length : end])
                if score is not None and sums[end - length] + score > best:
                    best, begin = sums[end - length] + score, end - length
            if text[end - 1] not in self._scores and sums[end - 1] + self._unknown > best:
                best, begin = sums[end - 1] + self._unknown, end - 1
            sums.append(best)
            starts.append(begin)
        spans: list[Span] = []
        end = len(text)
        while end:
            spans.append((starts[end], end))
            end = starts[end]
        spans.reverse()
        if self._falls_back:
            return spans
        known = [text[start:end] in self._scores for start, end in spans]
        return [span for at, span in enumerate(spans) if at == 0 or known[at] or known[at - 1]]


def passing_over(texts: Iterable[str], pieces: Callable[[], BestPieces]) -> pre_tokenizers.PreTokenizer:
    """Has a unigram model of the library never find these texts, which are tokens of it: where one stands, a text is cut here.

    pieces: all others; asked for when first needed.
    """
    finder, others = TextFinder(texts), cache(pieces)

    def cut(text: str) -> list[Span]:
        return [(0, len(text))] if next(finder.find(text), None) is None else others().cut(text)

    return Cutter(cut).part()


class Charsmap:
    """Sentencepiece's normalizer: at each place the longest key is replaced. The library's `Precompiled` does so by grapheme, and leaves decomposed
    Hangul and letters with two marks as they are.

    blob: the number of bytes of the keys, their trie as a double array, and texts that end with a zero byte. A unit of the double array has the label
    in bits 0-7, whether a key ends in bit 8, and the offset of its children in bits 10-30, times 256 if bit 9 is set; the unit of an end has
    the place of the text (https://github.com/s-yata/darts-clone, which sentencepiece uses). Raises ValueError if it is too short.
    """

    def __init__(self, blob: bytes) -> None:
        size = int.from_bytes(blob[:4], "little")
        if size < 4 or 4 + size > len(blob):
            raise ValueError("its trie is outside it")
        self._units = array("I", blob[4 : 4 + size // 4 * 4])
        if sys.byteorder == "big":
            self._units.byteswap()
        self._texts = blob[4 + size :]
        self._root = _children(self._units[0])
        plain = [char for char in _PLAIN if not any(self._longest(f"{char}{after}".encode(), 0)[0] for after in _PLAIN)]
        # Most text is passed over: a key begins with another character, or goes on with one.
        other = f"[^{re.escape(''.join(plain))}]" if plain else "."
        self._regions = re.compile(f"(?s:{other}|.(?={other}))+")

    def part(self) -> normalizers.Normalizer:
        """As the library takes it."""
        return normalizers.Normalizer.custom(self)

    def normalize(self, text: NormalizedString) -> None:
        chars: str = text.normalized
        new: dict[int, str] = {}
        removed: set[int] = set()
        for region in self._regions.finditer(chars):
            raw, at, place = region[0].encode(), 0, region.start()
            while at < len(raw):
                end, replacement = self._longest(raw, at)
                if not end:
                    at, place = at + _width(raw[at]), place + 1
                    continue
                size = len(raw[at:end].decode())
                # At the last character of the key, which is where a token ends in the text.
                if replacement:
                    new[place + size - 1] = replacement
                removed.update(range(place, place + size - bool(replacement)))
                at, place = end, place + size
        if not new and not removed:
            return
        # The library, which keeps track of places, maps one character to one: longer texts go by way of characters of private use.
        spare = (char for char in map(chr, range(0xF0000, 0x10FFFE)) if char not in chars)
        single = {each: each if len(each) == 1 else next(spare, each[0]) for each in set(new.values())}
        number = count()
        text.map(lambda char: single[new[at]] if (at := next(number)) in new else char)
        number = count()
        text.filter(lambda _: next(number) not in removed)
        for whole, char in single.items():
            if char != whole[0]:
                text.replace(char, whole)

    def _longest(self, raw: bytes, at: int) -> tuple[int, str]:
        """End of the longest key that begins at `at`, and what replaces it; (0, "") if there is none."""
        units, node, end, place = self._units, self._root, 0, 0
        for index in range(at, len(raw)):
            label = raw[index]
            node ^= label
            if not label or node >= len(units) or units[node] & 0x800000FF != label:
                break
            is_end = units[node] & 256
            node ^= _children(units[node])
            whole = index + 1 == len(raw) or raw[index + 1] & 0xC0 != 0x80
            if is_end and whole and node < len(units):
                end, place = index + 1, units[node] & 0x7FFFFFFF
        return end, self._texts[place : self._texts.find(b"\0", place)].decode(errors="replace") if end else ""


def _children(unit: int) -> int:
    return unit >> 10 << ((unit & 512) >> 6)


def _width(lead: int) -> int:
    """Bytes of the character that begins with this one in UTF-8."""
    return 1 + (lead >= 0xC0) + (lead >= 0xE0) + (lead >= 0xF0)
