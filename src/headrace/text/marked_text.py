"""Marks text from users, so that the text of a special token in a message is never read as that token.

Every special token begins and ends with one of a few characters (`<`, `>`, `[` ...), its edges. `Marks` replaces each of them by a
private-use character, one for one. In marked text a special token written by the template has its own edges, and one that came from a
message, whole or in part, has a marked edge. Strings of the class `Marked` compare and search like the originals, so that a
template which looks into a message takes the same path, and trimming, splitting, slicing and changing case keep the marks.

Does not know templates or tokens. Plain computation, on any thread.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from headrace.errors import RequestError


class Marks:
    """One private-use character for each edge character; none of them occurs in the texts."""

    def __init__(self, edges: set[str], texts: Sequence[str]) -> None:
        used: set[str] = set().union(*texts)
        free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
        self._forth: dict[int, str] = {}
        for edge in sorted(edges):
            mark = next(free, None)
            if mark is None:
                raise RequestError("the messages use up the private-use characters of Unicode", param="messages")
            self._forth[ord(edge)] = mark
        self.back = {mark: chr(edge) for edge, mark in self._forth.items()}
        self._back = {ord(mark): edge for mark, edge in self.back.items()}
        self._any = re.compile("[" + "".join(self.back) + "]")

    def mark(self, text: str) -> str:
        """Replace edge characters by their marks; marked text does not change."""
        return str.translate(text, self._forth)

    def unmark(self, text: str) -> str:
        """The inverse of `mark`; the length stays the same."""
        return str.translate(text, self._back)

    def any_in(self, text: str, start: int, end: int) -> bool:
        """Whether text[start:end] contains a mark."""
        return self._any.search(text, start, end) is not None


class Marked(str):
    """A marked string that compares and searches like the original text.

    Made of marked characters; arguments of its methods are marked first, and strings it returns are again of this class.
    """

    __slots__ = ("_marks",)
    _marks: Marks

    def __new__(cls, marked: str, marks: Marks) -> "Marked":
        self = super().__new__(cls, marked)
        self._marks = marks
        return self

    def __str__(self) -> str:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str.__eq__(self._marks.mark(self), self._marks.mark(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._marks.unmark(self))

    def __contains__(self, part: object) -> bool:
        return isinstance(part, str) and str.__contains__(self, self._marks.mark(part))

    def __radd__(self, left: str) -> str:
        # Template text is prepended: it must keep its edges, so it is not marked.
        return Marked(str.__add__(left, self), self._marks)

    def __add__(self, right: str) -> str:
        return Marked(str.__add__(self, right), self._marks)

    def __iter__(self) -> Iterator[str]:
        return (Marked(char, self._marks) for char in str.__iter__(self))

    def replace(self, old: str, new: str, count: Any = -1) -> str:
        # Text that the template inserts is its own.
        return Marked(str.replace(self, self._marks.mark(old), new, count), self._marks)

    def join(self, parts: Any) -> str:
        return Marked(str.join(self, parts), self._marks)


def _wrapped(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(self: Marked, *args: Any, **options: Any) -> Any:
        marks = self._marks
        return _rewrap(method(self, *(_mark_argument(arg, marks) for arg in args), **options), marks)

    call.__name__ = name
    return call


def _mark_argument(arg: Any, marks: Marks) -> Any:
    if isinstance(arg, str):
        return marks.mark(arg)
    return tuple(_mark_argument(item, marks) for item in arg) if isinstance(arg, tuple) else arg


def _rewrap(value: Any, marks: Marks) -> Any:
    if isinstance(value, str):
        return Marked(value, marks)
    if isinstance(value, list | tuple):
        return type(value)(_rewrap(item, marks) for item in value)
    return value


_SAME_ON_MARKED: Final = (
    *("__getitem__", "capitalize", "casefold", "count", "endswith", "find", "index", "lower", "lstrip", "partition"),
    *("removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
    *("startswith", "strip", "swapcase", "title", "upper"),
)
for _name in _SAME_ON_MARKED:
    setattr(Marked, _name, _wrapped(_name))


def strings_of(value: Any) -> Iterator[str]:
    """Every string in a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_of(key)
            yield from strings_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_of(item)


def mark_leaves(value: Any, marks: Marks) -> Any:
    """The value with every string marked. Keys stay lookups of the template where they have no edge characters."""
    if isinstance(value, str):
        return Marked(marks.mark(value), marks)
    if isinstance(value, Mapping):
        return {_mark_key(key, marks): mark_leaves(item, marks) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mark_leaves(item, marks) for item in value]
    return value


def _mark_key(key: Any, marks: Marks) -> Any:
    if not isinstance(key, str):
        return key
    marked = marks.mark(key)
    return key if marked == key else Marked(marked, marks)
