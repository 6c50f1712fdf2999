"""A custom logit processor that lets a test choose the output: the request's prompt is the script."""

import torch

from headrace.sampling.logit_processors import LogitContext

END_ID = 2


def play(context: LogitContext, logits: torch.Tensor) -> torch.Tensor:
    """Say the prompt again, token by token, then end. What the model thinks remains visible below the script's choice."""
    position = len(context.output_ids)
    wanted = int(context.prompt_ids[position]) if position < len(context.prompt_ids) else END_ID
    logits[wanted] = logits.max() + 50.0
    return logits
