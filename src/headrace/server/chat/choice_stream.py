"""The output of one choice of a chat as events: text, reasoning, tool calls and their arguments.

Owns how updates of a sample become pieces for the parser of the model's output format, and the final reason. Every chat API renders these events;
none reads another's chunks. Runs in the event loop that serves HTTP.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.frontend.sample_update import SampleUpdate
from headrace.parsers.base import Arguments, Event, Piece, Reasoning, Text, ToolCall
from headrace.parsers.engine import OutputParser
from headrace.text.incremental import IncrementalDecoder
from headrace.text.tokenizers import Tokenizer


class TokenPieces:
    """Text that arrives behind its tokens, cut into what each token adds.

    The text of an update may end earlier than its tokens do (it may begin a stop string, or be half a character) and is trimmed where a stop
    string was found; so the tokens are decoded here once more, and wait for their text.
    mark_ids: tokens that are given as pieces without text, whether or not the text shows them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        mark_ids: frozenset[int],
        context_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._marks = mark_ids
        self._decoder = IncrementalDecoder(
            tokenizer,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            context_ids=context_ids,
        )
        # (token id, how many characters of text belong to it); -1: what is left of the token before.
        self._waiting: deque[tuple[int, int]] = deque()
        self._text = ""

    def push(self, ids: Iterable[int], text: str, is_last: bool) -> list[Piece]:
        """What is new. is_last: nothing follows."""
        decode = self._decoder.push
        self._waiting.extend([(token_id, len(decode(token_id))) for token_id in ids])
        if is_last:
            self._waiting.append((-1, len(self._decoder.flush())))
        text = self._text + text
        at, pieces, waiting = 0, [], self._waiting
        while waiting:
            token_id, count = waiting[0]
            is_mark = token_id in self._marks
            if count > len(text) - at and (is_mark or at == len(text)):
                break
            waiting.popleft()
            end = min(len(text), at + count)
            if not is_mark and end < at + count:
                waiting.appendleft((-1, at + count - end))
            if token_id >= 0 or end > at:
                pieces.append(Piece("" if is_mark else text[at:end], token_id))
            at = end
        self._text = text[at:]
        if is_last and self._text:
            # The rest of a mark that a stop string has cut.
            pieces.append(Piece(self._text))
            self._text = ""
        return pieces


class ChoiceStream:
    """One choice. parser: None if the model's output is nothing but text."""

    def __init__(self, parser: OutputParser | None, pieces: TokenPieces | None) -> None:
        self._parser = parser
        self._pieces = pieces

    def push(self, update: SampleUpdate) -> list[Event]:
        """The events of an update, those of the last one with what was held back."""
        if self._parser is None or self._pieces is None:
            return [Text(update.text)] if update.text else []
        events = self._parser.push(self._pieces.push(update.ids, update.text, update.finish is not None))
        return events + self._parser.finish() if update.finish is not None else events

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens if self._parser is not None else 0

    @property
    def has_calls(self) -> bool:
        return self._parser is not None and self._parser.has_calls

    @property
    def in_call(self) -> bool:
        """Whether the last tool call is not whole."""
        return self._parser is not None and self._parser.in_call


@dataclass(slots=True)
class FoldedCall:
    """A whole tool call. arguments: JSON."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class FoldedReply:
    """All events of a choice, joined. reasoning: None if there was none."""

    content: str = ""
    reasoning: str | None = None
    calls: list[FoldedCall] = field(default_factory=list)


def fold(events: Iterable[Event]) -> FoldedReply:
    """The reply that events add up to."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[FoldedCall] = []
    parts: list[list[str]] = []
    for event in events:
        match event:
            case Text(text):
                texts.append(text)
            case Reasoning(text):
                thoughts.append(text)
            case ToolCall(_, call_id, name):
                calls.append(FoldedCall(call_id, name))
                parts.append([])
            case Arguments(index, text):
                parts[index].append(text)
    for call, joined in zip(calls, parts, strict=True):
        call.arguments = "".join(joined)
    return FoldedReply("".join(texts), "".join(thoughts) if thoughts else None, calls)
