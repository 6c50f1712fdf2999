"""What double sparsity gives and costs: decode steps after a long prompt in turns with a runner that attends to all, and the perplexity of a text.

    python -m bench.sparsity MODEL --channels FILE [--tokens 8192] [--prompt 4096] [--repeat 40] [--quantization int8] [--output FILE]

FILE is of `headrace quantize --calibrate-sparsity`. The text is the held-out half of the Python reference. Its first --prompt tokens are a prompt;
those after it count for the perplexity, computed as outputs: each position attends to what it would in a step of its own. The decode step that is
timed is that of the last of --tokens.
"""

import dataclasses
import math
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.program import parser_of, refusals, write_report
from headrace.benchmark.agreement import default_text
from headrace.checkpoint.names import resolve_model
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.execution.build import build_worker
from headrace.execution.forward_batch import ForwardBatch
from headrace.execution.model_runner import ModelRunner
from headrace.execution.worker import ModelWorker
from headrace.messages.control import ReadyInfo
from headrace.messages.requests import PromptContent, SampleTask
from headrace.messages.step import ModelWorkerBatch, NewSequence
from headrace.models.decoder import DecoderLM
from headrace.processes.model_files import tokens_of
from headrace.sampling.params import ResolvedSamplingParams
from headrace.text.tokenizers import load_tokenizer

_GREEDY = SampleTask(ResolvedSamplingParams(max_new_tokens=1 << 30, seed=0, temperature=0.0))
_CHUNK = 256
_WARM_UP = 3


class Sequence:
    """The text as one sequence in row 0 of a runner: computed in chunks, judged, and its last token computed again and again."""

    def __init__(self, args: ServerArgs, ids: list[int], num_prompt: int) -> None:
        room = -(-len(ids) // 16) * 16
        args = dataclasses.replace(
            args, max_running_requests=1, context_length=room, max_total_tokens=room, speculative_algorithm="off"
        )
        self.worker, self.info = build_worker(args, tokenize=partial(tokens_of, args))
        assert isinstance(self.worker, ModelWorker), self.worker
        assert isinstance(self.worker.runner, ModelRunner), self.worker.runner
        self.runner: ModelRunner = self.worker.runner
        self.ids, self.num_prompt = ids, num_prompt
        tokens = np.array(ids, np.int32)
        new = NewSequence(
            seq=0, rid="0", token_ids=tokens, num_prompt_tokens=num_prompt, prefix_slots=np.zeros(0, np.int32), task=_GREEDY,
            end_token_ids=(), content=PromptContent(tokens[:num_prompt].tobytes()),
        )  # fmt: skip
        self.runner.table.add(new)
        self.runner.sampler.add(0, new)

    def hidden(self, start: int, count: int) -> torch.Tensor:
        """The hidden states of positions [start, start + count)."""
        slots = np.arange(start, start + count, dtype=np.int32)
        one = partial(np.array, dtype=np.int32)
        plan = ModelWorkerBatch(
            step=1, new=(), seqs=one([0]), starts=one([start]), counts=one([count]), num_logits=one([0]), out_slots=slots
        )  # fmt: skip
        batch = ForwardBatch.from_plan(plan, self.runner.table)
        self.runner.attention.prepare(batch.rows)
        model = self.runner.model
        return model.forward(model.embed(batch.token_ids), batch.rows.positions, self.runner.attention)

    @torch.inference_mode()
    def losses(self) -> torch.Tensor:
        """Negative log likelihoods in nats of the tokens after the prompt, but the first."""
        found = []
        for start in range(0, len(self.ids), _CHUNK):
            count = min(_CHUNK, len(self.ids) - start)
            hidden = self.hidden(start, count)
            if start < self.num_prompt:
                continue
            logits = self.runner.model.logits(hidden)
            wanted = torch.tensor(self.ids[start + 1 : start + count + 1])
            found.append(torch.nn.functional.cross_entropy(logits[: len(wanted)], wanted, reduction="none").double())
        return torch.cat(found)

    @torch.inference_mode()
    def step(self) -> tuple[float, dict[str, float]]:
        """Seconds of a decode step with its logits, and of its parts."""
        model = self.runner.model
        assert isinstance(model, DecoderLM), model
        model.phase_seconds()
        begin = time.perf_counter()
        model.logits(self.hidden(len(self.ids) - 1, 1))
        return time.perf_counter() - begin, model.phase_seconds()


def timed(arms: dict[str, Sequence], repeat: int) -> dict[str, Any]:
    """Medians in ms, the arms in turns, and the median of the ratios of neighbours."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    attention: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(_WARM_UP + repeat):
        for name, arm in arms.items():
            taken, phases = arm.step()
            if turn >= _WARM_UP:
                seconds[name].append(taken)
                attention[name].append(phases["attention"])
    ratios = [dense / sparse for dense, sparse in zip(seconds["dense"], seconds["sparse"], strict=True)]
    return {
        "step_ms": {name: median(found) * 1e3 for name, found in seconds.items()},
        "best_ms": {name: min(found) * 1e3 for name, found in seconds.items()},
        "attention_ms": {name: median(found) * 1e3 for name, found in attention.items()},
        "speed_up": median(seconds["dense"]) / median(seconds["sparse"]),
        "speed_up_of_neighbours": median(ratios),
    }


def compared(dense: torch.Tensor, sparse: torch.Tensor) -> dict[str, Any]:
    difference = sparse - dense
    return {
        "num_tokens": len(dense),
        "dense": math.exp(float(dense.mean())),
        "sparse": math.exp(float(sparse.mean())),
        "increase": math.exp(float(difference.mean())) - 1,
        "standard_error": float(difference.std()) / math.sqrt(len(difference)),
    }


def arms_of(args: ServerArgs, **sparsity: Any) -> Iterator[tuple[str, ServerArgs]]:
    yield "dense", args
    yield "sparse", dataclasses.replace(args, enable_double_sparsity=True, max_loras=0, **sparsity)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--channels", required=True)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--heavy-channels", type=int, default=ServerArgs().ds_heavy_channel_num)
    parser.add_argument("--heavy-tokens", type=int, default=ServerArgs().ds_heavy_token_num)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=40)
    options = parser.parse_args()
    with refusals():
        ids = load_tokenizer(resolve_model(options.model)).encode(default_text("held out"))[: options.tokens]
        if options.prompt % _CHUNK or len(ids) <= options.prompt:
            raise ConfigError(f"--prompt must be a multiple of {_CHUNK} below the {len(ids)} tokens of the text")
        args = ServerArgs(
            model_path=options.model, quantization=options.quantization, kv_cache_dtype=options.kv_cache_dtype
        )
        sparsity = {
            "ds_channel_config_path": options.channels,
            "ds_heavy_channel_num": options.heavy_channels,
            "ds_heavy_token_num": options.heavy_tokens,
            "ds_sparse_decode_threshold": options.prompt,
        }
        arms = {name: Sequence(arm, ids, options.prompt) for name, arm in arms_of(args, **sparsity)}
        losses = {name: arm.losses() for name, arm in arms.items()}
        info: ReadyInfo = arms["dense"].info
        figures = {
            "precision": f"{info.precision}, {info.kv_cache_dtype} KV",
            "context": len(ids),
            "settings": sparsity | {"ds_channel_config_path": ""},
            "perplexity": compared(losses["dense"], losses["sparse"]),
            "decode": timed(arms, options.repeat),
        }
        for arm in arms.values():
            arm.worker.close()
        write_report({"model": options.model, **figures}, options.output)


if __name__ == "__main__":
    main()
