"""What models hear: sounds of every length give transformers' rows, with the bits that they have alone, and their weights can be replaced."""

import functools
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import randomise
from vision_harness import FAMILIES, LONGEST, open_encoder, save_seeing, sound

from headrace.kernels.cpu import why_not
from headrace.layers.weight import Keeper
from headrace.models.media import MediaInput, encode

FAMILY = "qwen2_audio"
# float32 on both sides, sums in another order.
TOLERANCE = 2e-4
LENGTHS = (*range(1, 10), 58, 59, 60, *range(LONGEST - 5, LONGEST + 1))


@functools.cache
def checkpoint() -> tuple[Path, Any, tempfile.TemporaryDirectory]:
    folder = tempfile.TemporaryDirectory()
    return Path(folder.name), save_seeing(FAMILY, Path(folder.name)), folder


@functools.cache
def sounds() -> list[MediaInput]:
    return [sound(num_frames, seed=num_frames) for num_frames in LENGTHS]


@torch.inference_mode()
def test_sounds_of_every_length_give_transformers_rows():
    want = FAMILIES[FAMILY].features(checkpoint()[1], sounds())

    got = encode(open_encoder(checkpoint()[0]), sounds())

    for rows, expected, num_frames in zip(got, want, LENGTHS, strict=True):
        assert len(rows) == ((num_frames - 1) // 2 + 1) // 2
        torch.testing.assert_close(rows, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("dtype", "quantization"), [(torch.float32, "none"), (torch.bfloat16, "int8")])
@torch.inference_mode()
def test_a_sound_has_its_bits_alone_in_a_batch_and_fused(dtype: torch.dtype, quantization: str):
    if why_not():
        pytest.skip(why_not())
    encoder = open_encoder(checkpoint()[0], dtype, quantization)
    alone = [encode(encoder, [item])[0] for item in sounds()]
    assert all(map(torch.equal, encode(encoder, sounds()), alone))

    assert encoder.fuse() == ""

    assert all(map(torch.equal, encode(encoder, sounds()), alone))
    assert encoder.fuse(native=False) != ""
    assert all(map(torch.equal, encode(encoder, sounds()[::-1]), alone[::-1]))


@torch.inference_mode()
def test_a_sound_is_near_the_floats_in_bfloat16():
    want = encode(open_encoder(checkpoint()[0]), sounds())
    for got, rows in zip(encode(open_encoder(checkpoint()[0], torch.bfloat16), sounds()), want, strict=True):
        assert (torch.cosine_similarity(got, rows, dim=-1) > 0.999).all()


@torch.inference_mode()
def test_every_tensor_is_read_as_it_was_loaded_and_can_be_replaced(tmp_path: Path):
    theirs = checkpoint()[1].state_dict()
    encoder = open_encoder(checkpoint()[0])
    named = {weight.name: weight for weight in encoder.weights()}
    assert {f"model.{name}" for name in named} == {
        name for name in theirs if "language" not in name and "head" not in name
    }
    for name, weight in named.items():
        assert torch.equal(weight.read(), theirs[f"model.{name}"]), name
        assert weight.shape == tuple(theirs[f"model.{name}"].shape), name

    other = save_seeing(FAMILY, tmp_path)
    randomise(other, seed=1)
    other.save_pretrained(tmp_path)
    new = other.state_dict()
    parts: dict[Keeper, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, weight in named.items():
        (keeper,) = weight.keepers
        parts[keeper][weight.part] = new[f"model.{name}"].clone()
    for keeper, given in parts.items():
        keeper.restore(keeper.staged(given))

    for name, weight in named.items():
        assert torch.equal(weight.read(), new[f"model.{name}"]), name
    for got, want in zip(encode(encoder, sounds()), encode(open_encoder(tmp_path), sounds()), strict=True):
        assert torch.equal(got, want)
