"""Every spelling of tensors' names in checkpoints of models that see or hear, and output projections that a config does not tell of."""

import functools
import tempfile
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from vision_harness import images, open_encoder, save_seeing

from headrace.checkpoint.source import open_checkpoint
from headrace.execution.load_weights import load_model
from headrace.execution.model_source import override_model
from headrace.layers.weight import Placement
from headrace.models.media import encode
from headrace.models.registry import model_class_for
from headrace.models.spec import CausalLM

# What published checkpoints have, beside what transformers 5 writes: (its part, theirs), the first that fits.
OLDER = {
    "llava clip": [
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.", ""),
    ],
    "llava pixtral": [
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.", ""),
    ],
    "qwen2_vl": [("model.language_model.", "model."), ("model.visual.", "visual.")],
    "gemma3": [
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.", ""),
    ],
    "llava_onevision": [
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.", ""),
    ],
    "qwen2_audio": [
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.", ""),
    ],
    "internvl": [
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.", ""),
    ],
}


@functools.cache
def saved(family: str) -> tuple[Path, tempfile.TemporaryDirectory]:
    folder = tempfile.TemporaryDirectory()
    save_seeing(family, Path(folder.name))
    return Path(folder.name), folder


def in_memory(family: str) -> dict[str, torch.Tensor]:
    """The tensors by the names that they have in transformers' model."""
    found = load_file(saved(family)[0] / "model.safetensors")
    renamed = {}
    for name, tensor in found.items():
        for ours, theirs in OLDER[family]:
            if theirs and name.startswith(theirs) and not name.startswith(ours):
                name = ours + name.removeprefix(theirs)
                break
        else:
            if not name.startswith(("model.", "lm_head.")):
                name = f"model.{name}"
        renamed[name] = tensor
    return renamed


def write(family: str, folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> None:
    stated = msgspec.json.decode((saved(family)[0] / "config.json").read_bytes())
    (folder / "config.json").write_bytes(msgspec.json.encode(stated | config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


def older(family: str, name: str) -> str:
    for theirs, published in OLDER[family]:
        if name.startswith(theirs):
            return published + name.removeprefix(theirs)
    return name


def open_model(folder: Path) -> CausalLM:
    checkpoint = open_checkpoint(folder)
    placement = Placement(torch.device("cpu"), torch.float32, 256, "none")
    return load_model(checkpoint, model_class_for(checkpoint.config), placement)


@pytest.mark.parametrize("family", OLDER)
@torch.inference_mode()
def test_both_spellings_are_the_same_model(family: str, tmp_path: Path):
    want = {weight.name: weight.read() for weight in open_model(saved(family)[0]).weights()}
    rows = encode(open_encoder(saved(family)[0]), images(family))
    newer = in_memory(family)
    for number, tensors in enumerate((newer, {older(family, name): tensor for name, tensor in newer.items()})):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(family, folder, tensors)

        found = {weight.name: weight.read() for weight in open_model(folder).weights()}

        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], want[name]) for name in want)
        assert all(map(torch.equal, encode(open_encoder(folder), images(family)), rows))


@pytest.mark.parametrize("family", ["mistral3", "internvl", "qwen2_audio"])
def test_an_output_projection_that_no_config_tells_of_is_used(family: str, tmp_path: Path):
    stated = {"tie_word_embeddings": True}
    tensors = load_file(saved(family)[0] / "model.safetensors")
    (embedding,) = (name for name in tensors if "embed_tokens" in name)
    head = next((name for name in tensors if "lm_head" in name), "language_model.lm_head.weight")
    tensors[head] = tensors[embedding] + 1
    write(family, tmp_path, tensors, **stated)
    assert not open_checkpoint(tmp_path).config.tie_word_embeddings

    write(family, tmp_path, tensors | {head: tensors[embedding]}, **stated)
    assert open_checkpoint(tmp_path).config.tie_word_embeddings

    write(family, tmp_path, {name: tensor for name, tensor in tensors.items() if name != head}, **stated)
    assert open_checkpoint(tmp_path).config.tie_word_embeddings
    open_model(tmp_path)


@pytest.mark.parametrize("family", ["llava clip", "qwen2_vl"])
def test_a_model_whose_config_is_overridden_still_sees(family: str):
    config = open_checkpoint(saved(family)[0]).config
    changed = override_model(config, '{"max_position_embeddings": 128}')
    assert changed.media == config.media
    assert changed.max_position_embeddings == 128
