"""A tokenizer from the metadata of a GGUF file."""

import math
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from headrace.checkpoint.gguf import GgufFile
from headrace.checkpoint.gguf_names import end_ids
from headrace.errors import ModelError
from headrace.log import get_logger
from headrace.text.tokenizers.base import Tokenizer, byte_level, frame_texts
from headrace.text.tokenizers.gguf_splits import SPLITS, Splits
from headrace.text.tokenizers.pieces import (
    BestPieces,
    Charsmap,
    Cutter,
    Span,
    TextFinder,
    TokenList,
    passing_over,
)

_log = get_logger(__name__)

_ANOTHER = "--tokenizer-path names a folder with the tokenizer.json of the model"

# token types of GGUF
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
_SPECIAL = (_UNKNOWN, _CONTROL, _USER_DEFINED)  # found in a text before all others

_LOOKED_UP = 24
"""Characters of the longest parts of a text that are looked up in a set."""


def tokenizer_from_gguf(file: GgufFile, *, encodes: bool = True, text: str | None = None) -> Tokenizer:
    """From the `tokenizer.ggml.*` metadata. Raises ModelError for kinds that are not supported. encodes, text: see `load_tokenizer`."""
    kind = file.require("tokenizer.ggml.model")
    stored = file.strings("tokenizer.ggml.tokens")
    types = [_NORMAL] * len(stored)
    if "tokenizer.ggml.token_type" in file:
        types = file.integers("tokenizer.ggml.token_type").tolist() or types
    if len(types) != len(stored):
        raise ModelError(f"{file.path.name}: {len(stored)} tokens but {len(types)} token types")
    if kind == "bert":
        return _word_piece(file, _unique(list(stored)), types)
    splits = _splits_of(file, kind, encodes)
    if splits is not None and splits.characters:
        kind = "gemma4"
    is_list = not encodes and kind in _DECODERS
    tokens: Sequence[str] = stored if is_list else _unique(list(stored))
    if kind == "rwkv":
        tokens = _unique(_byte_level(tokens, types))
    # As llama.cpp: the format does not say that a token takes the spaces after it.
    strips = re.search("phi-?3", str(file.get("general.name")).lower()) is not None
    ends = set(end_ids(file))  # some files have them as user-defined
    added = {
        index: AddedToken(
            tokens[index],
            normalized=False,
            rstrip=strips and tokens[index] not in _NOT_STRIPPED,
            special=entry in (_CONTROL, _UNKNOWN) or index in ends,
        )
        for index, entry in enumerate(types)
        if entry in _SPECIAL and tokens[index]
    }
    if is_list:
        return _with_facts(file, kind, splits, TokenList(stored, added, _DECODERS[kind](file)), tokens)
    if kind == "gemma4":
        backend = _byte_fallback_bpe(file, tokens)
    elif splits is not None:
        backend = _byte_level_bpe(file, tokens, splits, added, text)
    elif kind == "llama":
        backend = _sentencepiece_bpe(file, tokens, types)
    elif kind == "t5":
        backend = _unigram(file, tokens, types, encodes)
    elif kind == "rwkv":
        backend = _longest_pieces(file, tokens, types)
    elif kind == "plamo2":
        backend = _plamo(file, tokens, types)
    else:
        raise ModelError(
            f"{file.path.name}: tokenizer kind {kind!r:.80} is not supported; known: "
            f"bert, gemma4, gpt2, llama, plamo2, rwkv, t5; {_ANOTHER}"
        )
    if kind in _DECODERS:
        backend.decoder = _DECODERS[kind](file)
    backend.add_tokens(list(added.values()))
    return _with_facts(file, kind, splits, backend, tokens)


def _with_facts(
    file: GgufFile,
    kind: str,
    splits: Splits | None,
    backend: tokenizers.Tokenizer | TokenList,
    tokens: Sequence[str],
) -> Tokenizer:
    """What else the metadata say of a tokenizer of this kind, whose tokens have these names."""
    bos, eos = _gguf_id(file, tokens, "bos"), _gguf_id(file, tokens, "eos")
    add_bos = file.get("tokenizer.ggml.add_bos_token")
    if add_bos is None or (kind == "gemma4" and splits is not None and splits.begins):  # Gemma 4's first files say no
        add_bos = kind == "llama" if splits is None else splits.begins
    add_eos = file.get("tokenizer.ggml.add_eos_token", kind == "t5")
    if kind in ("rwkv", "plamo2"):  # llama.cpp adds neither, whatever the file says
        add_bos = add_eos = False
    frames = (add_bos and bos is not None) or (add_eos and eos is not None)
    if frames and isinstance(backend, tokenizers.Tokenizer):
        frame_texts(backend, bos if add_bos else None, eos if add_eos else None)
    template = file.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        bos_id=bos,
        eos_ids=[index for index in end_ids(file) if 0 <= index < len(tokens)],
        pad_id=_gguf_id(file, tokens, "padding"),
        chat_template={"default": template} if isinstance(template, str) else None,
        named_tokens={
            f"{name}_token": tokens[index]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if (index := _gguf_id(file, tokens, key)) is not None
        }
        | _fill_in_tokens(file, tokens),
    )


def _sentencepiece_decoder(file: GgufFile) -> decoders.Decoder:
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.model") == "llama" and file.get("tokenizer.ggml.add_space_prefix", True):
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


_DECODERS: dict[object, Callable[[GgufFile], decoders.Decoder]] = {
    "gpt2": lambda file: decoders.ByteLevel(),
    "llama": _sentencepiece_decoder,
    "gemma4": _sentencepiece_decoder,
}
"""Of the kinds of tokenizers whose tokens stand for the same bytes everywhere."""


def _unique(tokens: list[str]) -> list[str]:
    """Names for entries that repeat (padding, or bytes that are no text): the first keeps its own, and every id exists."""
    if len(set(tokens)) == len(tokens):
        return tokens
    seen: set[str] = set()
    unique = []
    for index, token in enumerate(tokens):
        token = f"{token}<duplicate {index}>" if token in seen else token
        seen.add(token)
        unique.append(token)
    return unique


def _gguf_id(file: GgufFile, tokens: Sequence[str], name: str) -> int | None:
    index = file.get(f"tokenizer.ggml.{name}_token_id")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise ModelError(f"{file.path.name}: {name} token {index!r} is outside the vocabulary of {len(tokens)}")
    return index


def _fill_in_tokens(file: GgufFile, tokens: Sequence[str]) -> dict[str, str]:
    """The tokens before the parts of a text whose middle is wanted, if the metadata names them; converters write -1 for a token that is missing."""
    found: dict[str, str] = {}
    for role, keys in (
        ("prefix", ("fim_pre", "prefix")),
        ("suffix", ("fim_suf", "suffix")),
        ("middle", ("fim_mid", "middle")),
    ):
        stated = [file.get(f"tokenizer.ggml.{key}_token_id") for key in keys]
        named = [tokens[index] for index in stated if isinstance(index, int) and 0 <= index < len(tokens)]
        found |= {f"{role}_token": token for token in named[:1]}
    return found


def _splits_of(file: GgufFile, kind: str, encodes: bool) -> Splits | None:
    """How a file of byte pairs has texts cut; None for other kinds. Raises ModelError for a name that is not known."""
    if kind not in ("gpt2", "gemma4"):
        return None
    name = "gemma4" if kind == "gemma4" else file.get("tokenizer.ggml.pre", "")
    if name == "":
        name = "default"
        if encodes:
            _log.warning(
                "%s does not name its pre-tokenizer (tokenizer.ggml.pre): texts are cut as by llama.cpp, perhaps not as in training",
                file.path.name,
            )
    if not isinstance(name, str) or name not in SPLITS:
        raise ModelError(
            f"{file.path.name}: pre-tokenizer {name!r:.80} (tokenizer.ggml.pre) is not supported; {_ANOTHER}"
        )
    return SPLITS[name]


def _byte_level_bpe(
    file: GgufFile, tokens: Sequence[str], splits: Splits, added: Collection[int], text: str | None
) -> tokenizers.Tokenizer:
    """GPT-2's byte pairs with the merges of the file. added: ids of tokens that are found as they are. text: as of `load_tokenizer`; whatever its
    bytes are merged to is a part of it."""
    vocab = {token: index for index, token in enumerate(tokens)}
    stated = file.strings("tokenizer.ggml.merges")
    if text is None:
        merges = _merges(file, vocab, stated)
    else:
        within = byte_level((unicodedata.normalize("NFC", text) if splits.nfc else text).encode())
        parts = {within[at : at + length] for at in range(len(within)) for length in range(1, _LOOKED_UP + 1)}

        def occurs(token: str) -> bool:
            return token in parts or (len(token) > _LOOKED_UP and token in within)

        vocab = {token: index for token, index in vocab.items() if len(token) == 1 or index in added or occurs(token)}
        merges = _merges(file, vocab, [merge for merge in stated if occurs(merge.replace(" ", "", 1))])
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=splits.whole_words))
    if splits.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splits.patterns]
    if splits.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits.gpt2))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return backend


def _merges(file: GgufFile, vocab: Mapping[str, int], stated: Iterable[str]) -> list[tuple[str, str]]:
    stated = list(stated)
    # A token may begin with a space.
    merges = [(merge[:cut], merge[cut + 1 :]) for merge in stated for cut in (merge.find(" ", 1),)]
    # The library aborts on a merge of others instead of raising.
    if not vocab.keys() >= {*chain.from_iterable(merges), *map("".join, merges)}:
        wrong = next(
            merge
            for merge, (left, right) in zip(stated, merges, strict=True)
            if not vocab.keys() >= {left, right, left + right}
        )
        raise ModelError(f"{file.path.name}: tokenizer merge {wrong!r} does not consist of tokens of the vocabulary")
    return merges


def _byte_fallback_bpe(file: GgufFile, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Gemma 4's: merges over characters, runs of newlines apart, and bytes for what is no token."""
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = _gguf_id(file, tokens, "unknown")
    unk_token = None if unknown is None else tokens[unknown]
    merges = _merges(file, vocab, file.strings("tokenizer.ggml.merges"))
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("\\n+"), behavior="isolated")
    return backend


def _sentencepiece_bpe(file: GgufFile, tokens: Sequence[str], types: list[int]) -> tokenizers.Tokenizer:
    """Sentencepiece BPE, which joins the two neighbours whose union scores best.

    A merge list in order of score does the same: every way to cut a piece in two pieces of the vocabulary is a merge, and
    its rank is the rank of the piece (Kudo and Richardson, 2018, https://arxiv.org/abs/1808.06226).
    """
    scores = _scores(file, tokens)
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
    return backend


def _scores(file: GgufFile, tokens: Sequence[str]) -> list[float]:
    scores = file.listed("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path.name}: {len(tokens)} tokens but {len(scores)} scores")
    return scores


def _unigram(file: GgufFile, tokens: Sequence[str], types: list[int], encodes: bool) -> tokenizers.Tokenizer:
    """Sentencepiece's unigram model, as `llm_tokenizer_ugm` in llama.cpp (src/llama-vocab.cpp) has it.

    The library finds every token in a text; llama.cpp does not look for special tokens.
    """
    scores = _scores(file, tokens)
    if not all(map(math.isfinite, scores)):
        raise ModelError(f"{file.path.name}: a token's score is not a number")
    unknown = _gguf_id(file, tokens, "unknown")
    unknown = 2 if unknown is None else unknown
    if unknown >= len(tokens):
        raise ModelError(f"{file.path.name}: the tokenizer has no unknown token")
    lowest = min((score for score, kind in zip(scores, types, strict=True) if kind == _NORMAL), default=0.0)
    rows = list(zip(tokens, scores, types, strict=True))
    hidden = {
        token
        for token, score, kind in rows
        if kind not in (_NORMAL, _USER_DEFINED, _UNUSED) or (kind == _UNUSED and score < lowest)
    }
    vocab = [(token, lowest if token in hidden else score) for token, score, _ in rows]
    model = (
        models.Unigram(vocab, unknown)
        if encodes
        else models.BPE({token: index for index, token in enumerate(tokens)}, [])
    )
    backend = tokenizers.Tokenizer(model)
    prefix = file.get("tokenizer.ggml.add_space_prefix", False)
    merge = file.get("tokenizer.ggml.remove_extra_whitespaces", False)
    spaces = [(r"\A(?= *[^ ])", "▁"), (" ", "▁")] if prefix else [(" ", "▁")]
    if merge:
        spaces = [(r"\A +| +\z", ""), (r"\A(?!\z)| +", "▁")]
    steps: list[Any] = [normalizers.Replace(Regex(pattern), text) for pattern, text in spaces]
    if encodes and file.get("tokenizer.ggml.precompiled_charsmap"):
        stated = file.listed("tokenizer.ggml.precompiled_charsmap", int)
        try:
            steps.insert(0, Charsmap(bytes(byte & 255 for byte in stated)).part())
        except ValueError as err:
            raise ModelError(f"{file.path.name}: the tokenizer's precompiled_charsmap is broken: {err}") from err
    backend.normalizer = normalizers.Sequence(steps)

    def others() -> BestPieces:
        found = {
            token: 0.0 if kind == _USER_DEFINED else score
            for token, score, kind in rows
            if kind in (_NORMAL, _USER_DEFINED, _UNUSED)
        }
        return BestPieces(found, lowest - 10)

    backend.pre_tokenizer = passing_over(hidden, others)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix or merge else []),
        ]
    )
    return backend


_RWKV_ESCAPE = re.compile(rb"\\(x[0-9a-f]{2}|.)", re.DOTALL)
_RWKV_CHARS = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def _byte_level(tokens: Sequence[str], types: list[int]) -> list[str]:
    """Tokens of RWKV, which are the insides of Python's literals of bytes, in the alphabet of byte-level BPE; special tokens as they are."""

    def byte(escape: re.Match[bytes]) -> bytes:
        return bytes([int(escape[1][1:], 16)]) if len(escape[1]) > 1 else _RWKV_CHARS.get(escape[1], escape[1])

    return [
        byte_level(_RWKV_ESCAPE.sub(byte, token.encode())) if kind not in _SPECIAL else token
        for token, kind in zip(tokens, types, strict=True)
    ]


def _longest_pieces(file: GgufFile, tokens: Sequence[str], types: list[int]) -> tokenizers.Tokenizer:
    """RWKV's: at each place the longest token (`llm_tokenizer_rwkv` in llama.cpp, and TRIE_TOKENIZER in https://github.com/BlinkDL/RWKV-LM)."""
    pieces = [token for token, kind in zip(tokens, types, strict=True) if kind not in _SPECIAL]
    if not set(pieces) >= set(pre_tokenizers.ByteLevel.alphabet()):
        raise ModelError(f"{file.path.name}: the tokenizer lacks tokens of single bytes")
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    finder = TextFinder(pieces)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            Cutter(lambda text: list(finder.find(text))).part(),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


_PLAMO_UNKNOWN = -10_000_000


def _plamo(file: GgufFile, tokens: Sequence[str], types: list[int]) -> tokenizers.Tokenizer:
    """PLaMo 2's: the best pieces, their scores rounded to four places, found from the end of the text; bytes for a character that is no piece
    (`llm_tokenizer_plamo2` in llama.cpp)."""
    scores = _scores(file, tokens)
    bytes_there = {token for token, kind in zip(tokens, types, strict=True) if kind == _BYTE}
    if not bytes_there >= {f"<0x{byte:02X}>" for byte in range(256)}:
        raise ModelError(f"{file.path.name}: the tokenizer lacks tokens of single bytes")
    rounded = {
        token[::-1]: value
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind not in (_UNKNOWN, _CONTROL, _BYTE)
        and math.isfinite(score)
        # What is worse than an unknown character is padding.
        and (value := int(score * 1e4 + math.copysign(0.5, score))) > _PLAMO_UNKNOWN
    }
    pieces = BestPieces(rounded, _PLAMO_UNKNOWN, falls_back=True)
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], ignore_merges=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(Regex(r"\A\ufeff"), "")

    def cut(text: str) -> list[Span]:
        return [(len(text) - end, len(text) - start) for start, end in reversed(pieces.cut(text[::-1]))]

    backend.pre_tokenizer = Cutter(cut).part()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _word_piece(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """BERT's WordPiece, which cuts words and puts a text, or a pair of texts, between special tokens.

    llama.cpp's converter writes the beginning of a word with `▁` before it, and the rest without the `##` of BERT. Older ones do not write
    whether text is lower-cased: it is if no token has a capital letter.
    """
    plain = [token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL]
    # Old converters knew special tokens by their brackets.
    own = {token for token in plain if token.startswith("[") and token.endswith("]")}
    vocab: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _NORMAL and token not in own:
            token = token.removeprefix("▁") if token.startswith("▁") else f"##{token}"
        vocab[token] = index
    names = list(vocab)
    if len(names) != len(tokens):
        raise ModelError(f"{file.path.name}: the tokenizer has duplicate tokens")
    special: dict[str, str] = {}
    for name, keys, usual in (
        ("cls", ("cls", "bos"), "[CLS]"),
        ("sep", ("seperator", "eos"), "[SEP]"),  # the key is spelled so
        ("unk", ("unknown",), "[UNK]"),
    ):
        ids = [_gguf_id(file, names, key) for key in keys] + [vocab.get(usual)]
        first = next((index for index in ids if index is not None), None)
        if first is None:
            raise ModelError(f"{file.path.name}: the tokenizer has no {usual}")
        special[name] = names[first]
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=special["unk"]))
    cased = any(token != token.lower() for token in plain if token not in own)
    lowers, strips = (file.get(f"tokenizer.ggml.normalizer.{key}") for key in ("lowercase", "strip_accents"))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowers if isinstance(lowers, bool) else not cased,
        strip_accents=strips if isinstance(strips, bool) else None,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    sep, cls = ((special[name], vocab[special[name]]) for name in ("sep", "cls"))
    backend.post_processor = processors.BertProcessing(sep, cls)
    pad = _gguf_id(file, names, "padding")
    others = [names[index] for index, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)]
    backend.add_special_tokens(list(dict.fromkeys([*special.values(), *others])))
    named = special if pad is None else special | {"pad": names[pad]}
    return Tokenizer(
        backend,
        bos_id=None,
        eos_ids=(),
        pad_id=pad,
        chat_template=None,
        named_tokens={f"{name}_token": token for name, token in named.items()},
    )
