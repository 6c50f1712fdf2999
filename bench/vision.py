"""Encoders of images: images a second from pixels to hidden states, a SigLIP base tower of random weights, beside transformers and OpenVINO.

    PYTHONPATH=.venv/peers:.venv/nncf .venv/bin/python -m bench.vision [--turns 9] [--images 1,8] [--ours] [--output FILE]

bench/contest.py says how, and what the peers need.
"""

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import SiglipVisionConfig, SiglipVisionModel

from bench.contest import (
    Call,
    Contestant,
    contest,
    contest_parser,
    export,
    openvino_peers,
    quantise_dynamically,
    torch_threads,
    use_threads,
)
from bench.program import counts
from headrace.checkpoint.media_config import MediaConfig, VisionConfig
from headrace.layers.weight import Placement
from headrace.models.media import MediaInput
from headrace.models.towers import ClipVision


def reference() -> SiglipVisionModel:
    """The tower in torch, float32, with weights of the size of trained ones. The sizes are those of transformers' default."""
    torch.manual_seed(0)
    config = SiglipVisionConfig(vision_use_head=False)
    config._attn_implementation = "sdpa"
    return SiglipVisionModel(config).float().eval()


def headrace(model: SiglipVisionModel, dtype: torch.dtype, quantization: Any) -> Call:
    """Our tower with the same weights."""
    vision = VisionConfig(
        tower="siglip",
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        head_dim=64,
        intermediate_size=3072,
        hidden_act="gelu_pytorch_tanh",
        norm_eps=1e-6,
        image_size=224,
        patch_size=16,
    )
    media = MediaConfig(family="llava", image_token_id=0, vision=vision)
    eyes = ClipVision(media, Placement(torch.device("cpu"), dtype, 1, quantization), "", final_norm=True)
    tensors = {name.removeprefix("vision_model."): tensor for name, tensor in model.state_dict().items()}
    for weight in eyes.weights():
        weight.load(tensors[weight.name])
    reason = eyes.tower.fuse()
    assert not reason, reason

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        work = eyes.run([MediaInput(pixels)])
        try:
            while True:
                next(work)
        except StopIteration as done:
            return done.value[0]

    return encode


class Hidden(torch.nn.Module):
    """The tower with one output."""

    def __init__(self, model: SiglipVisionModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """The last hidden states."""
        return self.model(pixels).last_hidden_state


def ours(model: SiglipVisionModel) -> dict[str, Contestant]:
    """By name."""
    return {
        "headrace float32": Contestant("fp32", headrace(model, torch.float32, "none")),
        "headrace bfloat16": Contestant("16 bit", headrace(model, torch.bfloat16, "bfloat16")),
        "headrace int8": Contestant("int8", headrace(model, torch.bfloat16, "int8")),
        "headrace int8-fast": Contestant("int8", headrace(model, torch.bfloat16, "int8-fast")),
    }


def peers(model: SiglipVisionModel, threads: int) -> dict[str, Contestant]:
    """By name."""

    def transformers(pixels: torch.Tensor) -> torch.Tensor:
        with torch_threads(threads):
            return model(pixels).last_hidden_state

    with tempfile.TemporaryDirectory() as made:
        f32 = Path(made) / "f32.onnx"
        model.config._attn_implementation = "eager"
        export(Hidden(model), {"pixels": torch.zeros(1, 3, 224, 224)}, {0: "images"}, f32)
        model.config._attn_implementation = "sdpa"
        int8 = Path(made) / "int8.onnx"
        if find_spec("nncf") is None:
            quantise_dynamically(f32, int8)
        generator = torch.Generator().manual_seed(1)
        samples = [[torch.randn(1, 3, 224, 224, generator=generator).numpy()] for _ in range(16)]
        found = openvino_peers(f32, int8, samples, threads)
    return {"transformers float32": Contestant("fp32", transformers), **found}


def main() -> None:
    """See the module docstring."""
    parser = contest_parser(__doc__, turns=9)
    parser.add_argument("--images", type=counts, default="1,8", help="images of a call")
    args = parser.parse_args()
    use_threads(args.threads)
    model = reference()
    made = ours(model) | ({} if args.ours else peers(model, args.threads))
    checked = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        want = model(checked).last_hidden_state
    generator = torch.Generator().manual_seed(1)
    sizes = {str(count): (count, torch.randn(count, 3, 224, 224, generator=generator)) for count in args.images}
    kinds = {kind: kind for kind in ("fp32", "16 bit", "int8")}
    name = "SigLIP base, 224 pixels, patches of 16, random weights"
    contest(name, made, (checked, want), sizes, "images", kinds, args)


if __name__ == "__main__":
    main()
