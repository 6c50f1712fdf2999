"""Prompts with images: the ids are those of transformers' processors, and the spans say which of them are rows."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seeing_checkpoints import CONFIG, PROCESSOR, file_of, picture, token_id, tokenizer, write_checkpoint
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from headrace.checkpoint import families
from headrace.checkpoint.media_config import MediaConfig, VisionConfig
from headrace.checkpoint.media_tokens import ItemFacts, layout_of
from headrace.checkpoint.preprocessor_config import image_settings
from headrace.config.web import MediaArgs
from headrace.errors import ModelError
from headrace.frontend.media import PromptMedia
from headrace.media_kinds import ImageRef, MediaRefs
from headrace.multimodal.families import PLAIN, Joints, make_family
from headrace.multimodal.loader import make_loader
from headrace.multimodal.processors import prepare

IMAGES = [picture(50, 70), picture(20, 20, seed=1), picture(90, 33, seed=2)]


def options(family: str) -> dict:
    return {key: value for key, value in PROCESSOR[family].items() if key != "image_processor_type"}


def llava(text: str) -> list[int]:
    processor = LlavaProcessor(
        CLIPImageProcessorPil(**options("llava")), tokenizer(image_token="<image>"), patch_size=14,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    return processor(images=IMAGES, text=[text])["input_ids"][0]


def idefics3(text: str) -> list[int]:
    processor = Idefics3Processor(Idefics3ImageProcessorPil(**options("idefics3")), tokenizer(), image_seq_len=4)
    return processor(images=[IMAGES], text=[text])["input_ids"][0]


def smolvlm(text: str) -> list[int]:
    # The processor itself needs num2words, for videos.
    found = Idefics3ImageProcessorPil(**options("smolvlm"))([IMAGES], return_row_col_info=True)
    for rows, columns in zip(found["rows"][0], found["cols"][0], strict=True):
        special = ("<fake_token_around_image>", "<IMAGE>", "<global-img>")
        text = text.replace("<image>", get_image_prompt_string(rows, columns, 4, *special), 1)
    return tokenizer()(text.replace("<IMAGE>", "<image>"))["input_ids"]


def qwen2_vl(text: str) -> list[int]:
    # The processor itself needs torchvision, for videos.
    images = Qwen2VLImageProcessorPil(**options("qwen2_vl"))
    inputs = images(IMAGES, return_tensors="np")
    processor = SimpleNamespace(image_processor=images, image_token="<|IMAGE|>")
    for number in range(len(IMAGES)):
        text = text.replace("<|image_pad|>", Qwen2VLProcessor.replace_image_token(processor, inputs, number), 1)
    return tokenizer()(text.replace("<|IMAGE|>", "<|image_pad|>"))["input_ids"]


def gemma3(text: str) -> list[int]:
    processor = Gemma3Processor(Gemma3ImageProcessorPil(**options("gemma3")), tokenizer(), image_seq_length=4)
    return processor(images=[IMAGES], text=[text])["input_ids"][0]


def aya_vision(text: str) -> list[int]:
    processor = AyaVisionProcessor(
        GotOcr2ImageProcessorPil(**options("aya_vision")), tokenizer(), patch_size=8, img_size=32, downsample_factor=2
    )
    return processor(images=[IMAGES], text=[text], padding=False)["input_ids"][0]


def rows_of(merge: int):
    def pixtral(text: str) -> list[int]:
        # The processor itself needs torchvision.
        for image in IMAGES:
            ratio = max(max(image.size) / 64, 1)
            columns, rows = (-(-int(side / ratio) // (8 * merge)) for side in image.size)
            row = "[I]" * columns
            text = text.replace("[IMG]", "[IMG_BREAK]".join([row] * rows) + "[IMG_END]", 1)
        return tokenizer()(text.replace("[I]", "[IMG]"))["input_ids"]

    return pixtral


THEIRS = {
    "llava": llava,
    "idefics3": idefics3,
    "smolvlm": smolvlm,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_vl,
    "gemma3": gemma3,
    "aya_vision": aya_vision,
    "pixtral": rows_of(1),
    "mistral3": rows_of(2),
}
TEXTS = ["a I b I\nc\n\nI", "III", "user\nI\nI\n\nI\n", "\n\n\nI\n\n\nI\n\n\n\n\nI\n x"]


@pytest.mark.parametrize("family", THEIRS)
async def test_ids_are_those_of_transformers(family: str, tmp_path):
    ours = write_checkpoint(tmp_path, family)
    loader = make_loader(tmp_path, ours, MediaArgs())
    images = PromptMedia(loader)
    refs = MediaRefs(tuple(ImageRef(data=file_of(image)) for image in IMAGES))
    try:
        for text in TEXTS:
            text = text.replace("I", loader.support.tokens["image"])
            content = await images.add(ours.encode(text, allow_special=True), refs)
            ids = content.ids()
            assert list(ids) == THEIRS[family](text), text
            row_token = next(value for key, value in CONFIG[family].items() if key.startswith("image_token"))
            rows = {index for span in content.spans for index in range(span.start, span.end)}
            assert rows == {index for index, token in enumerate(ids) if token == row_token}
            for number, item in enumerate(content.media):
                spans = [span for span in content.spans if span.item == number]
                covered = [row for span in spans for row in range(span.first_row, span.first_row + span.length)]
                assert covered == list(range(item.num_tokens))
                assert len(item.values) == 4 * np.prod(item.shape)
    finally:
        images.close()


async def test_an_image_has_the_same_key_wherever_it_comes_from(tmp_path):
    ours = write_checkpoint(tmp_path, "qwen2_vl")
    loader = make_loader(tmp_path, ours, MediaArgs())
    png, bmp = file_of(IMAGES[0]), file_of(IMAGES[0], "BMP")
    first, second, other = await loader.load([ImageRef(data=data) for data in (png, bmp, file_of(IMAGES[1]))])
    loader.close()
    assert first.item.key == second.item.key != other.item.key
    assert first.item == second.item


@pytest.mark.parametrize(
    ("family", "vision", "config", "processor", "words"),
    [
        ("llava", {"image_size": 56}, {}, {}, "28 x 28 pixels, and the vision tower takes 56"),
        ("llava", {"num_channels": 1}, {}, {}, "channels"),
        ("llava", {}, {"image_token_index": 5000}, {}, "no token 5000"),
        ("qwen2_vl", {"patch_size": 16}, {}, {}, "patch_size is 14"),
        ("idefics3", {"image_size": 16}, {}, {}, "32 pixels"),
        ("mistral3", {}, {}, PROCESSOR["llava"] | {"patch_size": None}, "Pixtral"),
        ("gemma3", {}, {"eoi_token_index": 5000}, {}, "no token 5000"),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_refused(family, vision, config, processor, words, tmp_path):
    ours = write_checkpoint(tmp_path, family, **processor)
    found = json.loads((tmp_path / "config.json").read_text())
    found["vision_config"] |= vision
    (tmp_path / "config.json").write_text(json.dumps(found | config))
    with pytest.raises(ModelError, match=words):
        make_loader(tmp_path, ours, MediaArgs())


def media(family: str, config: dict, **vision) -> MediaConfig:
    options = {
        "tower": "siglip",
        "hidden_size": 8,
        "num_layers": 1,
        "num_heads": 1,
        "head_dim": 8,
        "intermediate_size": 8,
        "hidden_act": "gelu",
    }
    options |= {"norm_eps": 1e-6, "image_size": 32, "patch_size": 8} | vision
    return MediaConfig(family=family, image_token_id=token_id("<image>"), vision=VisionConfig(**options), **config)


def layouts(family: str, processor: dict, config: dict, tmp_path, **vision):
    ours = write_checkpoint(tmp_path, "llava")
    found = make_family(
        media(family, config, **vision),
        image_settings(processor, families.all_families().vision[family].image_processor),
        ours,
        {},
    )
    return found, [prepare(image, found[1]) for image in IMAGES]


@pytest.mark.parametrize("most", [2, 9])
def test_tokens_of_llava_onevision(most: int, tmp_path):
    pinpoints = [[32 * rows, 32 * columns] for rows in range(1, 5) for columns in range(1, 5)]
    options = {"size": {"height": 32, "width": 32}, "image_grid_pinpoints": pinpoints}
    config = {"pinpoints": tuple(map(tuple, pinpoints)), "max_tiles": most}
    (family, _), prepared = layouts("llava_onevision", options, config, tmp_path)
    images = LlavaOnevisionImageProcessorPil(**options)
    theirs = SimpleNamespace(
        image_processor=images, num_image_tokens=16, vision_feature_select_strategy="full", image_token="I",
        vision_aspect_ratio=f"anyres_max_{most}",
    )  # fmt: skip
    theirs._get_unpadded_features = partial(LlavaOnevisionProcessor._get_unpadded_features, theirs)
    theirs._get_number_of_features = partial(LlavaOnevisionProcessor._get_number_of_features, theirs)
    for height, width in [(50, 70), (20, 20), (300, 41), (33, 500), (128, 128), (127, 95), (1, 64)]:
        inputs = images([picture(height, width)])
        expected = len(LlavaOnevisionProcessor.replace_image_token(theirs, inputs, 0))
        layout = family.kinds["image"].layout(ItemFacts((2,), (0, height, width)))
        assert (layout.num_rows, len(layout.tokens)) == (expected, expected)
    assert family.kinds["image"].layout(ItemFacts((1,), (0, 50, 70))).num_rows == 16 + 1
    assert prepared[0].grid == (0, 50, 70)


def test_tokens_of_internvl(tmp_path):
    options = {"size": {"height": 32, "width": 32}, "crop_to_patches": False, "max_patches": 6}
    (family, settings), prepared = layouts("internvl", options, {}, tmp_path)
    assert settings.splits
    found = GotOcr2ImageProcessorPil(**options)(IMAGES, crop_to_patches=True)["num_patches"]
    for number, image in zip(found, prepared, strict=True):
        layout = family.kinds["image"].layout(ItemFacts(image.values.shape, image.grid))
        assert layout.tokens == (token_id("<img>"), *[token_id("<image>")] * (4 * number), token_id("</img>"))
        assert layout.spans == ((1, 4 * number, 0),)


def test_a_model_without_eyes_has_no_loader(tmp_path):
    ours = write_checkpoint(tmp_path, "llava")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="take text only"):
        make_loader(tmp_path, ours, MediaArgs())


@given(st.lists(st.integers(0, 3), max_size=30))
def test_spans_cover_the_rows_in_order(tokens: list[int]):
    layout = layout_of(tokens, 1)
    covered = [(start + step, row + step) for start, length, row in layout.spans for step in range(length)]
    assert covered == [(index, row) for row, index in enumerate(i for i, token in enumerate(tokens) if token == 1)]
    assert layout.num_rows == tokens.count(1)
    starts = [start for start, _, _ in layout.spans]
    ends = [start + length for start, length, _ in layout.spans]
    assert all(end < start for end, start in zip(ends, starts[1:], strict=False))


def run_ids(count: int) -> list[int]:
    """Greedy, as tokens 100 + n of n line ends, n <= 3."""
    return [103] * (count // 3) + ([100 + count % 3] if count % 3 else [])


@given(st.lists(st.lists(st.sampled_from([1, 2, 101, 102, 103]), max_size=6), max_size=6))
def test_parts_are_joined_as_the_whole_text_is_read(parts: list[list[int]]):
    joints = Joints({101: 1, 102: 2, 103: 3}, run_ids)

    def normal(tokens: list[int]) -> list[int]:
        out: list[int] = []
        run = 0
        for token in [*tokens, 0]:
            if token > 100:
                run += token - 100
            else:
                out += [*run_ids(run), token]
                run = 0
        return out[:-1]

    tokens: list[int] = []
    for part in map(normal, parts):
        begin = joints.append(tokens, part)
        for index, token in enumerate(part):
            if token < 100:
                assert tokens[begin + index] == token
    assert tokens == normal([token for part in parts for token in part])


def test_plain_parts_are_not_changed():
    tokens = [1, 198]
    assert PLAIN.append(tokens, (198, 2)) == 2
    assert tokens == [1, 198, 198, 2]
