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

    def prompt_with_files(
        self, tokenizer: Tokenizer, prefix: str, suffix: str, start: str, files: Sequence[tuple[str, str]], room: int
    ) -> list[int]:
        """The prompt after parts of other files (name, text), as `/infill` makes it. start: how the middle begins. Texts never become special tokens.

        room: most tokens. Of a prefix and a suffix that are longer the nearest to the middle are taken, three quarters of the room for the prefix;
        of the files the last.
        """
        before, after, begun = tokenizer.encode_batch([prefix, suffix, start], False)
        room = max(0, room - len(self.begin) - 3 - len(begun))
        num_after = min(len(after), max(room // 4, room - len(before)))
        num_before = min(len(before), room - num_after)
        prompt = self.prompt([*before[len(before) - num_before :], *begun], after[:num_after])
        extra = self._files(tokenizer, files)
        return [*extra[max(0, len(extra) - (room - num_before - num_after)) :], *prompt]

    def _files(self, tokenizer: Tokenizer, files: Sequence[tuple[str, str]]) -> list[int]:
        """The repository and its files; the names of the repository and of the file with the middle are those that llama.cpp's server gives them."""
        runs: list[tuple[int | None, str]] = [] if self.repository is None else [(self.repository, "myproject\n")]
        for name, text in files:
            runs += [(None, "\n\n--- snippet ---\n\n") if self.file is None else (self.file, f"{name}\n"), (None, text)]
        if self.file is not None:
            runs.append((self.file, "filename\n"))
        rows = tokenizer.encode_batch([text for _, text in runs], False)
        return [
            index
            for (mark, _), row in zip(runs, rows, strict=True)
            for index in ([mark] if mark is not None else []) + row
        ]


def _ids(tokenizer: Tokenizer, texts: Iterable[str]) -> list[int]:
    return [index for text in texts if text and (index := tokenizer.token_to_id(text)) is not None]


def _all_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int] | None:
    """None if one of the texts is no token."""
    ids = _ids(tokenizer, texts)
    return ids if len(ids) == len(texts) else None
