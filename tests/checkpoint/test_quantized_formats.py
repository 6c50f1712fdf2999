"""Quantised checkpoints are read as their formats say, or refused naming the setting or the tensor."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.checkpoint.gguf import dequantize
from headrace.checkpoint.gguf_checkpoint import quantized_matrix
from headrace.checkpoint.quantized_formats import own_tensors, stored_format, stored_scheme
from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.source import open_checkpoint
from headrace.checkpoint.weight_formats import OWN_METHOD
from headrace.errors import ModelError

K, N = 128, 24
CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}
LAYER = "model.layers.0.mlp.up_proj"


def random_layer(group: int, symmetric: bool):
    """(codes int[k, n], zeros int[groups, n], scales half[groups, n], weight float32[n, k])."""
    generator = torch.Generator().manual_seed(group)
    codes = torch.randint(0, 16, (K, N), generator=generator)
    zeros = torch.full((K // group, N), 8) if symmetric else torch.randint(1, 16, (K // group, N), generator=generator)
    scales = (torch.rand(K // group, N, generator=generator) * 0.01 + 0.001).half()
    rows = torch.arange(K) // group
    return codes, zeros, scales, ((codes - zeros[rows]).float() * scales.float()[rows]).T


def pack_words(values: torch.Tensor, order=tuple(range(8))) -> torch.Tensor:
    """int[..., 8 m] -> int32[..., m]; nibble i of a word is element order[i]."""
    words = torch.zeros(*values.shape[:-1], values.shape[-1] // 8, dtype=torch.int64)
    for place, element in enumerate(order):
        words |= values[..., element::8].long() << 4 * place
    return (words - ((words >> 31) << 32)).to(torch.int32)


def gptq_parts(codes, zeros, scales, group, zero_offset=1):
    return {
        f"{LAYER}.qweight": pack_words(codes.T).T.contiguous(),
        f"{LAYER}.qzeros": pack_words(zeros - zero_offset),
        f"{LAYER}.scales": scales,
        f"{LAYER}.g_idx": (torch.arange(K) // group).to(torch.int32),
    }


def awq_parts(codes, zeros, scales):
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        f"{LAYER}.qweight": pack_words(codes, order),
        f"{LAYER}.qzeros": pack_words(zeros, order),
        f"{LAYER}.scales": scales,
    }


def write(folder, parts, **quantization):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantization}))
    save_file({**parts, "model.norm.weight": torch.ones(128)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2", "awq"])
def test_a_layer_of_four_bit_codes_reads_as_its_weight(tmp_path, version, group, symmetric):
    codes, zeros, scales, weight = random_layer(group, symmetric)
    if version == "awq":
        folder = write(tmp_path, awq_parts(codes, zeros, scales), quant_method="awq", bits=4, group_size=group)
    else:
        parts = gptq_parts(codes, zeros, scales, group, 1 if version == "gptq" else 0)
        folder = write(
            tmp_path, parts, quant_method="gptq", bits=4, group_size=group, checkpoint_format=version, desc_act=False
        )

    checkpoint = open_checkpoint(folder)

    assert sorted(checkpoint.tensor_names()) == [f"{LAYER}.weight", "model.norm.weight"]
    assert checkpoint.shape(f"{LAYER}.weight") == (N, K)
    assert checkpoint.total_bytes == 4 * N * K + 4 * 128
    matrix = checkpoint.quantized(f"{LAYER}.weight")
    assert matrix is not None
    assert (matrix.scheme, matrix.group_size) == ("int4", group)
    assert (matrix.minimums is None) == symmetric
    assert torch.allclose(matrix.dequantize(), weight, rtol=0, atol=1e-7)
    assert torch.equal(checkpoint.tensor(f"{LAYER}.weight"), matrix.dequantize())
    assert checkpoint.quantized("model.norm.weight") is None


def test_one_group_for_a_whole_row(tmp_path):
    codes, zeros, scales, weight = random_layer(128, False)
    folder = write(tmp_path, awq_parts(codes, zeros, scales), quant_method="awq", bits=4, group_size=-1)
    assert torch.allclose(open_checkpoint(folder).tensor(f"{LAYER}.weight"), weight, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "eetq"}, "quant_method eetq are not supported"),
        ({"quant_method": ["gptq"]}, "are not supported"),
        ({"quant_method": "gptq", "bits": 5, "group_size": 128}, "of 5 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "marlin"}, "version marlin"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "of 8 bits"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "mx_fp"}, "mx_fp weights"),
        ({"quant_method": "compressed-tensors"}, "without config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": ["Linear"]}}, "config_groups.a has no weights"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"a": {"weights": {}}}},
            "format marlin-24",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {}}},
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "with a sparsity_config",
        ),
        ({"quant_method": "fp8", "activation_scheme": "other"}, "activation_scheme other"),
        ({"quant_method": "modelopt", "quant_algo": "INT2"}, "quant_algo INT2"),
        ({"quant_method": "hqq", "quant_config": {"nbits": 5}}, "of 5 bits"),
        ({"quant_method": "torchao"}, "does not say their quant_type"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "bfp16"}}}, "bfp16 weights"),
        ({"quant_method": OWN_METHOD, "scheme": "int3", "group_size": 32}, "scheme int3"),
    ],
)
def test_settings_that_are_not_served_are_named(settings, message):
    with pytest.raises(ModelError, match=message):
        stored_format(settings)


def test_a_float_checkpoint_has_no_stored_scheme():
    assert stored_scheme(None) == "none"
    assert stored_scheme({"quant_method": "awq", "bits": 4, "group_size": 128}) == "int4"
    assert stored_scheme({"quant_method": OWN_METHOD, "scheme": "int8", "group_size": 32}) == "int8"


def test_a_missing_part_and_a_wrong_shape_are_named(tmp_path):
    codes, zeros, scales, _ = random_layer(32, True)
    parts = gptq_parts(codes, zeros, scales, 32)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    missing = {name: part for name, part in parts.items() if not name.endswith("scales")}
    with pytest.raises(ModelError, match="up_proj has no scales"):
        open_checkpoint(write(tmp_path, missing, **settings))
    parts[f"{LAYER}.scales"] = scales[:2].contiguous()
    with pytest.raises(ModelError, match=r"up_proj\.scales is \[2, 24\], expected \[4, 24\]"):
        open_checkpoint(write(tmp_path, parts, **settings)).tensor(f"{LAYER}.weight")


def test_a_config_that_promises_quantised_layers_needs_some(tmp_path):
    with pytest.raises(ModelError, match="has no qweight"):
        open_checkpoint(write(tmp_path, {}, quant_method="awq", bits=4, group_size=32))


@pytest.mark.parametrize("kind", ["int8", "int4", "int4-min"])
def test_our_own_layout_reads_back_what_was_written(tmp_path, kind):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256 if kind == "int8" else 16, (N, K), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(N, K // 32, generator=generator) + 0.01).half().float()
    minimums = torch.randn(N, K // 32, generator=generator).half().float() + 0.01 if kind == "int4-min" else None
    minimums = None if minimums is None else minimums.half().float()
    matrix = QuantizedMatrix("int8" if kind == "int8" else "int4", codes, scales, minimums, 32)
    parts = {f"{LAYER}.{suffix}": part for suffix, part in own_tensors(matrix).items()}
    folder = write(tmp_path, parts, quant_method=OWN_METHOD, scheme="int4", group_size=32)

    checkpoint = open_checkpoint(folder)

    assert checkpoint.shape(f"{LAYER}.weight") == (N, K)
    got = checkpoint.quantized(f"{LAYER}.weight")
    assert got is not None
    assert got.scheme == matrix.scheme
    assert torch.equal(got.codes, codes)
    assert torch.equal(got.dequantize(), matrix.dequantize())


def test_columns_cut_large_groups_exactly_and_small_ones_never():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (4, 192), generator=generator, dtype=torch.uint8)
    scales, minimums = torch.rand(2, 4, 3, generator=generator).unbind()
    matrix = QuantizedMatrix("int4", codes, scales, minimums, 64)
    assert torch.equal(matrix.columns(32, 160).dequantize(), matrix.dequantize()[:, 32:160])
    with pytest.raises(ModelError, match="groups of 64 cannot be cut at columns 48 and 192"):
        matrix.columns(48, 192)


def test_scales_too_small_for_half_precision_are_stored_in_single():
    codes = torch.zeros(4, 32, dtype=torch.uint8)
    tensors = own_tensors(QuantizedMatrix("int8", codes, torch.full((4, 1), 1e-6), None, 32))
    assert tensors["scales"].dtype == torch.float32


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q4_K"])
def test_gguf_blocks_become_a_matrix_of_the_same_weights(name):
    kind = gguf.GGMLQuantizationType[name]
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (6 * 512 // block_values, block_bytes), dtype=np.uint8)
    # Scales (and minimums) are halves at the front: keep them finite.
    halves = rng.normal(0, 0.01, (blocks.shape[0], 2)).astype(np.float16).view(np.uint8)
    blocks[:, :2] = halves[:, :2]
    if name in ("Q4_1", "Q4_K"):
        blocks[:, 2:4] = halves[:, 2:]
    rows = blocks.reshape(6, -1)

    matrix = quantized_matrix(name, rows, (6, 512))

    assert matrix is not None
    assert matrix.scheme == ("int8" if name == "Q8_0" else "int4")
    assert torch.allclose(matrix.dequantize(), torch.from_numpy(dequantize(rows, name)), rtol=1e-6, atol=1e-8)


def test_gguf_types_without_a_kernel_are_no_matrix():
    assert quantized_matrix("Q6_K", np.zeros((2, 210), np.uint8), (2, 256)) is None
