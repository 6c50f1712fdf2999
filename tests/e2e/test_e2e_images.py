"""Checkpoints of models that see, from the file of an image to greedy text: as transformers continues."""

import asyncio
import base64
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from headrace import Engine
from headrace.config.web import MediaArgs
from headrace.errors import ContextLengthError, RequestError
from headrace.frontend.media import PromptMedia
from headrace.media_kinds import ImageRef, MediaKind, MediaRefs, VideoRef
from headrace.messages import media
from headrace.messages.requests import PromptContent
from headrace.multimodal.loader import make_loader
from headrace.text.tokenizers import load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import make_tiny_vlm

FAMILIES = list(make_tiny_vlm.SPECIAL)
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def png(width: int, height: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


FILES = [png(120, 90, 0), png(60, 200, 1), png(75, 70, 2)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def written(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(family)
    return folder, make_tiny_vlm.write(family, folder)


@pytest.fixture(scope="module")
def engine(written: tuple[Path, Any]):
    options = {"dtype": "float32", "single_process": True, "max_total_tokens": 4096, "log_level": "error"}
    with Engine(model_path=str(written[0]), num_threads=1, **options) as made:
        yield made


def prompt(family: str, num_images: int) -> str:
    image = make_tiny_vlm.IN_A_PROMPT.get(family, "<image>")
    return " and ".join(["see", *[image] * num_images]) + "?"


def read(family: str, folder: Path, num_images: int, files: list[bytes] = FILES) -> PromptContent:
    """What the model reads of a prompt with images."""
    return loaded(folder, prompt(family, num_images), MediaRefs(tuple(map(image_of, files[:num_images]))))


def image_of(file: bytes) -> ImageRef:
    return ImageRef(data=file)


def loaded(folder: Path, text: str, refs: MediaRefs) -> PromptContent:
    """What the model reads of a prompt."""
    tokenizer = load_tokenizer(folder)
    media = PromptMedia(make_loader(folder, tokenizer, MediaArgs()))
    try:
        return asyncio.run(media.add(tokenizer.encode(text, allow_special=True), refs))
    finally:
        media.close()


def values_of_transformers(family: str, folder: Path, files: list[bytes]) -> dict[str, Any]:
    """What transformers' own image processor makes of the images of one prompt."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    # As the processors of texts say that go with them.
    tiles = {"crop_to_patches": True}
    more: dict[str, Any] = {"internvl": tiles, "aya_vision": tiles, "mistral3": {"patch_size": 28}}.get(family, {})
    images = [Image.open(io.BytesIO(file)) for file in files]
    found = processor([images], return_tensors="pt", **more)
    return {name: value for name, value in found.items() if name not in ("num_patches", "num_crops")}


def frames_of_transformers(content: PromptContent, family: str) -> dict[str, Any]:
    """The values of videos, which our own loader has made: transformers' processor of videos needs torchvision."""
    videos = [item for item in content.media if item.kind == "video"]
    if not videos:
        return {}
    values = [np.frombuffer(item.values, np.float32).reshape(-1, item.shape[-1]) for item in videos]
    inputs: dict[str, Any] = {
        "pixel_values_videos": torch.from_numpy(np.concatenate(values)),
        "video_grid_thw": torch.tensor([item.grid for item in videos]),
    }
    if family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([item.step_s for item in videos])
    return inputs


def continued(family: str, written: tuple[Path, Any], content: PromptContent, files: list[bytes]) -> list[int]:
    """transformers' greedy continuation. files: of the images."""
    folder, model = written
    ids = torch.tensor([content.ids()])
    is_image = torch.zeros_like(ids)
    for span in content.spans:
        is_image[0, span.start : span.end] = 1 if content.media[span.item].kind == "image" else 2
    inputs = values_of_transformers(family, folder, files) | frames_of_transformers(content, family)
    if "qwen" in family:
        inputs["mm_token_type_ids"] = is_image
    elif family == "gemma3":
        inputs["token_type_ids"] = is_image
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, **inputs, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("num_images", [1, 3])
def test_text_goes_on_as_transformers_goes_on(engine: Engine, family: str, written: tuple[Path, Any], num_images: int):
    content = read(family, written[0], num_images)
    want = continued(family, written, content, FILES[:num_images])

    cold = engine.generate(prompt(family, num_images), GREEDY, image_data=FILES[:num_images])
    warm = engine.generate(prompt(family, num_images), GREEDY, image_data=FILES[:num_images])

    assert cold["output_ids"] == warm["output_ids"] == want
    assert cold["meta_info"]["prompt_tokens"] == content.num_tokens
    assert cold["meta_info"]["image_tokens"] == sum(span.length for span in content.spans)
    assert warm["meta_info"]["cached_tokens"] == (content.num_tokens - 1) // 16 * 16


def test_videos_go_on_as_transformers_goes_on(engine: Engine, family: str, written: tuple[Path, Any]):
    if "qwen" not in family:
        with pytest.raises(RequestError, match="does not support videos"):
            engine.generate("see", GREEDY, video_data={"frames": FILES[:1]})
        return
    frames = [png(80, 60, seed) for seed in range(5)]
    text = prompt(family, 1).replace("image_pad", "video_pad") + prompt(family, 1)
    # Short enough for transformers, which lets the text after a longer one go on in the midst of its time.
    given = {"image_data": FILES[0], "video_data": {"frames": frames, "fps": 40}}
    video = VideoRef(frames=tuple(map(image_of, frames)), fps=40).checked("video")
    content = loaded(written[0], text, MediaRefs((ImageRef(data=FILES[0]),), (), (video,)))
    want = continued(family, written, content, FILES[:1])

    cold, warm = (engine.generate(text, GREEDY, **given) for _ in range(2))

    assert cold["output_ids"] == warm["output_ids"] == want
    assert cold["meta_info"]["prompt_tokens"] == content.num_tokens
    assert cold["meta_info"]["video_tokens"] == content.media_tokens[MediaKind.VIDEO] > 0


def test_a_second_turn_about_a_video_is_the_same_cached_as_cold(engine: Engine, family: str, written: tuple[Path, Any]):
    if "qwen" not in family:
        pytest.skip("it takes no videos")
    tokenizer = load_tokenizer(written[0])
    ids = tokenizer.encode(prompt(family, 1).replace("image_pad", "video_pad"), allow_special=True)
    given = {"video_data": {"frames": [png(40, 40, seed) for seed in range(16)], "fps": 0.7}}
    first = engine.generate(input_ids=ids, sampling_params=GREEDY, **given)
    ids += first["output_ids"] + tokenizer.encode("and then?")

    warm = engine.generate(input_ids=ids, sampling_params=GREEDY, **given)
    assert warm["meta_info"]["cached_tokens"] > first["meta_info"]["prompt_tokens"]
    assert engine.flush_cache()
    assert engine.generate(input_ids=ids, sampling_params=GREEDY, **given)["output_ids"] == warm["output_ids"]


def test_a_video_that_is_longer_than_the_context_is_refused(engine: Engine, family: str):
    if family != "qwen2_5_vl":
        pytest.skip("time takes no positions")
    text = prompt(family, 1).replace("image_pad", "video_pad")
    frames = [png(40, 40, seed) for seed in range(8)]
    for fps, max_new_tokens in ((0.001, 12), (0.0125, 200)):
        with pytest.raises(ContextLengthError, match="positions long in time"):
            engine.generate(text, {"max_new_tokens": max_new_tokens}, video_data={"frames": frames, "fps": fps})
    left = engine.generate(text, {"ignore_eos": True}, video_data={"frames": frames, "fps": 0.0125})
    assert left["meta_info"]["finish_reason"]["type"] == "length"


def test_the_work_of_a_large_image_is_cut_into_parts(
    engine: Engine, family: str, written: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
):
    files = [png(150, 130, 7)]
    content = read(family, written[0], 1, files)
    monkeypatch.setattr(media, "MAX_BATCH_BYTES", 30_000)

    answer = engine.generate(prompt(family, 1), GREEDY, image_data=files)

    assert answer["output_ids"] == continued(family, written, content, files)
    if len(content.media[0].shape) == 4 and content.media[0].shape[0] > 1:
        assert media.num_parts([content.media[0].shape]) > 1


def test_the_same_image_in_every_form_is_encoded_once(engine: Engine, family: str):
    coded = base64.b64encode(FILES[0]).decode()
    forms = [FILES[0], coded, f"data:image/png;base64,{coded}", {"url": coded, "detail": "auto"}]
    before = engine.internal_state().encodings.num_encoded
    answers = engine.generate([prompt(family, 1)] * len(forms), GREEDY, image_data=forms)

    assert len({tuple(answer["output_ids"]) for answer in answers}) == 1
    assert engine.internal_state().encodings.num_encoded <= before + 1


def test_an_image_without_a_place_and_a_place_without_an_image_are_refused(engine: Engine, family: str):
    with pytest.raises(RequestError, match="has 1 image, but the prompt has 0 image tokens"):
        engine.generate("see?", GREEDY, image_data=FILES[0])
    with pytest.raises(RequestError, match="neither a URL nor base64"):
        engine.generate(prompt(family, 1), GREEDY, image_data="!!!!")


def test_new_weights_and_released_memory_leave_the_text_as_it_is(
    engine: Engine, family: str, written: tuple[Path, Any]
):
    before = engine.generate(prompt(family, 1), GREEDY, image_data=FILES[0])["output_ids"]

    assert engine.update_weights_from_disk(str(written[0]))[0]
    assert engine.generate(prompt(family, 1), GREEDY, image_data=FILES[0])["output_ids"] == before
    assert engine.release_memory_occupation()[0]
    assert engine.resume_memory_occupation()[0]

    assert engine.generate(prompt(family, 1), GREEDY, image_data=FILES[0])["output_ids"] == before
