"""Whole models in every format of quantised safetensors compute as the float model of the same weights does."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_harness import CONTEXT, make_driver, prompt, save_llama
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "checkpoint"))

from quantised_layers import METHODS, Layer

from headrace import kernels
from headrace.checkpoint.quantized_formats import keeps_codes, stored_format
from headrace.checkpoint.source import open_checkpoint
from headrace.config.server_args import ServerArgs
from headrace.distributed.base import Shard
from headrace.execution.build import build_worker
from headrace.execution.calibrate import WindowRunner
from headrace.execution.load_weights import load_model
from headrace.kernels.cpu import why_not
from headrace.layers.weight import Placement
from headrace.models.registry import model_class_for

BACKEND = "torch_native" if why_not() else "cpu"
SIZES = {"hidden_size": 64, "intermediate_size": 128}
IN_FLOATS = ("layers.0.self_attn.k_proj", "layers.1.mlp.down_proj", "lm_head", "embed_tokens", "norm")
"""Layers that the checkpoint does not quantise: one of a product, one alone, and those outside of the blocks."""
KEPT_ERROR = 0.03
"""Of logits, relative: activations in 8 bits in ten products, and an output projection in 8 bits."""
FLOAT_ERROR = 1e-5
NO_GROUP: Any = None


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_llama(folder, **SIZES)
    return folder


def write_model(base: Path, folder: Path, name: str) -> Layer:
    """The model of `base` with random layers in the format `name` in folder / "stored", in floats in folder / "exact". Returns one layer."""
    config = json.loads((base / "config.json").read_text())
    stored, exact, metadata = {}, load_file(base / "model.safetensors"), {"format": "pt"}
    generator = torch.Generator().manual_seed(3)
    layer = None
    for tensor in list(exact):
        module = tensor.removesuffix(".weight")
        if any(part in tensor for part in IN_FLOATS):
            stored[tensor] = exact[tensor]
            continue
        layer = METHODS[name].layer(*exact[tensor].shape, generator)
        exact[tensor] = layer.weight.float()
        stored |= {f"{module}.{suffix}": part for suffix, part in layer.parts.items()}
        metadata |= {f"{module}.{suffix}": text for suffix, text in layer.metadata.items()}
    assert layer is not None
    for kind, tensors in (("stored", stored), ("exact", exact)):
        (folder / kind).mkdir()
        own = config | {"quantization_config": METHODS[name].config} if kind == "stored" else config
        (folder / kind / "config.json").write_text(json.dumps(own))
        save_file(tensors, folder / kind / "model.safetensors", metadata)
    return layer


def load(folder: Path, scheme: Any, shard: Shard | None = None, dtype: torch.dtype = torch.float32):
    checkpoint = open_checkpoint(folder)
    keeps = keeps_codes(checkpoint.config.quantization, scheme)
    placement = Placement(torch.device("cpu"), dtype, CONTEXT, scheme, shard or Shard(), keeps_floats=keeps)
    return load_model(checkpoint, model_class_for(checkpoint.config), placement)


def logits(folder: Path, model) -> torch.Tensor:
    runner = WindowRunner(model, open_checkpoint(folder).config, BACKEND, CONTEXT)
    return model.logits(runner.hidden(prompt(24, 0)))


def on_cpu(name: str) -> Any:
    scheme = stored_format(METHODS[name].config).scheme
    return "none" if scheme == "fp8" else scheme


@pytest.mark.parametrize("name", METHODS)
def test_a_model_computes_as_its_dequantised_weights_do(base, tmp_path, name):
    write_model(base, tmp_path, name)
    exact, stored = load(tmp_path / "exact", "none"), load(tmp_path / "stored", on_cpu(name))

    want, got = logits(tmp_path / "exact", exact), logits(tmp_path / "stored", stored)

    error = float((got - want).norm() / want.norm())
    assert error < (FLOAT_ERROR if on_cpu(name) == "none" else KEPT_ERROR)
    for ours, theirs in zip(stored.weights(), exact.weights(), strict=True):
        assert ours.name == theirs.name
        # Scales that are no halves, and scale * zero, round to 11 bits.
        exactness = 8e-3 if "lm_head" in ours.name else 2**-11
        assert (ours.read() - theirs.read()).abs().max() <= exactness * theirs.read().abs().max(), ours.name


@pytest.mark.parametrize(
    "name", ["gptq-4", "awq-gemv-fast", "ct-int8", "ct-4-asymmetric", "bnb-nf4", "ct-nvfp4", "modelopt-fp8"]
)
def test_two_ranks_have_the_weights_of_one_process(base, tmp_path, name):
    write_model(base, tmp_path, name)
    want = {weight.name: weight.read() for weight in load(tmp_path / "stored", on_cpu(name)).weights()}
    for rank in range(2):
        for weight in load(tmp_path / "stored", on_cpu(name), Shard(rank, 2, NO_GROUP)).weights():
            # What is kept is what one process keeps; a row that is cut rounds the scales of its parts alone.
            whole = want[weight.name][weight.own]
            assert torch.allclose(weight.read(), whole, rtol=2**-10, atol=1e-7), weight.name


@pytest.mark.parametrize("name", ["gptq-4", "ct-int8", "ct-mxfp4", "bnb-nf4"])
def test_a_worker_chooses_the_tokens_of_the_model_alone(base, tmp_path, name):
    """Its decode steps are fused, over products of codes and of floats side by side."""
    write_model(base, tmp_path, name)
    tokens = prompt(24, 0)
    driver = make_driver(tmp_path / "stored", kv_cache_dtype="float32", activations="float32")
    try:
        got = driver.generate(0, tokens, 8)
    finally:
        driver.worker.close()
    runner_model = load(tmp_path / "stored", on_cpu(name))
    runner = WindowRunner(runner_model, open_checkpoint(tmp_path / "stored").config, BACKEND, CONTEXT)
    for token in got:
        assert int(runner_model.logits(runner.hidden(tokens))[-1].argmax()) == token
        tokens = [*tokens, token]


@pytest.mark.parametrize("name", ["ct-4", "ct-int8"])
def test_an_update_of_a_projection_in_floats_leaves_the_others_as_they_are(base, tmp_path, name):
    write_model(base, tmp_path, name)
    model = load(tmp_path / "stored", on_cpu(name), dtype=torch.bfloat16)
    weights = {weight.name: weight for weight in model.weights()}
    k_proj = weights["model.layers.0.self_attn.k_proj.weight"]
    before = kernels.unpack_linear(k_proj.layer.packed)
    new = torch.randn(k_proj.shape, generator=torch.Generator().manual_seed(4))

    k_proj.layer.restore(k_proj.layer.staged({k_proj.part: new}))

    after, columns = kernels.unpack_linear(k_proj.layer.packed), k_proj.layer.columns("k_proj")
    assert torch.equal(after[: columns.start], before[: columns.start])
    assert torch.equal(after[columns.stop :], before[columns.stop :])
    assert torch.allclose(after[columns].float(), new, rtol=2**-8)
    # A projection in codes takes codes again.
    up_proj = weights["model.layers.0.mlp.up_proj.weight"]
    layout = up_proj.layer.packed.layout
    up_proj.layer.restore(up_proj.layer.staged({up_proj.part: torch.randn(up_proj.shape)}))
    assert up_proj.layer.packed.layout.removesuffix("_min") == layout.removesuffix("_min")


@pytest.mark.parametrize(
    ("name", "asked", "want"),
    [
        (
            "ct-int8",
            "auto",
            "quantization int8: the checkpoint's compressed-tensors int-quantized weights of 8 bits are kept",
        ),
        (
            "ct-int8",
            "int4",
            "quantization int4: the checkpoint's compressed-tensors int-quantized weights of 8 bits are kept",
        ),
        (
            "ct-4",
            "none",
            "quantization none: the checkpoint's compressed-tensors pack-quantized weights of 4 bits are dequantised",
        ),
        (
            "ct-mxfp4",
            "auto",
            "quantization gguf: the checkpoint's compressed-tensors mxfp4-pack-quantized weights of 4 bits are kept",
        ),
        (
            "ct-mxfp4",
            "int8",
            "quantization int8: the checkpoint's compressed-tensors mxfp4-pack-quantized weights of 4 bits are kept",
        ),
        (
            "modelopt-mxfp4",
            "none",
            "quantization none: the checkpoint's modelopt MXFP4 weights are dequantised",
        ),
        ("bnb-nf4", "auto", "quantization none: the checkpoint's bitsandbytes nf4 weights are dequantised"),
        (
            "bnb-nf4",
            "int8",
            "quantization int8: the checkpoint's bitsandbytes nf4 weights are dequantised and rounded again",
        ),
        (
            "modelopt-fp8",
            "auto",
            "quantization none: the checkpoint's fp8 weights are dequantised, because fp8 runs on GPUs; a CPU has int8",
        ),
    ],
)
def test_the_start_up_summary_says_what_became_of_the_weights(base, tmp_path, name, asked, want):
    write_model(base, tmp_path, name)
    options = {"device": "cpu", "max_total_tokens": 2 * CONTEXT, "disable_overlap_schedule": True}

    worker, info = build_worker(ServerArgs(model_path=str(tmp_path / "stored"), quantization=asked, **options))
    worker.close()

    assert want in info.decisions
