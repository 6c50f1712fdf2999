"""Videos: values of frames as transformers makes of images, sizes and tokens by its rules for videos, and what is refused."""

import ast
import base64
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import transformers
from PIL import Image
from seeing_checkpoints import file_of, picture, token_id, write_checkpoint
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from headrace.checkpoint.families import all_families
from headrace.checkpoint.media_tokens import ItemFacts
from headrace.checkpoint.preprocessor_config import ImageSettings, Size, read_video_settings
from headrace.config.web import MediaArgs
from headrace.errors import CapacityError, ModelError, RequestError
from headrace.frontend.media import PromptMedia
from headrace.media_kinds import ImageRef, MediaKind, MediaRefs, VideoRef, refs_of
from headrace.multimodal import loader as loader_module
from headrace.multimodal.limits import MAX_ITEM_BYTES, MediaRefusedError
from headrace.multimodal.loader import make_loader
from headrace.multimodal.media_messages import Setup
from headrace.multimodal.processors import prepare_video

SETTINGS = ImageSettings(
    recipe="patches", size=Size(shortest_edge=56 * 56, longest_edge=112 * 112), mean=(0.5,) * 3, std=(0.25,) * 3,
    patch_size=14, temporal_patch_size=2, merge_size=2,
)  # fmt: skip
FRAMES = [picture(90, 130, seed=seed) for seed in range(5)]


def test_patches_of_frames_are_those_of_images():
    values = prepare_video(FRAMES, len(FRAMES), 2.0, SETTINGS, 10_000)
    height, width = (side * 14 for side in values.grid[1:])
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 1, "longest_edge": height * width}, image_mean=SETTINGS.mean, image_std=SETTINGS.std
    )
    assert values.grid == (3, height // 14, width // 14)
    assert values.step_s == 1.0
    steps = values.values.reshape(3, -1, 3, 2, 14, 14)
    for number, frame in enumerate([*FRAMES, FRAMES[-1]]):
        found = images([frame.resize((width, height), Image.Resampling.BICUBIC)], do_resize=False)["pixel_values"]
        expected = np.asarray(found).reshape(-1, 3, 2, 14, 14)[:, :, 0]
        assert np.array_equal(steps[number // 2, :, :, number % 2], expected)


class Sizes(NamedTuple):
    height: int
    width: int
    frames: int


def smart_resize(family: str) -> Callable[..., tuple[int, int]]:
    """The function of transformers, whose module needs torchvision for other things."""
    file = Path(transformers.__file__).parent / "models" / family / f"video_processing_{family}.py"
    found = next(node for node in ast.parse(file.read_text()).body if getattr(node, "name", "") == "smart_resize")
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([found], []), file.name, "exec"), names)
    return names["smart_resize"]


@pytest.mark.parametrize(
    "size", [Sizes(90, 130, 5), Sizes(500, 300, 4), Sizes(64, 1000, 31), Sizes(8, 9, 2), Sizes(333, 333, 3)]
)
@pytest.mark.parametrize("by_volume", [False, True])
def test_sizes_are_those_of_transformers(size: Sizes, by_volume: bool):
    least, most = (56 * 56, 112 * 112) if not by_volume else (4 * 56 * 56, 40 * 56 * 56)
    settings = SimpleNamespace(**{name: getattr(SETTINGS, name) for name in SETTINGS.__struct_fields__})
    settings.size, settings.by_volume = Size(shortest_edge=least, longest_edge=most), by_volume
    frame = Image.new("RGB", (size.width, size.height))
    found = prepare_video([frame] * size.frames, size.frames, 1.0, settings, 1 << 20)
    if by_volume:
        expected = smart_resize("qwen3_vl")(size.frames, size.height, size.width, 2, 28, least, most)
    else:
        expected = smart_resize("qwen2_vl")(size.height, size.width, 28, least, most)
    assert tuple(side * 14 for side in found.grid[1:]) == tuple(expected)


def test_a_video_has_few_enough_patches_or_is_refused():
    frame = Image.new("RGB", (600, 400))
    found = prepare_video([frame] * 8, 8, 1.0, SETTINGS, 64)
    assert 0 < np.prod(found.grid) <= 64
    with pytest.raises(MediaRefusedError, match="too many for this server"):
        prepare_video([frame] * 8, 8, 1.0, SETTINGS, 12)
    with pytest.raises(MediaRefusedError, match=r"frames\[1\] has 5 x 6 pixels, and frames\[0\] 600 x 400"):
        prepare_video([frame, Image.new("RGB", (5, 6))], 2, 1.0, SETTINGS, 64)


@pytest.mark.parametrize(("num_frames", "fps"), [(4, 2.0), (5, 2.0), (3, 0.7), (1, 24.0)])
def test_tokens_of_qwen3_vl_tell_the_time_of_each_step(num_frames: int, fps: float, tmp_path):
    ours = write_checkpoint(tmp_path, "qwen3_vl")
    loader = make_loader(tmp_path, ours, MediaArgs())
    steps = -(-num_frames // 2)
    layout = loader._family.kinds["video"].layout(ItemFacts((1,), (steps, 4, 6), 2 / fps, num_frames))
    theirs = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token="<|video_pad|>",
    )
    theirs._calculate_timestamps = lambda *given: Qwen3VLProcessor._calculate_timestamps(theirs, *given)
    about = SimpleNamespace(fps=fps, frames_indices=list(range(num_frames)))
    inputs = {"video_grid_thw": np.array([[steps, 4, 6]]), "video_metadata": [about]}
    text = Qwen3VLProcessor.replace_video_token(theirs, inputs, 0)

    assert list(layout.tokens) == ours.encode(text, add_special_tokens=False, allow_special=True)
    assert layout.num_rows == steps * 6
    assert len(layout.spans) == steps
    loader.close()


def frames(*seeds: int) -> tuple[ImageRef, ...]:
    return tuple(ImageRef(data=file_of(picture(90, 130, seed=seed))) for seed in seeds)


async def test_a_video_is_one_item_however_it_comes(tmp_path):
    ours = write_checkpoint(tmp_path, "qwen2_5_vl")
    media = PromptMedia(make_loader(tmp_path, ours, MediaArgs()))
    pad = media.support.tokens["video"]
    assert pad == "<|video_pad|>"
    ids = ours.encode(f"see {pad} and {media.support.tokens['image']}!", allow_special=True)
    jpegs = []
    for seed in (1, 2, 3):
        file = io.BytesIO()
        picture(90, 130, seed=seed).save(file, "JPEG")
        jpegs.append(base64.b64encode(file.getvalue()).decode())
    forms = ["data:video/jpeg;base64," + ",".join(jpegs), VideoRef(frames=tuple(jpegs))]
    try:
        found = []
        for form in forms:
            (refs,) = refs_of(
                {MediaKind.IMAGE: ImageRef(data=file_of(picture(40, 40))), MediaKind.VIDEO: form}, 1, is_batch=False
            )
            media.check([refs])
            found.append(await media.add(ids, refs))
        assert found[0] == found[1]
        video, image = found[0].media
        assert (video.kind, image.kind, video.grid[0], video.step_s) == ("video", "image", 2, 1.0)
        assert found[0].media_tokens == {image.kind: image.num_tokens, video.kind: video.num_tokens}
        assert video.num_tokens == np.prod(video.grid) // 4
        assert [token_id("<|video_pad|>"), token_id("<|image_pad|>")] == [
            found[0].ids()[s.start] for s in found[0].spans
        ]
        # The same frames at another speed are another video: its tokens are at other places.
        slower = await media.add(ids, MediaRefs(refs.images, (), (VideoRef(frames=tuple(jpegs), fps=1.0),)))
        assert slower.media[0].values == video.values
        assert slower.media[0].key != video.key
    finally:
        media.close()


@pytest.mark.parametrize(
    ("video", "words"),
    [
        (VideoRef(frames=()), "has no frames"),
        (VideoRef(frames=frames(1), fps=0), "fps is 0; expected a number from 0.001 to 240"),
        (VideoRef(frames=frames(1), fps=float("nan")), "fps is nan"),
        ("data:video/jpeg;base64," + "," * 10_001, "more than 10000 frames"),
        ("data:video/jpeg;base64,QUFB,", r"frames\[1\] has neither url nor data"),
        (VideoRef(frames=frames(1), fps=float("inf")), "fps is inf"),
        (VideoRef(frames=(ImageRef(),)), r"frames\[0\] has neither url nor data"),
        (VideoRef(frames=(*frames(1), ImageRef(url="a", detail="low"))), r"frames\[1\] has detail low"),
        (VideoRef(frames=frames(*range(5))), r"video_data\[0\]: it has 5 frames; the limit is 4"),
        (VideoRef(frames=(*frames(1), ImageRef(data=b"x" * 50))), r"video_data\[0\]: frames\[1\]: it is not a known image format"),
        (VideoRef(frames=(*frames(1), ImageRef(url="https://a.example/b.png"))), r"video_data\[0\]: frames\[1\]: this server fetches no files"),
        ("https://a.example/video.mp4", "video files are not decoded. Take frames of the video, e.g. ffmpeg"),
    ],
)  # fmt: skip
async def test_other_videos_are_refused(video: VideoRef | str, words: str, tmp_path):
    media = PromptMedia(make_loader(tmp_path, write_checkpoint(tmp_path, "qwen2_vl"), MediaArgs(max_frames=4)))
    try:
        with pytest.raises(RequestError, match=words):
            await added(media, video)
    finally:
        media.close()


async def added(media: PromptMedia, video: VideoRef | str) -> None:
    (refs,) = refs_of({MediaKind.VIDEO: video}, 1, is_batch=False)
    media.check([refs])
    await media.add([token_id("<|video_pad|>")], refs)


async def test_families_without_videos_say_so(tmp_path):
    media = PromptMedia(make_loader(tmp_path, write_checkpoint(tmp_path, "llava"), MediaArgs()))
    with pytest.raises(
        RequestError, match="does not support videos: those of its family are not served; send frames as images"
    ):
        media.check([MediaRefs(videos=(VideoRef(frames=frames(1)),))])
    media.close()


@pytest.mark.parametrize(("name", "value"), [("merge_size", 4), ("temporal_patch_size", 1)])
def test_frames_that_are_not_made_for_the_tower_are_not_taken(name: str, value: int, tmp_path):
    ours = write_checkpoint(tmp_path, "qwen2_vl")
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({name: value}))
    loader = make_loader(tmp_path, ours, MediaArgs())
    assert list(loader.support.tokens) == ["image"]
    assert f"the video processor's {name} is {value}, and that of the vision tower 2" in loader.support.refusal(
        MediaKind.VIDEO
    )
    loader.close()


def test_many_patches_are_no_more_than_an_item_may_have(tmp_path):
    loader = make_loader(tmp_path, write_checkpoint(tmp_path, "qwen2_vl"), MediaArgs(max_patches=1 << 20))
    most = msgspec.msgpack.decode(loader._video_pool._setup, type=Setup).settings.video_patches
    assert most * 3 * 2 * 14 * 14 * 4 <= MAX_ITEM_BYTES
    loader.close()


async def test_a_video_by_url_waits_for_a_place_only_so_long(tmp_path, monkeypatch):
    monkeypatch.setattr(loader_module, "FETCH_LIMIT_S", 0.05)
    loader = make_loader(tmp_path, write_checkpoint(tmp_path, "qwen2_vl"), MediaArgs())
    try:
        for _ in range(6):
            await loader._videos.take()
        with pytest.raises(CapacityError, match="too many videos are being fetched"):
            await loader.load([VideoRef(frames=(ImageRef(url="https://a.example/b.png"),))])
        (found,) = await loader.load([VideoRef(frames=frames(1))])  # what is in the request waits for nobody
        assert found.item.kind == "video"
    finally:
        loader.close()


def test_settings_for_frames(tmp_path):
    assert not all_families().vision["llava"].video_processor
    with pytest.raises(ModelError, match="it says how videos are prepared"):
        read_video_settings(tmp_path, "Qwen2VL")
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 784}'
    )
    assert read_video_settings(tmp_path, "Qwen2VL").size == Size(shortest_edge=784, longest_edge=768 * 784)
    (tmp_path / "video_preprocessor_config.json").write_text(
        '{"video_processor_type": "Qwen3VLVideoProcessor", "fps": 2}'
    )
    assert read_video_settings(tmp_path, "Qwen3VL").by_volume
    (tmp_path / "video_preprocessor_config.json").write_text('{"cap_pixels_per_frame": true}')
    with pytest.raises(ModelError, match="cap_pixels_per_frame is not served"):
        read_video_settings(tmp_path, "Qwen2VL")
    (tmp_path / "processor_config.json").write_text(
        '{"video_processor": {"video_processor_type": "OtherVideoProcessor"}}'
    )
    with pytest.raises(ModelError, match="'Other' video processor"):
        read_video_settings(tmp_path, "Qwen2VL")
