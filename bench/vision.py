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

import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.progress import track
from transformers import SiglipVisionConfig, SiglipVisionModel

from bench.encoders import in_turns
from bench.program import parser_of, write_report
from headrace import kernels
from headrace.checkpoint.media_config import MediaConfig, VisionConfig
from headrace.layers.weight import Placement
from headrace.models.media import MediaInput
from headrace.models.towers.clip import ClipEyes

Encode = Callable[[torch.Tensor], torch.Tensor]
"""pixels float32[images, 3, 224, 224] -> hidden states float32[images, 196, 768]."""

SIZES: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}
CLASSES = {
    "headrace float32": "fp32",
    "headrace bfloat16": "16 bit",
    "headrace int8": "int8",
    "headrace int8-fast": "int8",
    "transformers float32": "fp32",
    "openvino float32": "fp32",
    "openvino": "16 bit",
    "openvino int8": "int8",
}


def reference() -> SiglipVisionModel:
    """The tower in torch, float32, with weights of the size of trained ones."""
    torch.manual_seed(0)
    config: Any = SiglipVisionConfig(vision_use_head=False, **{"attn_implementation": "sdpa", **SIZES})
    return SiglipVisionModel(config).float().eval()


def headrace(model: SiglipVisionModel, dtype: torch.dtype, quantization: Any) -> Encode:
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
    eyes = ClipEyes(media, Placement(torch.device("cpu"), dtype, 1, quantization), "", final_norm=True)
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
            (rows,) = done.value
            return rows

    return encode


class Hidden(torch.nn.Module):
    """The tower with one output."""

    def __init__(self, model: SiglipVisionModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """The last hidden states."""
        return self.model(pixels).last_hidden_state


def transformers_peer(model: SiglipVisionModel, threads: int) -> Encode:
    """transformers in torch, whose threads sleep while others compute."""

    @torch.inference_mode()
    def encode(pixels: torch.Tensor) -> torch.Tensor:
        torch.set_num_threads(threads)
        try:
            return model(pixels).last_hidden_state
        finally:
            torch.set_num_threads(1)

    return encode


def openvino_peer(model: Any, threads: int, precision: str | None) -> tuple[Encode, str]:
    """OpenVINO for low latency, and the precision that it chose. precision: what it is told to infer in, None = its own choice."""
    import openvino as ov

    config: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    if precision is not None:
        config["INFERENCE_PRECISION_HINT"] = precision
    compiled = ov.Core().compile_model(model, "CPU", config)
    request = compiled.create_infer_request()

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(request.infer([pixels.numpy()], share_inputs=True, share_outputs=True)[0])

    return encode, str(compiled.get_property("INFERENCE_PRECISION_HINT"))


def quantised(f32: Path, folder: Path) -> tuple[Any, str]:
    """The model in int8 as nncf quantises it after training, for transformers, or as onnxruntime does; and which of these it is."""
    import openvino as ov

    if find_spec("nncf") is None:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(str(f32), str(folder / "int8.onnx"), per_channel=True, weight_type=QuantType.QInt8)
        return ov.Core().read_model(str(folder / "int8.onnx")), "quantised by onnxruntime"
    import nncf

    generator = torch.Generator().manual_seed(1)
    samples = [[torch.randn(1, 3, 224, 224, generator=generator).numpy()] for _ in range(16)]
    read = ov.Core().read_model(str(f32))
    model = nncf.quantize(read, nncf.Dataset(samples), subset_size=16, model_type=nncf.ModelType.TRANSFORMER)
    return model, "quantised by nncf"


def contestants(model: SiglipVisionModel, threads: int) -> dict[str, tuple[Encode, str]]:
    """Call and remark of each, by name."""
    found: dict[str, tuple[Encode, str]] = {
        "headrace float32": (headrace(model, torch.float32, "none"), ""),
        "headrace bfloat16": (headrace(model, torch.bfloat16, "bfloat16"), ""),
        "headrace int8": (headrace(model, torch.bfloat16, "int8"), ""),
        "headrace int8-fast": (headrace(model, torch.bfloat16, "int8-fast"), ""),
        "transformers float32": (transformers_peer(model, threads), ""),
    }
    with tempfile.TemporaryDirectory() as made:
        f32 = Path(made) / "f32.onnx"
        axes = {"pixels": {0: "images"}, "hidden": {0: "images"}}
        pixels = torch.zeros(1, 3, 224, 224)
        model.config._attn_implementation = "eager"
        torch.onnx.export(
            Hidden(model), (pixels,), str(f32), dynamo=False, input_names=["pixels"], output_names=["hidden"],
            dynamic_axes=axes, opset_version=17,
        )  # fmt: skip
        model.config._attn_implementation = "sdpa"
        int8, how = quantised(f32, Path(made))
        for name, made_of, precision in (
            ("openvino float32", str(f32), "f32"),
            ("openvino", str(f32), None),
            ("openvino int8", int8, None),
        ):
            encode, chosen = openvino_peer(made_of, threads, precision)
            found[name] = encode, f"inference precision {chosen}" + (f", {how}" if name == "openvino int8" else "")
    return found


def main() -> None:
    """See the module docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("--images", default="1,8", help="images of a call")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    kernels.set_num_threads(args.threads)
    torch.set_num_threads(1)  # as the runtime does: its OpenMP threads spin, and take cores from the kernels' threads
    model = reference()
    made = contestants(model, args.threads)
    encodes = {name: encode for name, (encode, _) in made.items()}
    checked = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        want = model(checked).last_hidden_state
    cosines = {
        name: float(torch.cosine_similarity(encode(checked), want, dim=-1).mean()) for name, encode in encodes.items()
    }
    results = []
    for count in track([int(each) for each in args.images.split(",")], description="images"):
        pixels = torch.randn(count, 3, 224, 224, generator=torch.Generator().manual_seed(count))
        taken = in_turns(encodes, pixels, args.turns)
        rates = {name: sorted(count / seconds for seconds in found) for name, found in taken.items()}

        def fastest(kind: str, ours: bool, rates: dict[str, list[float]] = rates) -> tuple[float, str]:
            names = [name for name, each in CLASSES.items() if each == kind and ("headrace" in name) == ours]
            return max((median(rates[name]), name) for name in names)

        results.append(
            {
                "images": count,
                "images_per_s": {name: round(median(found), 2) for name, found in rates.items()},
                "quartiles": {
                    name: [round(rate, 2) for rate in quantiles(found, n=4)] for name, found in rates.items()
                },
                "ratio": {
                    kind: {
                        "ours": fastest(kind, True)[1],
                        "peer": fastest(kind, False)[1],
                        "of_medians": round(fastest(kind, True)[0] / fastest(kind, False)[0], 3),
                    }
                    for kind in ("fp32", "16 bit", "int8")
                },
            }
        )
        print(results[-1], file=sys.stderr, flush=True)
    report = {
        "model": "SigLIP base, 224 pixels, patches of 16, random weights",
        "threads": args.threads,
        "turns": args.turns,
        "contestants": {
            name: {"class": CLASSES[name], "cosine": round(cosines[name], 6), "remark": remark}
            for name, (_, remark) in made.items()
        },
        "results": results,
    }
    write_report(report, args.output)


if __name__ == "__main__":
    main()
