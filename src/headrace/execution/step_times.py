"""How long steps with draft tokens take here: measured once at start, with the model's own weights, on the cores that it gets.

Runs steps of a made-up sequence, before the first request: it has a cached prefix, which costs nothing to make up, so attention has
something to read. Its tokens differ, so that those of a mixture of experts go to different experts. Numbers of tokens are tried in turns, and of each
the fastest counts, since what else runs on the machine only adds time; those of earlier starts count, too, and are all that counts where trying again
would make the start noticeably longer. Several ranks are not measured: one that is late would end the start, where later it ends a step, which is
repeated. No token of any request depends on the result, only how many are drafted.
"""

import math
import time

import msgspec
import numpy as np

from headrace.errors import ExecutionError
from headrace.execution.model_runner import ModelRunner
from headrace.execution.setup import Setup
from headrace.execution.weight_files import WeightCache
from headrace.kernels import cpu as native_cpu
from headrace.log import get_logger
from headrace.messages.control import ReadyInfo
from headrace.messages.requests import PromptContent, SampleTask
from headrace.messages.step import Int32Array, ModelWorkerBatch, NewSequence, Worker
from headrace.sampling.params import ResolvedSamplingParams
from headrace.speculative.pace import SLOW, StepTimes

_logger = get_logger(__name__)

ISAS_WITH_BYTES = ("amx", "avx512bf16", "avx512vnni", "avxvnni")
"""Kernels that multiply 8-bit integers at four times the pace of floats."""

NUM_TOKENS = (1, 4, 16)
"""Of the steps that are timed."""

_PREFIX = 256
"""Tokens before them."""

_LEAST_ROUNDS, _MOST_ROUNDS = 2, 5
"""The least where nothing is known of an earlier start."""
_SHARE = 0.03
"""Of the time that loading has taken, which is two thirds of a start or more: what more rounds may take."""
_NOTICED = 0.95
"""What has become shorter by that is written down for the next start."""

_STRIDE = 7919
"""Between the ids of tokens."""


def paced(runner: ModelRunner, worker: Worker, info: ReadyInfo, setup: Setup, cache: WeightCache | None) -> ReadyInfo:
    """Measure what steps with draft tokens cost, so that the runner drafts accordingly; `auto` nothing where it never pays. `info` with what drafts.

    worker: of the runner. cache: see `measured_seconds`.
    """
    algorithm, drafts = setup.config.speculative_algorithm, runner.drafts
    if drafts is None:
        name = "speculative_algorithm "
        why = next((decision for decision in info.decisions if decision.startswith(name)), algorithm)
        return msgspec.structs.replace(info, speculation=why.removeprefix(name))
    seconds: dict[int, float] = {}
    if setup.is_cpu and setup.args.num_ranks == 1:
        runner.drafts = None
        seconds = measured_seconds(worker, info, setup, cache)
    found = "it was not measured how long its steps take"
    if setup.is_cpu and native_cpu.isa() not in ISAS_WITH_BYTES:
        drafts.times = SLOW
    if seconds:
        drafts.times = StepTimes.measured(seconds)
        found = drafts.times.summary
        if algorithm == "auto" and not drafts.times.pays:
            return msgspec.structs.replace(info, speculation=f"off: {found}, so draft tokens would not pay")
    runner.drafts = drafts
    return msgspec.structs.replace(info, speculative_algorithm=algorithm, speculation=f"{algorithm}: {found}")


def measured_seconds(worker: Worker, info: ReadyInfo, setup: Setup, cache: WeightCache | None) -> dict[int, float]:
    """Seconds of a step, by the number of its tokens, all of which are sampled from. Nothing where there is no room for them, or a step fails.

    worker: drafts nothing. info: of its model, with the time that loading has taken. cache: of its packed weights; keeps what was measured.
    """
    most = max(NUM_TOKENS)
    room = min(info.max_total_tokens, info.context_length) - most - 1
    prefix = min(_PREFIX, room) // info.page_size * info.page_size
    if prefix <= 0:
        return {}
    names = {count: _name(setup, count) for count in NUM_TOKENS}
    kept = {} if cache is None else {count: cache.measured(name) for count, name in names.items()}
    found = {count: seconds for count, seconds in kept.items() if seconds}
    is_known, budget_s = len(found) == len(NUM_TOKENS), _SHARE * info.load_s
    if is_known and found[most] + sum(found.values()) > budget_s:
        return found
    begin = time.perf_counter()
    try:
        # The first step reads all weights for the first time, and is not counted.
        new = _sequence(prefix, info.vocab_size)
        _run(worker, 0, new, most)
        for number in range(_MOST_ROUNDS):
            if time.perf_counter() - begin > budget_s and (is_known or number >= _LEAST_ROUNDS):
                break
            for place, count in enumerate(NUM_TOKENS):
                seconds = _run(worker, 1 + number * len(NUM_TOKENS) + place, new, count)
                found[count] = min(found.get(count, seconds), seconds)
    except ExecutionError as error:  # logged with its cause; the first request will meet it, too
        _logger.warning("it was not measured how long steps with draft tokens take: %s", error.message)
        return {}
    told = ", ".join(f"{count}: {1e3 * seconds:.2f} ms" for count, seconds in found.items())
    _logger.debug("steps by their tokens: %s (measured in %.2f s)", told, time.perf_counter() - begin)
    if cache is not None:
        cache.keep_measured(
            {names[n]: seconds for n, seconds in found.items() if seconds < _NOTICED * (kept.get(n) or math.inf)}
        )
    return found


def _name(setup: Setup, count: int) -> str:
    """Of a measurement among those of the same weights: what it depends on beside them."""
    config = setup.config
    kv = f"KV in {config.kv_cache_dtype}, {config.attention_backend}"
    return f"seconds of a step of {count} tokens, {config.num_threads} threads, {kv}, {native_cpu.isa()}"


def _run(worker: Worker, step: int, new: NewSequence, count: int) -> float:
    """Seconds of a step that computes `count` tokens after the prefix of a sequence, which enters again with its own tokens. It never leaves its
    row: the next one that enters there takes its place."""
    start = len(new.prefix_slots)

    def one(value: int) -> Int32Array:
        return np.array([value], np.int32)

    slots = np.arange(start, start + count, dtype=np.int32)
    worker.submit(ModelWorkerBatch(step, (new,), one(0), one(start), one(count), one(count), slots))
    return worker.collect().forward_s


def _sequence(prefix: int, vocab_size: int) -> NewSequence:
    ids = (np.arange(prefix + max(NUM_TOKENS)) * _STRIDE % vocab_size).astype(np.int32)
    return NewSequence(
        seq=0,
        rid="step-times",
        token_ids=ids,
        num_prompt_tokens=prefix + 1,
        prefix_slots=np.arange(prefix, dtype=np.int32),
        task=SampleTask(ResolvedSamplingParams(max_new_tokens=2 * max(NUM_TOKENS), seed=0, temperature=0.0)),
        end_token_ids=(),
        content=PromptContent(ids[: prefix + 1].tobytes()),
    )
