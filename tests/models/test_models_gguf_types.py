"""Models whose matrices have each of ggml's types: the logits are those of transformers with the gguf library's values."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from model_harness import open_runner, random_tokens

from headrace.checkpoint.gguf import BLOCK_TYPES
from headrace.checkpoint.source import open_checkpoint

# float32 on both sides, sums in another order: differences of 1e-5 at logits of order 5.
TOLERANCE = 2e-4
HIDDEN, FEED_FORWARD, VOCAB = 256, 512, 64
PROMPT = random_tokens(20, seed=1, vocab_size=VOCAB)
MATRICES = {
    "token_embd": (VOCAB, HIDDEN),
    "blk.0.attn_q": (HIDDEN, HIDDEN),
    "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate": (FEED_FORWARD, HIDDEN),
    "blk.0.ffn_up": (FEED_FORWARD, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, FEED_FORWARD),
}
QUANTISED = [block for block in BLOCK_TYPES.values() if block.block_values > 1]


def blocks_of(kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Random blocks whose largest value is between 0.05 and 0.5: uint8[n, block_bytes], n >= 8."""
    draws = np.random.default_rng(3).integers(0, 256, (20000, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        largest = np.abs(gguf.quants.dequantize(draws, kind)).max(axis=1)
    kept = draws[(largest > 0.05) & (largest < 0.5)]
    assert len(kept) >= 8
    return kept


def save_gguf(path: Path, kind: gguf.GGMLQuantizationType) -> dict[str, torch.Tensor]:
    """Write a qwen2 model of one layer, and give its tensors by GGUF name, dequantised by the library."""
    rng = np.random.default_rng(4)
    pool, (block_values, _) = blocks_of(kind), gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(1)
    writer.add_context_length(160)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    values: dict[str, np.ndarray] = {}
    for name, (rows, columns) in MATRICES.items():
        data = pool[rng.integers(0, len(pool), rows * columns // block_values)].reshape(rows, -1)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
        values[f"{name}.weight"] = gguf.quants.dequantize(data, kind)
    vectors = {"output_norm.weight": HIDDEN, "blk.0.attn_norm.weight": HIDDEN, "blk.0.ffn_norm.weight": HIDDEN}
    vectors |= {"blk.0.attn_q.bias": HIDDEN, "blk.0.attn_k.bias": HIDDEN // 2, "blk.0.attn_v.bias": HIDDEN // 2}
    for name, size in vectors.items():
        values[name] = rng.standard_normal(size, dtype=np.float32)
        writer.add_tensor(name, values[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: torch.from_numpy(value) for name, value in values.items()}


def transformers_logits(values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits of PROMPT by transformers, float32[tokens, VOCAB]."""
    config = transformers.Qwen2Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FEED_FORWARD, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    modules = {
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "blk.0.attn_norm": "layers.0.input_layernorm",
        "blk.0.ffn_norm": "layers.0.post_attention_layernorm",
        "blk.0.attn_output": "layers.0.self_attn.o_proj",
    }
    modules |= {f"blk.0.attn_{part}": f"layers.0.self_attn.{part}_proj" for part in "qkv"}
    modules |= {f"blk.0.ffn_{part}": f"layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")}
    model = transformers.Qwen2ForCausalLM(config).float().eval()
    state = {f"{modules[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": value for name, value in values.items()}
    model.model.load_state_dict(state, strict=True)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


@pytest.mark.parametrize("block", QUANTISED, ids=lambda block: block.name)
def test_a_model_of_each_type_has_the_logits_of_its_dequantised_twin(block, tmp_path):
    values = save_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType[block.name])

    got = open_runner(tmp_path / "model.gguf", "torch_native").chunks(0, PROMPT, [])

    want = transformers_logits(values)
    assert want.std() > 0.1  # not all the same
    torch.testing.assert_close(got, want, atol=TOLERANCE * float(want.abs().max()), rtol=TOLERANCE)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_type_without_a_kernel_is_quantised_like_the_values_it_stands_for(scheme, tmp_path):
    """Dequantised while loading and rounded again: the same bits as a float32 file with the same values."""
    kind = gguf.GGMLQuantizationType.IQ4_XS
    values = save_gguf(tmp_path / "model.gguf", kind)
    writer = gguf.GGUFWriter(tmp_path / "twin.gguf", "qwen2")
    for key, field in gguf.GGUFReader(tmp_path / "model.gguf").fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
    for name, value in values.items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    got, want = (
        open_runner(tmp_path / name, "torch_native", quantization=scheme).chunks(0, PROMPT, [])
        for name in ("model.gguf", "twin.gguf")
    )

    assert torch.equal(got, want)
    assert open_checkpoint(tmp_path / "model.gguf").quantized("model.layers.0.self_attn.q_proj.weight") is None
