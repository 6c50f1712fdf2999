"""Models whose matrices have each of ggml's types: the logits are those of transformers with the gguf library's values."""

import itertools
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from model_harness import open_runner, random_tokens

from headrace import Engine
from headrace.checkpoint.gguf import BLOCK_TYPES, GgufFile
from headrace.checkpoint.source import open_checkpoint
from headrace.checkpoint.weight_formats import GGUF_METHOD
from headrace.config.resolve import override_model
from headrace.distributed.base import Shard
from headrace.errors import ModelError
from headrace.kernels import cpu

# float32 on both sides, sums in another order: differences of 1e-5 at logits of order 5.
TOLERANCE = 2e-4
HIDDEN, FEED_FORWARD, VOCAB = 256, 512, 128
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


def save_gguf(path: Path, *kinds: gguf.GGMLQuantizationType) -> dict[str, torch.Tensor]:
    """Write a qwen2 model of one layer, and give its tensors by GGUF name, dequantised by the library. kinds: of the matrices in turn."""
    rng = np.random.default_rng(4)
    pools = {kind: blocks_of(kind) for kind in kinds}
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(1)
    writer.add_context_length(160)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    values: dict[str, np.ndarray] = {}
    for (name, (rows, columns)), kind in zip(MATRICES.items(), itertools.cycle(kinds)):
        pool, block_values = pools[kind], gguf.GGML_QUANT_SIZES[kind][0]
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


def copy_with(path: Path, copy: Path, tensors: dict[str, np.ndarray]) -> None:
    """A copy of a file with other tensors of these names, or with them besides."""
    writer, reader = gguf.GGUFWriter(copy, "qwen2"), gguf.GGUFReader(path)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if tensor.name not in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def transformers_logits(values: dict[str, torch.Tensor], head: torch.Tensor | None = None) -> torch.Tensor:
    """The logits of PROMPT by transformers, float32[tokens, VOCAB]. head: the output projection, None = the embedding."""
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
    if head is not None:
        model.lm_head.weight = torch.nn.Parameter(head)
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
        == {"quant_method": GGUF_METHOD}
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


MIXED = [
    ("Q6_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
    ("Q3_K", "IQ2_S", "Q5_0"),
    ("Q5_K", "IQ2_XXS", "IQ3_S", "Q5_K", "IQ3_XXS"),
    ("IQ3_XXS",),
    ("Q4_K", "F16", "Q8_0", "BF16"),
]
mixed = pytest.mark.parametrize("names", MIXED, ids="-".join)


@needs_native
@mixed
def test_a_file_that_mixes_types_within_a_product(names, tmp_path):
    """Types without a kernel, and floats, make their product one of floats."""
    values = save_gguf(tmp_path / "model.gguf", *(gguf.GGMLQuantizationType[name] for name in names))

    check_in_own_bits(tmp_path / "model.gguf", values)


@mixed
def test_a_file_that_mixes_types_is_dequantised_to_its_values(names, tmp_path):
    values = save_gguf(tmp_path / "model.gguf", *(gguf.GGMLQuantizationType[name] for name in names))

    got = open_runner(tmp_path / "model.gguf", "torch_native").chunks(0, PROMPT, [])

    want = transformers_logits(values)
    torch.testing.assert_close(got, want, atol=TOLERANCE * float(want.abs().max()), rtol=TOLERANCE)


@needs_native
def test_an_embedding_of_floats_beside_an_output_projection_of_its_own(tmp_path):
    """Lookups and logits each read the table that is theirs."""
    path, head = tmp_path / "model.gguf", torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    values = save_gguf(path, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q4_K)
    copy_with(path, tmp_path / "untied.gguf", {"output.weight": head.half().numpy()})

    runner = open_runner(tmp_path / "untied.gguf", "torch_native", quantization="gguf")

    want = transformers_logits(values, head.half().float())
    got = runner.chunks(0, PROMPT, [])
    assert float((got - want).norm() / want.norm()) < 0.05
    weights = {weight.name: weight for weight in runner.model.weights()}
    assert torch.equal(weights["model.embed_tokens.weight"].read().half().float(), values["token_embd.weight"])
    assert torch.equal(weights["lm_head.weight"].read().float(), head.half().float())


SAMPLING = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
OWN_BITS_OPTIONS = {"quantization": "gguf", "skip_tokenizer_init": True, "max_total_tokens": 512, "log_level": "error"}


@needs_native
def test_two_ranks_in_the_bits_of_a_file_answer_as_one(tmp_path):
    """Half of what attention gives is half a block of 256, so that matrix has blocks of 32."""
    path = tmp_path / "model.gguf"
    names = ("Q6_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q3_K", "Q2_K", "Q4_K")
    save_gguf(path, *(gguf.GGMLQuantizationType[name] for name in names))
    found = []
    for size in (1, 2):
        options = OWN_BITS_OPTIONS | {"tp_size": size, "num_threads": size, "single_process": size == 1}
        with Engine(model_path=str(path), **options) as engine:
            answer = engine.generate(input_ids=PROMPT, sampling_params=SAMPLING, return_logprob=True)
            found.append((answer["output_ids"], answer["meta_info"]["output_token_logprobs"]))

    assert found[0][0] == found[1][0]
    for one, two in zip(found[0][1], found[1][1], strict=True):
        assert one[0] == pytest.approx(two[0], abs=0.05)


@needs_native
def test_a_block_that_two_ranks_would_share_is_refused(tmp_path):
    save_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q4_K)
    with pytest.raises(ModelError, match=r"Q4_K weights in blocks of 256 cannot be cut at columns 128 and 256 of 256"):
        open_runner(tmp_path / "model.gguf", "torch_native", quantization="gguf", shard=Shard(1, 2))


@needs_native
def test_weights_in_the_bits_of_a_file_are_not_saved(tmp_path):
    path = tmp_path / "model.gguf"
    save_gguf(path, gguf.GGMLQuantizationType.Q4_K)
    with Engine(model_path=str(path), single_process=True, save_dir=str(tmp_path), **OWN_BITS_OPTIONS) as engine:
        saved, why = engine.save_sharded_state("copy")

    assert not saved
    assert "quantised to gguf when they were loaded cannot be saved" in why


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_type_without_a_kernel_is_quantised_like_the_values_it_stands_for(scheme, tmp_path):
    """Dequantised while loading and rounded again: the same bits as a float32 file with the same values."""
    kind = gguf.GGMLQuantizationType.IQ4_XS
    values = save_gguf(tmp_path / "model.gguf", kind)
    copy_with(tmp_path / "model.gguf", tmp_path / "twin.gguf", {name: value.numpy() for name, value in values.items()})

    got, want = (
        open_runner(tmp_path / name, "torch_native", quantization=scheme).chunks(0, PROMPT, [])
        for name in ("model.gguf", "twin.gguf")
    )

    assert torch.equal(got, want)
    assert open_checkpoint(tmp_path / "model.gguf").quantized("model.layers.0.self_attn.q_proj.weight") is None
