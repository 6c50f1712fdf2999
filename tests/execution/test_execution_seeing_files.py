"""Checkpoints of models that see or hear, written by ourselves: quantised, and of the current weights."""

from pathlib import Path

import pytest
import torch
import transformers
from vision_harness import FAMILIES, images, open_encoder, save_seeing

from headrace.checkpoint.source import open_checkpoint
from headrace.execution.calibrate import quantize_checkpoint
from headrace.execution.load_weights import load_model
from headrace.execution.weight_files import WeightSaver
from headrace.layers.weight import Placement
from headrace.models.media import encode
from headrace.models.registry import model_class_for, stored_name

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llava clip", "idefics3", "qwen2_vl", "gemma3", "qwen2_audio"])
@torch.inference_mode()
def test_a_quantised_checkpoint_still_sees(family: str, tmp_path: Path):
    save_seeing(family, tmp_path / "original")
    original = open_checkpoint(tmp_path / "original")

    quantize_checkpoint(original, "int4", [list(range(10, 42))], tmp_path / "int4", backend="cpu")

    written = open_checkpoint(tmp_path / "int4")
    assert written.config.media == original.config.media
    assert written.config.audio == original.config.audio
    stored = [name for name in written.tensor_names() if written.quantized(name) is not None]
    assert stored
    assert not any("vis" in name or "audio" in name for name in stored)
    want = encode(open_encoder(tmp_path / "original"), images(family))
    for got, rows in zip(
        encode(open_encoder(tmp_path / "int4", torch.bfloat16, "int4"), images(family)), want, strict=True
    ):
        # The tower is in int8, of weights in bfloat16.
        assert torch.cosine_similarity(got, rows, dim=-1).min() > 0.999


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "idefics3 27"])
def test_transformers_reads_what_is_saved(family: str, tmp_path: Path):
    theirs = save_seeing(family, tmp_path / "original").state_dict()
    checkpoint = open_checkpoint(tmp_path / "original")
    config = checkpoint.config
    model = load_model(checkpoint, model_class_for(config), Placement(CPU, torch.float32, 256))
    saver = WeightSaver(str(tmp_path), config.as_file(), "none", lambda name: stored_name(config, name))

    saver.save(model.weights(), "saved").install()

    (tmp_path / "saved" / "model-rank-0-part-0.safetensors").rename(tmp_path / "saved" / "model.safetensors")
    found, info = transformers.AutoModelForMultimodalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["unexpected_keys"]
    # Layers that nothing of what is computed depends on.
    missing = set(info["missing_keys"])
    assert all("vision_tower" in name for name in missing)
    for name, tensor in found.state_dict().items():
        assert name in missing or torch.equal(tensor, theirs[name])
    saved = open_checkpoint(tmp_path / "saved").config
    assert saved.media == config.media
    assert saved.audio == config.audio
