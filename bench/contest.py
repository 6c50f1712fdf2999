"""Encoders in one process on the same number of threads, in turns: ours, and those of peers, for which there have to be packages:

    .venv/bin/python -m pip install --no-deps --target .venv/peers onnxruntime==1.31.1 openvino==2026.4.1 onnx==1.23.2 flatbuffers protobuf \\
        ml_dtypes openvino-telemetry
    .venv/bin/python -m pip install --no-deps --target .venv/nncf nncf==3.4.0 pydot==4.0.1 tabulate scikit-learn scipy joblib threadpoolctl \\
        narwhals pyparsing

Without those of .venv/nncf OpenVINO runs the model as onnxruntime quantised it. The programs print JSON: medians over the turns, with their
quartiles, and for each class the fastest of ours over the fastest peer. fp32: peers that compute in float32. 16 bit: OpenVINO as it chooses by
itself on a processor with products of bfloat16. Who is further from float32 in torch than `LEAST_COSINE` of its class takes no part.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.progress import track

from bench.program import parser_of, write_report
from headrace import kernels

Call = Callable[..., torch.Tensor]
SECONDS = 0.25  # of one turn
LEAST_COSINE = {"fp32": 0.9999, "16 bit": 0.9999, "int8": 0.99}


@dataclass(frozen=True)
class Contestant:
    """kind: the class that it is compared in."""

    kind: str
    call: Call
    remark: str = ""


def contest_parser(description: str | None, turns: int) -> argparse.ArgumentParser:
    """A command line with `--turns`, `--threads` and `--ours`."""
    parser = parser_of(description)
    parser.add_argument("--turns", type=int, default=turns)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ours", action="store_true", help="without peers")
    return parser


def use_threads(threads: int) -> None:
    """As the runtime does: torch's OpenMP threads spin, and would take cores from the kernels' threads."""
    kernels.set_num_threads(threads)
    torch.set_num_threads(1)


@contextlib.contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Torch's own threads, for as long as it computes. No gradients."""
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(1)


def contest(
    model: str,
    contestants: Mapping[str, Contestant],
    checked: tuple[torch.Tensor, torch.Tensor],
    sizes: Mapping[str, tuple[int, torch.Tensor]],
    unit: str,
    kinds: Mapping[str, str],
    options: argparse.Namespace,
) -> None:
    """Write how many of `unit` each computes a second, and the ratios.

    checked: an input, and what float32 gives for it. sizes: by name, the units of a call, and its input. kinds: see `best_ratios`.
    """
    calls = {name: each.call for name, each in contestants.items()}
    given, want = checked
    cosines = {name: torch.cosine_similarity(call(given), want, dim=-1) for name, call in calls.items()}
    near = [name for name, each in contestants.items() if cosines[name].mean() >= LEAST_COSINE[each.kind]]
    results = []
    for size, (units, inputs) in track(sizes.items(), description="sizes"):
        taken = in_turns(calls, inputs, options.turns)
        rates = {name: [units / seconds for seconds in found] for name, found in taken.items()}
        ratio = best_ratios(contestants, {name: rates[name] for name in near}, kinds)
        results.append({"size": size, f"{unit}_per_s": spread(rates), "ratio": ratio})
        print(results[-1], file=sys.stderr, flush=True)
    about = {
        name: {
            "class": each.kind,
            "cosine": {"least": round(float(cosines[name].min()), 6), "mean": round(float(cosines[name].mean()), 6)},
            "remark": each.remark,
        }
        for name, each in contestants.items()
    }
    found = {"threads": options.threads, "turns": options.turns, "contestants": about, "results": results}
    write_report({"model": model, **found}, options.output)


def in_turns(calls: Mapping[str, Call], inputs: torch.Tensor, turns: int) -> dict[str, list[float]]:
    """Seconds of a call in each turn, by name; the median of as many as fit into SECONDS."""
    repeat = {name: max(1, int(SECONDS / _seconds(call, inputs, 2))) for name, call in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            time.sleep(0.02)  # threads that still spin for the one before go to sleep
            call(inputs)
            taken[name].append(_seconds(call, inputs, repeat[name]))
    return taken


def _seconds(call: Call, inputs: torch.Tensor, repeat: int) -> float:
    taken = []
    for _ in range(repeat):
        begin = time.perf_counter()
        call(inputs)
        taken.append(time.perf_counter() - begin)
    return median(taken)


def spread(found: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Medians and quartiles by name."""
    quarters = {name: quantiles(values, n=4) for name, values in found.items() if len(values) > 1}
    return {
        "median": {name: round(median(values), 2) for name, values in found.items()},
        "quartiles": {name: [round(value, 2) for value in values] for name, values in quarters.items()},
    }


def best_ratios(
    contestants: Mapping[str, Contestant], rates: Mapping[str, Sequence[float]], kinds: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """The fastest of ours over the fastest peer. kinds: each class of peers, and the class of ours that it is compared with."""

    def fastest(kind: str, is_ours: bool) -> tuple[float, str]:
        found = (
            (median(rates[name]), name)
            for name, each in contestants.items()
            if name in rates and each.kind == kind and name.startswith("headrace") == is_ours
        )
        return max(found, default=(0.0, ""))

    best = {kind: (fastest(of_ours, True), fastest(kind, False)) for kind, of_ours in kinds.items()}
    return {
        kind: {"ours": mine[1], "peer": peer[1], "of_medians": round(mine[0] / peer[0], 3)}
        for kind, (mine, peer) in best.items()
        if mine[1] and peer[1]
    }


def export(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], axes: Mapping[int, str], to: Path) -> None:
    """A model as ONNX. axes: those of the inputs that are free."""
    torch.onnx.export(
        model, tuple(inputs.values()), str(to), dynamo=False, input_names=list(inputs), output_names=["out"],
        dynamic_axes={**{name: dict(axes) for name in inputs}, "out": {0: axes[0]}}, opset_version=17,
    )  # fmt: skip


def openvino_peers(f32: Path, int8: Path, samples: Sequence[Sequence[Any]], threads: int) -> dict[str, Contestant]:
    """OpenVINO for low latency: told to compute in float32, as it chooses by itself, and in int8, as nncf quantises it after training.

    int8: the model as onnxruntime quantised it, for where nncf is not there. samples: inputs to quantise by.
    """
    import openvino as ov

    quantised, how = str(int8), "quantised by onnxruntime"
    if find_spec("nncf") is not None:
        import nncf

        read, data = ov.Core().read_model(str(f32)), nncf.Dataset(samples)
        quantised = nncf.quantize(read, data, subset_size=len(samples), model_type=nncf.ModelType.TRANSFORMER)
        how = "quantised by nncf"
    found = {}
    for name, kind, model, hint, remark in (
        ("openvino float32", "fp32", str(f32), {"INFERENCE_PRECISION_HINT": "f32"}, ""),
        ("openvino", "16 bit", str(f32), {}, ""),
        ("openvino int8", "int8", quantised, {}, f", {how}"),
    ):
        config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, **hint}
        compiled = ov.Core().compile_model(model, "CPU", config)
        chosen = compiled.get_property("INFERENCE_PRECISION_HINT")
        found[name] = Contestant(kind, _openvino_call(compiled), f"inference precision {chosen}{remark}")
    return found


def _openvino_call(compiled: Any) -> Call:
    request = compiled.create_infer_request()

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        arrays = [each.numpy() for each in inputs]
        return torch.from_numpy(request.infer(arrays, share_inputs=True, share_outputs=True)[0])

    return call


def quantise_dynamically(f32: Path, to: Path) -> Path:
    """In int8 by onnxruntime."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(str(f32), str(to), per_channel=True, weight_type=QuantType.QInt8)
    return to
