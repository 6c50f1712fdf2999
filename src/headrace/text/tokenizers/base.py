"""`Tokenizer`: the vocabulary of one model, ids to text and back. See the package's text."""

import json
import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, processors

from headrace.errors import ModelError, RequestError
from headrace.text.tokenizers.pieces import BestPieces, TextFinder, TokenList, passing_over

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a rendered prompt. template: special tokens in it are meant; else it is user text that looks like one."""

    text: str
    template: bool


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A chat rendered to text. The segments joined are the text."""

    text: str
    segments: tuple[Segment, ...]


class Tokenizer:
    """The vocabulary of one model.

    bos_id, pad_id: None when the model has none. eos_ids: what ends a text, possibly empty. vocab_size: ids are below it.
    special_ids: tokens that `skip_special_tokens` leaves out. special_texts: finds their texts in a string.
    chat_template: the checkpoint's own, by name ("default", "tool_use" ...); empty when there is none.
    named_tokens: texts of special tokens by role (`bos_token` ...), which chat templates use.
    response_template: how the checkpoint says that outputs are to be read (transformers' name); None if it does not.
    fixed_bytes: every token stands for the same bytes wherever it is, so text is the concatenation of the tokens' bytes
    (byte-level BPE, and sentencepiece with byte fallback). strips_first_space: the first space of a text is not shown.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | TokenList,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        pad_id: int | None = None,
        chat_template: dict[str, str] | None = None,
        named_tokens: dict[str, str] | None = None,
        response_template: dict[str, Any] | None = None,
    ) -> None:
        self._truncation = "longest_first"
        if isinstance(backend, tokenizers.Tokenizer):
            if (stated := backend.truncation) is not None:
                self._truncation = str(stated["strategy"])
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = False
        self._vocabulary = backend
        added = backend.get_added_tokens_decoder()
        self._added = {token.content: token for token in added.values()}
        self._added_ids = {token.content: index for index, token in added.items()}
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self.pad_id = pad_id
        self.chat_template = chat_template or {}
        self.named_tokens = named_tokens or {}
        self.response_template = response_template
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=True), *(index + 1 for index in added)])
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.special_texts = TextFinder(token.content for token in added.values() if token.special)
        self._sentinels = {
            (lstrip, rstrip): f"\ue000{secrets.token_hex(8)}{lstrip:d}{rstrip:d}\ue001"
            for lstrip in (False, True)
            for rstrip in (False, True)
        }
        if isinstance(backend, tokenizers.Tokenizer):
            self._backend = backend
            self._plain = _without_specials(backend, self._sentinels)
            self._sentinel_ids = {self._plain.token_to_id(text) for text in self._sentinels.values()}
        self._pieces, self.strips_first_space = _fixed_pieces(backend)
        self.fixed_bytes = self._pieces is not None

    # --- encoding

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        """Token ids of a text.

        add_special_tokens: begin (and end) as the model wants a text to begin, usually with bos.
        allow_special: read the texts of special tokens as these tokens; otherwise they are ordinary characters.
        Raises RequestError for text that is not Unicode (a lone surrogate).
        """
        return self.encode_batch([text], add_special_tokens, allow_special)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, allow_special: bool = False
    ) -> list[list[int]]:
        """As `encode`, for several texts at once on several cores."""
        backend = self._backend if allow_special else self._plain
        try:
            # Also for one text: `encode` of the library keeps the GIL for as long as it takes.
            return [item.ids for item in backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]
        except (TypeError, UnicodeEncodeError):
            for text in texts:
                check_unicode(text)
            raise

    def encode_whole(
        self,
        texts: Sequence[str | tuple[str, str]],
        most_tokens: int | None = None,
        side: Literal["right", "left"] = "right",
    ) -> list[tuple[list[int], list[int]]]:
        """Token ids of texts and pairs of texts as an encoder reads them, and to which text of a pair each belongs (0 or 1).

        Special tokens are placed, and types numbered, by the tokenizer's post-processor. most_tokens: longer inputs are cut to this, special
        tokens included, at this side, and pairs as the checkpoint says (`truncation`). Special tokens that a text spells out are read as such,
        as sentence-transformers does. Raises RequestError as `encode`.
        """
        try:
            encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=True)
            if most_tokens is not None:
                for index, item in enumerate(encoded):
                    if len(item) > most_tokens:
                        encoded[index] = self._cut(texts[index], most_tokens, side)
        except (TypeError, UnicodeEncodeError):
            for text in texts:
                for part in (text,) if isinstance(text, str) else text:
                    check_unicode(part)
            raise
        return [(item.ids, item.type_ids) for item in encoded]

    def beginnings(self, texts: Sequence[str], most_tokens: int) -> list[str]:
        """Each text up to the end of its token number `most_tokens`, special tokens not counted. Raises RequestError as `encode`."""
        for text in texts:
            check_unicode(text)
        encoded = self._plain.encode_batch(list(texts), add_special_tokens=False)
        return [
            text if len(item) <= most_tokens else text[: item.offsets[most_tokens - 1][1]]
            for text, item in zip(texts, encoded, strict=True)
        ]

    def _cut(self, text: str | tuple[str, str], most_tokens: int, side: str) -> tokenizers.Encoding:
        """The text, or the pair, in at most `most_tokens` tokens."""
        parts = [text] if isinstance(text, str) else list(text)
        # The library cuts in its post-processing, with settings of the whole tokenizer: a twin with the same post-processor has its own.
        twin = tokenizers.Tokenizer(self._backend.model)
        if self._backend.post_processor is not None:
            twin.post_processor = self._backend.post_processor
        if twin.num_special_tokens_to_add(len(parts) > 1) >= most_tokens:
            raise RequestError(
                f"truncate_prompt_tokens: {most_tokens} tokens have no room beside the special tokens",
                "truncate_prompt_tokens",
            )
        twin.enable_truncation(most_tokens, strategy=self._truncation, direction=side)
        first, *second = self._backend.encode_batch_fast(parts, add_special_tokens=False)
        try:
            return twin.post_process(first, second[0] if second else None, add_special_tokens=True)
        except Exception as error:  # the library raises bare Exception where the other text of a pair leaves no room
            raise RequestError(
                f"the pair cannot be truncated to {most_tokens} tokens: {error}", "truncate_prompt_tokens"
            ) from None

    def encode_rendered(self, prompt: RenderedPrompt) -> list[int]:
        """Token ids of a rendered chat; no bos is added, the template writes it.

        Ordinary chats give exactly the ids of the rendered text. Where a user wrote the text of a special token, the
        template's own special tokens are first replaced by sentinels that cannot be guessed, the text is encoded in one piece
        with special tokens off, and the sentinels' ids are then replaced by those of the special tokens. So merges across
        the border of template and user text are the same as ever. Raises RequestError as `encode`.
        """
        check_unicode(prompt.text)
        if all(segment.template for segment in prompt.segments):
            return list(self._backend.encode_batch_fast([prompt.text], add_special_tokens=False)[0].ids)
        text, own = self._hide_template_specials(prompt)
        ids = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        in_order = iter(own)
        return [next(in_order) if index in self._sentinel_ids else index for index in ids]

    def _hide_template_specials(self, prompt: RenderedPrompt) -> tuple[str, list[int]]:
        """The text with the template's special tokens as sentinels, and the ids of these tokens in order."""
        parts: list[str] = []
        own: list[int] = []
        for segment in prompt.segments:
            at = 0
            if segment.template:
                for start, end in self.special_texts.find(segment.text):
                    token = self._added[segment.text[start:end]]
                    parts += [segment.text[at:start], self._sentinels[token.lstrip, token.rstrip]]
                    own.append(self._added_ids[token.content])
                    at = end
            parts.append(segment.text[at:])
        return "".join(parts), own

    # --- decoding

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of token ids. Ids outside the vocabulary have no text; bytes that are no UTF-8 become U+FFFD.

        spaces_between_special_tokens: False keeps a decoder that joins tokens with spaces from putting one beside a special
        token. Decoders whose tokens carry their own spaces (nearly all) never put one there.
        """
        if skip_special_tokens:
            ids = [index for index in ids if index not in self.special_ids]
        if self._pieces is not None:
            text = b"".join([self._pieces[index] for index in ids]).decode(errors="replace")
            return text[1:] if self.strips_first_space and text.startswith(" ") else text
        ids = [index for index in ids if 0 <= index < 2**32]
        if spaces_between_special_tokens or skip_special_tokens:
            return self._backend.decode(ids, skip_special_tokens=False)
        return "".join(self._backend.decode(run, skip_special_tokens=False) for run in self._runs(ids))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, empty for an id outside the vocabulary. Only where `fixed_bytes`."""
        assert self._pieces is not None, "tokens of this tokenizer have no fixed bytes"
        return self._pieces[token_id]

    def vocabulary_bytes(self) -> list[bytes]:
        """`token_bytes` of every id, of which none stays in memory."""
        assert self._pieces is not None, "tokens of this tokenizer have no fixed bytes"
        return list(map(self._pieces.read, range(self.vocab_size)))

    def _runs(self, ids: Sequence[int]) -> Iterator[list[int]]:
        """Cut before and after every special token."""
        run: list[int] = []
        for index in ids:
            if index in self.special_ids:
                yield from ([run, [index]] if run else [[index]])
                run = []
            else:
                run.append(index)
        if run:
            yield run

    # --- vocabulary

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token (not its text), None for an id outside."""
        return self._vocabulary.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry, None when there is none."""
        try:
            return self._vocabulary.token_to_id(token)
        except UnicodeEncodeError:
            return None

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `load_tokenizer` reads back as this tokenizer.

        Raises ModelError for a kind that tokenizer.json cannot express (`pieces.py`).
        """
        try:
            self._backend.save(str(folder / "tokenizer.json"))
        except Exception as err:  # the library raises bare Exception
            raise ModelError(f"the tokenizer cannot be written as tokenizer.json: {err}") from err
        config: dict[str, Any] = dict(self.named_tokens)
        if self.chat_template:
            config["chat_template"] = [
                {"name": name, "template": template} for name, template in self.chat_template.items()
            ]
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")

    @property
    def added_tokens(self) -> dict[str, int]:
        """Text -> id of the tokens that were added to the vocabulary, special or not."""
        return dict(self._added_ids)

    @property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id of the special tokens."""
        return {text: self._added_ids[text] for text, token in self._added.items() if token.special}


def check_unicode(text: str) -> None:
    """Raise RequestError unless the text is Unicode, naming the place of the lone surrogate."""
    if not isinstance(text, str):
        raise RequestError(f"expected text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise RequestError(f"the text is not valid Unicode: lone surrogate at character {err.start}") from None


def frame_texts(backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
    """Make the backend put bos before and eos after a text."""
    frame = {name: index for name, index in (("bos", bos), ("eos", eos)) if index is not None}
    single = [f"{name}:0" if name in frame else "" for name in ("bos", "eos")]
    # By these names: a token may be called as no piece of a template can be.
    special_tokens = [
        {"id": name, "ids": [index], "tokens": [backend.id_to_token(index)]} for name, index in frame.items()
    ]
    backend.post_processor = processors.TemplateProcessing(
        single=[piece for piece in (single[0], "$A:0", single[1]) if piece], special_tokens=special_tokens
    )


def _without_specials(backend: tokenizers.Tokenizer, sentinels: dict[tuple[bool, bool], str]) -> tokenizers.Tokenizer:
    """A twin that reads special tokens as text and knows the sentinels. The vocabulary is shared, not copied."""
    twin = tokenizers.Tokenizer(backend.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor"):
        if (part := getattr(backend, name)) is not None:
            setattr(twin, name, part)
    added = backend.get_added_tokens_decoder()
    twin.add_tokens([added[index] for index in sorted(added)])
    if any(twin.token_to_id(token.content) != index for index, token in added.items()):
        # Ids with holes between them cannot be given again in order: read the whole tokenizer twice instead.
        twin = tokenizers.Tokenizer.from_str(backend.to_str())
    twin.encode_special_tokens = True
    if isinstance(backend.model, models.Unigram):
        # Its special tokens are pieces like any other.
        special = [token.content for token in added.values() if token.special]
        first = [] if backend.pre_tokenizer is None else [backend.pre_tokenizer]
        twin.pre_tokenizer = pre_tokenizers.Sequence(
            [*first, passing_over(special, lambda: _other_pieces(backend, special))]
        )
    twin.add_tokens(
        [
            AddedToken(text, lstrip=lstrip, rstrip=rstrip, normalized=False, special=False)
            for (lstrip, rstrip), text in sentinels.items()
        ]
    )
    return twin


def _other_pieces(backend: tokenizers.Tokenizer, special: Collection[str]) -> BestPieces:
    """The pieces of a unigram model but these, and what the library gives an unknown character (sentencepiece's kUnkPenalty)."""
    model = json.loads(backend.model.__getstate__())
    scores = dict(model["vocab"])
    unknown = min(scores.values()) - 10
    return BestPieces({piece: scores[piece] for piece in scores.keys() - special}, unknown, model["byte_fallback"])


class _Pieces(dict[int, bytes]):
    """Bytes of tokens, computed on first use. An id outside the vocabulary gives no bytes and is not cached."""

    def __init__(self, backend: tokenizers.Tokenizer | TokenList, byte_level: bool = False, space: str = " ") -> None:
        super().__init__()
        self._backend = backend
        self._byte_level = byte_level
        self._space = space

    def __missing__(self, token_id: int) -> bytes:
        piece = self.read(token_id)
        if piece:
            self[token_id] = piece
        return piece

    def read(self, token_id: int) -> bytes:
        """As the dictionary, which does not keep it."""
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if not self._byte_level:
            byte = _BYTE_PIECE.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace(self._space, " ").encode()
        try:
            return token.translate(_BYTES).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes follow from U+0100.

    Radford et al., 2019 (GPT-2), `bytes_to_unicode`.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = {byte: char for char, byte in _byte_level_alphabet().items()}
_BYTES = dict.fromkeys(range(256), 256) | {ord(char): byte for char, byte in _byte_level_alphabet().items()}
"""Characters as the bytes that they stand for, in Latin-1; others become what has no place in it."""


def byte_level(text: bytes) -> str:
    """Bytes in the alphabet of byte-level BPE."""
    return text.decode("latin-1").translate(_BYTE_LEVEL)


def _fixed_pieces(backend: tokenizers.Tokenizer | TokenList) -> tuple[_Pieces | None, bool]:
    """(bytes of each token or None when they depend on their place, whether the first space of a text is dropped)."""
    if backend.decoder is None:
        return None, False
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _Pieces(backend, byte_level=True), False
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if [step["type"] for step in steps] == ["ByteFallback", "Fuse"]:
        return _Pieces(backend), False
    falls_back = [step["type"] for step in steps[:3]] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == spaces
    if falls_back and steps[3:] in ([], [strip]):
        return _Pieces(backend, space="▁"), bool(steps[3:])
    return None, False
