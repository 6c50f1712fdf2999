"""Decodes token ids that arrive one by one, and returns text as soon as it is final.

Owns `IncrementalDecoder`, one per request. Does not know the vocabulary (a `Tokenizer` does) and does not look for stops
(`stop.py`). Used in the scheduler and the detokenizer; no torch.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.text.tokenizers import Tokenizer

_CONTEXT_TOKENS = 8  # of the prompt: enough to complete a character and to decide a space
_MAX_HELD_TOKENS = 32  # of a decoder without fixed bytes whose text keeps ending in U+FFFD


class IncrementalDecoder:
    """Text of one growing sequence of token ids.

    The pieces returned by `push` and `flush`, joined, equal `tokenizer.decode` of all ids, however they were split. An incomplete
    character is held back; bytes that can never become a character are returned as U+FFFD at once.

    If tokens have fixed bytes, the state is at most three bytes. Otherwise a window of tokens is decoded twice and the
    difference is used (the "surrogate" and "read" offsets of vLLM and TGI); at most 32 tokens are held back.

    context_ids: the last tokens of the prompt. With them, the text continues that of the prompt: a leading space that a decoder would drop
    at the start of a text is kept, and a character begun in the prompt is completed.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        context_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._spaces = spaces_between_special_tokens
        context = [index for index in context_ids[-_CONTEXT_TOKENS:] if index not in self._skipped]
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Tokens of the window [surrogate, ...): the text of those before `read` has been returned.
        self._window: list[int] = []
        self._read = 0
        self._strip = tokenizer.strips_first_space
        if tokenizer.fixed_bytes:
            if context:
                self._bytes.decode(b"".join(tokenizer.token_bytes(index) for index in context))
                self._strip = False
        else:
            self._window = context
            self._read = len(context)

    def push(self, token_id: int) -> str:
        """The text that becomes final with this token, possibly empty."""
        if token_id in self._skipped:
            return ""
        if not self._tokenizer.fixed_bytes:
            return self._push_window(token_id)
        text = self._bytes.decode(self._tokenizer.token_bytes(token_id))
        return self._without_first_space(text) if self._strip else text

    def extend(self, token_ids: Iterable[int]) -> str:
        return "".join([self.push(index) for index in token_ids])

    def flush(self) -> str:
        """The text still held, with U+FFFD for an incomplete character. Call it once, at the end."""
        if self._tokenizer.fixed_bytes:
            text = self._bytes.decode(b"", final=True)
            return self._without_first_space(text) if self._strip else text
        tail = self._decode(self._window)[len(self._decode(self._window[: self._read])) :]
        self._read = len(self._window)
        return tail

    def _without_first_space(self, text: str) -> str:
        if not text:
            return text
        self._strip = False
        return text.removeprefix(" ")

    def _push_window(self, token_id: int) -> str:
        self._window.append(token_id)
        before = self._decode(self._window[: self._read])
        after = self._decode(self._window)
        if len(after) <= len(before) or (
            after.endswith("\ufffd") and len(self._window) - self._read < _MAX_HELD_TOKENS
        ):
            return ""
        # The tokens just returned become the context of the next ones, replacing the older context.
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, False, self._spaces)
