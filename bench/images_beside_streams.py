"""Text streams beside requests with images: how long the streams wait between two tokens, beside nothing, beside prompts of as many tokens of text,
and beside prompts with images that have not been seen before.

    .venv/bin/python -m bench.images_beside_streams [--turns 5] [--streams 4] [--max-step-ms N] [--output FILE]

The model has the sizes of SmolLM2-135M and a SigLIP base tower (196 tokens for an image), and random weights. In each turn `--streams` texts of 160
tokens are written, beside one request at a time of each kind, in turns. Prints JSON: the worst and the usual gap of each turn, in milliseconds, and
the ratio of the medians of the worst.
"""

import asyncio
import io
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import transformers
from PIL import Image

from bench.program import parser_of, write_report
from examples import make_tiny_vlm
from headrace import Engine

TOKENS_OF_A_STREAM = 160
IMAGE_TOKENS = 196


def write_model(folder: Path) -> None:
    """A checkpoint without weights."""
    ids = make_tiny_vlm.tokenizer("llava")
    text = transformers.LlamaConfig.from_pretrained(
        Path(__file__).parent / "configs" / "smollm2-135m", eos_token_id=ids.eos_token_id, bos_token_id=None
    )
    config = transformers.LlavaConfig(
        text_config=text,
        vision_config=transformers.SiglipVisionConfig(vision_use_head=False),  # by default as SigLIP base
        image_token_index=ids.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    config.architectures = ["LlavaForConditionalGeneration"]
    config.save_pretrained(folder)
    ids.save_pretrained(folder)
    kind = {"image_processor_type": "SiglipImageProcessor", "processor_class": "LlavaProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps({**kind, "size": {"height": 224, "width": 224}}))


def jpeg(seed: int) -> bytes:
    """An image that no other turn has."""
    pixels = np.random.default_rng(seed).integers(0, 255, (28, 28, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((448, 448)).save(file, "jpeg", quality=90)
    return file.getvalue()


async def stream(engine: Engine, seed: int) -> list[float]:
    """Seconds between the tokens of one text."""
    params: Any = {"temperature": 1.0, "seed": seed, "max_new_tokens": TOKENS_OF_A_STREAM, "ignore_eos": True}
    gaps, last = [], 0.0
    async for _ in await engine.async_generate(f"text {seed}", params, stream=True):
        now = time.perf_counter()
        if last:
            gaps.append(now - last)
        last = now
    return gaps


async def beside(engine: Engine, kind: str, seed: int, done: asyncio.Event) -> int:
    """One request after another until `done`. Returns how many."""
    params: Any = {"max_new_tokens": 1, "ignore_eos": True}
    count = 0
    while kind != "nothing" and not done.is_set():
        number = seed * 1000 + count
        if kind == "images":
            await engine.async_generate(f"{number} <image>", params, image_data=jpeg(number))
        else:
            letters = "".join(map(chr, np.random.default_rng(number).integers(97, 123, IMAGE_TOKENS)))
            await engine.async_generate(f"{number} {letters}", params)
        count += 1
    return count


async def turn(engine: Engine, kind: str, seed: int, streams: int) -> dict[str, Any]:
    """The gaps of the streams beside requests of a kind."""
    done = asyncio.Event()
    other = asyncio.create_task(beside(engine, kind, seed, done))
    found = await asyncio.gather(*(stream(engine, seed * 100 + number) for number in range(streams)))
    done.set()
    gaps = sorted(gap for each in found for gap in each)
    return {
        "worst_ms": round(1000 * gaps[-1], 1),
        "p99_ms": round(1000 * gaps[int(len(gaps) * 0.99)], 1),
        "median_ms": round(1000 * median(gaps), 1),
        "requests": await other,
    }


def main() -> None:
    """See the module docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--max-step-ms", type=int)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    kinds = ("nothing", "texts", "images")
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as made:
        write_model(Path(made))
        options: dict[str, Any] = {} if args.max_step_ms is None else {"max_step_ms": args.max_step_ms}
        options |= {"load_format": "dummy", "log_level": "error", "max_total_tokens": 32768}
        with Engine(model_path=made, **options) as engine:
            for number in range(-1, args.turns):  # the first turn warms up
                for kind in kinds:
                    found = asyncio.run(turn(engine, kind, number + 2, args.streams))
                    if number >= 0:
                        results[kind].append(found)
                        print(kind, found, file=sys.stderr, flush=True)
    worst = {kind: median(found["worst_ms"] for found in results[kind]) for kind in kinds}
    report = {
        "model": "SmolLM2-135M's sizes with a SigLIP base tower, random weights",
        "streams": args.streams,
        "max_step_ms": args.max_step_ms,
        "turns": results,
        "worst_ms": worst,
        "ratio": {
            "images to nothing": round(worst["images"] / worst["nothing"], 2),
            "images to texts": round(worst["images"] / worst["texts"], 2),
        },
    }
    write_report(report, args.output)


if __name__ == "__main__":
    main()
