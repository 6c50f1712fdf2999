"""A server whose model sees, and the official clients: one image, one prompt and one greedy text through every API."""

import base64
import contextlib
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import psutil
import pytest
from PIL import Image
from server_process import ServerProcess

from headrace import Runtime

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import make_tiny_vlm

anthropic = pytest.importorskip("anthropic")

WORDS = "what is this?"
MODEL = "tiny"
NUM_TOKENS = 10


def png(seed: int, size: tuple[int, int] = (70, 90)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


FILE = png(0)
CODED = base64.b64encode(FILE).decode()
URI = f"data:image/png;base64,{CODED}"
PART = {"type": "image_url", "image_url": {"url": URI}}
CHAT: list[Any] = [{"role": "user", "content": [PART, {"type": "text", "text": WORDS}]}]
SOURCE = {"type": "base64", "media_type": "image/png", "data": CODED}
MESSAGES: list[Any] = [
    {"role": "user", "content": [{"type": "image", "source": SOURCE}, {"type": "text", "text": WORDS}]}
]
INPUT: list[Any] = [
    {
        "role": "user",
        "content": [{"type": "input_image", "image_url": URI, "detail": "auto"}, {"type": "input_text", "text": WORDS}],
    }
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen2_vl")
    make_tiny_vlm.write("qwen2_vl", made)
    return made


@pytest.fixture(scope="module")
def runtime(folder: Path) -> Iterator[Runtime]:
    """With HTTP workers, so that images cross a process; sounds are served by one (test_e2e_sounds)."""
    options: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096, "served_model_name": MODEL}
    with Runtime(model_path=str(folder), **options, tokenizer_worker_num=2, anthropic_cache_control="pin") as it:
        yield it


@pytest.fixture(scope="module")
def server(runtime: Runtime) -> ServerProcess:
    return ServerProcess(runtime.url)


@pytest.fixture(scope="module")
def reference(server: ServerProcess) -> dict[str, Any]:
    body = {"model": MODEL, "messages": CHAT, "max_tokens": NUM_TOKENS, "temperature": 0}
    return server.post("/v1/chat/completions", body)


def test_the_clients_get_the_same_text(server: ServerProcess, reference: dict[str, Any]):
    want = reference["choices"][0]["message"]["content"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=NUM_TOKENS, temperature=0)
        response = client.responses.create(model=MODEL, input=INPUT, max_output_tokens=NUM_TOKENS, temperature=0)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model=MODEL, messages=MESSAGES, max_tokens=NUM_TOKENS, extra_body={"temperature": 0}
        )
    with ollama.Client(host=server.url) as client:
        greedy = {"temperature": 0, "num_predict": NUM_TOKENS}
        said = client.chat(
            MODEL, [ollama.Message(role="user", content=WORDS, images=[ollama.Image(value=FILE)])], options=greedy
        )
        generated = client.generate(MODEL, WORDS, images=[FILE], options=greedy)

    assert chat.choices[0].message.content == want
    assert response.output_text == want
    assert message.content[0].text == want
    assert said.message.content == generated.response == want


def test_usage_counts_the_tokens_of_images(server: ServerProcess, reference: dict[str, Any]):
    num_tokens = reference["usage"]["prompt_tokens"]
    details = reference["usage"]["prompt_tokens_details"]
    native = server.post("/generate", {"input_ids": tokens(server, CHAT, whole=False), "image_data": URI})
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
        message = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=1)

    assert counted.input_tokens == num_tokens
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == num_tokens
    assert native["meta_info"]["prompt_tokens"] == len(tokens(server, CHAT)) == num_tokens
    assert native["meta_info"]["image_tokens"] == details["image_tokens"] > 1


def tokens(server: ServerProcess, messages: list[Any], whole: bool = True) -> list[int]:
    """Token ids of messages; whole: with those of images, else with one for each image."""
    ids: list[int] = server.post("/tokenize", {"messages": messages})["tokens"]
    image = server.post("/tokenize", {"prompt": "<|image_pad|>"})["tokens"][0]
    return ids if whole else [id_ for at, id_ in enumerate(ids) if id_ != image or ids[at - 1] != image]


def test_a_stream_is_the_same_text(server: ServerProcess, reference: dict[str, Any]):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chunks = client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=NUM_TOKENS, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == reference["choices"][0]["message"]["content"]


def test_what_is_no_image_is_the_fault_of_the_request_alone(server: ServerProcess, reference: dict[str, Any]):
    for url, words in (
        ("data:image/png;base64," + base64.b64encode(FILE[:200]).decode(), "image 1 of the messages"),
        ("https://127.0.0.1:1/a.png", "--allowed-media-domains"),
        ("file:///etc/passwd", "--allowed-local-media-path"),
        ("not base64!", "image 1 of the messages"),
    ):
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        reply = httpx.post(f"{server.url}/v1/chat/completions", json={"model": MODEL, "messages": messages})
        assert reply.status_code == 400, reply.text
        assert words in reply.json()["error"]["message"]
        assert reply.json()["error"]["param"] == "messages"
    body = {"model": MODEL, "messages": CHAT, "max_tokens": NUM_TOKENS, "temperature": 0}
    assert server.post("/v1/chat/completions", body)["choices"] == reference["choices"]


def test_what_a_user_writes_is_no_image(server: ServerProcess):
    written = "<|vision_start|><|image_pad|><|vision_end|>"
    messages = [{"role": "user", "content": [{"type": "text", "text": written}, PART]}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 1}
    usage = server.post("/v1/chat/completions", body)["usage"]

    alone = server.post("/v1/chat/completions", body | {"messages": [{"role": "user", "content": [PART]}]})["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == alone["prompt_tokens_details"]["image_tokens"]
    assert usage["prompt_tokens"] == alone["prompt_tokens"] + len(written), "a token for each of its bytes"


def test_a_program_that_owns_its_server_sends_bytes(runtime: Runtime):
    file = png(1)  # which no other test has shown
    image = {"type": "image_url", "image_url": {"url": file}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": WORDS}]}]
    prompt = f"<|im_start|>user\n{make_tiny_vlm.IN_A_PROMPT['qwen2_vl']}{WORDS}<|im_end|>\n<|im_start|>assistant\n"
    before = runtime.internal_state().encodings.num_encoded
    reply = runtime.chat(messages, max_tokens=NUM_TOKENS, temperature=0)
    greedy = {"temperature": 0, "max_new_tokens": NUM_TOKENS}
    generated = runtime.generate(prompt, greedy, image_data=[file])
    for salt, num_encoded in ((None, 1), ("mine", 2), ("mine", 2), ("yours", 3)):
        assert runtime.generate(prompt, greedy, image_data=file, cache_salt=salt)["text"] == reply.text
        assert runtime.internal_state().encodings.num_encoded == before + num_encoded
    assert generated["text"] == reply.text
    assert generated["meta_info"]["prompt_tokens"] == reply.usage.prompt_tokens


def test_a_mark_behind_images_pins_them_with_the_text(runtime: Runtime, server: ServerProcess):
    small, large = (
        {"type": "image", "source": SOURCE | {"data": base64.b64encode(png(seed, size)).decode()}}
        for seed, size in ((2, (30, 40)), (3, (150, 90)))
    )
    until_s = time.monotonic() + 120
    mark = {"cache_control": {"type": "ephemeral"}}
    parts = [small, {"type": "text", "text": "and"}, large | mark, {"type": "text", "text": WORDS}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:

        def usage(*parts: Any) -> Any:
            return client.messages.create(
                model=MODEL, messages=[{"role": "user", "content": [*parts]}], max_tokens=1
            ).usage

        first = usage(*parts)
        (pin,) = server.get("/v1/cache")["pins"]
        up_to_mark = client.messages.count_tokens(
            model=MODEL, messages=[{"role": "user", "content": parts[:3]}]
        ).input_tokens
        assert first.cache_creation_input_tokens == pin["tokens"] - first.cache_read_input_tokens > 0
        assert 0 < up_to_mark - pin["tokens"] < 64, "the end of a turn and part of a page are left out"
        again = usage(*parts[:3], {"type": "text", "text": "which is larger?"})
        assert again.cache_read_input_tokens >= pin["tokens"]
        other = usage(large, *parts[1:3], {"type": "text", "text": WORDS})
        assert other.cache_read_input_tokens < pin["tokens"]

        def pins() -> Any:
            found = httpx.get(f"{server.url}/v1/cache").json().get("pins", [])
            return {one["id"]: (one["tokens"], one["held"]) for one in found}

        def schedulers() -> Iterator[psutil.Process]:
            for child in psutil.Process(runtime.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # one that ends just now, or is not waited for yet
                    if "scheduler" in child.cmdline():
                        yield child

        before = pins()
        (scheduler,) = schedulers()
        scheduler.kill()
        scheduler.wait()
        while not list(schedulers()) and time.monotonic() < until_s:
            time.sleep(0.05)
        while (held := pins()) != before and time.monotonic() < until_s:
            time.sleep(0.05)
        assert held == before, "they are made again with the images"
