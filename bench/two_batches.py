"""What two-batch overlap gains, and what it costs: the same steps of two ranks with it and without, over sums that are delayed as by a network.

    .venv/bin/python -m bench.two_batches [--model bench/configs/llama-1b] [--rows 2,8,32] [--cached 256] [--delays-ms 0,2] [--output FILE]

Each rank is a process with one thread: two beside each other, with the option and without, take turns of some decode steps, so that a busy moment of
the machine meets both. With a delay, ranks see each other's part of a sum that much later, and have the processor until then. First the tokens of
both are compared. Medians over all steps, in milliseconds; spread: the 10th and 90th percentile; sums_ms: what a step spends in the sums of its
layers, and layers_ms in the rest of them. Prints JSON. A folder with a config alone gets random weights.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench.program import counts, parser_of, refusals, words, write_report
from headrace.attention.base import AttentionBackend
from headrace.config.server_args import ServerArgs
from headrace.distributed.base import HALVES_FROM, Shard
from headrace.distributed.one_host import SharedMemoryGroup
from headrace.distributed.rank import Rank
from headrace.execution.build import build_follower, build_worker
from headrace.execution.ranks import LeaderRunner
from headrace.execution.worker import ModelWorker
from headrace.messages.requests import PromptContent, SampleTask
from headrace.messages.step import ModelWorkerBatch, NewSequence, Worker
from headrace.models.decoder import DecoderLM
from headrace.models.spec import CausalLM
from headrace.sampling.params import ResolvedSamplingParams

LIMIT_S = 120.0
STEPS = 5  # of a turn
COMPARED = 3  # steps whose tokens are compared
GREEDY = SampleTask(ResolvedSamplingParams(max_new_tokens=1 << 30, seed=0, temperature=0.0))


def server_args(options: argparse.Namespace, overlaps: bool) -> ServerArgs:
    steps = COMPARED + STEPS * (options.rounds + 1) * len(options.delays_ms)
    room = -(-(max(options.cached) + 1 + steps) // 16) * 16
    is_file = options.model.endswith(".gguf")
    return ServerArgs(
        model_path=options.model,
        load_format="auto" if is_file or any(Path(options.model).glob("*.safetensors")) else "dummy",
        quantization=options.quantization,
        tp_size=2,
        ep_size=options.ep_size,
        enable_two_batch_overlap=overlaps,
        skip_tokenizer_init=True,
        disable_overlap_schedule=True,
        disable_weight_cache=True,
        kv_cache_dtype=options.kv_cache_dtype,
        num_threads=1,
        max_running_requests=max(options.rows),
        context_length=room,
        max_total_tokens=room * max(options.rows),
    )


def rank_of(group: SharedMemoryGroup, overlaps: bool) -> Rank:
    return Rank(Shard(group.rank, 2, group, HALVES_FROM if overlaps else 0), group=group)


def follow(options: argparse.Namespace, fd: int, overlaps: bool) -> None:
    group = SharedMemoryGroup.join(fd, 1, 2, LIMIT_S)
    runner, resources = build_follower(server_args(options, overlaps), rank_of(group, overlaps))
    with resources:
        touch(runner.runner.attention)
        runner.follow()


def touch(attention: AttentionBackend) -> None:
    """Memory that was never written is read from one page of zeros, faster than any real one."""
    kv = attention.paged_kv()
    for tensor in () if kv is None else (*kv.pool.k, *kv.pool.v):
        tensor.fill_(0.01)


@dataclass
class Pair:
    """Two ranks, this process the first of them. start: of the next step, in each row."""

    worker: Worker
    model: CausalLM
    group: SharedMemoryGroup
    room: int
    vocab_size: int
    num_steps: int = 0
    start: int = 0

    def step(self, rows: int, cached: int | None = None) -> tuple[list[int], float]:
        """A decode step of the first `rows` rows: its ids and its seconds. cached: they begin anew, after so many tokens."""
        new: tuple[NewSequence, ...] = ()
        if cached is not None:
            self.start = cached
            new = tuple(self._entering(row, cached) for row in range(rows))
        seqs = np.arange(rows, dtype=np.int32)
        plan = ModelWorkerBatch(
            step=self.num_steps,
            new=new,
            seqs=seqs,
            starts=np.full(rows, self.start, np.int32),
            counts=np.ones(rows, np.int32),
            num_logits=np.ones(rows, np.int32),
            out_slots=seqs * self.room + self.start,
        )
        begin = time.perf_counter()
        self.worker.submit(plan)
        result = self.worker.collect()
        taken = time.perf_counter() - begin
        assert not result.errors, result.errors
        self.num_steps += 1
        self.start += 1
        return result.ids.tolist(), taken

    def phase_seconds(self) -> dict[str, float]:
        """See `DecoderLM.phase_seconds`; since the last call."""
        assert isinstance(self.model, DecoderLM), self.model
        return self.model.phase_seconds()

    def _entering(self, row: int, cached: int) -> NewSequence:
        tokens = np.random.default_rng(row).integers(0, self.vocab_size, cached + 1).astype(np.int32)
        return NewSequence(
            seq=row,
            rid=str(row),
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            prefix_slots=np.arange(row * self.room, row * self.room + cached, dtype=np.int32),
            task=GREEDY,
            end_token_ids=(),
            content=PromptContent(tokens.tobytes()),
        )


@contextmanager
def pair_of(options: argparse.Namespace, overlaps: bool) -> Iterator[Pair]:
    args = server_args(options, overlaps)
    fd = SharedMemoryGroup.memory(2)
    group = SharedMemoryGroup.join(fd, 0, 2, LIMIT_S)
    command = [sys.executable, "-m", "bench.two_batches", *sys.argv[1:], "--follow", str(fd), str(int(overlaps))]
    follower = subprocess.Popen(command, pass_fds=[fd])
    os.close(fd)
    worker, info = build_worker(args, rank=rank_of(group, overlaps))
    try:
        assert isinstance(worker, ModelWorker), worker
        assert isinstance(worker.runner, LeaderRunner), worker.runner
        touch(worker.runner.runner.attention)
        assert args.context_length is not None
        yield Pair(worker, worker.runner.runner.model, group, args.context_length, info.vocab_size)
    finally:
        worker.close()
        assert follower.wait(LIMIT_S) == 0


def measure(pairs: dict[str, Pair], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for rows, cached in product(options.rows, options.cached):
        ids = {
            name: [pair.step(rows, None if step else cached)[0] for step in range(COMPARED)]
            for name, pair in pairs.items()
        }
        assert ids["whole"] == ids["overlapped"], "the tokens differ"
        for delay_ms in options.delays_ms:
            taken: dict[str, list[float]] = {name: [] for name in pairs}
            phases: dict[str, list[dict[str, float]]] = {name: [] for name in pairs}
            for number in range(options.rounds + 1):
                for name, pair in list(pairs.items())[:: -1 if number % 2 else 1]:
                    pair.group.delay_sums(delay_ms / 1e3)
                    pair.phase_seconds()
                    for _ in range(STEPS):
                        step = pair.step(rows)[1], pair.phase_seconds()
                        if number:
                            taken[name].append(step[0])
                            phases[name].append(step[1])
            found = {name: summary(times, rows) | in_layers(phases[name]) for name, times in taken.items()}
            gain = found["whole"]["median_ms"] / found["overlapped"]["median_ms"]
            yield {"rows": rows, "cached": cached, "delay_ms": delay_ms, **found, "gain": round(gain, 3)}


def in_layers(steps: list[dict[str, float]]) -> dict[str, float]:
    """Empty where layers run op by op."""
    if not steps[0]:
        return {}
    sums = statistics.median(step["reduce"] for step in steps)
    layers = statistics.median(sum(step.values()) - step["reduce"] for step in steps)
    return {"sums_ms": round(sums * 1e3, 2), "layers_ms": round(layers * 1e3, 2)}


def summary(times: list[float], rows: int) -> dict[str, float]:
    tenths = statistics.quantiles(times, n=10)
    median = statistics.median(times)
    return {
        "median_ms": round(median * 1e3, 2),
        "p10_ms": round(tenths[0] * 1e3, 2),
        "p90_ms": round(tenths[-1] * 1e3, 2),
        "tokens_per_s": round(rows / median, 1),
        "steps": len(times),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="bench/configs/llama-1b")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--ep-size", type=int, default=1, choices=(1, 2))
    parser.add_argument("--rows", type=counts, default=(2, 8, 32))
    parser.add_argument("--cached", type=counts, default=(256,), help="tokens of each row before the first step")
    parser.add_argument("--delays-ms", type=lambda text: tuple(map(float, words(text))), default=(0.0, 2.0))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--follow", nargs=2, type=int, help=argparse.SUPPRESS)  # how a follower is started
    options = parser.parse_args()
    with refusals():
        if options.follow is not None:
            follow(options, options.follow[0], bool(options.follow[1]))
            return
        with pair_of(options, False) as whole, pair_of(options, True) as overlapped:
            results = list(measure({"whole": whole, "overlapped": overlapped}, options))
    named = ("model", "quantization", "kv_cache_dtype", "ep_size")
    model = {name: getattr(options, name) for name in named}
    write_report({"model": model, "ranks": 2, "threads_per_rank": 1, "results": results}, options.output)


if __name__ == "__main__":
    main()
