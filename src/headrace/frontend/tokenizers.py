"""Text to token ids and back, for the checkpoint that is served.

Owns `Tokenizer`, a wrapper of the `tokenizers` library, and its making from a Hugging Face folder or from GGUF metadata.
Does not render chat templates (`chat_templates.py`) and does not follow streams (`headrace.text.incremental`). Used by the
main process and by the detokenizer process; imports neither torch nor, except for folders with only a sentencepiece
model, transformers. A Tokenizer may be used from several threads.

Text of users is never read as special tokens: `encode` recognises them only when told to, and `encode_rendered` only where
the chat template wrote them.
"""

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from headrace.checkpoint.gguf import GgufFile
from headrace.checkpoint.model_config import read_json_object
from headrace.errors import ModelError, RequestError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

# token types of GGUF
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# How the kinds of `tokenizer.ggml.pre` cut text before the byte pairs are merged; the patterns are those of the models'
# own tokenizer.json files. "gpt2" means GPT-2's pattern, which the library has built in; "digits" that with every digit
# alone, as StarCoder and SmolLM have it.
_LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2_KINDS = ("gpt-2", "gpt2", "olmo", "mpt", "phi-2", "jais", "default")
_DIGIT_KINDS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_PATTERN_KINDS = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "megrez": _QWEN2_SPLIT,
}
_LLAMA3_KINDS = ("llama-bpe", "llama3", "llama-v3")


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


class SpecialTexts:
    """Finds the texts of special tokens in a string: leftmost first, and of those the longest, as the library does."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(text for text in texts if text)
        self._lengths: dict[str, tuple[int, ...]] = {}
        for first in {text[0] for text in self._texts}:
            lengths = {len(text) for text in self._texts if text[0] == first}
            self._lengths[first] = tuple(sorted(lengths, reverse=True))
        firsts = "".join(re.escape(first) for first in sorted(self._lengths))
        self._start = re.compile(f"[{firsts}]") if firsts else None
        # A special token that a user wrote has one of these at its ends.
        self.edges = frozenset(edge for text in self._texts for edge in (text[0], text[-1]))

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """(start, end) of every special text, in order, not overlapping. Time is linear in the text."""
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


class Tokenizer:
    """The vocabulary of one model.

    bos_id, pad_id: None when the model has none. eos_ids: what ends a text, possibly empty. vocab_size: ids are below it.
    special_ids: tokens that `skip_special_tokens` leaves out. special_texts: finds their texts in a string.
    chat_template: the checkpoint's own, by name ("default", "tool_use" ...); empty when there is none.
    named_tokens: texts of special tokens by role (`bos_token` ...), which chat templates use.
    fixed_bytes: every token stands for the same bytes wherever it is, so text is the concatenation of the tokens' bytes
    (byte-level BPE, and sentencepiece with byte fallback). strips_first_space: the first space of a text is not shown.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        pad_id: int | None = None,
        chat_template: dict[str, str] | None = None,
        named_tokens: dict[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {token.content: token for token in added.values()}
        self._added_ids = {token.content: index for index, token in added.items()}
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self.pad_id = pad_id
        self.chat_template = chat_template or {}
        self.named_tokens = named_tokens or {}
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=True), *(index + 1 for index in added)])
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.special_texts = SpecialTexts(token.content for token in added.values() if token.special)
        self._sentinels = {
            (lstrip, rstrip): f"\ue000{secrets.token_hex(8)}{lstrip:d}{rstrip:d}\ue001"
            for lstrip in (False, True)
            for rstrip in (False, True)
        }
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

    def encode_rendered(self, prompt: RenderedPrompt) -> list[int]:
        """Token ids of a rendered chat; no bos is added, the template writes it.

        Ordinary chats give exactly the ids of the rendered text. Where a user wrote the text of a special token, the
        template's own special tokens are first replaced by sentinels nobody can guess, the text is encoded in one piece
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
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry, None when there is none."""
        return self._backend.token_to_id(token) if _is_unicode(token) else None

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `load_tokenizer` reads back as this tokenizer."""
        self._backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = dict(self.named_tokens)
        if self.chat_template:
            config["chat_template"] = [
                {"name": name, "template": template} for name, template in self.chat_template.items()
            ]
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")

    @property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id of the special tokens."""
        return {text: self._added_ids[text] for text, token in self._added.items() if token.special}


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint: a Hugging Face folder or a GGUF file. Raises ModelError."""
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1 and not (path / "config.json").is_file():
            return tokenizer_from_gguf(GgufFile(found[0]))
        return tokenizer_from_folder(path)
    return tokenizer_from_gguf(GgufFile(path))


def check_unicode(text: str) -> None:
    """Raise RequestError unless the text is Unicode, naming the place of the lone surrogate."""
    if not isinstance(text, str):
        raise RequestError(f"expected text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise RequestError(f"the text is not valid Unicode: lone surrogate at character {err.start}") from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- Hugging Face folders


def tokenizer_from_folder(path: Path) -> Tokenizer:
    """From tokenizer.json and its companions. Raises ModelError when they are missing or broken."""
    config_file = path / "tokenizer_config.json"
    config = read_json_object(config_file) if config_file.is_file() else {}
    map_file = path / "special_tokens_map.json"
    named = read_json_object(map_file) if map_file.is_file() else {}
    named |= {key: value for key, value in config.items() if value is not None}
    backend = _read_backend(path)
    _mark_special(backend, config, named)
    ids = {key: _named_id(backend, named.get(key)) for key in _NAMED_TOKENS}
    _ensure_bos_and_eos(backend, config, ids)
    eos = ids["eos_token"]
    return Tokenizer(
        backend,
        bos_id=ids["bos_token"],
        eos_ids=() if eos is None else (eos,),
        pad_id=ids["pad_token"],
        chat_template=_folder_template(path, config),
        named_tokens={key: text for key in _NAMED_TOKENS if (text := _content(named.get(key))) is not None},
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as err:  # the library raises bare Exception for a malformed file
            raise ModelError(f"tokenizer.json cannot be read: {err}") from err
    if not (path / "tokenizer.model").is_file():
        raise ModelError(f"{path.name} holds neither tokenizer.json nor tokenizer.model")
    import transformers

    try:
        loaded = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (ValueError, OSError, ImportError, KeyError) as err:
        raise ModelError(f"tokenizer.model cannot be converted: {err}") from err
    backend = loaded.backend_tokenizer if loaded.is_fast else None
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError("tokenizer.model has no fast form; convert the folder to tokenizer.json with transformers")
    return backend


def _content(token: Any) -> str | None:
    """The text of a token as tokenizer_config.json spells it: a string, or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    content = _content(token)
    return None if content is None else backend.token_to_id(content)


def _mark_special(backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, Any]) -> None:
    """Tokens that only tokenizer_config.json calls special, or adds: transformers honours both files."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    entries = [] if not isinstance(listed, dict) else [listed[key] for key in sorted(listed, key=_as_int)]
    new = [
        AddedToken(
            entry["content"],
            single_word=bool(entry.get("single_word")),
            lstrip=bool(entry.get("lstrip")),
            rstrip=bool(entry.get("rstrip")),
            normalized=bool(entry.get("normalized", not entry.get("special"))),
            special=bool(entry.get("special")),
        )
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and entry["content"] not in known
    ]
    backend.add_tokens(new)
    special: list[Any] = [named.get(key) for key in _NAMED_TOKENS]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = named.get(key) or []
        special += extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    unmarked = []
    for content in dict.fromkeys(text for text in map(_content, special) if text):
        if backend.token_to_id(content) is not None and not (content in known and known[content].special):
            unmarked.append(AddedToken(content, special=True, normalized=False))
    backend.add_special_tokens(unmarked)


def _as_int(key: str) -> int:
    return int(key) if key.isdecimal() else 1 << 40


def _ensure_bos_and_eos(backend: tokenizers.Tokenizer, config: dict[str, Any], ids: dict[str, int | None]) -> None:
    """`add_bos_token` and `add_eos_token`, where tokenizer.json does not already say so."""
    wanted_bos = config.get("add_bos_token") is True and ids["bos_token"] is not None
    wanted_eos = config.get("add_eos_token") is True and ids["eos_token"] is not None
    frame = backend.encode("", add_special_tokens=True).ids
    if (wanted_bos and ids["bos_token"] not in frame) or (wanted_eos and ids["eos_token"] not in frame):
        bos = ids["bos_token"] if wanted_bos or ids["bos_token"] in frame else None
        eos = ids["eos_token"] if wanted_eos or ids["eos_token"] in frame else None
        _frame_texts(backend, bos, eos)


def _frame_texts(backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
    """Make the backend put bos before and eos after a text."""
    frame = {index: str(backend.id_to_token(index)) for index in (bos, eos) if index is not None}
    single = [f"{frame[bos]}:0"] if bos is not None else []
    single.append("$A:0")
    if eos is not None:
        single.append(f"{frame[eos]}:0")
    special_tokens = [(token, index) for index, token in frame.items()]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special_tokens)


def _folder_template(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name: chat_template.jinja wins over tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    stated = config.get("chat_template")
    if isinstance(stated, str):
        templates["default"] = stated
    elif isinstance(stated, list):
        for entry in stated:
            match entry:
                case {"name": str(name), "template": str(template)}:
                    templates[name] = template
                case _:
                    raise ModelError("tokenizer_config.json: chat_template holds an entry without name and template")
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as err:
                raise ModelError(f"{file.name} cannot be read: {err}") from err
    json_file = path / "chat_template.json"
    if not templates and json_file.is_file():
        stated = read_json_object(json_file).get("chat_template")
        if isinstance(stated, str):
            templates["default"] = stated
    return templates


# --- GGUF


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """From the `tokenizer.ggml.*` metadata. Raises ModelError for kinds that are not supported."""
    kind = file.require("tokenizer.ggml.model")
    tokens: list[str] = _unique(file.listed("tokenizer.ggml.tokens", str))
    types = [_NORMAL] * len(tokens)
    if file.get("tokenizer.ggml.token_type"):
        types = file.listed("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise ModelError(f"{file.path.name}: {len(tokens)} tokens but {len(types)} token types")
    if kind == "gpt2":
        backend = _byte_level_bpe(file, tokens)
    elif kind == "llama":
        backend = _sentencepiece_bpe(file, tokens, types)
    else:
        raise ModelError(f"{file.path.name}: tokenizer kind {kind!r} is not supported; known: gpt2, llama")
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=entry in (_CONTROL, _UNKNOWN))
            for token, entry in zip(tokens, types, strict=True)
            if entry in (_CONTROL, _UNKNOWN, _USER_DEFINED) and token
        ]
    )
    bos, eos = _gguf_id(file, tokens, "bos"), _gguf_id(file, tokens, "eos")
    add_bos = file.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = kind == "llama" or str(file.get("tokenizer.ggml.pre")) in _LLAMA3_KINDS
    add_eos = file.get("tokenizer.ggml.add_eos_token", False)
    if (add_bos and bos is not None) or (add_eos and eos is not None):
        _frame_texts(backend, bos if add_bos else None, eos if add_eos else None)
    ends = [eos, _gguf_id(file, tokens, "eot"), _gguf_id(file, tokens, "eom")]
    template = file.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(index for index in ends if index is not None)),
        pad_id=_gguf_id(file, tokens, "padding"),
        chat_template={"default": template} if isinstance(template, str) else None,
        named_tokens={
            f"{name}_token": tokens[index]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if (index := _gguf_id(file, tokens, key)) is not None
        },
    )


def _unique(tokens: list[str]) -> list[str]:
    """Names for entries that repeat (padding, or bytes that are no text): the first keeps its own, and every id exists."""
    seen: set[str] = set()
    unique = []
    for index, token in enumerate(tokens):
        token = f"{token}<duplicate {index}>" if token in seen else token
        seen.add(token)
        unique.append(token)
    return unique


def _gguf_id(file: GgufFile, tokens: list[str], name: str) -> int | None:
    index = file.get(f"tokenizer.ggml.{name}_token_id")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise ModelError(f"{file.path.name}: {name} token {index!r} is outside the vocabulary of {len(tokens)}")
    return index


def _byte_level_bpe(file: GgufFile, tokens: list[str]) -> tokenizers.Tokenizer:
    """GPT-2's byte pairs with the merges of the file."""
    pre = str(file.get("tokenizer.ggml.pre", "default"))
    vocab = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for merge in file.listed("tokenizer.ggml.merges", str):
        left, _, right = merge.partition(" ")
        # The library aborts on such a merge instead of raising.
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(f"{file.path.name}: tokenizer merge {merge!r} is not made of tokens of the vocabulary")
        merges.append((left, right))
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3_KINDS)
    backend = tokenizers.Tokenizer(model)
    if pre in _GPT2_KINDS:
        steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    elif pre in _DIGIT_KINDS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        steps = [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    elif pre in _PATTERN_KINDS:
        split = pre_tokenizers.Split(Regex(_PATTERN_KINDS[pre]), behavior="isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        known = ", ".join([*_GPT2_KINDS, *_DIGIT_KINDS, *_PATTERN_KINDS])
        raise ModelError(f"{file.path.name}: pre-tokenizer kind {pre!r} is not supported; known: {known}")
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(file: GgufFile, tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    """Sentencepiece BPE, which joins the two neighbours whose union scores best.

    A merge list in order of score does the same: every way to cut a piece in two pieces of the vocabulary is a merge, and
    its rank is the rank of the piece (Kudo and Richardson, 2018, https://arxiv.org/abs/1808.06226).
    """
    scores = file.listed("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path.name}: {len(tokens)} tokens but {len(scores)} scores")
    vocab = {token: index for index, token in enumerate(tokens)}
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind in (_NORMAL, _USER_DEFINED)}
    ranked = sorted(
        (index for index, token in enumerate(tokens) if len(token) > 1 and token in pieces),
        key=lambda index: -scores[index],
    )
    merges = []
    for index in ranked:
        token = tokens[index]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                merges.append((left, right))
    unknown = _gguf_id(file, tokens, "unknown")
    model = models.BPE(
        vocab=vocab,
        merges=merges,
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    backend = tokenizers.Tokenizer(model)
    prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


# --- the plain twin, and the bytes of tokens


def _without_specials(backend: tokenizers.Tokenizer, sentinels: dict[tuple[bool, bool], str]) -> tokenizers.Tokenizer:
    """A twin that reads special tokens as text and knows the sentinels. The vocabulary is shared, not copied."""
    twin = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        twin.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        twin.pre_tokenizer = backend.pre_tokenizer
    if backend.post_processor is not None:
        twin.post_processor = backend.post_processor
    added = backend.get_added_tokens_decoder()
    twin.add_tokens([added[index] for index in sorted(added)])
    if any(twin.token_to_id(token.content) != index for index, token in added.items()):
        # Ids with holes between them cannot be given again in order: read the whole tokenizer twice instead.
        twin = tokenizers.Tokenizer.from_str(backend.to_str())
    twin.encode_special_tokens = True
    twin.add_tokens(
        [
            AddedToken(text, lstrip=lstrip, rstrip=rstrip, normalized=False, special=False)
            for (lstrip, rstrip), text in sentinels.items()
        ]
    )
    return twin


class _Pieces(dict[int, bytes]):
    """Bytes of tokens, worked out when first asked for. An id outside the vocabulary is empty and not remembered."""

    def __init__(self, backend: tokenizers.Tokenizer, byte_level: bool) -> None:
        super().__init__()
        self._backend = backend
        self._byte_of = _byte_level_alphabet() if byte_level else None

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        piece = self[token_id] = self._bytes(token)
        return piece

    def _bytes(self, token: str) -> bytes:
        if self._byte_of is None:
            byte = _BYTE_PIECE.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
        try:
            return bytes([self._byte_of[char] for char in token])
        except KeyError:
            return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes follow from U+0100.

    Radford et al., 2019 (GPT-2), `bytes_to_unicode`.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _fixed_pieces(backend: tokenizers.Tokenizer) -> tuple[_Pieces | None, bool]:
    """(bytes of each token or None when they depend on their place, whether the first space of a text is dropped)."""
    if backend.decoder is None:
        return None, False
    decoder = json.loads(backend.decoder.__getstate__())
    if decoder["type"] == "ByteLevel":
        return _Pieces(backend, byte_level=True), False
    if decoder["type"] != "Sequence":
        return None, False
    steps = decoder["decoders"]
    if len(steps) == 1 and steps[0]["type"] == "ByteLevel":
        return _Pieces(backend, byte_level=True), False
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if [step["type"] for step in steps[:3]] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == spaces:
        if not steps[3:]:
            return _Pieces(backend, byte_level=False), False
        if steps[3:] == [strip]:
            return _Pieces(backend, byte_level=False), True
    return None, False
