"""Where the time of an encoder of images goes: the parts of one layer of SigLIP base, and the slices of a layer on one large image.

    .venv/bin/python -m bench.tower_parts [--turns 20] [--output FILE]

Parts: milliseconds of each on 196 tokens an image, the least over the turns, and operations a second of the products, beside the machine's peak
(`bench step`). Slices: SigLIP's larger tower on an image of 896 pixels, a layer as one call and cut as the scheduler has it, the least over the
turns of the longest slice and of the whole layer. Random weights. Prints JSON.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from rich.progress import track

from bench.program import parser_of, write_report
from headrace import kernels
from headrace.benchmark.step import machine_limits
from headrace.checkpoint.media_config import MediaConfig, VisionConfig
from headrace.layers.weight import Placement
from headrace.messages import media as media_messages
from headrace.models.media import MediaInput
from headrace.models.towers import ClipVision, packed

BASE: dict[str, Any] = {
    "hidden_size": 768,
    "num_heads": 12,
    "head_dim": 64,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 16,
}
LARGE: dict[str, Any] = {
    "hidden_size": 1152,
    "num_heads": 16,
    "head_dim": 72,
    "intermediate_size": 4304,
    "image_size": 896,
    "patch_size": 14,
}
SCHEMES = ("bfloat16", "int8", "int8-fast")


def eyes(sizes: dict[str, Any], num_layers: int, scheme: Any) -> ClipVision:
    """A tower with random weights."""
    vision = VisionConfig(tower="siglip", num_layers=num_layers, hidden_act="gelu_pytorch_tanh", norm_eps=1e-6, **sizes)
    media = MediaConfig(family="llava", image_token_id=0, vision=vision)
    made = ClipVision(media, Placement(torch.device("cpu"), torch.bfloat16, 1, scheme), "", final_norm=True)
    generator = torch.Generator().manual_seed(0)
    for weight in made.weights():
        weight.load(torch.randn(weight.shape, generator=generator) * 0.02)
    assert not made.tower.fuse()
    return made


def least_ms(work: Callable[[], torch.Tensor], turns: int) -> float:
    """Milliseconds of the fastest of some calls."""
    taken = []
    for _ in range(turns):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return 1000 * min(taken)


def parts(scheme: str, num_images: int, turns: int) -> dict[str, Any]:
    """Of one layer."""
    block = eyes(BASE, 1, scheme).tower._blocks[0]
    num_tokens, size, inner = 196 * num_images, BASE["hidden_size"], BASE["intermediate_size"]
    x, items = torch.randn(num_tokens, size), packed([196] * num_images, torch.device("cpu"))
    q, k, v = block._projected(x, items)
    attended = block._attended(q, k, v, items).flatten(1)
    up = block._up(x)
    active = block._activate(up)
    ms = {
        "norm": least_ms(lambda: block._attention_norm(x), turns),
        "qkv": least_ms(lambda: block._qkv(x), turns),
        "attention": least_ms(lambda: block._attended(q, k, v, items), turns),
        "out": least_ms(lambda: block._out(attended), turns),
        "up": least_ms(lambda: block._up(x), turns),
        "activation": least_ms(lambda: block._activate(up), turns),
        "down": least_ms(lambda: block._down(active), turns),
        "one call": least_ms(lambda: block(x, items), turns),
    }
    elements = {"qkv": 3 * size * size, "out": size * size, "up": size * inner, "down": size * inner}
    gops = {name: round(2 * num_tokens * count / ms[name] / 1e6) for name, count in elements.items()}
    return {
        "scheme": scheme,
        "images": num_images,
        "ms": {name: round(each, 3) for name, each in ms.items()},
        "gops": gops,
    }


def slices(scheme: str, turns: int) -> dict[str, Any]:
    """Of a layer on a large image."""
    made, usual = eyes(LARGE, 3, scheme), media_messages.MAX_BATCH_BYTES
    pixels = torch.randn(1, 3, 896, 896)
    found: dict[str, Any] = {"scheme": scheme}
    for name, most in (("one call", 1 << 30), ("cut", usual)):
        media_messages.MAX_BATCH_BYTES = most
        layers, longest = [], []
        for _ in range(turns):
            work = made.run([MediaInput(pixels)])
            taken, before = [], time.perf_counter()
            for _ in work:
                now = time.perf_counter()
                taken.append(now - before)
                before = now
            a_layer = len(taken) // 3
            layers.append(sum(taken[a_layer:]) / 2)  # the first has the patches, too
            longest.append(max(taken[a_layer:]))
        found[name] = {"layer_ms": round(1000 * min(layers), 1), "longest_slice_ms": round(1000 * min(longest), 1)}
    media_messages.MAX_BATCH_BYTES = usual
    return found


def main() -> None:
    """See the module docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    kernels.set_num_threads(args.threads)
    torch.set_num_threads(1)  # as the runtime does
    report = {
        "threads": args.threads,
        "turns": args.turns,
        "limits": asdict(machine_limits()),
        "parts": [
            parts(scheme, count, args.turns) for count in track((1, 8), description="parts") for scheme in SCHEMES
        ],
        "slices": [slices(scheme, max(3, args.turns // 4)) for scheme in track(SCHEMES[:2], description="slices")],
    }
    write_report(report, args.output)


if __name__ == "__main__":
    main()
