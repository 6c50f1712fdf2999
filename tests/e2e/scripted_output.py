"""Custom logit processors that let a test choose the output: the request's prompt is the script."""

from functools import cache

import torch

from headrace.checkpoint.names import resolve_model
from headrace.sampling.logit_processors import LogitContext
from headrace.text.tokenizers import load_tokenizer

END_ID = 2


def play(context: LogitContext, logits: torch.Tensor) -> torch.Tensor:
    """Say the prompt again, token by token, then end. What the model thinks remains visible below the script's choice."""
    position = len(context.output_ids)
    wanted = int(context.prompt_ids[position]) if position < len(context.prompt_ids) else END_ID
    logits[wanted] = logits.max() + 50.0
    return logits


def write(context: LogitContext, logits: torch.Tensor) -> torch.Tensor:
    """Say the text of the prompt again in whatever tokens may come next, the longest first, then end. Once something else was said, end soon."""
    tokens, ids = _tokens()
    script = b"".join(tokens[index] for index in context.prompt_ids)
    said = b"".join(tokens[index] for index in context.output_ids)
    rest = script[len(said) :]
    most = float(logits.max())
    if not rest or not script.startswith(said):
        logits[END_ID] = most + 50.0
        return logits
    for length in range(1, len(rest) + 1):
        index = ids.get(rest[:length])
        if index is not None:
            logits[index] = most + 50.0 + length
    return logits


@cache
def _tokens() -> tuple[list[bytes], dict[bytes, int]]:
    """The bytes of SmolLM2's tokens, and the ids of bytes."""
    tokenizer = load_tokenizer(resolve_model("smollm2"))
    tokens = [b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    return tokens, {token: index for index, token in enumerate(tokens) if token}
