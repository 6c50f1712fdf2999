"""Every format of quantised safetensors reads as the weights of its published formula, or is refused naming the tensor."""

import json
import subprocess
import sys

import pytest
import torch
from quantised_layers import METHODS, Layer
from safetensors.torch import save_file

from headrace.checkpoint.quantized_formats import stored_format
from headrace.checkpoint.source import open_checkpoint
from headrace.checkpoint.weight_formats import FORMATS
from headrace.errors import ModelError

N, K = 96, 128
LAYER = "model.layers.0.mlp.up_proj"
CONFIG = {"model_type": "llama", "hidden_size": K, "num_attention_heads": 4, "vocab_size": 40}


def random_layer(name: str) -> Layer:
    return METHODS[name].layer(N, K, torch.Generator().manual_seed(1))


def write(folder, layer: Layer, config, parts=None):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": config}))
    tensors = {f"{LAYER}.{suffix}": part.contiguous() for suffix, part in (parts or layer.parts).items()}
    metadata = {f"{LAYER}.{suffix}": text for suffix, text in layer.metadata.items()}
    save_file({**tensors, "model.norm.weight": torch.ones(K)}, folder / "model.safetensors", metadata)
    return folder


@pytest.mark.parametrize("name", METHODS)
def test_a_layer_reads_as_the_weights_of_its_formula(tmp_path, name):
    layer = random_layer(name)
    checkpoint = open_checkpoint(write(tmp_path, layer, METHODS[name].config))

    assert sorted(checkpoint.tensor_names()) == [f"{LAYER}.weight", "model.norm.weight"]
    assert checkpoint.shape(f"{LAYER}.weight") == (N, K)
    assert checkpoint.total_bytes == 4 * N * K + 4 * K
    matrix = checkpoint.quantized(f"{LAYER}.weight")
    assert (None if matrix is None else matrix.scheme) == layer.kept
    weight = checkpoint.tensor(f"{LAYER}.weight")
    # Two roundings of float32: of a product, and of scale * zero.
    assert weight.dtype == torch.float32
    assert torch.allclose(weight, layer.weight.float(), rtol=1e-6, atol=1e-7)
    if matrix is not None:
        assert torch.equal(matrix.dequantize(), weight)
    blocks = checkpoint.blocks(f"{LAYER}.weight")
    assert (blocks is not None) == name.endswith("mxfp4")
    if blocks is not None:
        assert blocks.blocks.nbytes == N * K * 17 // 32
        assert torch.equal(blocks.dequantize(), weight)


@pytest.mark.parametrize("name", METHODS)
def test_the_config_alone_tells_how_a_model_computes(name):
    found, kept = stored_format(METHODS[name].config), random_layer(name).kept
    assert found is not None
    if kept is not None and found.scheme not in ("none", "gguf"):
        assert kept in FORMATS[found.scheme].takes
    # modelopt's config does not say which layers have scales of their input.
    assert (kept is not None) == (found.scheme in ("int4", "int8", "gguf")) or name == "modelopt-awq-smoothed"


@pytest.mark.parametrize(
    ("file", "name"),
    [("hf_quant_config.json", "modelopt-nvfp4"), ("quantize_config.json", "gptq-3"), ("quant_config.json", "awq-gemv")],
)
def test_older_checkpoints_say_it_in_a_file_of_its_own(tmp_path, file, name):
    layer, stated = (
        random_layer(name),
        {key: value for key, value in METHODS[name].config.items() if key != "quant_method"},
    )
    write(tmp_path, layer, None)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / file).write_text(json.dumps({"quantization": stated} if name.startswith("modelopt") else stated))
    weight = open_checkpoint(tmp_path).tensor(f"{LAYER}.weight")
    assert torch.allclose(weight, layer.weight.float(), rtol=1e-6, atol=1e-7)


def wrong_parts(layer: Layer):
    """(what is wrong, the parts) of a layer, one fault each."""
    for suffix, part in layer.parts.items():
        missing = {name: other for name, other in layer.parts.items() if name != suffix}
        yield f"no {suffix}", missing
        yield f"{suffix} in float64", layer.parts | {suffix: torch.ones(part.shape, dtype=torch.float64)}
        yield f"{suffix} in int64", layer.parts | {suffix: torch.full(part.shape, -3, dtype=torch.int64)}
        yield f"empty {suffix}", layer.parts | {suffix: part.flatten()[:0]}
        yield f"flat {suffix}", layer.parts | {suffix: part.flatten()}
        if part.ndim == 2:
            yield f"cut {suffix}", layer.parts | {suffix: part[:, :1].contiguous()}
            yield f"short {suffix}", layer.parts | {suffix: part[:1].contiguous()}
            yield f"{suffix} of three dimensions", layer.parts | {suffix: part.unsqueeze(0)}
        if part.dtype in (torch.float32, torch.float16, torch.bfloat16):
            yield f"NaN in {suffix}", layer.parts | {suffix: torch.full_like(part, torch.nan)}
        if part.dtype in (torch.uint8, torch.int32):
            yield f"bits of {suffix}", layer.parts | {suffix: torch.full_like(part, 255)}


@pytest.mark.parametrize("name", METHODS)
def test_a_broken_layer_is_refused_in_one_line_or_reads_as_finite_weights(tmp_path, name):
    layer, config = random_layer(name), METHODS[name].config
    refusals = []
    for what, parts in wrong_parts(layer):
        try:
            checkpoint = open_checkpoint(write(tmp_path, layer, config, parts))
            for found in checkpoint.tensor_names():
                checkpoint.quantized(found)
                tensor = checkpoint.checked_tensor(found, check_finite=True)
                assert tuple(tensor.shape) == checkpoint.shape(found), what
                assert bool(torch.isfinite(tensor.float()).all()), what
        except ModelError as err:
            refusals.append(str(err))
    assert len(refusals) >= 5
    assert not any("\n" in refusal for refusal in refusals)


VALUES = (None, True, -1, 0, 1.5, 10**9, "", "int", "x" * 999, [], [1], [-1, 2], {}, {"a": 1}, [[]], float("nan"))


def with_other_values(config):
    """Copies of a config with one value changed."""
    for key, value in config.items():
        for other in VALUES:
            yield {**config, key: other}
        if isinstance(value, dict):
            for changed in with_other_values(value):
                yield {**config, key: changed}


@pytest.mark.parametrize("name", METHODS)
def test_any_value_in_a_config_makes_a_format_or_one_short_line(name):
    for config in with_other_values(METHODS[name].config):
        try:
            assert stored_format(config) is not None
        except ModelError as err:
            refusal = str(err)
        else:
            refusal = ""
        assert "\n" not in refusal
        assert len(refusal) < 400


def test_a_config_is_read_without_torch():
    code = (
        "import json, sys; from headrace.checkpoint.quantized_formats import stored_format\n"
        "print([stored_format(config).scheme for config in json.loads(sys.argv[1])], 'torch' in sys.modules)"
    )
    configs = json.dumps([METHODS[name].config for name in ("gptq-4", "ct-fp8", "bnb-nf4")])
    ran = subprocess.run([sys.executable, "-c", code, configs], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['int4', 'fp8', 'none'] False"
