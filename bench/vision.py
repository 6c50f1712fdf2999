"""Encoders of images: images a second from pixels to hidden states, a SigLIP base tower of random weights, beside transformers and OpenVINO.

    .venv/bin/python -m pip install --no-deps --target .venv/peers onnxruntime==1.31.1 openvino==2026.4.1 onnx==1.23.2 flatbuffers protobuf \\
        ml_dtypes openvino-telemetry
    .venv/bin/python -m pip install --no-deps --target .venv/nncf nncf==3.4.0 pydot==4.0.1 tabulate scikit-learn scipy joblib threadpoolctl \\
        narwhals pyparsing
    PYTHONPATH=.venv/peers:.venv/nncf .venv/bin/python -m bench.vision [--turns 9] [--images 1,8] [--output FILE]

All run in this process on the same number of threads, in turns. Three comparisons, each of the fastest of ours with the fastest peer: fp32:
transformers in torch, and OpenVINO told to compute in float32. 16 bit: OpenVINO as it chooses by itself. int8: OpenVINO with the model as nncf
quantises it, or onnxruntime where that is not there. Prints JSON; medians over the turns, with their quartiles, and the mean cosine of each with
transformers.
"""

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import SiglipVisionConfig, SiglipVisionModel

from bench.contest import (
    Call,
    Contestant,
    best_ratios,
    contest_parser,
    export,
    in_turns,
    openvino_peers,
    quantise_dynamically,
    show,
    spread,
    torch_threads,
    use_threads,
)
from bench.program import counts, write_report
from headrace.checkpoint.media_config import MediaConfig, VisionConfig
from headrace.layers.weight import Placement
from headrace.models.media import MediaInput
from headrace.models.towers import ClipVision

SIZES: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}


def reference() -> SiglipVisionModel:
    """The tower in torch, float32, with weights of the size of trained ones."""
    torch.manual_seed(0)
    config: Any = SiglipVisionConfig(vision_use_head=False, **{"attn_implementation": "sdpa", **SIZES})
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


def contestants(model: SiglipVisionModel, threads: int) -> dict[str, Contestant]:
    """By name."""

    def transformers(pixels: torch.Tensor) -> torch.Tensor:
        with torch_threads(threads):
            return model(pixels).last_hidden_state

    found = {
        "headrace float32": Contestant("fp32", headrace(model, torch.float32, "none")),
        "headrace bfloat16": Contestant("16 bit", headrace(model, torch.bfloat16, "bfloat16")),
        "headrace int8": Contestant("int8", headrace(model, torch.bfloat16, "int8")),
        "headrace int8-fast": Contestant("int8", headrace(model, torch.bfloat16, "int8-fast")),
        "transformers float32": Contestant("fp32", transformers),
    }
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
        return found | openvino_peers(f32, int8, samples, threads)


def main() -> None:
    """See the module docstring."""
    parser = contest_parser(__doc__, turns=9)
    parser.add_argument("--images", type=counts, default="1,8", help="images of a call")
    args = parser.parse_args()
    use_threads(args.threads)
    model = reference()
    made = contestants(model, args.threads)
    encodes = {name: each.call for name, each in made.items()}
    checked = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        want = model(checked).last_hidden_state
    cosines = {
        name: float(torch.cosine_similarity(encode(checked), want, dim=-1).mean()) for name, encode in encodes.items()
    }
    results = []
    for count in track(args.images, description="images"):
        pixels = torch.randn(count, 3, 224, 224, generator=torch.Generator().manual_seed(count))
        taken = in_turns(encodes, pixels, args.turns)
        rates = {name: [count / seconds for seconds in found] for name, found in taken.items()}
        ratio = best_ratios(made, rates, {kind: kind for kind in ("fp32", "16 bit", "int8")})
        results.append({"images": count, "images_per_s": spread(rates, 2), "ratio": ratio})
        show(results[-1])
    about = {
        name: {"class": each.kind, "cosine": round(cosines[name], 6), "remark": each.remark}
        for name, each in made.items()
    }
    found = {"threads": args.threads, "turns": args.turns, "contestants": about, "results": results}
    write_report({"model": "SigLIP base, 224 pixels, patches of 16, random weights", **found}, args.output)


if __name__ == "__main__":
    main()
