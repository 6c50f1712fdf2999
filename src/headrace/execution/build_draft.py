"""Makes what guesses: loads what --speculative-draft-model-path names, and makes its KV cache. Runs once at start, in the scheduler's process."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from headrace.attention import select
from headrace.attention.base import AttentionBackend, KvShape
from headrace.checkpoint.model_config import ModelConfig
from headrace.config.checks import guesses_by_text
from headrace.config.resolve import AttentionNeeds
from headrace.config.server_args import ServerArgs
from headrace.distributed.base import ALL_LAYERS
from headrace.distributed.rank import ALONE
from headrace.errors import ConfigError, ModelError
from headrace.execution.drafting import DeviceDraftSteps, DeviceEagleDrafter, DraftModel, DraftSteps, EagleDrafter
from headrace.execution.kv_precision import Tokenize, settle_kv_cache
from headrace.execution.load_weights import fill_from_checkpoint, fill_random
from headrace.execution.memory import naming_memory
from headrace.execution.model_source import open_model
from headrace.execution.pool_plan import RankNeeds
from headrace.execution.released import DraftMemory, keepers_of
from headrace.execution.setup import (
    Setup,
    check_unchanged,
    fingerprint_of,
    load_checkpoint,
    model_bytes,
    set_up,
)
from headrace.layers.weight import Keeper
from headrace.messages.step import MOST_VERIFIED
from headrace.models import eagle3
from headrace.models.decoder import DecoderLM
from headrace.models.eagle3 import NUM_STREAMS, EagleHead
from headrace.models.spec import CausalLM, kv_shape
from headrace.sampling.sampler import Sampler
from headrace.speculative.base import Drafter, Drafts
from headrace.speculative.forced import ForcedDrafter
from headrace.speculative.ngram import NgramDrafter, SharedOutputs

_OPTION = "--speculative-draft-model-path"


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """What guesses, with its weights and still without a KV cache.

    needs: what it takes beside the target. make: the drafter, from its steps. backend: a fresh attention backend; bind: lets the model fuse its
    layers with it, once it has a pool. keepers: of its weights. facts: see `DraftMemory`.
    """

    needs: RankNeeds
    make: Callable[[DraftSteps], Drafter]
    shape: KvShape
    backend: AttentionBackend
    bind: Callable[[AttentionBackend], object]
    keepers: list[Keeper]
    facts: dict[str, object]
    target: Setup

    def with_cache(self, num_slots: int) -> DraftMemory:
        """All that it holds, with a KV cache of as many slots as the target's, in pages as large. Raises ConfigError."""
        with naming_memory("the draft model's KV cache", "lower --max-total-tokens or --mem-fraction-static"):
            pool = self.backend.make_kv_pool(
                self.shape, num_slots, self.target.config.page_size, self.target.placement.device
            )
        self.bind(self.backend)
        return DraftMemory(self.keepers, self.backend, pool, self.bind, self.facts)


def make_drafts(algorithm: str, args: ServerArgs, sampler: Sampler, on_host: bool) -> Drafts | None:
    """What guesses without weights. None: nothing is guessed.

    algorithm: see `Config`. sampler: of the sequences, whose grammars it has. on_host: the model is, too; on a device masks of grammars are filled
    at other times, and what they demand is not guessed.
    """
    if not guesses_by_text(algorithm):
        return None
    most, shared = args.speculative_num_draft_tokens, args.speculative_shared_tokens
    ngram = NgramDrafter(most, SharedOutputs(shared) if shared else None)
    if algorithm == "ngram" or not on_host:
        return Drafts([ngram])
    sampler.grammars.notes_demands = True
    return Drafts([ForcedDrafter(sampler.grammars.demanded, most), ngram])


def load_draft(
    target: Setup, model: CausalLM, resources: ExitStack, decisions: list[str], tokenize: Tokenize
) -> LoadedDraft | None:
    """model: the target's, whose layers are not fused yet. tokenize: see `settle_kv_cache`. None: nothing guesses that has weights.

    Raises ConfigError or ModelError that name the option.
    """
    algorithm = target.args.speculative_algorithm
    if algorithm not in ("draft", "eagle3"):
        return None
    try:
        if algorithm == "eagle3":
            return _load_head(target, model, decisions)
        return _load_model(target, resources, decisions, tokenize)
    except (ConfigError, ModelError) as error:
        raise type(error)(f"{_OPTION}: {error.message}") from error


def _load_model(target: Setup, resources: ExitStack, decisions: list[str], tokenize: Tokenize) -> LoadedDraft:
    args = _own_args(target)
    checkpoint = open_model(args)
    setup = set_up(args, checkpoint, ALONE)
    _check(target, setup)
    setup, draft, cache = load_checkpoint(setup, checkpoint, resources, decisions)
    setup = settle_kv_cache(setup, draft, ALONE, cache, tokenize)
    most = target.args.speculative_num_draft_tokens
    shape = setup.kv_shape(ALL_LAYERS)
    decisions.append(
        f"draft model: {args.served_name}, {setup.config.quantization} weights, {setup.config.kv_cache_dtype} KV"
    )
    return LoadedDraft(
        needs=RankNeeds(
            model_bytes(draft),
            shape.bytes_per_token,
            _step_bytes(setup.model_config, target, num_rows=MOST_VERIFIED // 2),
        ),
        make=lambda steps: DraftModel(draft, setup.model_config.vocab_size, steps, most),
        shape=shape,
        backend=setup.make_attention(),
        bind=draft.fuse if target.is_cpu else lambda attention: None,
        keepers=keepers_of(draft.weights()),
        facts={
            "model": setup.model_config.as_file(),
            "dtype": setup.config.dtype,
            "quantization": setup.config.quantization,
            "activations": setup.config.activations,
            "kv": setup.config.kv_cache_dtype,
        },
        target=target,
    )


def _own_args(target: Setup) -> ServerArgs:
    """The target's options, as far as they hold for both."""
    args, quantization = target.args, target.args.speculative_draft_model_quantization
    assert args.speculative_draft_model_path is not None
    return replace(
        args,
        model_path=args.speculative_draft_model_path,
        served_model_name=None,
        mmproj="none",
        quantization=quantization if quantization != "auto" or args.quantization == "gguf" else args.quantization,
        page_size=target.config.page_size,
        context_length=None,
        max_total_tokens=None,
        json_model_override_args="{}",
        lora_paths="",
        speculative_algorithm="off",
        speculative_draft_model_path=None,
        speculative_draft_model_quantization="auto",
    )


def _check(target: Setup, draft: Setup) -> None:
    """Raises ConfigError if the draft model cannot follow the target."""
    if draft.config.context_length < target.config.context_length:
        raise ConfigError(
            f"it was trained for {draft.config.context_length} positions, fewer than the model's {target.config.context_length}: "
            f"start with --context-length {draft.config.context_length}"
        )
    if draft.config.attention_backend != target.config.attention_backend:
        raise ConfigError(
            f"its attention backend would be {draft.config.attention_backend} and the model's is {target.config.attention_backend}: "
            "both have the same pages, so both need the same one, see --attention-backend"
        )
    if draft.model_config.vocab_size > target.model_config.vocab_size:
        raise ConfigError(
            f"its vocabulary has {draft.model_config.vocab_size} tokens, more than the model's {target.model_config.vocab_size}"
        )


def _load_head(target: Setup, model: CausalLM, decisions: list[str]) -> LoadedDraft:
    args, own_args = target.args, _own_args(target)
    checkpoint = open_model(own_args)
    fingerprint = fingerprint_of(checkpoint)
    config, vocab_size = checkpoint.config, target.model_config.vocab_size
    if not isinstance(model, DecoderLM):
        raise ConfigError(f"model class {target.spec.name} has no layers of Headrace that a head could read")
    _check_attention(target, config)
    model.tap(_layers(config, target.model_config))
    head = EagleHead(config, target.placement, model.embed, vocab_size)
    if checkpoint.kind == "dummy":
        fill_random(head.weights(), args.random_seed, target.placement.device)
    else:
        fill_from_checkpoint(head.weights(), checkpoint, eagle3.SPEC, quantization=target.placement.quantization)
    check_unchanged(checkpoint, fingerprint)
    checkpoint.release()
    shape = kv_shape(config, getattr(torch, target.config.kv_cache_dtype))
    decisions.append(f"EAGLE-3 head: {own_args.served_name}, reads before layers {model.taps}")
    num_rows = target.config.max_running_requests if target.is_cpu else MOST_VERIFIED // 2
    step_bytes = _step_bytes(config, target, num_rows, num_streams=NUM_STREAMS)
    return LoadedDraft(
        needs=RankNeeds(
            round(sum(weight.num_bytes for weight in head.weights())),
            shape.bytes_per_token,
            step_bytes if target.is_cpu else step_bytes + _kept_bytes(target),
        ),
        make=lambda steps: _eagle_drafter(target, model, head, steps),
        shape=shape,
        backend=target.make_attention(),
        bind=lambda attention: None,
        keepers=keepers_of(head.weights()),
        facts={"model": config.as_file(), "taps": model.taps},
        target=target,
    )


def _check_attention(target: Setup, head: ModelConfig) -> None:
    """Raises ConfigError if the target's attention backend cannot serve the head."""
    config = target.config
    needs = AttentionNeeds(
        config.device,
        config.native_kernels,
        head.head_dim,
        config.kv_cache_dtype,
        config.page_size,
        config.deterministic,
    )
    if reasons := select.backend_named(config.attention_backend).reasons_against(needs):
        raise ConfigError(
            f"attention backend {config.attention_backend} cannot serve the head ({'; '.join(reasons)}): see --attention-backend"
        )


def _eagle_drafter(target: Setup, model: DecoderLM, head: EagleHead, steps: DraftSteps) -> Drafter:
    if target.is_cpu:
        return EagleDrafter(head, model, steps, target.args.speculative_num_draft_tokens)
    assert isinstance(steps, DeviceDraftSteps), steps
    model.keep_tapped(_most_kept(target))
    shape = _features_shape(target)
    placement = target.placement
    features = torch.zeros(shape, dtype=placement.compute_dtype, device=placement.device)
    return DeviceEagleDrafter(head, model, steps, features)


def _kept_bytes(target: Setup) -> int:
    """Bytes that a head on a device keeps from step to step: streams of the target and features."""
    streams = NUM_STREAMS * _most_kept(target) * target.model_config.hidden_size
    return target.placement.compute_dtype.itemsize * (streams + math.prod(_features_shape(target)))


def _most_kept(target: Setup) -> int:
    """Tokens of the largest graph."""
    return max((*target.config.cuda_graph_sizes, MOST_VERIFIED))


def _features_shape(target: Setup) -> tuple[int, int, int]:
    most = target.args.speculative_num_draft_tokens
    return target.config.max_running_requests, 1 + most, target.model_config.hidden_size


def _step_bytes(draft: ModelConfig, target: Setup, num_rows: int, num_streams: int = 0) -> int:
    """Bytes that the draft's largest step needs, about: the activations of a layer, in float32, and logits of both vocabularies.

    num_rows: most rows that guess at once. num_streams: of the target, which are kept for the head, and copied into its input.
    """
    config = target.config
    rows = max(config.max_running_requests, MOST_VERIFIED)
    num_tokens = min(config.chunked_prefill_size + rows, max(target.args.max_prefill_tokens, rows))
    heads = 2 * draft.num_q_heads + 2 * draft.num_kv_heads  # q, k, v and what attention gives
    mlp, moe = draft.intermediate_size, draft.moe
    if moe is not None:  # the feed-forward layers that a token goes through at once
        mlp = moe.num_experts_per_tok * moe.intermediate_size + moe.shared_expert_intermediate_size
    own = 4 * draft.hidden_size + heads * draft.head_dim + 3 * mlp
    read = 3 * num_streams * draft.hidden_size  # kept, chosen, and side by side
    logits = draft.vocab_size + target.model_config.vocab_size
    return 4 * (num_tokens * (own + read) + min(num_rows, rows) * logits)


def _layers(head: ModelConfig, target: ModelConfig) -> tuple[int, ...]:
    """The layers of the target before which the head reads. Raises ModelError if it was not made for the target."""
    if head.hidden_size != target.hidden_size:
        raise ModelError(
            f"a head for hidden states of {head.hidden_size} elements; the model's have {target.hidden_size}"
        )
    if int(head.raw.get("draft_vocab_size") or 0) > target.vocab_size:
        raise ModelError(f"draft_vocab_size is more than the model's {target.vocab_size} tokens")
    outputs_of = (head.raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    last = target.num_layers
    layers = tuple(layer + 1 for layer in outputs_of) if outputs_of else (2, last // 2, last - 3)
    if len(layers) != NUM_STREAMS or not 0 < layers[0] < layers[1] < layers[2] < last:
        raise ModelError(f"a head that reads before layers {layers} does not fit a model of {last} layers")
    return layers
