"""Every op of the kernels over the shapes of a model, in bytes and operations a second.

Owns the shapes and what each op must read and compute at least. Does not own the ops. Weights and KV cycle through
more memory than the processor caches hold, as the layers of a model do; the shapes are timed in turns. Runs in the main process.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Console

from bench.program import counts, names_of, parser_of, refusals, report_of, table_of, words
from headrace import kernels
from headrace.benchmark.figures import timing
from headrace.benchmark.results import write_json
from headrace.benchmark.step import machine_limits
from headrace.benchmark.tables import print_table
from headrace.errors import ConfigError

_FLOAT = 4
_ROUND_BYTES = 192 << 20
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one layer and of the vocabulary."""

    hidden: int
    intermediate: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int


SHAPES = {"135m": ModelShape(576, 1536, 9, 3, 64, 49152), "1b": ModelShape(2048, 8192, 32, 8, 64, 128256)}


@dataclass(frozen=True, slots=True)
class Case:
    """One op on one shape. num_bytes: read and written at least. flops: multiply and add count as two; 0 where bytes are what counts."""

    op: str
    shape: str
    detail: str
    rows: int
    num_bytes: int
    flops: int
    run: Callable[[], object]


def run_kernels(options: argparse.Namespace, console: Console) -> None:
    """Measure, print, write. Raises ConfigError for an unknown op."""
    if options.num_threads is not None:
        kernels.set_num_threads(options.num_threads)
    before = machine_limits()
    results = []
    for name in options.shapes:
        for group in _groups(name, options):
            # Group by group: together they would not fit into memory.
            cases = [case for case in group if not options.ops or case.op.startswith(options.ops)]
            results += _measure(cases, options.repeat)
    limits = before.best(machine_limits())
    if not results:
        raise ConfigError(f"no op begins with {', '.join(options.ops)}")
    subject = {
        "options": {key: value for key, value in vars(options).items() if key != "output"},
        "num_threads": kernels.num_threads(),
        "implementations": {row.op: row.implementation for row in kernels.report()},
        "limits": asdict(limits),
    }
    content = report_of("kernels", {**subject, "results": results})
    print_kernels(console, content)
    if options.output is not None:
        write_json(options.output, content)


def print_kernels(console: Console, content: dict[str, Any]) -> None:
    """The document's results as a table."""
    limits = content["limits"]
    reads, computes = limits["read_bytes_per_s"] / 1e9, limits["fma_flops_per_s"] / 1e9
    said = f"this machine reads {reads:.1f} GB/s and computes {computes:.0f} GFLOP/s; times are medians"
    console.print(said, highlight=False)
    for shape in dict.fromkeys(row["shape"] for row in content["results"]):
        numbers = ("rows", "us", "GB/s", "GFLOP/s")
        table = table_of(f"Kernels, shapes of a {shape} model", ("op", "sizes"), numbers)
        for row in content["results"]:
            if row["shape"] == shape:
                median_s = row["time"]["median_s"]
                rates = f"{median_s * 1e6:.1f}", f"{row['num_bytes'] / median_s / 1e9:.1f}"
                flops = f"{row['flops'] / median_s / 1e9:.0f}" if row["flops"] else "-"
                table.add_row(row["op"], row["detail"], str(row["rows"]), *rates, flops)
        print_table(console, table)


def _measure(cases: list[Case], repeat: int) -> list[dict[str, Any]]:
    seconds: list[list[float]] = [[] for _ in cases]
    for turn in range(_WARM_UP + repeat):
        for index, case in enumerate(cases):
            begin = perf_counter()
            case.run()
            elapsed = perf_counter() - begin
            if turn >= _WARM_UP:
                seconds[index].append(elapsed)
    names = ("op", "shape", "detail", "rows", "num_bytes", "flops")
    fields = [{name: getattr(case, name) for name in names} for case in cases]
    return [row | {"time": asdict(timing(times))} for row, times in zip(fields, seconds, strict=True)]


def _groups(name: str, options: argparse.Namespace) -> Iterator[list[Case]]:
    """Every op of a model over all rows, in groups that share memory: linears, attention (decode: a row is a sequence), the rest."""
    s = SHAPES[name]
    dtype = getattr(torch, options.dtype)
    q_size, kv_size = s.num_q_heads * s.head_dim, s.num_kv_heads * s.head_dim
    linears = {
        "qkv": (q_size + 2 * kv_size, s.hidden),
        "out": (s.hidden, q_size),
        "gate_up": (2 * s.intermediate, s.hidden),
        "down": (s.hidden, s.intermediate),
        "lm_head": (s.vocab, s.hidden),
    }
    for part, (n, k) in linears.items():
        yield _linears(name, part, n, k, options.rows, dtype)
    for rows in options.rows:
        if rows <= 64:
            yield [_attention(name, s, rows, options.context, 1, dtype)]
        if rows >= 16:
            yield [_attention(name, s, 1, options.context, rows, dtype)]
    for rows in options.rows:
        yield _rowwise(name, s, rows, options.context)
        yield _lookups(name, s, rows, dtype)


def _linears(shape: str, part: str, n: int, k: int, all_rows: tuple[int, ...], dtype: torch.dtype) -> list[Case]:
    weight_bytes = n * k * dtype.itemsize
    weight = torch.full((n, k), 0.01, dtype=dtype)
    copies = cycle([kernels.pack_linear(weight) for _ in range(max(1, _ROUND_BYTES // weight_bytes))])

    def case(rows: int) -> Case:
        x, out = torch.randn(rows, k), torch.empty(rows, n)
        moved, flops = weight_bytes + rows * (n + k) * _FLOAT, 2 * rows * n * k

        def run() -> object:
            return kernels.linear(x, next(copies), out)

        return Case(f"linear {part}", shape, f"{n} x {k}", rows, moved, flops, run)

    return [case(rows) for rows in all_rows]


def _rowwise(name: str, s: ModelShape, rows: int, context: int) -> list[Case]:
    """Norm, gates and rotation: what passes over activations."""
    x, residual, weight = torch.randn(rows, s.hidden), torch.randn(rows, s.hidden), torch.ones(s.hidden)
    gate_up = torch.randn(rows, 2 * s.intermediate)
    gate_bytes = 3 * rows * s.intermediate * _FLOAT
    q, k = torch.randn(rows, s.num_q_heads, s.head_dim), torch.randn(rows, s.num_kv_heads, s.head_dim)
    positions = torch.arange(rows, dtype=torch.int32)
    table = torch.ones(max(rows, context), s.head_dim // 2)
    heads = f"{s.num_q_heads}+{s.num_kv_heads} x {s.head_dim}"
    return [
        Case("rms_norm", name, f"{s.hidden} + residual", rows, 4 * x.numel() * _FLOAT, 0,
             lambda: kernels.rms_norm(x, weight, 1e-5, residual)),
        Case("silu_mul", name, str(s.intermediate), rows, gate_bytes, 0, lambda: kernels.silu_mul(gate_up)),
        Case("gelu_tanh_mul", name, str(s.intermediate), rows, gate_bytes, 0, lambda: kernels.gelu_tanh_mul(gate_up)),
        Case("rotary", name, heads, rows, 2 * (q.numel() + k.numel()) * _FLOAT, 0,
             lambda: kernels.rotary(q, k, positions, table, table)),
    ]  # fmt: skip


def _lookups(name: str, s: ModelShape, rows: int, dtype: torch.dtype) -> list[Case]:
    """What moves rows in and out of big tables: the KV write, the embedding, the most likely token, draws under token masks."""
    k = torch.randn(rows, s.num_kv_heads, s.head_dim)
    slots = torch.arange(rows, dtype=torch.int32)
    k_shape, v_shape = kernels.kv_cache_shapes(-(-rows // kernels.PAGE_SIZE), s.num_kv_heads, s.head_dim, dtype)
    k_cache, v_cache = torch.zeros(k_shape, dtype=dtype), torch.zeros(v_shape, dtype=dtype)
    table = torch.full((s.vocab, s.hidden), 0.01, dtype=dtype)
    ids = torch.randint(0, s.vocab, (rows,))
    both = _FLOAT + dtype.itemsize
    cases = [
        Case("write_kv", name, f"{s.num_kv_heads} x {s.head_dim}", rows, 2 * k.numel() * both, 0,
             lambda: kernels.write_kv(k, k, k_cache, v_cache, slots)),
        Case("embedding", name, f"{s.vocab} x {s.hidden}", rows, rows * s.hidden * both, 0,
             lambda: kernels.embedding(ids, table)),
    ]  # fmt: skip
    if rows <= 64:
        logits = torch.randn(rows, s.vocab)
        read = logits.numel() * _FLOAT
        cases.append(Case("argmax", name, str(s.vocab), rows, read, 0, lambda: kernels.argmax(logits)))
        cases += [_masked_draw(name, s.vocab, logits, num_allowed) for num_allowed in (10, s.vocab - 10)]
    return cases


def _masked_draw(name: str, vocab: int, logits: torch.Tensor, num_allowed: int) -> Case:
    """Draws of which a mask allows `num_allowed` tokens in each row, others in each."""
    rows = logits.shape[0]
    random = np.random.default_rng(0)
    allowed = np.zeros((rows, -(-vocab // 32) * 32), dtype=np.bool_)
    for row in allowed:
        row[random.permutation(vocab)[:num_allowed]] = True
    masks = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view(np.int32))
    off = torch.zeros(rows, dtype=torch.int64)
    u = torch.rand(rows, dtype=torch.float64)
    # A word of the mask without a bit reads no logits.
    num_bytes = masks.nbytes + int((masks != 0).sum()) * 32 * _FLOAT
    detail = f"{vocab}, {num_allowed} allowed"
    inputs = (logits, torch.full((rows,), 0.8), off, torch.ones(rows, dtype=torch.float64), off, u, masks)
    return Case("draw", name, detail, rows, num_bytes, 0, lambda: kernels.draw(*inputs, torch.arange(rows)))


def _attention(shape: str, s: ModelShape, num_seqs: int, context: int, new_tokens: int, dtype: torch.dtype) -> Case:
    """`num_seqs` sequences of `context` keys, the last `new_tokens` (or all) of which are queries."""
    new_tokens = min(new_tokens, context)
    pages_each = -(-context // kernels.PAGE_SIZE)
    k_shape, v_shape = kernels.kv_cache_shapes(num_seqs * pages_each, s.num_kv_heads, s.head_dim, dtype)
    kv_bytes = 2 * num_seqs * context * s.num_kv_heads * s.head_dim * dtype.itemsize
    num_caches = max(1, min(64, _ROUND_BYTES // kv_bytes))
    caches = cycle([(torch.randn(k_shape).to(dtype), torch.randn(v_shape).to(dtype)) for _ in range(num_caches)])
    tokens = num_seqs * new_tokens
    q = torch.randn(tokens, s.num_q_heads, s.head_dim)
    page_table = torch.randperm(num_seqs * pages_each).to(torch.int32).view(num_seqs, pages_each)
    seq_lens = torch.full((num_seqs,), context, dtype=torch.int32)
    q_starts = torch.arange(0, tokens + 1, new_tokens, dtype=torch.int32)
    keys = context - (new_tokens - 1) / 2  # that a row sees, on average
    flops = int(4 * tokens * keys * s.num_q_heads * s.head_dim)
    kind = "decode" if new_tokens == 1 else "extend"

    def run() -> object:
        k_cache, v_cache = next(caches)
        return kernels.paged_attention(q, k_cache, v_cache, page_table, seq_lens, q_starts, s.head_dim**-0.5)

    detail = f"{num_seqs} seqs x {context} keys"
    return Case(f"attention {kind}", shape, detail, tokens, kv_bytes + 2 * q.numel() * _FLOAT, flops, run)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=names_of(tuple(SHAPES)), default="135m,1b", help="models whose shapes to time")
    parser.add_argument(
        "--ops", type=words, default="", help="ops to time, by the beginnings of their names; empty: all"
    )
    parser.add_argument("--rows", type=counts, default="1,8,32,256", help="numbers of rows of a call")
    parser.add_argument("--context", type=int, default=256, help="number of keys that attention reads")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and KV")
    parser.add_argument("--repeat", type=int, default=20, help="calls per shape")
    parser.add_argument("--num-threads", type=int, help="default: the cores that this process may use")
    return parser.parse_args(arguments)


def main() -> None:
    """See the module docstring."""
    with refusals():
        run_kernels(parse(), Console())


if __name__ == "__main__":
    main()
