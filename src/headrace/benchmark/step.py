"""`headrace bench step`: prefill and decode steps of a model runner, without a scheduler or a server.

Owns the plans it gives the runner, the limits of the machine by its own measure, and what it makes of the times. Does not own the runner. The
shapes are visited in turns, so that a busy moment of the machine meets all of them. Runs in the main process.
"""

import dataclasses
import math
import os
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from headrace.benchmark.figures import Timing, timing
from headrace.benchmark.results import header, write_json
from headrace.benchmark.tables import print_table
from headrace.checkpoint.weight_formats import FORMATS, Scheme
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.execution.build import build_worker
from headrace.execution.model_runner import ModelRunner
from headrace.execution.model_source import read_model_config
from headrace.execution.worker import ModelWorker
from headrace.kernels import cpu
from headrace.messages.control import ReadyInfo
from headrace.messages.requests import PromptContent, SampleTask
from headrace.messages.step import ModelWorkerBatch, NewSequence
from headrace.models.decoder import DecoderLM
from headrace.models.spec import CausalLM
from headrace.processes.model_files import tokens_of
from headrace.sampling.params import ResolvedSamplingParams

_READ_BYTES = 256 << 20
_FMA_ROUNDS = 1 << 20


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """read_bytes_per_s: from memory, in order. fma_flops_per_s: float32 multiply-adds, two operations each. dot_ops_per_s, word_ops_per_s,
    bf16_ops_per_s: the same of bytes, of 16-bit words and of bfloat16, as the linear layers that round their input compute them."""

    read_bytes_per_s: float
    fma_flops_per_s: float
    dot_ops_per_s: float
    word_ops_per_s: float
    bf16_ops_per_s: float

    def best(self, other: "MachineLimits") -> "MachineLimits":
        """The higher of two measurements: what else runs on a machine can only lower them."""
        return MachineLimits(*map(max, astuple(self), astuple(other)))

    def shortest_s(
        self, num_bytes: float, flops: float = 0.0, dot_ops: float = 0.0, word_ops: float = 0.0, bf16_ops: float = 0.0
    ) -> float:
        """No step that reads so much and computes so much, in floats, in bytes, in words and in bfloat16, can be shorter."""
        rounded_s = dot_ops / self.dot_ops_per_s + word_ops / self.word_ops_per_s + bf16_ops / self.bf16_ops_per_s
        return max(num_bytes / self.read_bytes_per_s, flops / self.fma_flops_per_s + rounded_s)


def machine_limits() -> MachineLimits:
    """The best of five measurements of each. ConfigError when the native kernels do not load."""
    native = cpu.load()
    if native is None:
        raise ConfigError(f"measuring the machine's limits needs the native kernels: {cpu.why_not()}")
    memory = torch.ones(_READ_BYTES // 4)
    # By DotKind of csrc/cpu/ops.h: bytes, words, bfloat16. Without instructions for the last, its products are slow.
    dot_rounds = (_FMA_ROUNDS, _FMA_ROUNDS, _FMA_ROUNDS if cpu.multiplies_bf16() else _FMA_ROUNDS // 64)

    def ops_per_s(multiply: Callable[[], float]) -> float:
        return multiply() / _best(multiply)

    return MachineLimits(
        _READ_BYTES / _best(lambda: native.probe_read(memory.data_ptr(), _READ_BYTES)),
        ops_per_s(lambda: native.probe_fma(_FMA_ROUNDS)),
        *(ops_per_s(partial(native.probe_dot, rounds, kind)) for kind, rounds in enumerate(dot_rounds)),
    )


def _best(run: Callable[[], object]) -> float:
    return min(timeit.repeat(run, repeat=5, number=1))


_GREEDY = SampleTask(ResolvedSamplingParams(max_new_tokens=1 << 30, seed=0, temperature=0.0))
_WARM_UP = 2
_KV_PRODUCTS = {"int8": "byte", "int16": "word"}  # what attention multiplies, by dtype of the KV cache
_PAGE = 16
_CHOICES = ("dtype", "quantization", "activations", "kv_cache_dtype", "attention_backend", "weight_bytes", "decisions")
"""What the results record of a model."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What to time. batches x contexts: decode steps of so many rows over so many cached tokens. prefills: prompt tokens of a step
    that computes one whole prompt. repeat: steps of each shape. phases: print the parts of a step. busy_neighbours: measure again beside so
    many processes that never rest."""

    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (256,)
    prefills: tuple[int, ...] = (512,)
    repeat: int = 20
    phases: bool = False
    busy_neighbours: int = 0
    output: Path | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of step: `batch` rows, each computing `new_tokens` after `context` cached ones."""

    batch: int
    context: int
    new_tokens: int

    @property
    def kind(self) -> str:
        return "decode" if self.context else "prefill"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """total: the runner's whole step. model: embedding, layers and logits in it. host: the rest of it. phases: medians of the parts of the
    model in seconds, where the fused decoder runs it."""

    total: Timing
    model: Timing
    host: Timing
    phases: dict[str, float]


def run_step(server_args: ServerArgs, options: StepOptions, console: Console) -> dict[str, Any]:
    """Build the runner, measure, print, write; the results document. Raises ConfigError or ModelError."""
    shapes = [Shape(batch, context, 1) for context in options.contexts for batch in options.batches]
    shapes += [Shape(1, 0, tokens) for tokens in options.prefills]
    if (
        not shapes
        or options.repeat < 1
        or options.busy_neighbours < 0
        or min(min(s.batch, s.context + s.new_tokens) for s in shapes) < 1
    ):
        raise ConfigError(
            "give at least one batch and context, or one prefill, all positive, --repeat 1 or more and --busy-neighbours 0 or more"
        )
    needed = max(shape.context + shape.new_tokens for shape in shapes) + options.repeat + _WARM_UP + _PAGE
    room = -(-needed // _PAGE) * _PAGE
    rows = max(shape.batch for shape in shapes)
    algorithm = server_args.speculative_algorithm
    args = dataclasses.replace(
        server_args,
        disable_overlap_schedule=True,
        speculative_algorithm="off" if algorithm == "auto" else algorithm,  # its steps are planned here, without drafts
        max_running_requests=rows,
        context_length=room,
        max_total_tokens=rows * room,
    )
    worker, info = build_worker(args, tokenize=partial(tokens_of, args))
    assert isinstance(worker, ModelWorker), type(worker)
    try:
        if info.device != "cpu":
            raise ConfigError(f"bench step measures the CPU; it does not support --device {info.device}")
        before = machine_limits()
        runner = worker.runner
        if not isinstance(runner, ModelRunner):
            raise ConfigError(
                "bench step measures models that generate; for encoders there is bench serving --presets EMB"
            )
        bench = _StepBench(runner, info, room)
        times = bench.measure(shapes, options.repeat)
        limits = before.best(machine_limits())
        busy = {}
        if options.busy_neighbours:
            with _neighbours(options.busy_neighbours):
                busy = bench.measure(shapes, options.repeat)
        work = _Work.of(args, info, bench.model)
    finally:
        worker.close()
    results = [
        {
            **asdict(shape),
            "kind": shape.kind,
            **asdict(times[shape]),
            "tokens_per_s": shape.batch * shape.new_tokens / times[shape].total.median_s,
            "limit_s": work.limit_s(shape, limits),
            **({"busy_total": asdict(busy[shape].total)} if busy else {}),
        }
        for shape in shapes
    ]
    fused = next((decision for decision in info.decisions if decision.startswith("fused")), "")
    content = {
        **header("step"),
        "model": {"path": server_args.model_path, **{name: getattr(info, name) for name in _CHOICES}},
        "limits": asdict(limits),
        "busy_neighbours": options.busy_neighbours,
        "results": results,
    }
    console.print(f"{server_args.model_path}: {info.precision}, {info.kv_cache_dtype} KV, {fused}", highlight=False)
    print_steps(console, content)
    if options.phases:
        print_phases(console, content)
    if options.output is not None:
        write_json(options.output, content)
    return content


def print_steps(console: Console, content: dict[str, Any]) -> None:
    limits = content["limits"]
    console.print(
        f"limits of this machine: {limits['read_bytes_per_s'] / 1e9:.1f} GB/s, {limits['fma_flops_per_s'] / 1e9:.0f} GFLOP/s, "
        f"{limits['dot_ops_per_s'] / 1e9:.0f} int8 and {limits['word_ops_per_s'] / 1e9:.0f} int16 GOP/s, "
        f"{limits['bf16_ops_per_s'] / 1e9:.0f} bfloat16 GFLOP/s",
        highlight=False,
    )
    table = Table(title="Steps (ms, median)", title_justify="left")
    busy = content["busy_neighbours"]
    columns = ["step", "ms", "best", "host", "tok/s", "limit", "share"]
    for name in columns + ([f"beside\n{busy} busy"] if busy else []):
        table.add_column(name, justify="left" if name == "step" else "right", no_wrap=True)
    for row in content["results"]:
        total = row["total"]
        table.add_row(
            _step_name(row),
            f"{total['median_s'] * 1e3:.2f}",
            f"{total['best_s'] * 1e3:.2f}",
            f"{row['host']['median_s'] * 1e3:.2f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['limit_s'] * 1e3:.2f}",
            f"{row['limit_s'] / total['median_s']:.0%}",
            *([f"{total['median_s'] / row['busy_total']['median_s']:.0%}"] if busy else []),
        )
    print_table(console, table)


def print_phases(console: Console, content: dict[str, Any]) -> None:
    """The parts of each step as a table of at most 80 columns for three steps; nothing when the layers ran op by op."""
    results = [row for row in content["results"] if row["phases"]]
    if not results:
        console.print("no phases: the fused decoder does not support this model", highlight=False)
        return
    table = Table(title="Parts of a step (ms, median)", title_justify="left")
    table.add_column("part")
    for row in results:
        table.add_column(_step_name(row), justify="right")
    for name in (*results[0]["phases"], "host"):
        seconds = [row["host"]["median_s"] if name == "host" else row["phases"][name] for row in results]
        table.add_row(name, *(f"{part * 1e3:.2f}" for part in seconds))
    print_table(console, table)


def _step_name(row: dict[str, Any]) -> str:
    rows, cached = row["batch"], f" over {row['context']}" if row["context"] else ""
    return f"decode {rows}{cached}" if row["kind"] == "decode" else f"prefill {row['new_tokens']}{cached}"


@contextmanager
def _neighbours(count: int) -> Iterator[None]:
    """`count` processes that compute without rest; they end with the block, or with this process."""
    code = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100000))"
    command = [sys.executable, "-c", code, str(os.getpid())]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class _StepBench:
    """A runner, its sequences (row r owns slots r * room onwards), and the clock around its model."""

    def __init__(self, runner: ModelRunner, info: ReadyInfo, room: int) -> None:
        self._runner = runner
        self._room = room
        self._vocab_size = info.vocab_size
        self.model = runner.model
        self._model = _TimedModel(runner.model)
        self._num_steps = 0
        runner.model = cast(CausalLM, self._model)
        kv = runner.attention.paged_kv()
        for tensor in () if kv is None else (*kv.pool.k, *kv.pool.v):
            tensor.fill_(0.01)  # memory that was never written is read from one page of zeros, faster than any real one

    def measure(self, shapes: Sequence[Shape], repeat: int) -> dict[Shape, StepTimes]:
        """Times of each shape, the shapes in turns."""
        total: dict[Shape, list[float]] = {shape: [] for shape in shapes}
        model: dict[Shape, list[float]] = {shape: [] for shape in shapes}
        phases: dict[Shape, list[dict[str, float]]] = {shape: [] for shape in shapes}
        plans = {shape: self._plans(shape) for shape in shapes}
        for turn in range(_WARM_UP + repeat):
            for shape in shapes:
                plan = next(plans[shape])
                self._model.reset()
                begin = time.perf_counter()
                result = self._runner.run(plan)
                elapsed = time.perf_counter() - begin
                assert not result.errors, result.errors
                if turn >= _WARM_UP:
                    total[shape].append(elapsed)
                    model[shape].append(self._model.seconds)
                    phases[shape].append(self._model.phase_seconds())
        return {
            shape: StepTimes(
                timing(total[shape]),
                timing(model[shape]),
                timing([t - m for t, m in zip(total[shape], model[shape], strict=True)]),
                {name: median(step[name] for step in phases[shape]) for name in phases[shape][0]},
            )
            for shape in shapes
        }

    def _plans(self, shape: Shape) -> Iterator[ModelWorkerBatch]:
        """Endless steps of one shape: each decode continues the one before, each prefill starts over. Sequences are added with
        every step, since the shapes that take turns share rows; the first `context` tokens of a row count as cached."""
        start = shape.context
        while True:
            yield self._plan(shape, start)
            # A decode step sees one more token than the one before, as it would in a server.
            start += shape.context > 0

    def _plan(self, shape: Shape, start: int) -> ModelWorkerBatch:
        rng = np.random.default_rng(start)
        end = start + shape.new_tokens
        tokens = rng.integers(0, self._vocab_size, (shape.batch, end)).astype(np.int32)
        first = np.arange(shape.batch, dtype=np.int32) * self._room
        slots = (first[:, None] + np.arange(end, dtype=np.int32)).astype(np.int32)
        self._num_steps += 1
        for row in range(shape.batch):
            # Entering is the scheduler's cost of a request, not of a step.
            entering = NewSequence(
                seq=row,
                rid=str(row),
                token_ids=tokens[row],
                num_prompt_tokens=end,
                prefix_slots=slots[row, :start],
                task=_GREEDY,
                end_token_ids=(),
                content=PromptContent(tokens[row].tobytes()),
            )
            self._runner.table.add(entering)
            self._runner.sampler.add(row, entering)
        return ModelWorkerBatch(
            step=self._num_steps,
            new=(),
            seqs=np.arange(shape.batch, dtype=np.int32),
            starts=np.full(shape.batch, start, np.int32),
            counts=np.full(shape.batch, shape.new_tokens, np.int32),
            num_logits=np.ones(shape.batch, np.int32),
            out_slots=np.ascontiguousarray(slots[:, start:]).reshape(-1),
        )


class _TimedModel:
    """A `CausalLM` that adds up the seconds spent in it, of the output projection also apart."""

    def __init__(self, model: CausalLM) -> None:
        self._inner = model
        self.reset()

    def reset(self) -> None:
        self.seconds = self._logits_s = 0.0
        self.phase_seconds()

    def phase_seconds(self) -> dict[str, float]:
        """Seconds of the parts of this step, the output projection among them; empty unless the fused decoder runs."""
        phases = self._inner.phase_seconds() if isinstance(self._inner, DecoderLM) else {}
        return {**phases, "lm_head": self._logits_s} if phases else {}

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._timed(self._inner.embed, token_ids)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._timed(self._inner.forward, *args, **kwargs)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        before = self.seconds
        logits = self._timed(self._inner.logits, hidden, out)
        self._logits_s = self.seconds - before
        return logits

    def _timed(self, part: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        begin = time.perf_counter()
        out = part(*args, **kwargs)
        self.seconds += time.perf_counter() - begin
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(frozen=True, slots=True)
class _Work:
    """What a step cannot avoid. Of a mixture of experts all experts count, so its limit is too long; so does the whole last layer of a
    prefill, by up to 1 / number of layers.

    products, attention: what is multiplied in the linear layers and in attention, "float", "byte" or "word".
    """

    layer_parameters: int
    head_parameters: int
    products: str
    attention: str
    num_bytes: int
    kv_bytes_per_token: int
    attention_flops_per_key: int

    @classmethod
    def of(cls, args: ServerArgs, info: ReadyInfo, model: CausalLM) -> "_Work":
        """Counted from config and weights: a lookup reads one row of the embedding, a product the whole weight."""
        config = read_model_config(args)
        vocabulary = (config.vocab_size, config.hidden_size)
        weights = list(model.weights())
        matrices = [weight.shape for weight in weights if len(weight.shape) > 1 and weight.shape != vocabulary]
        # A tied table that has no codes is the projection's own weight.
        scheme = FORMATS[cast(Scheme, info.quantization)]
        shared = config.tie_word_embeddings and scheme.is_a_table
        table = next((weight for weight in weights if weight.shape == vocabulary), None)
        if shared:
            lookup_bytes = 0
        elif scheme.blocks and table is not None:
            lookup_bytes = round(table.num_bytes)
        else:
            lookup_bytes = math.prod(vocabulary) * getattr(torch, info.dtype).itemsize
        products = "float" if info.activations == "float32" else "bf16"
        in_bits = any(weight.load_quantized is not None and weight.itemsize < 2 for weight in weights)
        if scheme.activations is not None and scheme.activations.bits == 16:
            products = "word"
        elif in_bits:
            products = "byte"
        return cls(
            layer_parameters=sum(math.prod(shape) for shape in matrices),
            head_parameters=math.prod(vocabulary),
            products=products,
            attention=_KV_PRODUCTS.get(info.kv_cache_dtype, "float"),
            num_bytes=info.weight_bytes - lookup_bytes,
            kv_bytes_per_token=info.kv_bytes // info.max_total_tokens,
            attention_flops_per_key=4 * config.num_layers * config.num_q_heads * config.head_dim,
        )

    def limit_s(self, shape: Shape, limits: MachineLimits) -> float:
        tokens, keys = shape.batch * shape.new_tokens, shape.context + (shape.new_tokens + 1) / 2
        num_bytes = self.num_bytes + shape.batch * shape.context * self.kv_bytes_per_token
        products = 2.0 * (self.layer_parameters * tokens + self.head_parameters * shape.batch)
        attention = tokens * keys * self.attention_flops_per_key
        work = {"float": 0.0, "byte": 0.0, "word": 0.0, "bf16": 0.0}
        work[self.products] += products
        work[self.attention] += attention
        return limits.shortest_s(num_bytes, *work.values())
