"""What models see: rows of images equal transformers' rows, and their bits depend on nothing but the image."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_harness import FAMILIES, images, open_encoder, save_seeing

from headrace.checkpoint.media_config import SERVED
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


def test_every_family_is_tested():
    tested = {family.config().model_type for family in FAMILIES.values()}
    assert tested == set(SERVED)
