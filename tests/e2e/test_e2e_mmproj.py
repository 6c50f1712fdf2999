"""GGUF models with a vision encoder in a file beside them: they continue prompts with images as the same checkpoints in Hugging Face's format do,
which `test_e2e_images.py` compares with transformers."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from PIL import Image

from headrace import Engine

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import make_tiny_vlm
from mmproj_files import PROJECTORS, write_pair

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "quantization": "none",
    "single_process": True,
    "max_total_tokens": 2048,
    "log_level": "error",
    "num_threads": 1,
}
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def png(width: int, height: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


FILES = [png(120, 90, 0), png(60, 200, 1)]


def prompt(family: str) -> str:
    return " and ".join(["see", *[make_tiny_vlm.IN_A_PROMPT.get(family, "<image>")] * len(FILES)]) + "?"


def answers(engine: Engine, family: str) -> Any:
    """Tokens and logprobs, as the images are in a prompt and in a chat."""
    answer = engine.generate(prompt(family), GREEDY, image_data=FILES, return_logprob=True)
    content = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": FILES[0]}]
    chat = engine.chat([{"role": "user", "content": content}], max_tokens=8, temperature=0)
    return answer["output_ids"], answer["meta_info"]["output_token_logprobs"], chat.text


def write(family: str, folder: Path) -> Path:
    make_tiny_vlm.write(family, folder)
    if family == "llava":  # it was trained so, and its file does not say it
        file = folder / "preprocessor_config.json"
        settings = json.loads(file.read_text()) | {"image_processor_type": "LlavaImageProcessor", "do_pad": True}
        file.write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("family", PROJECTORS)
def test_a_pair_of_files_continues_as_its_checkpoint(family: str, tmp_path: Path):
    folder = write(family, tmp_path / family)
    text, _ = write_pair(folder, family)
    with Engine(model_path=str(folder), **OPTIONS) as engine:
        want = answers(engine, family)

    with Engine(model_path=str(text), **OPTIONS) as engine:
        assert answers(engine, family) == want
        if family == "gemma3":
            assert engine.update_weights_from_disk(str(text))[0]
            assert answers(engine, family) == want


def test_the_token_of_rows_may_be_missing_in_the_vocabulary(tmp_path: Path):
    folder = write("gemma3", tmp_path / "m")
    text, _ = write_pair(folder, "gemma3", without="<image_soft_token>")
    with Engine(model_path=str(folder), **OPTIONS) as engine:
        want = answers(engine, "gemma3")

    with Engine(model_path=str(text), **OPTIONS) as engine:
        assert answers(engine, "gemma3") == want


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_an_encoder_of_fewer_bits_gives_nearly_the_same(kind: str, tmp_path: Path):
    folder = write("qwen2_5_vl", tmp_path / "m")
    text, _ = write_pair(folder, "qwen2_5_vl", gguf.GGMLQuantizationType[kind])
    with Engine(model_path=str(folder), **OPTIONS) as engine:
        [_, want, _] = answers(engine, "qwen2_5_vl")

    with Engine(model_path=str(text), **OPTIONS) as engine:
        [_, got, _] = answers(engine, "qwen2_5_vl")
    assert abs(got[0][0] - want[0][0]) < 0.05
    with Engine(model_path=str(text), **(OPTIONS | {"quantization": "gguf"})) as engine:
        [_, got, _] = answers(engine, "qwen2_5_vl")
    assert abs(got[0][0] - want[0][0]) < 0.05
