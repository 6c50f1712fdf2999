"""`FillInMiddle`: the prompt that has a model write what belongs between a prefix and a suffix.

The tokens, their texts and their order are those of `/infill` of llama.cpp (`format_prompt_infill` in tools/server/server-common.cpp and
`llama_vocab::impl::load` in src/llama-vocab.cpp). Mistral's models have no token for the middle and read the suffix first (`encode_fim` of
mistral-common). Pure functions over a tokenizer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from headrace.checkpoint.gguf_names import END_TEXTS
from headrace.text.tokenizers import Tokenizer

ROLES = ("prefix_token", "suffix_token", "middle_token")
"""Names of the tokens in tokenizer_config.json."""

_FAMILIES: tuple[tuple[str, str, str], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1
)
_MISTRAL = ("[PREFIX]", "[SUFFIX]")
_REPOSITORY = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")
_FILE = ("<|file_sep|>",)
_ENDS = END_TEXTS | {"▁<EOT>", "<file_sep>", "<|file_separator|>"}


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """What a tokenizer has for it.

    prefix, suffix, middle: the tokens before each part; middle: None = the suffix comes first and the prefix last. repository, file: the tokens
    before the names of a repository and of one of its files; None = it has none. begin: what begins every text. ends: tokens that end the middle.
    """

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    file: int | None
    begin: tuple[int, ...]
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self | None:
        """None for a tokenizer that lacks the tokens. Those that the checkpoint names go before those that are known by their text."""
        named = [tokenizer.named_tokens.get(role, "") for role in ROLES]
        found = next((ids for texts in (named, *_FAMILIES, _MISTRAL) if (ids := _all_ids(tokenizer, texts))), None)
        if found is None:
            return None
        frame = tokenizer.encode("", add_special_tokens=True)
        begin = () if tokenizer.bos_id not in frame else (frame[0],)
        own_ends = frozenset(index for text, index in tokenizer.added_tokens.items() if text in _ENDS)
        repository, file = (next(iter(_ids(tokenizer, texts)), None) for texts in (_REPOSITORY, _FILE))
        middle = found[2] if len(found) == len(ROLES) else None
        return cls(found[0], found[1], middle, repository, file, begin, own_ends.union(found))

    def prompt(self, prefix: Sequence[int], suffix: Sequence[int], begins: bool = True) -> list[int]:
        """The prompt's tokens. begins: as a text of this model begins, usually with bos."""
        begin = self.begin if begins else ()
        if self.middle is None:
            return [*begin, self.suffix, *suffix, self.prefix, *prefix]
        return [*begin, self.prefix, *prefix, self.suffix, *suffix, self.middle]


def _ids(tokenizer: Tokenizer, texts: Iterable[str]) -> list[int]:
    """Of those texts that are tokens."""
    return [index for text in texts if text and (index := tokenizer.token_to_id(text)) is not None]


def _all_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int] | None:
    """None if one of the texts is no token."""
    ids = _ids(tokenizer, texts)
    return ids if len(ids) == len(texts) else None
