"""A tiny model behind a worker, and plans made by hand."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from headrace.config.server_args import ServerArgs
from headrace.execution.build import build_worker
from headrace.messages.control import FaultReq, ReadyInfo
from headrace.messages.requests import PromptContent, SampleTask
from headrace.messages.step import EncodeWork, ModelWorkerBatch, NewSequence, StepResult, Worker
from headrace.sampling.params import ResolvedSamplingParams

VOCAB_SIZE = 131
CONTEXT = 96
GREEDY = ResolvedSamplingParams(max_new_tokens=50, seed=0, temperature=0.0)
DRAWN = ResolvedSamplingParams(max_new_tokens=50, seed=7, temperature=1.5, top_k=20, top_p=0.9)
WEARY = ResolvedSamplingParams(
    max_new_tokens=50,
    seed=5,
    temperature=0.7,
    top_k=4,
    frequency_penalty=0.9,
    presence_penalty=-0.4,
    repetition_penalty=0.6,
)


def save_llama(folder: Path, **changes: Any) -> Any:
    """A random two-layer llama in `folder`; returns the transformers model."""
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": False,
            **changes,
        }
    )
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for tensor in model.parameters():
        if tensor.ndim > 1:
            tensor.data = torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5
    model.eval().save_pretrained(folder)
    return model


def int32(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), dtype=np.int32)


def ids_by_row(result: StepResult) -> list[int]:
    """The one id that each row gave, -1 where it gave none."""
    assert np.diff(result.id_starts).max(initial=0) <= 1, result.id_starts
    return [int(result.ids[begin]) if end > begin else -1 for begin, end in pairwise(result.id_starts.tolist())]


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


@dataclass
class Driver:
    """Plans steps for a worker: sequence `seq` owns the slots seq * CONTEXT onwards."""

    worker: Worker
    info: ReadyInfo
    num_steps: int = 0
    computed: dict[int, int] = field(default_factory=dict)

    def new(
        self, seq: int, tokens: list[int], sampling: ResolvedSamplingParams = GREEDY, **changes: Any
    ) -> NewSequence:
        """changes: fields of the sequence or of its task."""
        task = {name: changes.pop(name) for name in SampleTask.__struct_fields__ if name in changes}
        fields: dict[str, Any] = {
            "seq": seq,
            "rid": f"r{seq}",
            "token_ids": int32(tokens),
            "num_prompt_tokens": len(tokens),
            "prefix_slots": int32([]),
            "task": SampleTask(sampling, **task),
            "end_token_ids": (),
            "content": PromptContent(int32(tokens).tobytes()),
            **changes,
        }
        self.computed[seq] = len(fields["prefix_slots"])
        return NewSequence(**fields)

    def submit(
        self,
        rows: list[tuple[int, int, bool]],
        new: tuple[NewSequence, ...] = (),
        faults: tuple[FaultReq, ...] = (),
        left: tuple[int, ...] = (),
    ) -> None:
        """rows: (seq, count, samples); a row goes on where its sequence was."""
        starts = [self.computed[seq] for seq, _, _ in rows]
        slots = [seq * CONTEXT + start + i for (seq, n, _), start in zip(rows, starts, strict=True) for i in range(n)]
        for seq, count, _ in rows:
            self.computed[seq] += count
        self.worker.submit(
            ModelWorkerBatch(
                step=self.num_steps,
                new=new,
                seqs=int32(seq for seq, _, _ in rows),
                starts=int32(starts),
                counts=int32(count for _, count, _ in rows),
                num_logits=int32(samples for _, _, samples in rows),
                out_slots=int32(slots),
                left=left,
                faults=faults,
            )
        )
        self.num_steps += 1

    def step(self, *args: Any, **kwargs: Any) -> StepResult:
        self.submit(*args, **kwargs)
        return self.worker.collect()

    def encode(self, work: EncodeWork) -> StepResult:
        """A step for the encoder alone."""
        nothing = int32([])
        self.worker.submit(
            ModelWorkerBatch(
                step=self.num_steps,
                new=(),
                seqs=nothing,
                starts=nothing,
                counts=nothing,
                num_logits=nothing,
                out_slots=nothing,
                encode=work,
            )
        )
        self.num_steps += 1
        return self.worker.collect()

    def generate(self, seq: int, tokens: list[int], count: int, chunks: tuple[int, ...] = (), **new: Any) -> list[int]:
        """`count` tokens of one sequence alone, its prompt in chunks of these sizes."""
        entering = (self.new(seq, tokens, **new),)
        for size in chunks:
            self.step([(seq, size, False)], entering)
            entering = ()
        out = self.step([(seq, len(tokens) - self.computed[seq], True)], entering).ids.tolist()
        while len(out) < count:
            out += self.step([(seq, 1, True)]).ids.tolist()
        return out


def make_driver(folder: Path, **options: Any) -> Driver:
    """A driver over the checkpoint in `folder`; float32 and synchronous unless `options` say otherwise."""
    defaults = {
        "dtype": "float32",
        "disable_overlap_schedule": True,
        "max_running_requests": 4,
        "max_total_tokens": 4 * CONTEXT,
        "speculative_algorithm": "off",  # steps are planned by tests, which know of no draft tokens
        "num_threads": 2,
    }
    worker, info = build_worker(ServerArgs(model_path=str(folder), **{**defaults, **options}))
    return Driver(worker, info)
