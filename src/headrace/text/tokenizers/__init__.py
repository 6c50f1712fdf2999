"""Text to token ids and back, for the checkpoint that is served.

Owns `Tokenizer` (base.py), a wrapper of the `tokenizers` library, and its making from a Hugging Face folder (folder.py) or from GGUF metadata
(gguf.py; gguf_splits.py has how texts are cut there, pieces.py what the library lacks for it). Imports neither torch nor, except for folders with
only a sentencepiece model, transformers. A Tokenizer may be used from several threads.

Text of users is never read as special tokens: `encode` recognises them only when told to, and `encode_rendered` only
where the chat template wrote them.
"""

from pathlib import Path

from headrace.checkpoint.gguf import gguf_of, opened
from headrace.text.tokenizers.base import RenderedPrompt, Segment, Tokenizer, check_unicode
from headrace.text.tokenizers.folder import tokenizer_from_folder
from headrace.text.tokenizers.gguf import tokenizer_from_gguf
from headrace.text.tokenizers.pieces import TextFinder

__all__ = [
    "RenderedPrompt",
    "Segment",
    "TextFinder",
    "Tokenizer",
    "check_unicode",
    "load_tokenizer",
    "tokenizer_from_folder",
    "tokenizer_from_gguf",
]


def load_tokenizer(path: Path, *, encodes: bool = True, text: str | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint: a Hugging Face folder or a GGUF file. Raises ModelError.

    encodes: without, it finds and decodes tokens only, where that takes a tenth of the time and memory: with most GGUF files. text: only this one
    will be encoded, which takes a third of the time where tokens are byte pairs.
    """
    file = gguf_of(path) if path.is_dir() else path
    return (
        tokenizer_from_folder(path) if file is None else tokenizer_from_gguf(opened(file), encodes=encodes, text=text)
    )
