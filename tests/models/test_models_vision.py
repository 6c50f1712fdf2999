"""What models see and hear: rows of images and sounds equal transformers' rows, and their bits depend on nothing but the item."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_harness import FAMILIES, images, open_encoder, save_seeing

from headrace import kernels
from headrace.checkpoint.families import all_families
from headrace.messages import media
from headrace.models import towers
from headrace.models.media import encode

# float32 on both sides, sums in another order.
TOLERANCE = 2e-4

families = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def checkpoint(family: str) -> tuple[Path, Any, tempfile.TemporaryDirectory]:
    folder = tempfile.TemporaryDirectory()
    return Path(folder.name), save_seeing(family, Path(folder.name)), folder


@functools.cache
def rows(family: str) -> list[torch.Tensor]:
    with torch.inference_mode():
        return encode(open_encoder(checkpoint(family)[0]), images(family))


@families
def test_rows_are_those_of_transformers(family: str):
    with torch.inference_mode():
        want = FAMILIES[family].features(checkpoint(family)[1], images(family))

    for got, expected in zip(rows(family), want, strict=True):
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


@families
@torch.inference_mode()
def test_an_image_alone_or_fused_gives_the_bits_of_a_batch(family: str):
    encoder = open_encoder(checkpoint(family)[0])
    for number, item in enumerate(images(family)):
        assert torch.equal(encode(encoder, [item])[0], rows(family)[number])
    encoder.fuse()
    for got, want in zip(encode(encoder, images(family)), rows(family), strict=True):
        assert torch.equal(got, want)


@families
@torch.inference_mode()
def test_work_is_cut_into_as_many_slices_as_it_says(family: str):
    encoder = open_encoder(checkpoint(family)[0])
    assert sum(1 for _ in encoder.slices(images(family))) == encoder.num_slices


@families
@torch.inference_mode()
def test_parts_of_a_layer_give_the_bits_of_the_whole(family: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(towers, "MAX_TOKENS", 20)
    monkeypatch.setattr(media, "MAX_BATCH_BYTES", 3000)
    encoder = open_encoder(checkpoint(family)[0])
    parts = media.num_parts(tuple(item.values.shape) for item in images(family))
    assert parts > 1
    for fused in (False, True):
        if fused:
            encoder.fuse()
        assert sum(1 for _ in encoder.slices(images(family))) == parts * encoder.num_slices
    for got, want in zip(encode(encoder, images(family)), rows(family), strict=True):
        assert torch.equal(got, want)


@families
@torch.inference_mode()
def test_rows_without_native_kernels(family: str):
    native = rows(family)
    with kernels.prefer("torch"):
        encoder = open_encoder(checkpoint(family)[0])
        for got, want in zip(encode(encoder, images(family)), native, strict=True):
            torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)


# Cosine of each row with that of the float model: int8 rounds weights and activations, int4 leaves towers in int8.
@pytest.mark.parametrize("scheme", ["int8", "int4"])
@families
@torch.inference_mode()
def test_rows_of_a_quantised_tower(family: str, scheme: str):
    encoder = open_encoder(checkpoint(family)[0], torch.bfloat16, scheme)
    for got, want in zip(encode(encoder, images(family)), rows(family), strict=True):
        assert torch.cosine_similarity(got, want, dim=-1).min() > 0.995


def test_every_family_is_tested():
    tested = {family.config().model_type for family in FAMILIES.values()}
    assert tested == {*all_families().vision, *all_families().audio}
