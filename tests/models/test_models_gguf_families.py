"""Decoders in GGUF files, whose tensors have the names that the gguf library gives them: the logits are those of transformers."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from model_harness import BACKENDS, FAMILIES, open_runner, random_tokens, save_tiny, tiny_config

from headrace.checkpoint import families

TOLERANCE = 2e-4  # as in test_models_families.py
PROMPT = random_tokens(70, seed=1)
ELSEWHERE = {"gemma3", "qwen3moe", "qwen2vl", "qwen3vl"}
"""Those with metadata or stacked tensors of their own: `tests/checkpoint/test_source.py` has them, `tests/e2e/test_e2e_mmproj.py` those that see."""
DECODERS = [arch for arch, own in families.all_families().gguf.items() if own.name is None and arch not in ELSEWHERE]


def write(theirs: Any, file: Path, arch: str) -> None:
    """The model as llama.cpp's converter writes it."""
    config = theirs.config
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in theirs.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if families.all_families().gguf[arch].interleaved and ("q_proj" in name or "k_proj" in name):
            tensor = interleaved(tensor, config.head_dim)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(found, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The halves of each head, row by row in turn."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(rows.shape).contiguous()


@pytest.mark.parametrize("arch", DECODERS)
def test_a_decoder_has_the_logits_of_transformers(arch: str, tmp_path: Path):
    model_type = families.all_families().gguf[arch].model_type
    family = next(name for name, (tiny, _) in FAMILIES.items() if tiny == model_type)
    theirs = save_tiny(tiny_config(family), tmp_path)
    write(theirs, tmp_path / "model.gguf", arch)

    got = open_runner(tmp_path / "model.gguf", BACKENDS[-1]).chunks(0, PROMPT, [])

    with torch.inference_mode():
        want = theirs(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)
