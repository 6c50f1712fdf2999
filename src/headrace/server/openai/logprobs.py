"""Logprobs of tokens, in every shape in which OpenAI's routes show them. Pure functions; any thread."""

from collections.abc import Iterable, Iterator
from itertools import chain

from headrace.frontend.sample_update import LogprobItem, SampleUpdate, TokenLogprobs
from headrace.server.http import LongList
from headrace.server.openai.protocol import GenerationRequest
from headrace.text.incremental import IncrementalDecoder
from headrace.text.tokenizers import Tokenizer

Place = tuple[LogprobItem, list[LogprobItem]]
"""A token, and its alternatives: none if none were requested."""

_UNKNOWN = "\ufffd"
"""What is decoded where bytes are no text."""


def token_logprob(tokenizer: Tokenizer, entry: LogprobItem, as_id: bool = False) -> dict[str, object]:
    """A token: its text, see `token_text`, logprob and bytes."""
    value, token_id, text = entry
    shown = token_text(tokenizer, token_id, text, as_id)
    if tokenizer.fixed_bytes:
        raw = tokenizer.token_bytes(token_id)
    else:
        raw = _decoded(tokenizer, token_id, text).encode(errors="replace")
    return {"token": shown, "logprob": finite_logprob(value), "bytes": list(raw)}


def token_text(tokenizer: Tokenizer, token_id: int, text: str | None, as_id: bool = False) -> str:
    """The text of a token, its bytes as OpenAI writes them (`bytes:\\xe5\\xae`) if they are part of a character, or `token_id:123`.

    text: as it was decoded; None = not yet.
    """
    if as_id:
        return f"token_id:{token_id}"
    shown = _decoded(tokenizer, token_id, text)
    if _UNKNOWN not in shown or not tokenizer.fixed_bytes:
        return shown
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + repr(raw)[2:-1]


def _decoded(tokenizer: Tokenizer, token_id: int, text: str | None) -> str:
    return text if text is not None else tokenizer.decode([token_id], False)


def finite_logprob(value: float | None) -> float:
    """A logprob that JSON and clients can represent; -inf and a missing one as OpenAI writes them."""
    return -9999.0 if value is None or value < -9999.0 or value != value else value


def chat_logprobs(tokenizer: Tokenizer, places: Iterable[Place], as_id: bool = False) -> Iterator[dict[str, object]]:
    for token, others in places:
        top = [token_logprob(tokenizer, other, as_id) for other in others]
        yield token_logprob(tokenizer, token, as_id) | {"top_logprobs": top}


def places_of(logprobs: TokenLogprobs, num_top: int | None = None, has_picked: bool = False) -> Iterator[Place]:
    """The tokens of a list, which is unpacked a part at a time. num_top: of the most likely alternatives, if there are more. has_picked: the
    requested ids in place of these."""
    for part in logprobs.parts():
        rows = (part.picked if has_picked else part.top) or [None] * len(part)
        for token, row in zip(part.tokens, rows, strict=True):
            yield token, (row or [])[:num_top]


def new_places(update: SampleUpdate, request: GenerationRequest) -> Iterator[Place]:
    """The tokens that an update adds, as a request wants to see them."""
    assert update.logprobs is not None, "they were requested"
    if request.logprob_token_ids:
        return places_of(update.logprobs.output, has_picked=True)
    # There may be more alternatives, which belong to the prompt's logprobs.
    return places_of(update.logprobs.output, request.num_top_logprobs)


class LegacyLogprobs:
    """The logprobs object of the completions route: parallel lists over tokens.

    `text_offset` is where a token's text begins, in characters of the choice's text (with echo, of prompt and text). A token
    that ends within a character has that character's offset. `top_logprobs` always includes the token itself, even with
    `logprobs: 0`, which requests no alternatives. Tokens that are parts of characters are shown by their bytes, so that they differ; as_ids: all
    by their id.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._skip = skip_special_tokens
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._length = 0
        self.tokens: list[str] = []
        self._values: list[float | None] = []
        self._tops: list[Iterator[dict[str, float] | None]] = []
        self._offsets: list[int] = []

    def add_prompt(self, logprobs: TokenLogprobs, length: int, num_top: int) -> None:
        """The prompt's tokens; `length` characters of the choice's text are the prompt. num_top: alternatives of each."""
        ids = self.add(logprobs, places_of(logprobs, num_top), begins=True)
        self._offsets = [min(offset, length) for offset in self._offsets]
        self._decoder = IncrementalDecoder(self._tokenizer, skip_special_tokens=self._skip, context_ids=ids)
        self._length = length

    def add(self, logprobs: TokenLogprobs, places: Iterable[Place], begins: bool = False) -> list[int]:
        """More tokens. places: the same with their alternatives, looked at when these are written. begins: the first may have no logprob.
        Returns their ids."""
        entries = logprobs.tokens
        for position, (value, token_id, text) in enumerate(entries):
            is_unknown = begins and position == 0 and value is None
            self.tokens.append(token_text(self._tokenizer, token_id, text, self._as_ids))
            self._values.append(None if is_unknown else finite_logprob(value))
            self._offsets.append(self._length)
            self._length += len(self._decoder.push(token_id))
        self._tops.append(self._top(places, begins))
        return [token_id for _, token_id, _ in entries]

    def take(self, length: int | None) -> dict[str, object]:
        """What was added since the last call. length: of the whole text if it is final; trimmed tokens end there."""
        result: dict[str, object] = {
            "tokens": self.tokens,
            "token_logprobs": self._values,
            "top_logprobs": LongList(chain(*self._tops)),
            "text_offset": self._offsets if length is None else [min(offset, length) for offset in self._offsets],
        }
        self.tokens, self._values, self._tops, self._offsets = [], [], [], []
        return result

    def _top(self, places: Iterable[Place], begins: bool) -> Iterator[dict[str, float] | None]:
        for position, (token, others) in enumerate(places):
            if begins and position == 0 and token[0] is None:
                yield None
                continue
            top: dict[str, float] = {}
            for value, token_id, text in (token, *others):
                top.setdefault(token_text(self._tokenizer, token_id, text, self._as_ids), finite_logprob(value))
            yield top


def prompt_logprobs(tokenizer: Tokenizer, request: GenerationRequest, update: SampleUpdate) -> LongList:
    """For each prompt token null (the first) or an object: token id -> {logprob, rank, decoded_token}.

    The token itself is always there, beside the `prompt_logprobs` most likely ones. rank: 1 = the most likely; null for a token that
    is not among them.
    """
    assert update.logprobs is not None, "they were requested"
    return LongList(_ranked(tokenizer, places_of(update.logprobs.prompt, request.prompt_logprobs)))


def _ranked(tokenizer: Tokenizer, places: Iterable[Place]) -> Iterator[dict[str, object] | None]:
    for token, best in places:
        if token[0] is None:
            yield None
            continue
        entries: dict[str, object] = {}
        for rank, (value, token_id, text) in [*enumerate(best, start=1), (None, token)]:
            decoded = _decoded(tokenizer, token_id, text)
            shown = {"logprob": finite_logprob(value), "rank": rank, "decoded_token": decoded}
            entries.setdefault(str(token_id), shown)
        yield entries
