"""The tokenizer of smollm2, which takes 0.3 s to open: once in a process."""

from functools import cache

from headrace.checkpoint.names import resolve_model
from headrace.text.tokenizers import Tokenizer, load_tokenizer


@cache
def smollm2_tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2"))
