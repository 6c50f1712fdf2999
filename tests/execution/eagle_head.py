"""An EAGLE-3 head with random weights, for the llama of `runner_harness` with five layers."""

import json
from pathlib import Path

import torch
from runner_harness import CONTEXT, VOCAB_SIZE
from safetensors.torch import save_file

from headrace.checkpoint.model_config import parse_hf_config
from headrace.layers.weight import Placement
from headrace.models.eagle3 import EagleHead

HIDDEN_SIZE = 32
NUM_LAYERS, READS = 5, (1, 3, 4)
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": 50,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in READS]},
}


def save_head(folder: Path) -> None:
    """It guesses every other of the first hundred ids."""
    folder.mkdir()
    placement = Placement(torch.device("cpu"), torch.float32, CONTEXT)
    weights = EagleHead(parse_hf_config(CONFIG), placement, lambda ids: ids, VOCAB_SIZE).weights()
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for weight in weights:
        tensor = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
        tensors[weight.name] = torch.ones(weight.shape) if weight.init == "ones" else tensor
    tensors["d2t"] = torch.arange(50)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
