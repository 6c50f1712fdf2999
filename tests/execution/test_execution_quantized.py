"""Whole models with quantised linear layers: at load, from quantised checkpoints, and written by us."""

import json
from pathlib import Path

import pytest
import torch
from runner_harness import CONTEXT, prompt, save_llama
from safetensors.torch import load_file, save_file

from headrace.checkpoint.quantized_formats import own_tensors
from headrace.checkpoint.source import open_checkpoint
from headrace.checkpoint.weight_formats import FORMATS, OWN_METHOD, STORED, names_on_cpu
from headrace.config.server_args import ServerArgs
from headrace.errors import ModelError
from headrace.execution.build import build_worker
from headrace.execution.calibrate import WindowRunner, perplexity, quantize_checkpoint
from headrace.execution.load_weights import load_model, load_threads
from headrace.kernels.cpu import why_not
from headrace.layers.quantization import integer_format
from headrace.layers.weight import Placement
from headrace.models.registry import model_class_for

BACKEND = "torch_native" if why_not() else "cpu"
SIZES = {"hidden_size": 64, "intermediate_size": 96}
# How far the logits may be from the float model's, relative: the rounding of weights and activations of two layers.
ERRORS = {name: 3.75 * FORMATS[name].error for name in ("bfloat16", *names_on_cpu())}


def logits(folder: Path, scheme, tokens):
    checkpoint = open_checkpoint(folder)
    placement = Placement(torch.device("cpu"), torch.float32, CONTEXT, scheme)
    model = load_model(checkpoint, model_class_for(checkpoint.config), placement)
    return model, model.logits(WindowRunner(model, checkpoint.config, BACKEND, CONTEXT).hidden(tokens))


def quantise_folder(source: Path, target: Path, scheme: str) -> None:
    """The checkpoint of `source` rewritten in our own layout, rounded to nearest."""
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "_proj" in name:
            parts = own_tensors(integer_format(scheme).quantize(tensor))
            tensors |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in parts.items()}
        else:
            tensors[name] = tensor
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": OWN_METHOD, "scheme": scheme, "group_size": 32}
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", list(ERRORS))
def test_a_model_quantised_at_load_is_close_to_itself(tmp_path, scheme, tied):
    save_llama(tmp_path, **SIZES, tie_word_embeddings=tied)
    tokens = prompt(40, 0)
    _, want = logits(tmp_path, "none", tokens)
    model, got = logits(tmp_path, scheme, tokens)
    assert 0 < (got - want).norm() / want.norm() < ERRORS[scheme]
    norm = next(weight for weight in model.weights() if weight.name == "model.norm.weight")
    assert torch.equal(norm.read(), load_file(tmp_path / "model.safetensors")["model.norm.weight"])


@pytest.mark.parametrize("scheme", STORED)
def test_a_stored_matrix_gives_what_quantising_at_load_gives(tmp_path, scheme):
    (tmp_path / "float").mkdir()
    save_llama(tmp_path / "float", **SIZES)
    quantise_folder(tmp_path / "float", tmp_path / "stored", scheme)
    tokens = prompt(40, 0)
    _, at_load = logits(tmp_path / "float", scheme, tokens)
    _, stored = logits(tmp_path / "stored", scheme, tokens)
    # Scales of the file are halves; those of the kernel are halves times a power of two. What int8 rounds at load is rotated, too.
    tolerance = 0.02 if FORMATS[scheme].rounds_to is None else 2 * ERRORS[scheme]
    assert (stored - at_load).norm() / at_load.norm() < tolerance


def test_a_quantised_checkpoint_serves_without_being_asked(tmp_path):
    (tmp_path / "float").mkdir()
    save_llama(tmp_path / "float", **SIZES)
    quantise_folder(tmp_path / "float", tmp_path / "stored", "int4")
    options = {"device": "cpu", "max_total_tokens": 2 * CONTEXT, "disable_overlap_schedule": True}
    worker, info = build_worker(ServerArgs(model_path=str(tmp_path / "stored"), **options))
    worker.close()
    assert "quantization int4: the checkpoint's headrace int4 weights are kept" in info.decisions
    worker, plain = build_worker(ServerArgs(model_path=str(tmp_path / "float"), **options))
    worker.close()
    assert info.weight_bytes < 0.75 * plain.weight_bytes
    for asked, what in (("none", "dequantised"), ("int8", "dequantised and rounded again")):
        worker, info = build_worker(ServerArgs(model_path=str(tmp_path / "stored"), quantization=asked, **options))
        worker.close()
        assert f"quantization {asked}: the checkpoint's headrace int4 weights are {what}" in info.decisions


def test_a_zero_filled_stored_matrix_is_refused(tmp_path):
    (tmp_path / "float").mkdir()
    save_llama(tmp_path / "float", **SIZES)
    quantise_folder(tmp_path / "float", tmp_path / "stored", "int8")
    file = tmp_path / "stored" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.scales"].zero_()
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"up_proj\.weight .* zero-filled"):
        logits(tmp_path / "stored", "int8", prompt(4, 0))


@pytest.mark.parametrize("scheme", STORED)
def test_a_written_checkpoint_loads_and_is_close_to_its_model(tmp_path, scheme):
    (tmp_path / "float").mkdir()
    save_llama(tmp_path / "float", **SIZES)
    windows = [prompt(CONTEXT, seed) for seed in range(4)]
    checkpoint = open_checkpoint(tmp_path / "float")

    for num, folder in ((2, "out"), (1, "again")):
        with load_threads(num) as threads:
            quantize_checkpoint(checkpoint, scheme, windows, tmp_path / folder, backend=BACKEND, threads=threads)

    written, again = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("out", "again")]
    assert written == again
    tokens = prompt(60, 9)
    _, want = logits(tmp_path / "float", "none", tokens)
    _, got = logits(tmp_path / "out", scheme, tokens)
    assert (got - want).norm() / want.norm() < ERRORS[scheme]
    with pytest.raises(ModelError, match="already quantised"):
        quantize_checkpoint(open_checkpoint(tmp_path / "out"), scheme, windows, tmp_path / "twice", backend=BACKEND)


def test_perplexity_of_a_model_that_knows_nothing_is_near_the_vocabulary(tmp_path):
    save_llama(tmp_path, **SIZES)
    checkpoint = open_checkpoint(tmp_path)
    placement = Placement(torch.device("cpu"), torch.float32, CONTEXT)
    model = load_model(checkpoint, model_class_for(checkpoint.config), placement)
    runner = WindowRunner(model, checkpoint.config, BACKEND, CONTEXT)
    value = perplexity(runner, [prompt(CONTEXT, seed) for seed in range(3)])
    assert checkpoint.config.vocab_size / 2 < value < checkpoint.config.vocab_size * 4
