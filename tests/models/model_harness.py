"""Tiny random checkpoints of every family, and a way to run a model over chunks without the runner."""

import copy
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import transformers

from headrace.attention.base import AttentionBackend, KvPool, OwnRows, ReadTokens, StepRows
from headrace.attention.select import make_backend
from headrace.checkpoint.source import open_checkpoint
from headrace.distributed.base import ALL_LAYERS, WHOLE, Shard, Stage
from headrace.execution.load_weights import load_model
from headrace.kernels.cpu import why_not
from headrace.layers.weight import Placement
from headrace.models.registry import model_class_for
from headrace.models.spec import CausalLM, kv_shape

CPU = torch.device("cpu")
MAX_POSITIONS = 160
# As when serving: torch's OpenMP threads would take the cores from the kernels' own.
torch.set_num_threads(1)
BACKENDS = ["torch_native", *([] if why_not() else ["cpu"])]

_BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 40,
}
_EXPERTS = {"num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 24}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama-llama3-rope": ("llama", {"rope_parameters": _LLAMA3, "head_dim": 32}),
    "llama-yarn-rope": ("llama", {"rope_parameters": _YARN}),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 21, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 48}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "num_experts": 5, "mlp_only_layers": [1]}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 20.0,
            "num_attention_heads": 4,
        },
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 32}),
    "cohere2-tied": (
        "cohere2",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 4,
            "sliding_window": 21,
            "sliding_window_pattern": 2,
        },
    ),
}


def tiny_config(name: str) -> Any:
    """The transformers config of one entry of FAMILIES."""
    model_type, changes = FAMILIES[name]
    return transformers.AutoConfig.for_model(model_type, **copy.deepcopy(_BASE | changes))


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights large enough that every part of the model matters."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1:
            tensor.data = noise / tensor.shape[-1] ** 0.5
        else:
            tensor.data = tensor.data + 0.2 * noise


def save_tiny(config: Any, folder: Path) -> Any:
    """Save a random model of `config` in `folder`; returns the transformers model, eager attention, float32."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomise(model)
    model.eval().save_pretrained(folder)
    return model


@dataclass
class Runner:
    """A model, its attention, and sequences in scattered pages of 16 slots."""

    model: CausalLM
    attention: AttentionBackend
    pool: KvPool
    pages_each: int
    stage: Stage = ALL_LAYERS

    def slots(self, sequence: int) -> list[int]:
        """Slots of a sequence's positions; its pages are not in order."""
        first = sequence * self.pages_each
        pages = [first + (3 * i + 1) % self.pages_each for i in range(self.pages_each)]
        return [page * 16 + offset for page in pages for offset in range(16)]

    @torch.inference_mode()
    def step(self, rows: list[tuple[int, int, list[int]]]) -> list[torch.Tensor]:
        """rows: (sequence, start, tokens). Returns logits [count, vocab_size] of each row; of a stage without the head, nothing."""
        hidden = self.hidden(rows)
        if not self.stage.is_first:
            return []
        return list(self.model.logits(hidden).split([len(tokens) for _, _, tokens in rows]))

    @torch.inference_mode()
    def hidden(
        self, rows: list[tuple[int, int, list[int]]], num_read: list[int] | None = None, own: range | None = None
    ) -> torch.Tensor:
        """Hidden states of the last num_read[r] tokens of each row r, one row after the other; None = of all. Stages pass them on.

        own: the rows whose attention this rank computes; None = all.
        """
        if own is not None:
            return self._hidden_of_own(rows, num_read, own)
        step = self._prepared(rows)
        tokens = torch.tensor([token for _, _, tokens in rows for token in tokens])
        reads = _reads(rows, num_read)
        if self.stage.before is None or self.stage.after is None:
            return self.model.forward(self.model.embed(tokens), step.positions, self.attention, reads)
        mine = self.model.embed(tokens) if self.stage.is_first else self.stage.before.receive(len(tokens))
        mine = self.model.forward(mine, step.positions, self.attention, reads if self.stage.is_last else None)
        self.stage.after.send(mine)
        num_out = len(tokens) if reads is None else len(reads.index)
        return self.stage.before.receive(num_out) if self.stage.is_first else mine

    def _hidden_of_own(
        self, rows: list[tuple[int, int, list[int]]], num_read: list[int] | None, own: range
    ) -> torch.Tensor:
        row_starts = [0, *accumulate(len(tokens) for _, _, tokens in rows)]
        mine = OwnRows(slice(own.start, own.stop), slice(row_starts[own.start], row_starts[own.stop]))
        positions = self._prepared(rows[own.start : own.stop]).positions if own else torch.empty(0, dtype=torch.int32)
        tokens = torch.tensor([token for _, _, tokens in rows for token in tokens])
        return self.model.forward(self.model.embed(tokens), positions, self.attention, _reads(rows, num_read), own=mine)

    def _prepared(self, rows: list[tuple[int, int, list[int]]]) -> StepRows:
        """The rows, for which attention is prepared."""
        longest = max(start + len(tokens) for _, start, tokens in rows)
        starts, counts = [start for _, start, _ in rows], [len(tokens) for _, _, tokens in rows]
        positions = [start + i for _, start, tokens in rows for i in range(len(tokens))]
        out_slots = [self.slots(sequence)[start + i] for sequence, start, tokens in rows for i in range(len(tokens))]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        row_starts = [0, *accumulate(counts)]

        def int32(values: list[Any]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        step = StepRows(
            starts=starts,
            counts=counts,
            positions=int32(positions),
            seq_lens=int32(ends),
            row_starts=int32(row_starts),
            out_slots=int32(out_slots),
            slots=int32([self.slots(sequence)[:longest] for sequence, _, _ in rows]),
        )
        self.attention.prepare(step)
        return step

    def chunks(self, sequence: int, tokens: list[int], sizes: list[int]) -> torch.Tensor:
        """Logits of all positions, computed in chunks of these sizes (the last as large as it must be)."""
        out, start = [], 0
        for size in [*sizes, len(tokens)]:
            part = tokens[start : start + size]
            if part:
                out += self.step([(sequence, start, part)])
                start += len(part)
        return torch.cat(out)


def _reads(rows: list[tuple[int, int, list[int]]], num_read: list[int] | None) -> ReadTokens | None:
    """The last num_read[r] tokens of each row r."""
    if num_read is None:
        return None
    ends = list(accumulate(len(tokens) for _, _, tokens in rows))
    index = [ends[row] - n + i for row, n in enumerate(num_read) for i in range(n)]
    return ReadTokens(torch.tensor(index, dtype=torch.int64), [0, *accumulate(num_read)])


def open_runner(
    folder: Path,
    backend: str,
    dtype: torch.dtype = torch.float32,
    impl: Any = "auto",
    quantization: Any = "none",
    kv_dtype: torch.dtype | None = None,
    page_size: int = 16,
    shard: Shard = WHOLE,
    whole_experts: bool = False,
    stage: Stage = ALL_LAYERS,
    whole_attention: bool = False,
) -> Runner:
    """Load the checkpoint in `folder` with room for four sequences of MAX_POSITIONS tokens."""
    checkpoint = open_checkpoint(folder)
    placement = Placement(CPU, dtype, MAX_POSITIONS, quantization, shard, stage, whole_experts, whole_attention)
    model = load_model(checkpoint, model_class_for(checkpoint.config, impl), placement)
    attention = make_backend(backend)
    pages_each = MAX_POSITIONS // 16
    pool = attention.make_kv_pool(
        kv_shape(checkpoint.config, kv_dtype or dtype, placement.attention.shard, stage),
        4 * MAX_POSITIONS,
        page_size,
        CPU,
    )
    return Runner(model, attention, pool, pages_each, stage)


def random_tokens(count: int, seed: int, vocab_size: int = 199) -> list[int]:
    """`count` ids."""
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
