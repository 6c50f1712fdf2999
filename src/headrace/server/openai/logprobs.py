"""Logprobs of tokens, in every shape in which OpenAI's routes show them. Pure functions; any thread."""

from collections.abc import Iterable, Sequence

from headrace.frontend.sample_update import LogprobItem, LogprobRow, SampleUpdate
from headrace.server.openai.protocol import GenerationRequest
from headrace.text.incremental import IncrementalDecoder
from headrace.text.tokenizers import Tokenizer

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


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[LogprobItem], alternatives: Sequence[LogprobRow], as_id: bool = False
) -> list[dict[str, object]]:
    """Tokens of a text, each with the alternatives in its place, if there are any."""
    return [
        token_logprob(tokenizer, token, as_id)
        | {"top_logprobs": [token_logprob(tokenizer, other, as_id) for other in row or ()]}
        for token, row in zip(tokens, alternatives or [None] * len(tokens), strict=True)
    ]


def new_logprobs(update: SampleUpdate, request: GenerationRequest) -> tuple[list[LogprobItem], list[list[LogprobItem]]]:
    """The logprobs of the tokens that an update adds, and for each the most likely alternatives (empty if none were requested), or in place of
    these the requested ids."""
    assert update.logprobs is not None, "they were requested"
    output = update.logprobs.output
    if request.logprob_token_ids:
        return output.tokens, [row or [] for row in output.picked or ()]
    # There may be more alternatives, which belong to the prompt's logprobs.
    return output.tokens, [(row or [])[: request.num_top_logprobs] for row in output.top or ()]


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
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(self, update: SampleUpdate, length: int, num_top: int) -> None:
        """The prompt's tokens; `length` characters of the choice's text are the prompt. num_top: alternatives of each."""
        assert update.logprobs is not None, "they were requested"
        entries = update.logprobs.prompt.tokens
        tops = [None if top is None else top[:num_top] for top in update.logprobs.prompt.top or ()]
        self.add(entries, tops, first_is_unknown=True)
        self._offsets = [min(offset, length) for offset in self._offsets]
        ids = [token_id for _, token_id, _ in entries]
        self._decoder = IncrementalDecoder(self._tokenizer, skip_special_tokens=self._skip, context_ids=ids)
        self._length = length

    def add(
        self,
        entries: Iterable[LogprobItem],
        alternatives: Sequence[Sequence[LogprobItem] | None] | None,
        first_is_unknown: bool = False,
    ) -> None:
        for position, (value, token_id, text) in enumerate(entries):
            shown = token_text(self._tokenizer, token_id, text, self._as_ids)
            unknown = first_is_unknown and position == 0 and value is None
            self.tokens.append(shown)
            self._values.append(None if unknown else finite_logprob(value))
            self._offsets.append(self._length)
            self._length += len(self._decoder.push(token_id))
            if unknown:
                self._tops.append(None)
                continue
            top = {shown: finite_logprob(value)}
            for top_value, top_id, top_text in (alternatives[position] if alternatives else None) or ():
                top.setdefault(token_text(self._tokenizer, top_id, top_text, self._as_ids), finite_logprob(top_value))
            self._tops.append(top)

    def take(self, length: int | None) -> dict[str, object]:
        """What was added since the last call. length: of the whole text if it is final; trimmed tokens end there."""
        result = {
            "tokens": self.tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._tops,
            "text_offset": self._offsets if length is None else [min(offset, length) for offset in self._offsets],
        }
        self.tokens, self._values, self._tops, self._offsets = [], [], [], []
        return result


def prompt_logprobs(tokenizer: Tokenizer, request: GenerationRequest, update: SampleUpdate) -> list[object]:
    """For each prompt token null (the first) or an object: token id -> {logprob, rank, decoded_token}.

    The token itself is always there, beside the `prompt_logprobs` most likely ones. rank: 1 = the most likely; null for a token that
    is not among them.
    """
    assert update.logprobs is not None, "they were requested"
    prompt = update.logprobs.prompt
    tops = prompt.top or []
    rows: list[object] = []
    for position, token in enumerate(prompt.tokens):
        if token[0] is None:
            rows.append(None)
            continue
        best = (tops[position] if position < len(tops) else None) or []
        ranked = [*enumerate(best[: request.prompt_logprobs], start=1), (None, token)]
        entries: dict[str, object] = {}
        for rank, (value, token_id, text) in ranked:
            decoded = _decoded(tokenizer, token_id, text)
            shown = {"logprob": finite_logprob(value), "rank": rank, "decoded_token": decoded}
            entries.setdefault(str(token_id), shown)
        rows.append(entries)
    return rows
