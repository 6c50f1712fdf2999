"""Models whose matrices have each of ggml's types: the logits are those of transformers with the gguf library's values."""

import itertools
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from model_harness import open_runner, random_tokens

from headrace.checkpoint.gguf import BLOCK_TYPES, GgufFile
from headrace.checkpoint.source import open_checkpoint
from headrace.checkpoint.weight_formats import GGUF_METHOD
from headrace.errors import ModelError
from headrace.execution.model_source import override_model
from headrace.kernels import cpu

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


def save_gguf(
    path: Path, *kinds: gguf.GGMLQuantizationType, num_layers: int = 1, seed: int = 4
) -> dict[str, torch.Tensor]:
    """Write a qwen2 model, and give its tensors by GGUF name, dequantised by the library. kinds: of the matrices in turn."""
    rng = np.random.default_rng(seed)
    pools = {kind: blocks_of(kind) for kind in kinds}
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(num_layers)
    writer.add_context_length(160)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    values: dict[str, np.ndarray] = {}
    matrices = MATRICES | {
        name.replace(".0.", f".{layer}."): shape for layer in range(1, num_layers) for name, shape in MATRICES.items()
    }
    for (name, (rows, columns)), kind in zip(matrices.items(), itertools.cycle(kinds)):
        pool, block_values = pools[kind], gguf.GGML_QUANT_SIZES[kind][0]
        data = pool[rng.integers(0, len(pool), rows * columns // block_values)].reshape(rows, -1)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
        values[f"{name}.weight"] = gguf.quants.dequantize(data, kind)
    vectors = {"output_norm.weight": HIDDEN}
    for layer in range(num_layers):
        sizes = {"attn_norm.weight": HIDDEN, "ffn_norm.weight": HIDDEN}
        sizes |= {"attn_q.bias": HIDDEN, "attn_k.bias": HIDDEN // 2, "attn_v.bias": HIDDEN // 2}
        vectors |= {f"blk.{layer}.{name}": size for name, size in sizes.items()}
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


def check_in_own_bits(path: Path, values: dict[str, torch.Tensor]) -> None:
    """Logits with activations in 8 bits, whole and in chunks, and the tensors read back."""
    runner = open_runner(path, "torch_native", quantization="gguf")
    got = runner.chunks(0, PROMPT, [])

    want = transformers_logits(values)
    assert float((got - want).norm() / want.norm()) < 0.05
    assert torch.equal(runner.chunks(1, PROMPT, [7, 12]), got)
    for weight in runner.model.weights():
        if weight.name.endswith(
            ("q_proj.weight", "v_proj.weight", "up_proj.weight", "down_proj.weight", "embed_tokens.weight")
        ):
            assert torch.equal(weight.read(), values[GGUF_NAMES[weight.name.split(".")[-2]]]), weight.name


GGUF_NAMES = {
    "embed_tokens": "token_embd.weight",
    **{f"{part}_proj": f"blk.0.attn_{part}.weight" for part in "qkv"},
    **{f"{part}_proj": f"blk.0.ffn_{part}.weight" for part in ("gate", "up", "down")},
}
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2],
    "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip
"""Places of the float16 scales in a block, of ggml-common.h."""
OWN_BITS = [*SCALES, "MXFP4"]
needs_native = pytest.mark.skipif(bool(cpu.why_not()), reason=cpu.why_not())


@needs_native
@pytest.mark.parametrize("name", OWN_BITS)
def test_a_file_in_its_own_bits_has_the_logits_of_its_values(name, tmp_path):
    values = save_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType[name])

    check_in_own_bits(tmp_path / "model.gguf", values)


@needs_native
@pytest.mark.parametrize(("name", "size"), [("F16", 2), ("BF16", 2), ("F32", 4)])
def test_a_file_of_floats_in_its_own_bits_rounds_nothing(name, size, tmp_path):
    path = tmp_path / "model.gguf"
    values = save_gguf(path, gguf.GGMLQuantizationType[name])
    assert open_checkpoint(path).config.quantization == {"quant_method": GGUF_METHOD, "in_own_bits": name != "BF16"}

    runner = open_runner(path, "torch_native", quantization="gguf")

    got, want = runner.chunks(0, PROMPT, []), transformers_logits(values)
    torch.testing.assert_close(got, want, atol=TOLERANCE * float(want.abs().max()), rtol=TOLERANCE)
    assert torch.equal(runner.chunks(1, PROMPT, [7, 12]), got)
    assert {weight.itemsize for weight in runner.model.weights() if len(weight.shape) == 2} == {size}


@needs_native
def test_an_update_of_one_projection_leaves_its_neighbours_as_they_were(tmp_path):
    values = save_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q5_K)
    model = open_runner(tmp_path / "model.gguf", "torch_native", quantization="gguf").model
    weights = {weight.name.split(".")[-2]: weight for weight in model.weights() if weight.name.endswith("proj.weight")}
    new = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1))

    [keeper] = weights["q_proj"].keepers
    keeper.restore(keeper.staged({weights["q_proj"].part: new}))

    assert torch.equal(weights["q_proj"].read(), new)
    for name in ("k_proj", "v_proj"):
        assert torch.equal(weights[name].read(), values[GGUF_NAMES[name]]), name


def test_overrides_leave_the_format_of_the_file(tmp_path):
    save_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    config = open_checkpoint(tmp_path / "model.gguf").config

    assert (
        override_model(config, '{"rope_theta": 1000000.0}').quantization
        == config.quantization
        == {"quant_method": GGUF_METHOD, "in_own_bits": True}
    )


@pytest.mark.parametrize("name", OWN_BITS)
def test_scales_that_are_no_numbers_and_matrices_of_zeros_are_refused(name, tmp_path):
    path = tmp_path / "model.gguf"
    save_gguf(path, gguf.GGMLQuantizationType[name])
    tensor, whole = GgufFile(path).tensors["blk.0.attn_q.weight"], path.read_bytes()
    begin, end = tensor.offset, tensor.offset + tensor.num_bytes
    places = [0] if name == "MXFP4" else SCALES[name]
    not_a_number = b"\xff" if name == "MXFP4" else np.float16("nan").tobytes()
    for content, why in (
        *(
            (whole[: begin + at] + not_a_number + whole[begin + at + len(not_a_number) :], "contains NaN")
            for at in places
        ),
        (whole[:begin] + bytes(end - begin) + whole[end:], "is zero-filled"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=why):
            open_checkpoint(path).blocks("model.layers.0.self_attn.q_proj.weight")


@needs_native
@pytest.mark.parametrize(
    "names",
    [
        ("Q6_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
        ("Q3_K", "IQ2_S", "Q5_0"),
        ("IQ3_XXS",),
        ("Q4_K", "F16", "Q8_0", "BF16"),
    ],
    ids="-".join,
)
def test_a_file_that_mixes_types_within_a_product(names, tmp_path):
    """Types without a kernel, and floats, make their product one of floats."""
    values = save_gguf(tmp_path / "model.gguf", *(gguf.GGMLQuantizationType[name] for name in names))

    check_in_own_bits(tmp_path / "model.gguf", values)


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
