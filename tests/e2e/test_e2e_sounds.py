"""A checkpoint that hears, from the file of a sound to greedy text: as transformers continues, by Python, by HTTP and by the official client."""

import asyncio
import base64
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import torch
import transformers
from server_process import ServerProcess, serving

from headrace import Engine
from headrace.config.web import MediaArgs
from headrace.errors import RequestError
from headrace.frontend.media import PromptMedia
from headrace.media_kinds import AudioRef, MediaKind, MediaRefs
from headrace.messages.requests import PromptContent
from headrace.multimodal.loader import make_loader
from headrace.text.tokenizers import load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import make_tiny_vlm

FAMILY = "qwen2_audio"
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
SOUND = make_tiny_vlm.IN_A_PROMPT[FAMILY]
RATE = 16000


def samples(seconds: float, seed: int) -> np.ndarray:
    """A tone that rises, in noise."""
    time = np.arange(int(seconds * RATE)) / RATE
    noise = np.random.default_rng(seed).normal(0, 0.05, len(time))
    return (0.5 * np.sin(2 * np.pi * (200 + 300 * (seed + time)) * time) + noise).astype(np.float32)


def wav(seconds: float, seed: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples(seconds, seed), RATE, subtype="FLOAT", format="WAV")
    return file.getvalue()


LENGTHS = (0.9, 0.31)
FILES = [wav(seconds, seed) for seed, seconds in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(FAMILY)
    return folder, make_tiny_vlm.write(FAMILY, folder, seed=1)  # with other seeds, any sound may get the same text


@pytest.fixture(scope="module")
def engine(written: tuple[Path, Any]) -> Iterator[Engine]:
    options = {"dtype": "float32", "single_process": True, "max_total_tokens": 4096, "log_level": "error"}
    with Engine(model_path=str(written[0]), num_threads=1, **options) as made:
        yield made


def prompt(num_sounds: int) -> str:
    return " and ".join(["hear", *[SOUND] * num_sounds]) + "?"


def loaded(folder: Path, num_sounds: int) -> PromptContent:
    """What the model reads."""
    tokenizer = load_tokenizer(folder)
    media = PromptMedia(make_loader(folder, tokenizer, MediaArgs()))
    refs = MediaRefs(audios=tuple(AudioRef(data=file) for file in FILES[:num_sounds]))
    try:
        return asyncio.run(media.add(tokenizer.encode(prompt(num_sounds), allow_special=True), refs))
    finally:
        media.close()


def continued(folder: Path, model: Any, content: PromptContent) -> list[int]:
    """transformers' greedy continuation, of the features that its own extractor makes."""
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    given = [samples(seconds, seed) for seed, seconds in enumerate(LENGTHS)][: len(content.media)]
    features = extractor(given, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt")
    ids = torch.tensor([content.ids()])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            input_features=features["input_features"],
            feature_attention_mask=features["attention_mask"],
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("num_sounds", [1, 2])
def test_text_goes_on_as_transformers_goes_on(engine: Engine, written: tuple[Path, Any], num_sounds: int):
    content = loaded(written[0], num_sounds)
    want = continued(*written, content)

    cold, warm = (engine.generate(prompt(num_sounds), GREEDY, audio_data=FILES[:num_sounds]) for _ in range(2))

    assert cold["output_ids"] == warm["output_ids"] == want
    assert cold["meta_info"]["prompt_tokens"] == content.num_tokens
    assert cold["meta_info"]["audio_tokens"] == content.media_tokens[MediaKind.AUDIO] > 0
    other = engine.generate(prompt(1), GREEDY, audio_data=FILES[1])
    assert other["output_ids"] != want
    assert warm["meta_info"]["cached_tokens"] == (content.num_tokens - 1) // 16 * 16


def test_the_same_sound_in_every_form_is_encoded_once(engine: Engine):
    coded = base64.b64encode(FILES[0]).decode()
    forms = [FILES[0], coded, f"data:audio/wav;base64,{coded}", {"url": coded}]
    before = engine.internal_state().encodings.num_encoded
    answers = engine.generate([prompt(1)] * len(forms), GREEDY, audio_data=forms)

    assert len({tuple(answer["output_ids"]) for answer in answers}) == 1
    assert engine.internal_state().encodings.num_encoded <= before + 1


def test_what_the_model_does_not_take_is_refused(engine: Engine):
    with pytest.raises(RequestError, match="has 1 audio clip, but the prompt has 0 audio tokens"):
        engine.generate("hear?", GREEDY, audio_data=FILES[0])
    with pytest.raises(RequestError, match="does not support images"):
        engine.generate(prompt(1), GREEDY, image_data=FILES[0])
    with pytest.raises(RequestError, match=r"audio_data\[0\]: "):
        engine.generate(prompt(1), GREEDY, audio_data=b"no sound at all" * 10)
    with pytest.raises(RequestError, match=r"audio_data\[1\]: .* s"):
        engine.generate(prompt(2), GREEDY, audio_data=[FILES[0], wav(40, 3)])


def test_new_weights_and_released_memory_leave_the_text_as_it_is(engine: Engine, written: tuple[Path, Any]):
    def answer() -> list[int]:
        return engine.generate(prompt(1), GREEDY, audio_data=FILES[0])["output_ids"]

    before = answer()
    assert engine.update_weights_from_disk(str(written[0]))[0]
    assert answer() == before
    assert engine.release_memory_occupation()[0]
    assert engine.resume_memory_occupation()[0]
    assert answer() == before


@pytest.fixture(scope="module")
def server(written: tuple[Path, Any]) -> Iterator[ServerProcess]:
    """One process; test_image_clients has HTTP workers."""
    options = ["--dtype", "float32", "--max-total-tokens", "4096", "--served-model-name", "tiny"]
    with serving(str(written[0]), *options, "--single-process") as it:
        yield it


CODED = base64.b64encode(FILES[0]).decode()
PART: Any = {"type": "input_audio", "input_audio": {"data": CODED, "format": "wav"}}
CHAT: Any = [{"role": "user", "content": [PART, {"type": "text", "text": "what is this?"}]}]


def test_the_official_client_gets_the_text_that_the_engine_gives(server: ServerProcess, engine: Engine):
    want = engine.chat(CHAT, max_tokens=10, temperature=0).text
    native = {"text": prompt(1), "audio_data": CODED, "sampling_params": GREEDY}
    broken: Any = [{"role": "user", "content": [{**PART, "input_audio": {"data": "AAAA" * 20, "format": "wav"}}]}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=10, temperature=0)
        with pytest.raises(openai.BadRequestError, match="audio clip 1 of the messages"):
            client.chat.completions.create(model="tiny", messages=broken)

    assert chat.choices[0].message.content == want
    own = engine.generate(prompt(1), GREEDY, audio_data=FILES[0])
    assert server.post("/generate", native)["output_ids"] == own["output_ids"]
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.audio_tokens == own["meta_info"]["audio_tokens"]
