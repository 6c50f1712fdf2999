"""Requests through the scheduler: throughput, the gap between decode steps, and the share of the steps' floors."""

import random
from itertools import pairwise
from statistics import median

from bench.gpu.bench import Bench, Rows
from bench.gpu.floor import Work
from bench.gpu.scheduled import Scheduled


def measure_serving(bench: Bench, rows: Rows) -> None:
    """Requests that are all there from the beginning."""
    sizes, model = bench.sizes, bench.options.models[0]
    room = -(-(sizes.context + sizes.new_tokens + 32) // 32) * 32
    args = bench.args(
        model, max_running_requests=sizes.requests, context_length=room, max_total_tokens=sizes.requests * room,
        chunked_prefill_size=4096, max_prefill_tokens=4096,
    )  # fmt: skip
    scheduled = Scheduled(bench, model, args)
    scheduled.run([(sizes.context, 4)] * sizes.requests)
    elapsed = scheduled.run([(sizes.context, sizes.new_tokens)] * sizes.requests)
    rate = sizes.requests * sizes.new_tokens / elapsed
    what = f"{sizes.requests} requests, {sizes.context} -> {sizes.new_tokens} tokens of {model}"
    rows.add("serving throughput", f"{rate:.0f} output tok/s: {what}", tokens_per_s=rate)
    _add_gap(bench, rows, scheduled)
    # As the preset B32 of `headrace bench serving` sends them.
    draw, bounds = random.Random(1), (8, 30) if bench.tiny else (128, 512)
    lengths = [(draw.randint(*bounds), sizes.new_tokens) for _ in range(sizes.requests)]
    scheduled.run([(num_in, 4) for num_in, _ in lengths])
    elapsed = scheduled.run(lengths)
    rate = sum(out for _, out in lengths) / elapsed
    rows.add("throughput of B32's requests, all at once", f"{rate:.0f} output tok/s", tokens_per_s=rate)
    scheduled.close()


def offline_lengths(bench: Bench) -> list[tuple[int, int]]:
    """Tokens in and out of mini-sglang's offline workload: 256 requests of 100 to 1,024 each."""
    count, most = (6, 24) if bench.tiny else (256, 1024)
    draw, least = random.Random(0), most // 10
    return [(draw.randint(least, most), draw.randint(least, most)) for _ in range(count)]


def measure_offline(bench: Bench, rows: Rows) -> None:
    """The offline workload of mini-sglang, all at once; and the first 64 requests of it."""
    model, tiny = bench.options.models[0], bench.tiny
    lengths = offline_lengths(bench)
    room = 64 + max(map(sum, lengths))
    args = bench.args(
        model, max_running_requests=len(lengths), context_length=room, max_total_tokens=len(lengths) * room if tiny else None,
        chunked_prefill_size=8192, max_prefill_tokens=8192,
    )  # fmt: skip
    scheduled = Scheduled(bench, model, args)
    rows.add("KV cache", f"{scheduled.info.max_total_tokens} tokens")
    scheduled.run([(lengths[0][0], 4)] * len(lengths))
    work = Work.of(bench.config(model))
    for what, chosen in (("offline throughput", lengths), ("the first 64 alone", lengths[:64])):
        elapsed = scheduled.run(chosen)
        steps = scheduled.marked.steps
        floor = sum(work.step_floor_s(bench, s.num_tokens, s.num_logits, s.num_cached, s.num_pairs) for s in steps)
        rate, share = sum(out for _, out in chosen) / elapsed, floor / elapsed
        text = f"{rate:.0f} output tok/s in {elapsed:.1f} s, {len(steps)} steps, {share:.1%} of the sum of their floors"
        rows.add_at_least(what, text, share, bench.least(0.6), tokens_per_s=rate, share=share)
    scheduled.close()


def _add_gap(bench: Bench, rows: Rows, scheduled: Scheduled) -> None:
    clock, requests = bench.clock, bench.sizes.requests
    steps = pairwise(scheduled.marked.steps)
    full = [(a, b) for a, b in steps if a.num_rows == a.num_tokens == b.num_rows == b.num_tokens == requests]
    if not full:
        rows.add("gap between decode steps", "no two full decode steps in a row", ok=False)
        return
    gap = median(clock.seconds(a.end, b.begin) for a, b in full)
    step = median(clock.seconds(a.begin, a.end) for a, _ in full)
    ok, expected = (gap < 0.05 * (gap + step), "< 5%") if bench.on_gpu else (True, "")
    text = f"{gap * 1e6:.0f} us of {(gap + step) * 1e3:.2f} ms, {gap / (gap + step):.1%}"
    rows.add("gap between decode steps", text, ok, expected, gap_s=gap, step_s=step)
