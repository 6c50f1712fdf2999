"""Requests through the scheduler and a worker in this process, without tokenizer and HTTP; every step is marked on the clock of the device."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from bench.gpu.bench import Bench, Clock
from headrace.cache.base import PageAllocator
from headrace.cache.radix_cache import RadixCache
from headrace.config.server_args import ServerArgs
from headrace.execution.build import build_worker
from headrace.messages.channel import LocalChannels
from headrace.messages.outputs import BatchTokenIDOut
from headrace.messages.packing import pack_int32
from headrace.messages.requests import (
    BatchTokenizedGenerateReqInput,
    PromptContent,
    SampleTask,
    TokenizedGenerateReqInput,
)
from headrace.messages.step import ModelWorkerBatch, StepResult, Worker
from headrace.processes.model_files import EndTokens
from headrace.processes.scheduler_process import scheduler_config
from headrace.sampling.params import ResolvedSamplingParams
from headrace.scheduler.kv_manager import KVManager, KvPart
from headrace.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class MarkedStep:
    """How large a step was, and its marks on the clock. num_cached: tokens before it, of all rows. num_pairs: of a query and a key that it sees."""

    num_rows: int
    num_tokens: int
    num_logits: int
    num_cached: int
    num_pairs: int
    begin: Any
    end: Any


class MarkedWorker:
    """A `Worker` that marks the beginning and the end of each step in the queue of the device."""

    def __init__(self, worker: Worker, clock: Clock) -> None:
        self._worker = worker
        self._clock = clock
        self.weights, self.loras = worker.weights, worker.loras
        self.pages, self.pages_refusal = worker.pages, worker.pages_refusal
        self.profile, self.count_experts, self.ends_within = worker.profile, worker.count_experts, worker.ends_within
        self.steps: list[MarkedStep] = []

    def submit(self, batch: ModelWorkerBatch) -> None:
        begin = self._clock.mark()
        self._worker.submit(batch)
        starts, counts = batch.starts.astype(np.int64), batch.counts.astype(np.int64)
        pairs = int((counts * starts + counts * (counts + 1) // 2).sum())
        num_logits, num_cached = int(batch.num_logits.sum()), int(starts.sum())
        self.steps.append(
            MarkedStep(len(batch.seqs), batch.num_tokens, num_logits, num_cached, pairs, begin, self._clock.mark())
        )

    def collect(self) -> StepResult:
        return self._worker.collect()

    def idle(self, left: tuple[int, ...]) -> None:
        self._worker.idle(left)

    def close(self) -> None:
        self._worker.close()


class Scheduled:
    """A scheduler over a model with random weights."""

    def __init__(self, bench: Bench, model: str, args: ServerArgs) -> None:
        def no_stop_strings(request: TokenizedGenerateReqInput) -> NoReturn:
            raise AssertionError("no request has stop strings")

        worker, self.info = build_worker(args)
        self.marked = MarkedWorker(worker, bench.clock)
        channels = LocalChannels()
        pages = PageAllocator(self.info.max_total_tokens // self.info.page_size, self.info.page_size)
        config = bench.config(model)
        ends = EndTokens(frozenset(config.eos_token_ids), frozenset())
        self._scheduler = Scheduler(
            scheduler_config(args, config, self.info, ends),
            KVManager([KvPart(pages, RadixCache(self.info.page_size))], self.info.max_running_requests),
            self.marked,
            channels.receiver("to_scheduler"),
            channels.sender("to_detokenizer"),
            channels.sender("to_tokenizer"),
            no_stop_strings,
        )
        self._requests, self._outputs = channels.sender("to_scheduler"), channels.receiver("to_detokenizer")
        self._rng = np.random.default_rng(0)
        self._sent = 0

    def run(self, lengths: Sequence[tuple[int, int]]) -> float:
        """Seconds until all requests of so many tokens (in, out), sent at once, are done. Greedy; their prompts have nothing in common."""
        self.marked.steps.clear()
        requests = []
        for num_in, num_out in lengths:
            self._sent += 1
            sampling = ResolvedSamplingParams(max_new_tokens=num_out, seed=0, temperature=0.0, ignore_eos=True)
            prompt = PromptContent(pack_int32(self._rng.integers(0, self.info.vocab_size, num_in).tolist()))
            requests.append(TokenizedGenerateReqInput(f"{self._sent}", prompt, SampleTask(sampling)))
        begin = time.perf_counter()
        self._requests.send(BatchTokenizedGenerateReqInput(tuple(requests)))
        waiting = len(lengths)
        while waiting:
            self._scheduler.run_once()
            while (message := self._outputs.recv_nowait()) is not None:
                assert isinstance(message, BatchTokenIDOut), message
                for out in message.rows:
                    if out.finish is not None:
                        assert out.finish.type == "length", out.finish
                        waiting -= 1
        return time.perf_counter() - begin

    def close(self) -> None:
        """Release the worker."""
        self.marked.close()
