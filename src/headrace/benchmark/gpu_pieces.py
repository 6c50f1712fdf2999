"""The pieces of `gpu_check`: what each one measures or compares, and what is expected of it.

Owns the plans, the clocks and the floors. Does not own the runner, the scheduler or the ops. Figures are of random weights in the shapes of
real models; the KV cache of a decode step holds zeros, which take as long to read as anything. Runs in the process of one piece.

A floor is the least time a step can take: the bytes of the weights and of the KV cache it must read over the copy bandwidth, or its
multiplications over the rate of products, both as piece `rates` measured them, whichever is longer.
"""

import json
import math
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from headrace import kernels
from headrace.attention import select
from headrace.attention.base import AttentionLayerSpec, KvShape, StepRows
from headrace.benchmark.gpu_check import CONFIGS, Options
from headrace.checkpoint.model_config import ModelConfig, load_model_config
from headrace.config.resolve import AttentionNeeds, override_model
from headrace.config.server_args import ServerArgs
from headrace.execution.build import build_worker
from headrace.execution.graphs import graph_bytes
from headrace.execution.load_weights import load_model
from headrace.kernels.torch_quantized import fp8_per_row, fp8_product, int4_product, pack_fp8, pack_int4, unpack_fp8
from headrace.layers.quantization import quantize
from headrace.layers.weight import Placement
from headrace.messages.control import ProfileReq
from headrace.messages.experts import ExpertCountsReply, ExpertCountsReq
from headrace.messages.packing import pack_int32
from headrace.messages.requests import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
from headrace.messages.step import Int32Array, ModelWorkerBatch, NewSequence, StepResult, Worker
from headrace.models.spec import kv_shape, model_class_for
from headrace.sampling.params import ResolvedSamplingParams

Rows = list[dict[str, Any]]

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GREEDY = ResolvedSamplingParams(max_new_tokens=1 << 20, seed=0, temperature=0.0, ignore_eos=True)
DRAWN = ResolvedSamplingParams(max_new_tokens=1 << 20, seed=5, temperature=0.8, top_k=40, top_p=0.9, ignore_eos=True)
PENALISED = ResolvedSamplingParams(
    max_new_tokens=1 << 20, seed=0, temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.2, ignore_eos=True
)

BF16_ERROR = 0.02
"""Norm of the difference over that of the reference: bfloat16 keeps 8 bits, and sums round once more."""

_ROOM = 64  # tokens behind the context of a measured sequence
_SPARE_BYTES = 3 << 30  # of a GPU, for activations and the libraries


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the pieces are. context, prompt, chunk in tokens; copy in bytes; product: rows, columns and depth."""

    batches: tuple[int, ...] = (1, 64, 256)
    context: int = 1024
    prompt: int = 8192
    steps: int = 20
    copy: int = 2 << 30
    product: int = 8192
    requests: int = 64
    new_tokens: int = 128


SMALL = Sizes(batches=(1, 3), context=32, prompt=64, steps=3, copy=1 << 20, product=128, requests=4, new_tokens=6)


def run(name: str, options: Options, earlier: dict[str, Any], rows: Rows) -> None:
    """Piece `name`; each row is there as soon as it is known. earlier: the pieces that ran before, by name."""
    pieces: dict[str, Callable[[Bench, Rows], None]] = {
        "device": device_facts,
        "kernels": check_kernels,
        "rates": measure_rates,
        "decode": measure_decode,
        "prefill": measure_prefill,
        "serving": measure_serving,
        "transformers": measure_transformers,
    }
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU here")
    bench = Bench(options, SMALL if options.tiny else Sizes(), earlier)
    pieces[name](bench, rows)


def row(what: str, value: str, ok: bool = True, expected: str = "", **figures: float | str) -> dict[str, Any]:
    """One line of a piece. ok: what was expected came."""
    return {"what": what, "value": value, "ok": ok, "expected": expected, **figures}


class Clock(Protocol):
    """Marks between queued work."""

    def mark(self) -> Any:
        """The moment when all that was queued so far is done."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks; waits for the second."""


class _HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class _CudaClock:
    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


@dataclass(slots=True)
class Bench:
    """What the pieces share."""

    options: Options
    sizes: Sizes
    earlier: dict[str, Any]

    @property
    def device(self) -> torch.device:
        """Where things run."""
        return torch.device(self.options.device)

    @property
    def clock(self) -> Clock:
        """Of that device."""
        return _CudaClock() if self.options.device == "cuda" else _HostClock()

    def args(self, model: str, **changes: Any) -> ServerArgs:
        """Options of an engine with random weights."""
        fields: dict[str, Any] = {
            "model_path": str(CONFIGS / model),
            "load_format": "dummy",
            "device": self.options.device,
            "json_model_override_args": json.dumps(TINY) if self.options.tiny else "{}",
            # On a CPU a mark means something only when the work is done where it is submitted.
            "disable_overlap_schedule": self.options.device == "cpu",
        }
        return ServerArgs(**{**fields, **changes})

    def config(self, model: str) -> ModelConfig:
        """The shapes of a model."""
        return override_model(load_model_config(CONFIGS / model), json.dumps(TINY) if self.options.tiny else "{}")

    def figure(self, piece: str, what: str, key: str) -> float:
        """A figure of an earlier piece; NaN when it was not measured."""
        for entry in self.earlier.get(piece, {}).get("rows", []):
            if entry["what"] == what and key in entry:
                return float(entry[key])
        return math.nan


# -- device, rates


def device_facts(bench: Bench, rows: Rows) -> None:
    """Names and versions."""
    rows.append(row("python", platform.python_version()))
    rows.append(row("torch", str(torch.__version__)))
    for module in ("triton", "transformers"):
        try:
            rows.append(row(module, str(__import__(module).__version__)))
        except ImportError:
            rows.append(row(module, "not installed", ok=module != "triton" or bench.options.device == "cpu"))
    if bench.options.device == "cuda":
        facts = torch.cuda.get_device_properties(0)
        rows.append(row("device", facts.name))
        rows.append(row("compute capability", f"{facts.major}.{facts.minor}"))
        rows.append(row("memory", f"{facts.total_memory / 2**30:.1f} GiB", bytes=facts.total_memory))
        rows.append(row("CUDA of torch", str(torch.version.cuda)))
    for entry in kernels.report(bench.options.device):
        rows.append(row(f"op {entry.op} is run by", entry.implementation))


def measure_rates(bench: Bench, rows: Rows) -> None:
    """What the memory and the multipliers of this device do at best."""
    clock, sizes = bench.clock, bench.sizes
    source = torch.zeros(sizes.copy, dtype=torch.uint8, device=bench.device)
    seconds = _best(clock, partial(torch.empty_like(source).copy_, source))
    rate = 2 * sizes.copy / seconds
    rows.append(row("copy bandwidth", f"{rate / 1e9:.0f} GB/s, read and write", bytes_per_s=rate))
    size = (sizes.product, sizes.product)
    a, b = (torch.randn(size, device=bench.device).to(torch.bfloat16) for _ in range(2))
    seconds = _best(clock, lambda: torch.mm(a, b))
    rate = 2 * sizes.product**3 / seconds
    rows.append(row("bfloat16 products", f"{rate / 1e12:.1f} TFLOP/s", flops_per_s=rate))


def _best(clock: Clock, work: Callable[[], object], repeat: int = 20) -> float:
    work()
    seconds = []
    for _ in range(repeat):
        begin = clock.mark()
        work()
        end = clock.mark()
        seconds.append(clock.seconds(begin, end))
    return min(seconds)


# -- kernels


def check_kernels(bench: Bench, rows: Rows) -> None:
    """Every op and backend against torch on the CPU; each one that fails is a row of its own."""
    dtype = torch.bfloat16 if bench.options.device == "cuda" else torch.float32
    checks: list[tuple[str, Callable[[], tuple[float, float]]]] = [
        *_op_checks(bench.device, dtype),
        *_attention_checks(bench, dtype),
        *_format_checks(bench.device),
        ("tokens: graphs, eager and CPU", lambda: _token_check(bench)),
    ]
    if bench.options.device == "cuda":
        checks.append(("no step waits for the device", lambda: _wait_check(bench)))
    for what, check in checks:
        try:
            error, limit = check()
        except Exception as failure:  # the boundary of a check: the others go on
            rows.append(row(what, f"failed: {type(failure).__name__}: {failure}"[:300], ok=False))
            continue
        rows.append(row(what, f"error {error:.2g}", ok=error <= limit, expected=f"<= {limit:g}", error=error))


def _op_checks(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """Ops with the same inputs here and on the CPU."""
    x, residual = _random(37, 256), _random(37, 256, seed=1)
    weight, bias = _random(256, seed=2), _random(256, seed=3)
    matrix = _random(512, 256, seed=4)
    ids = torch.randint(0, 512, (37,), generator=torch.Generator().manual_seed(5))
    angles = torch.arange(600.0)[:, None] * (1e-2 ** (torch.arange(32) / 32))
    positions = torch.arange(300, 337, dtype=torch.int32)
    logits = _random(37, 5000, seed=6) * 4
    experts = [(_random(128, 256, seed=10 + i) / 16, _random(256, 64, seed=30 + i) / 8) for i in range(8)]
    shares, chosen = torch.topk(torch.softmax(_random(37, 8, seed=7), 1), 2)

    def place(tensor: torch.Tensor, where: torch.device, floats: torch.dtype) -> torch.Tensor:
        # Both sides begin from the same rounded values.
        return tensor.to(dtype).to(where, floats) if tensor.is_floating_point() else tensor.to(where)

    def with_residual(op: Callable[..., torch.Tensor], *extra: Any) -> Callable[..., torch.Tensor]:
        def act(to: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            sum_ = to(residual).clone()
            out = op(to(x), weight.to(sum_.device), *[e.to(sum_.device) for e in extra], 1e-5, sum_)
            return torch.cat((out, sum_))

        return act

    def rotated(to: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        q, k = (to(tensor.view(37, 4, 64)).clone() for tensor in (x, residual))
        where = q.device
        kernels.rotary(q, k, positions.to(where), angles.cos().to(where), angles.sin().to(where))
        return torch.cat((q, k))

    def mixed(to: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        packed = [[kernels.pack_linear(to(part)) for part in pair] for pair in experts]
        whole = kernels.pack_experts([up for up, _ in packed], [down for _, down in packed], "silu")
        inputs = to(x)
        return kernels.moe(inputs, chosen.to(inputs.device), shares.to(inputs.device), whole)

    close: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]] = {
        "rms_norm": with_residual(kernels.rms_norm),
        "layer_norm": with_residual(kernels.layer_norm, bias),
        "silu_mul": lambda to: kernels.silu_mul(to(x)),
        "gelu_tanh_mul": lambda to: kernels.gelu_tanh_mul(to(x)),
        "linear": lambda to: kernels.linear(to(x), kernels.pack_linear(to(matrix), to(matrix[:, 0]))),
        "embedding": lambda to: kernels.embedding(to(ids), to(matrix), 1.5),
        "rotary": rotated,
        "moe": mixed,
    }
    for name, act in close.items():

        def compare(act: Callable[..., torch.Tensor] = act) -> tuple[float, float]:
            got = act(lambda tensor: place(tensor, device, dtype))
            with kernels.prefer("torch"):
                want = act(lambda tensor: place(tensor, torch.device("cpu"), torch.float32))
            return _distance(got, want), BF16_ERROR

        yield f"op {name}", compare

    temperatures = torch.tensor([0.0, 0.7, 1.5] * 12 + [1.0])
    top_k = torch.tensor([0, 1, 40] * 12 + [5000])
    top_p = torch.tensor([1.0, 0.9, 0.5] * 12 + [0.99], dtype=torch.float64)
    least = torch.tensor([0, 1 << 36, 0] * 12 + [0])
    u = torch.rand(37, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    equal: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "argmax": kernels.argmax,
        "draw": lambda where: kernels.draw(where, temperatures, top_k, top_p, least, u),
        "exp_sums": lambda where: kernels.exp_sums(where)[1],
    }
    for name, choose in equal.items():

        def match(choose: Callable[[torch.Tensor], torch.Tensor] = choose) -> tuple[float, float]:
            with kernels.prefer("torch"):
                want = choose(logits)
            return float((choose(logits.to(device)).cpu() != want).sum()), 0.0

        yield f"op {name}", match


def _attention_checks(bench: Bench, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """Backends that can run here, over prefill, extension and decode, against plain torch in float32."""
    cases = [(64, 9, 3, 0, 0.0), (128, 32, 8, 0, 0.0), (128, 32, 4, 64, 0.0), (256, 8, 4, 0, 30.0)]
    for head_dim, heads, kv_heads, window, cap in cases[: 1 if bench.options.tiny else None]:
        spec = AttentionLayerSpec(0, heads, kv_heads, head_dim, head_dim**-0.5, window, cap)
        name_of_dtype = str(dtype).removeprefix("torch.")
        needs = AttentionNeeds(bench.options.device, True, head_dim, name_of_dtype, None)
        for name in select.PREFERENCE:
            if select.reasons_against(name, needs):
                continue

            def compare(name: str = name, spec: AttentionLayerSpec = spec) -> tuple[float, float]:
                got = _attention_outputs(name, spec, bench.device, dtype, dtype)
                want = _attention_outputs("torch_native", spec, torch.device("cpu"), torch.float32, dtype)
                return _distance(got, want), BF16_ERROR

            window_text = f", window {window}" if window else ""
            yield f"attention {name}: {heads}/{kv_heads} heads of {head_dim}{window_text}", compare


def _attention_outputs(
    name: str, spec: AttentionLayerSpec, device: torch.device, dtype: torch.dtype, rounded: torch.dtype
) -> torch.Tensor:
    """What a backend gives in three steps of three sequences, [tokens, heads * head_dim]. Inputs are rounded to `rounded`."""
    page = select.preferred_page_size(name)
    room = 400 // page * page + page
    backend = select.make_backend(name)
    backend.make_kv_pool(KvShape(1, spec.num_kv_heads, spec.head_dim, dtype), 3 * room, page, device)
    pages = torch.randperm(3 * room // page, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    slots = (pages[:, None] * page + torch.arange(page, dtype=torch.int32)).reshape(3, room)
    starts, out = [0, 0, 0], []
    for step, counts in enumerate(([1, 17, 300], [5, 1, 40], [1, 1, 1])):
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        positions = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        rows = StepRows(
            starts=starts,
            counts=counts,
            positions=torch.cat(positions).to(device, torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            row_starts=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device),
            out_slots=torch.cat([slots[i, at] for i, at in enumerate(positions)]).to(device),
            slots=slots[:, : max(ends)].contiguous().to(device),
        )
        backend.prepare(rows)
        heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
        tensors = [_random(sum(counts), n, spec.head_dim, seed=100 * step + i) for i, n in enumerate(heads)]
        q, k, v = (tensor.to(rounded).to(device, dtype) for tensor in tensors)
        out.append(backend.forward(q, k, v, spec).float().cpu())
        starts = ends
    return torch.cat(out)


def _format_checks(device: torch.device) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """Quantised products against floats of the same quantised weights."""
    matrix, x = _random(512, 256) / 16, _random(37, 256, seed=1).to(torch.bfloat16)

    def fp8() -> tuple[float, float]:
        packed = pack_fp8(matrix.to(device), None, fp8_per_row(device))
        want = x.float() @ unpack_fp8(packed).cpu().T
        return _distance(fp8_product(x.to(device), packed), want), 0.04  # the activations' own rounding

    def int4() -> tuple[float, float]:
        codes = quantize(matrix, "int4")
        want = x.float() @ codes.dequantize().T
        return _distance(int4_product(x.to(device), pack_int4(codes.to(device), None)), want), BF16_ERROR

    yield "fp8 linear", fp8
    yield "int4 linear", int4


def _token_check(bench: Bench) -> tuple[float, float]:
    """How many greedy tokens of a small model with real weights differ: graphs and eager steps here, and the CPU."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _save_small(folder)
        common = {"load_format": "auto", "model_path": name, "json_model_override_args": "{}", "dtype": "float32"}
        variants: list[dict[str, Any]] = [{"disable_cuda_graph": False}, {"disable_cuda_graph": True}]
        variants.append({"device": "cpu", "disable_native_kernels": True, "disable_overlap_schedule": True})
        got = [_greedy(bench.args("smollm2-135m", **{**_small(3), **common, **variant})) for variant in variants]
    return float(sum(a != b for other in got[1:] for a, b in zip(got[0], other, strict=True))), 0.0


def _wait_check(bench: Bench) -> tuple[float, float]:
    """Decode steps, by graphs and eagerly, greedy, drawn and with penalties, under torch's detector of hidden waiting, which raises."""
    for eagerly in (False, True):
        worker, _ = build_worker(bench.args("smollm2-135m", disable_cuda_graph=eagerly, **_small(3)))
        for sampling in (GREEDY, DRAWN, PENALISED):
            plans = _decode_plans(3, 40, 100, 160, sampling)
            for _ in range(3):
                worker.submit(next(plans))
                _check(worker.collect())
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(2):
                    worker.submit(next(plans))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            for _ in range(2):
                _check(worker.collect())
        worker.close()
    return 0.0, 0.0


def _small(rows: int) -> dict[str, Any]:
    overrides = json.dumps({**TINY, "head_dim": 64, "tie_word_embeddings": False})
    return {
        "json_model_override_args": overrides,
        "max_running_requests": rows,
        "context_length": 160,
        "max_total_tokens": rows * 160,
    }


def _save_small(folder: Path) -> None:
    """A small llama with random weights of the CPU's generator, as a checkpoint."""
    from safetensors.torch import save_file

    raw = json.loads((CONFIGS / "smollm2-135m" / "config.json").read_text())
    raw |= {**TINY, "head_dim": 64, "tie_word_embeddings": False, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(raw))
    config = load_model_config(folder)
    spec = model_class_for(config)
    placement = Placement(torch.device("cpu"), torch.float32, 160)
    checkpoint = _dummy(folder)
    with kernels.prefer("torch"):
        model = load_model(checkpoint, spec, placement)
        # Larger than the default, so that greedy tokens differ from step to step.
        tensors = {w.name: w.read().clone() * (10.0 if w.init == "normal" else 1.0) for w in model.weights()}
    save_file(tensors, folder / "model.safetensors")


def _dummy(folder: Path) -> Any:
    from headrace.checkpoint.source import dummy_checkpoint

    return dummy_checkpoint(folder)


def _greedy(args: ServerArgs) -> list[int]:
    """Tokens of three sequences, prompts of 40, 9 and 17, then 12 steps together."""
    worker, info = build_worker(args)
    lengths = np.array([40, 9, 17], np.int32)
    rng = np.random.default_rng(0)
    room = 160
    new = tuple(
        _sequence(r, rng.integers(0, info.vocab_size, n).astype(np.int32), np.empty(0, np.int32))
        for r, n in enumerate(lengths)
    )
    seqs = np.arange(3, dtype=np.int32)
    slots = np.concatenate([r * room + np.arange(n) for r, n in enumerate(lengths)]).astype(np.int32)
    samples = np.ones(3, np.bool_)
    worker.submit(ModelWorkerBatch(0, new, seqs, np.zeros(3, np.int32), lengths, samples, slots))
    tokens = worker.collect().token_ids.tolist()
    for step in range(12):
        starts = (lengths + step).astype(np.int32)
        plan = ModelWorkerBatch(step + 1, (), seqs, starts, np.ones(3, np.int32), samples, seqs * room + starts)
        worker.submit(plan)
        tokens += worker.collect().token_ids.tolist()
    worker.close()
    return tokens


# -- steps


def measure_decode(bench: Bench, rows: Rows) -> None:
    """Decode steps of every model and batch, two in flight as in a server."""
    sizes = bench.sizes
    for model in bench.options.models:
        work = Work.of(bench.config(model))
        room = sizes.context + _ROOM
        batches = [batch for batch in sizes.batches if work.fits(bench, batch * room, batch, room)]
        for batch in sizes.batches:
            if batch not in batches:
                rows.append(row(_decode_name(model, batch), "not measured: weights and KV cache do not fit"))
        if not batches:
            continue
        largest = max(batches)
        worker, _ = build_worker(
            bench.args(
                model, max_running_requests=largest, context_length=room, max_total_tokens=largest * room,
                cuda_graph_bs=",".join(map(str, batches)) if bench.options.device == "cuda" else "",
            )
        )  # fmt: skip
        for batch in batches:
            seconds = _decode_seconds(bench, worker, batch, room, bench.config(model).vocab_size)
            floor = work.floor_s(bench, batch, 1, sizes.context)
            expected = 0.0
            if model == "llama-3.1-8b" and not bench.options.tiny:
                expected = 0.85 if batch == 1 else 0.7
            rows.append(_share_row(_decode_name(model, batch), seconds, floor, batch, expected))
        worker.close()
        del worker
        if bench.options.device == "cuda":
            torch.cuda.empty_cache()


def measure_prefill(bench: Bench, rows: Rows) -> None:
    """One prompt in one step."""
    prompt = bench.sizes.prompt
    for model in bench.options.models[:2]:
        work = Work.of(bench.config(model))
        room = prompt + _ROOM
        if not work.fits(bench, room, 1, room):
            rows.append(row(f"prefill {model}, {prompt} tokens", "not measured: weights and KV cache do not fit"))
            continue
        worker, info = build_worker(
            bench.args(
                model, max_running_requests=1, context_length=room, max_total_tokens=room, disable_cuda_graph=True
            )
        )
        clock, seconds = bench.clock, []
        for step in range(4):
            tokens = np.random.default_rng(step).integers(0, info.vocab_size, prompt).astype(np.int32)
            plan = ModelWorkerBatch(
                step,
                (_sequence(0, tokens, np.empty(0, np.int32)),),
                np.zeros(1, np.int32),
                np.zeros(1, np.int32),
                np.array([prompt], np.int32),
                np.ones(1, np.bool_),
                np.arange(prompt, dtype=np.int32),
            )
            begin = clock.mark()
            worker.submit(plan)
            end = clock.mark()
            worker.collect()
            seconds.append(clock.seconds(begin, end))
        worker.close()
        expected = 0.6 if model == "llama-3.1-8b" and not bench.options.tiny else 0.0
        floor = work.floor_s(bench, 1, prompt, 0)
        rows.append(_share_row(f"prefill {model}, {prompt} tokens", min(seconds), floor, prompt, expected))


def _decode_name(model: str, batch: int) -> str:
    return f"decode {model}, batch {batch}"


def _share_row(what: str, seconds: float, floor: float, tokens: int, expected: float) -> dict[str, Any]:
    share = floor / seconds
    text = f"{seconds * 1e3:.2f} ms, {tokens / seconds:.0f} tok/s, {share:.0%} of the floor {floor * 1e3:.2f} ms"
    return row(
        what, text, ok=not expected or share >= expected, expected=f">= {expected:.0%} of the floor" if expected else "",
        step_s=seconds, floor_s=floor, share=share, tokens_per_s=tokens / seconds,
    )  # fmt: skip


def _decode_seconds(bench: Bench, worker: Worker, batch: int, room: int, vocab_size: int) -> float:
    """Of one step, over `steps` of them."""
    clock, sizes = bench.clock, bench.sizes
    plans = _decode_plans(batch, sizes.context, vocab_size, room)
    submit_ahead = bench.options.device == "cuda"
    marks = []
    for step in range(sizes.steps + 3):
        worker.submit(next(plans))
        marks.append(clock.mark())
        if step or not submit_ahead:
            _check(worker.collect())
    if submit_ahead:
        _check(worker.collect())
    return median(clock.seconds(a, b) for a, b in pairwise(marks[2:]))


def _check(result: StepResult) -> None:
    assert not result.errors, result.errors


def _decode_plans(
    batch: int, context: int, vocab_size: int, room: int, sampling: ResolvedSamplingParams = GREEDY
) -> Iterator[ModelWorkerBatch]:
    """Decode steps of `batch` sequences whose first `context` tokens count as cached; row r owns the slots r * room onwards."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (batch, context + 1)).astype(np.int32)
    first = np.arange(batch, dtype=np.int32) * room
    new = tuple(
        _sequence(r, tokens[r], (first[r] + np.arange(context, dtype=np.int32)).astype(np.int32), sampling)
        for r in range(batch)
    )
    seqs, ones, samples = np.arange(batch, dtype=np.int32), np.ones(batch, np.int32), np.ones(batch, np.bool_)
    for step in range(room - context - 1):
        starts = np.full(batch, context + step, np.int32)
        yield ModelWorkerBatch(step, new if step == 0 else (), seqs, starts, ones, samples, first + starts)


def _sequence(
    seq: int, tokens: Int32Array, cached: Int32Array, sampling: ResolvedSamplingParams = GREEDY
) -> NewSequence:
    return NewSequence(
        seq=seq,
        rid=str(seq),
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        prefix_slots=cached,
        sampling=sampling,
        end_token_ids=(),
    )


@dataclass(frozen=True, slots=True)
class Work:
    """What a step of a model cannot avoid. Elements of weights: of the layers but for experts, of one expert's matrices over all layers, of
    the output projection."""

    config: ModelConfig
    layers: int
    expert: int
    head: int

    @classmethod
    def of(cls, config: ModelConfig) -> "Work":
        """Counted from the shapes."""
        placement = Placement(torch.device("meta"), torch.bfloat16, 16)
        shapes = [(w.name, w.shape) for w in model_class_for(config).build(config, placement).weights()]
        matrices = [(name, math.prod(shape)) for name, shape in shapes if len(shape) > 1]
        experts = sum(size for name, size in matrices if ".experts." in name)
        vocabulary = config.vocab_size * config.hidden_size
        layers = sum(size for name, size in matrices if ".layers." in name) - experts
        return cls(config, layers, experts // config.moe.num_experts if config.moe else 0, vocabulary)

    @property
    def weight_bytes(self) -> int:
        """Of the whole model in bfloat16."""
        experts = self.expert * (self.config.moe.num_experts if self.config.moe else 0)
        tables = 1 if self.config.tie_word_embeddings else 2
        return 2 * (self.layers + experts + tables * self.head)

    def fits(self, bench: Bench, num_tokens: int, batch: int, context: int) -> bool:
        """Whether weights, so many tokens of KV cache and graphs find room on the device."""
        if bench.options.device == "cpu":
            return True
        free = torch.cuda.mem_get_info()[0] - _SPARE_BYTES
        cache = num_tokens * kv_shape(self.config, torch.bfloat16).bytes_per_token
        graphs = graph_bytes(batch, self.config.vocab_size, self.config.hidden_size, context)
        return self.weight_bytes + cache + graphs < free

    def floor_s(self, bench: Bench, batch: int, new_tokens: int, context: int) -> float:
        """The least time of a step of `batch` rows that compute `new_tokens` each behind `context` cached ones. NaN without rates."""
        config, tokens = self.config, batch * new_tokens
        read_experts = used_experts = 0.0
        if config.moe is not None:
            num, chosen = config.moe.num_experts, config.moe.num_experts_per_tok
            # How many of them are met by at least one token, when each token's are drawn evenly.
            read_experts, used_experts = num * (1 - (1 - chosen / num) ** tokens), chosen
        num_bytes = 2 * (self.layers + read_experts * self.expert + self.head)
        num_bytes += batch * context * kv_shape(config, torch.bfloat16).bytes_per_token
        flops = 2 * tokens * (self.layers + used_experts * self.expert) + 2 * batch * self.head
        keys = tokens * (context + (new_tokens + 1) / 2)
        flops += 4 * config.num_layers * config.num_q_heads * config.head_dim * keys
        memory = num_bytes / bench.figure("rates", "copy bandwidth", "bytes_per_s")
        products = flops / bench.figure("rates", "bfloat16 products", "flops_per_s")
        return max(memory, products)


# -- serving


@dataclass(frozen=True, slots=True)
class _Step:
    num_rows: int
    num_tokens: int
    begin: Any
    end: Any


class _MarkedWorker:
    """A `Worker` that marks the beginning and the end of each step in the queue of the device."""

    def __init__(self, worker: Worker, clock: Clock) -> None:
        self._worker = worker
        self._clock = clock
        self.weights = worker.weights
        self.steps: list[_Step] = []

    def submit(self, batch: ModelWorkerBatch) -> None:
        begin = self._clock.mark()
        self._worker.submit(batch)
        self.steps.append(_Step(len(batch.seqs), batch.num_tokens, begin, self._clock.mark()))

    def collect(self) -> StepResult:
        return self._worker.collect()

    def load_lora(self, lora_id: int, path: str, fingerprint: str) -> str:
        return self._worker.load_lora(lora_id, path, fingerprint)

    def unload_lora(self, lora_id: int) -> None:
        self._worker.unload_lora(lora_id)

    def has_lora(self, lora_id: int) -> bool:
        return self._worker.has_lora(lora_id)

    def profile(self, request: ProfileReq) -> str:
        return self._worker.profile(request)

    def count_experts(self, request: ExpertCountsReq) -> ExpertCountsReply:
        return self._worker.count_experts(request)

    def close(self) -> None:
        self._worker.close()


def measure_serving(bench: Bench, rows: Rows) -> None:
    """Requests through the scheduler, all there from the beginning; without tokenizer and HTTP."""
    from headrace.cache.allocator import PageAllocator
    from headrace.cache.radix_cache import RadixCache
    from headrace.launch import scheduler_config
    from headrace.messages.channel import LocalChannels
    from headrace.messages.outputs import BatchTokenIDOut
    from headrace.scheduler.kv_manager import KVManager
    from headrace.scheduler.scheduler import Scheduler

    def no_stop_strings(request: TokenizedGenerateReqInput) -> NoReturn:
        raise AssertionError("no request has stop strings")

    sizes, model = bench.sizes, bench.options.models[0]
    room = -(-(sizes.context + sizes.new_tokens + 32) // 32) * 32
    args = bench.args(
        model, max_running_requests=sizes.requests, context_length=room, max_total_tokens=sizes.requests * room,
        chunked_prefill_size=4096, max_prefill_tokens=4096,
    )  # fmt: skip
    worker, info = build_worker(args)
    clock = bench.clock
    marked = _MarkedWorker(worker, clock)
    config, channels = bench.config(model), LocalChannels()
    pages = PageAllocator(info.max_total_tokens // info.page_size, info.page_size)
    scheduler = Scheduler(
        scheduler_config(args, config, info),
        KVManager(pages, RadixCache(info.page_size), info.max_running_requests),
        marked,
        channels.receiver("to_scheduler"),
        channels.sender("to_detokenizer"),
        channels.sender("to_tokenizer"),
        no_stop_strings,
    )
    outputs = channels.receiver("to_detokenizer")
    rng = np.random.default_rng(0)
    elapsed = 0.0
    for turn, new_tokens in enumerate((4, sizes.new_tokens)):  # the first warms up
        marked.steps.clear()
        sampling = ResolvedSamplingParams(max_new_tokens=new_tokens, seed=0, temperature=0.0, ignore_eos=True)
        requests = tuple(
            TokenizedGenerateReqInput(
                rid=f"{turn}-{i}",
                input_ids=pack_int32(rng.integers(0, info.vocab_size, sizes.context).tolist()),
                sampling=sampling,
            )
            for i in range(sizes.requests)
        )
        begin = time.perf_counter()
        channels.sender("to_scheduler").send(BatchTokenizedGenerateReqInput(requests))
        waiting = sizes.requests
        while waiting:
            scheduler.run_once()
            while (message := outputs.recv_nowait()) is not None:
                assert isinstance(message, BatchTokenIDOut), message
                for out in message.rows:
                    if out.finish is not None:
                        assert out.finish.type == "length", out.finish
                        waiting -= 1
        elapsed = time.perf_counter() - begin
    rate = sizes.requests * sizes.new_tokens / elapsed
    rows.append(
        row(
            "serving throughput",
            f"{rate:.0f} output tok/s: {sizes.requests} requests, {sizes.context} -> {sizes.new_tokens} tokens of {model}",
            tokens_per_s=rate,
        )
    )
    full = [
        (a, b)
        for a, b in pairwise(marked.steps)
        if a.num_rows == a.num_tokens == b.num_rows == b.num_tokens == sizes.requests
    ]
    if not full:
        rows.append(row("gap between decode steps", "no two full decode steps in a row", ok=False))
    else:
        gap = median(clock.seconds(a.end, b.begin) for a, b in full)
        step = median(clock.seconds(a.begin, a.end) for a, _ in full)
        limit = 0.05 if bench.options.device == "cuda" else math.inf
        rows.append(
            row(
                "gap between decode steps",
                f"{gap * 1e6:.0f} us of {(gap + step) * 1e3:.2f} ms, {gap / (gap + step):.1%}",
                ok=gap < limit * (gap + step),
                expected="< 5%" if limit < 1 else "",
                gap_s=gap,
                step_s=step,
            )
        )
    marked.close()


def measure_transformers(bench: Bench, rows: Rows) -> None:
    """The same model and context in transformers, one request, and our figures over it."""
    import transformers

    sizes, model = bench.sizes, bench.options.models[0]
    raw = json.loads((CONFIGS / model / "config.json").read_text()) | (TINY if bench.options.tiny else {})
    model_type = raw.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **raw)
    with torch.device(bench.device):
        peer = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompt = torch.randint(0, config.vocab_size, (1, sizes.context), device=bench.device)
    attention_mask = torch.ones_like(prompt)
    peer.generation_config.eos_token_id = None
    short, long = (8, 8 + 4 * sizes.steps) if not bench.options.tiny else (2, 4)

    # One cache for both lengths: it is compiled for its size.
    cache = transformers.StaticCache(config=config, max_cache_len=sizes.context + long)

    def generate(num_tokens: int) -> float:
        clock = bench.clock
        cache.reset()
        begin = clock.mark()
        with torch.no_grad():
            out = peer.generate(
                prompt, attention_mask=attention_mask, min_new_tokens=num_tokens, max_new_tokens=num_tokens, do_sample=False,
                past_key_values=cache, pad_token_id=0, disable_compile=bench.options.device == "cpu",
            )  # fmt: skip
        assert out.shape[1] == sizes.context + num_tokens, out.shape
        return clock.seconds(begin, clock.mark())

    for num_tokens in (short, long, short):  # compiles, or captures, in the first steps
        generate(num_tokens)
    each = [(generate(long) - generate(short)) / (long - short) for _ in range(3)]
    step = median(each)
    rows.append(row(f"transformers generate {model}, batch 1", f"{step * 1e3:.2f} ms a token", step_s=step))
    own = bench.figure("decode", _decode_name(model, 1), "step_s")
    serving = bench.figure("serving", "serving throughput", "tokens_per_s")
    check = bench.options.device == "cuda" and not bench.options.tiny
    for what, ratio, least in (
        ("speed at batch 1 over transformers", step / own, 1.2),
        (f"throughput of {sizes.requests} requests over transformers", serving * step, 10.0),
    ):
        if math.isnan(ratio):
            rows.append(row(what, "not known: run decode, serving and transformers together", ok=not check))
            continue
        rows.append(
            row(
                what,
                f"{ratio:.2f}x",
                ok=not check or ratio >= least,
                expected=f">= {least}x" if check else "",
                ratio=ratio,
            )
        )


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over that of `want`; infinite where a value is not finite."""
    difference = got.float().cpu() - want.float().cpu()
    if not bool(difference.isfinite().all()):
        return math.inf
    return float(difference.norm() / want.float().norm())
