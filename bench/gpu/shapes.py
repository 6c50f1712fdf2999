"""The kernels in several shapes of tiles: which is the fastest on this card, beside the vendor's product.

Each is timed as a CUDA graph of many launches over weights or caches that together are larger than the second-level cache, as in a model.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from bench.gpu.bench import Bench, Rows
from headrace.kernels import pack_experts
from headrace.kernels.packing import PackedLinear
from headrace.kernels.torch_fallback import linear as torch_linear
from headrace.kernels.torch_quantized import FP8
from headrace.kernels.triton.attention import Plan, attend, decode, extend
from headrace.kernels.triton.attention.plan import Tile
from headrace.kernels.triton.experts import LARGE, SMALL, moe_in_tiles
from headrace.kernels.triton.launch import Tile as ProductTile
from headrace.kernels.triton.linear import INT4_ROWS, described_linear, int4_rows, invariant_linear
from headrace.kernels.triton.one_row import SHAPES, one_row_linear

_MANY_BYTES = 256 << 20
"""Of what is read before it is read again: several times the second-level cache."""

_FEW_INVARIANT = (ProductTile(64, 32, 128, 4, 4), ProductTile(64, 32, 64, 4, 6), ProductTile(64, 64, 64, 4, 5))
_MANY_INVARIANT = (ProductTile(256, 128, 64, 8, 3), ProductTile(128, 256, 64, 8, 4), ProductTile(128, 128, 64, 8, 4))
_EXPERTS = (SMALL, replace(SMALL, columns=32), replace(SMALL, columns=32, inner=256), LARGE)
_DECODE = (Tile(16, 128, 4, 2), Tile(16, 64, 4, 2), Tile(16, 64, 4, 3))
_PREFILL = (Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 3))


class _Tries:
    """Times launches over many inputs. dtype: of activations."""

    def __init__(self, bench: Bench, rows: Rows) -> None:
        self.bench, self.rows = bench, rows
        self.tiny = bench.tiny
        self.device = bench.device
        self.dtype = torch.bfloat16 if bench.on_gpu else torch.float32

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def copies(self, num_bytes: int) -> int:
        """How many inputs of so many bytes are more than the cache holds."""
        return 2 if self.tiny else max(2, -(-_MANY_BYTES // num_bytes))

    def few(self, shapes: Sequence[Any]) -> Sequence[Any]:
        """The shapes to try."""
        return shapes[:1] if self.tiny else shapes

    def add(
        self, what: str, run: Callable[[Any], object], inputs: Sequence[Any], num_bytes: int, flops: float = 0.0
    ) -> None:
        """A row with the time of one launch, and what it moves or multiplies in a second; or why it does not run."""
        try:
            seconds = self._seconds(run, inputs)
        except Exception as error:  # such as a tile that does not fit into the processor's memory: the others go on
            self.rows.add(what, f"does not run: {type(error).__name__}")
            return
        rate = f"{flops / seconds / 1e12:.0f} TFLOP/s" if flops else f"{num_bytes / seconds / 1e9:.0f} GB/s"
        self.rows.add(what, f"{seconds * 1e6:.1f} us, {rate}", seconds=seconds)

    def _seconds(self, run: Callable[[Any], object], inputs: Sequence[Any], repeat: int = 5) -> float:
        def all_of_them() -> None:
            for one in inputs:
                run(one)

        work: Callable[[], object] = all_of_them
        all_of_them()
        if self.bench.on_gpu:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                all_of_them()
            work = graph.replay
            work()
        return median(self.bench.clock.time(work) for _ in range(repeat)) / len(inputs)


def measure_shapes(bench: Bench, rows: Rows) -> None:
    """Linear layers of one row and of a few, batch-invariant ones, experts, decode attention, prefill attention."""
    tries = _Tries(bench, rows)
    hidden, intermediate = (64, 96) if tries.tiny else (4096, 14336)
    for n, k in ((hidden * 3 // 2, hidden), (hidden, hidden), (2 * intermediate, hidden), (hidden, intermediate)):
        for layout, bits in (("torch", 16.0), ("torch_fp8", 8.0), ("torch_int4", 5.0)):
            _linear(tries, n, k, layout, round(n * k * bits / 8))
    for n, k in ((hidden, hidden), (2 * intermediate, hidden)):
        _invariant(tries, n, k)
    _experts(tries)
    _decode(tries)
    _prefill(tries)


def _weights(tries: _Tries, n: int, k: int, layout: str, num_bytes: int) -> list[PackedLinear]:
    count, on = tries.copies(num_bytes), tries.device
    if layout == "torch":
        return [PackedLinear(n, k, "torch", tries.random(n, k) / 64, None) for _ in range(count)]
    if layout == "torch_fp8":
        scales = torch.ones(n, device=on)
        return [PackedLinear(n, k, "torch_fp8", tries.random(n, k).to(FP8), None, scales) for _ in range(count)]
    pairs = torch.rand(n, k // 32, 2, device=on).to(torch.bfloat16)
    words = [torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device=on) for _ in range(count)]
    return [PackedLinear(n, k, "torch_int4", part, None, pairs.clone()) for part in words]


def _linear(tries: _Tries, n: int, k: int, layout: str, num_bytes: int) -> None:
    weights, x, out = _weights(tries, n, k, layout, num_bytes), tries.random(64, k), tries.random(64, n)
    shape = SHAPES[layout][-1][1]
    shapes = [replace(shape, columns=columns, stages=stages) for columns in (4, 8, 16) for stages in (2, shape.stages)]
    for one in tries.few(shapes):
        name = f"one row [{n}, {k}] {layout} {astuple(one)}"
        run = partial(one_row_linear, x[:1], out=out[:1], accumulate=False, shape=one)
        tries.add(name, run, weights, num_bytes)
    for rows in (1, 4, 16, 64) if layout == "torch" else ():
        whole = partial(torch_linear, x[:rows], out=None, accumulate=False)
        tries.add(f"torch [{n}, {k}], {rows} rows", whole, weights, num_bytes)
    for rows in (4, 64) if layout == "torch_int4" else ():
        for few in tries.few((INT4_ROWS, replace(INT4_ROWS, inner=32, stages=3))):
            name = f"{rows} rows [{n}, {k}] {layout} {astuple(few)}"
            run = partial(int4_rows, x[:rows], out=out[:rows], accumulate=False, shape=few)
            tries.add(name, run, weights, num_bytes)


def _invariant(tries: _Tries, n: int, k: int) -> None:
    """The batch-invariant linear layer in several tiles, and whether a row has the same bits in all of them."""
    num_bytes, many = 2 * n * k, 70 if tries.tiny else 8192
    weights, x = _weights(tries, n, k, "torch", num_bytes), tries.random(many, k)
    out = tries.random(many, n)
    want = invariant_linear(x[:1], weights[0], None, False)
    for tile in tries.few(_FEW_INVARIANT):
        name = f"invariant [{n}, {k}], 64 rows {astuple(tile)}"
        run = partial(invariant_linear, x[:64], out=None, accumulate=False, tile=tile)
        tries.add(name, run, weights, num_bytes)
        same = torch.equal(invariant_linear(x[:64], weights[0], None, False, tile)[:1], want)
        # The interpreter's products are NumPy's, whose bits depend on shapes and on the processor.
        tries.rows.add(f"bits of {name}", "the same" if same else "others", ok=same or not tries.bench.on_gpu)
    flops = 2.0 * n * k * many
    whole = partial(torch_linear, x, out=None, accumulate=False)
    tries.add(f"torch [{n}, {k}], {many} rows", whole, weights[:1], 0, flops)
    for tile in tries.few(_MANY_INVARIANT) if tries.bench.on_gpu else ():
        name = f"invariant [{n}, {k}], {many} rows {astuple(tile)}"
        described = partial(described_linear, x, out=out, accumulate=False, tile=tile)
        tries.add(name, described, weights[:1], 0, flops)
        described(weights[0])
        same = torch.equal(out[:1], want)
        tries.rows.add(f"bits of {name}", "the same" if same else "others", ok=same)


def _experts(tries: _Tries) -> None:
    """The experts of a layer of Qwen3-30B-A3B, at 1, 16 and 64 rows."""
    hidden, inter, num, top = (64, 32, 4, 2) if tries.tiny else (2048, 768, 128, 8)

    def packed(n: int, k: int) -> list[PackedLinear]:
        return [PackedLinear(n, k, "torch", part, None) for part in tries.random(num, n, k) / 64]

    count = 1 if tries.tiny else 3
    layers = [pack_experts(packed(2 * inter, hidden), packed(hidden, inter), "silu") for _ in range(count)]
    for rows in (1, 3) if tries.tiny else (1, 16, 64):
        ids = torch.stack([torch.randperm(num, device=tries.device)[:top] for _ in range(rows)])
        x, shares = tries.random(rows, hidden), torch.full((rows, top), 1 / top, device=tries.device)
        num_bytes = len(ids.unique()) * 3 * hidden * inter * 2
        for tile in tries.few(_EXPERTS):
            name = f"experts, {rows} rows {astuple(tile)}"
            tries.add(name, partial(moe_in_tiles, x, ids, shares, tile=tile), layers * 4, num_bytes)


def _decode(tries: _Tries) -> None:
    context, head_dim, kv_heads, heads = (40, 16, 2, 4) if tries.tiny else (1024, 128, 8, 32)
    for batch in (1, 3) if tries.tiny else (1, 64, 256):
        num_bytes = 4 * batch * context * kv_heads * head_dim
        shape, copies = (batch * context, kv_heads, head_dim), tries.copies(num_bytes)
        pools = [[tries.random(*shape) for _ in range(2)] for _ in range(copies)]
        plan, q = _plan(tries, batch, context, 1), tries.random(batch, heads, head_dim)
        for tile in tries.few(_DECODE):
            with patch.object(decode, "decode_tile", lambda *args, t=tile, **kwargs: t):
                name = f"decode {batch} x {context} {astuple(tile)}"
                tries.add(name, partial(_attend, q, plan), pools, num_bytes)


def _prefill(tries: _Tries) -> None:
    tokens, head_dim, kv_heads, heads = (40, 16, 2, 4) if tries.tiny else (8192, 128, 8, 32)
    pools = [[tries.random(tokens, kv_heads, head_dim) for _ in range(2)]]
    plan, q = _plan(tries, 1, tokens, tokens), tries.random(tokens, heads, head_dim)
    flops = 4 * heads * head_dim * tokens * (tokens + 1) / 2
    for tile in tries.few(_PREFILL):
        with patch.object(extend, "extend_tile", lambda *args, t=tile, **kwargs: t):
            tries.add(f"prefill {tokens} {astuple(tile)}", partial(_attend, q, plan), pools, 0, flops)


def _attend(q: torch.Tensor, plan: Plan, pool: list[torch.Tensor]) -> None:
    attend(q, pool[0], pool[1], plan, 0.1, window=0, soft_cap=0.0)


def _plan(tries: _Tries, batch: int, context: int, new: int) -> Plan:
    on = tries.device
    return Plan(
        table=torch.arange(batch * context, dtype=torch.int32, device=on).view(batch, context),
        page_size=1,
        seq_lens=torch.full((batch,), context, dtype=torch.int32, device=on),
        row_starts=torch.arange(batch + 1, dtype=torch.int32, device=on) * new,
        num_tokens=batch * new,
        max_keys=context,
        has_single=new == 1,
        has_longer=new > 1,
        deterministic=False,
        num_processors=132,
    )
