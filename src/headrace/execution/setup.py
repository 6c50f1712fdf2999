"""What is decided before weights are loaded (`Setup`), loading them, and the `ModelWeights` of what was loaded.

Runs once at start, in the process that runs the model.
"""

from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import msgspec
import torch

from headrace import kernels
from headrace.attention import select
from headrace.attention.base import AttentionBackend, KvPool, KvShape
from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.copies import copy_checkpoint
from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.pooling import PoolingConfig, read_pooling
from headrace.checkpoint.quantized_formats import keeps_codes
from headrace.checkpoint.weight_cache import NOTHING_AHEAD, ReadAhead, files_fingerprint
from headrace.checkpoint.weight_formats import StoredType
from headrace.config.machine import DeviceFacts
from headrace.config.resolve import Config, resolve
from headrace.config.server_args import ServerArgs
from headrace.distributed.base import Stage
from headrace.distributed.rank import Rank
from headrace.errors import ConfigError, ModelError
from headrace.execution.load_weights import IN_THIS_THREAD, load_model, load_threads, straddled
from headrace.execution.memory import available_bytes, check_pool_fits
from headrace.execution.model_source import args_of_update, open_model, override_model
from headrace.execution.pool_plan import whole_pages
from headrace.execution.released import DraftMemory
from headrace.execution.update_weights import ModelWeights, check_same_model
from headrace.execution.weight_files import Progress, WeightCache, WeightSaver, open_cache
from headrace.garbage import give_back_free_memory
from headrace.kernels import cpu as native_cpu
from headrace.kernels.cpu import default_num_threads
from headrace.layers.weight import Placement
from headrace.messages.weights import UpdateFromDisk
from headrace.models.registry import encoder_class_for, model_class_for, pooled_class_for, stored_name
from headrace.models.spec import FamilySpec, Model, ModelSpec, kv_shape


@dataclass(frozen=True, slots=True)
class Setup:
    """What is decided before weights are loaded: of which kind the model is, where it goes and how it runs.

    pooling: what it makes of a text; None = it generates. file_format, stored_precision, stored_types, fingerprint (when it was opened): of
    its checkpoint.
    """

    args: ServerArgs
    model_config: ModelConfig
    pooling: PoolingConfig | None
    spec: FamilySpec[Any]
    config: Config
    placement: Placement
    file_format: Literal["gguf", "safetensors"]
    stored_precision: str
    stored_types: tuple[StoredType, ...]
    fingerprint: str

    @property
    def is_cpu(self) -> bool:
        return self.config.device == "cpu"

    def kv_shape(self, stage: Stage) -> KvShape:
        """The KV cache of this rank, or of its likes in another stage."""
        dtype = getattr(torch, self.config.kv_cache_dtype)
        return kv_shape(self.model_config, dtype, self.placement.attention.shard, stage)

    def make_attention(self) -> AttentionBackend:
        config = self.config
        rounded = config.activations == "bfloat16"
        return select.make_backend(config.attention_backend, deterministic=config.deterministic, rounded=rounded)


def set_up(args: ServerArgs, checkpoint: Checkpoint, rank: Rank) -> Setup:
    """Raises ConfigError or ModelError."""
    fingerprint = fingerprint_of(checkpoint)
    model_config = override_model(checkpoint.config, args.json_model_override_args)
    pooling = read_pooling(checkpoint.path, model_config, args.is_embedding)
    spec = _spec(model_config, pooling, args)
    config = resolve(
        args,
        model_config,
        device_facts(),
        select.BACKENDS,
        batch_invariant=spec.batch_invariant,
        most_tokens=None if pooling is None else pooling.max_tokens,
        generates=pooling is None,
    )
    dtype = getattr(torch, config.dtype)
    if rank.group is not None:
        check_can_be_split(args, spec, config)
    has_places = model_config.media is not None and bool(model_config.media.rope_sections)
    device, deals = own_device(args, config, rank), args.ep_size > 1
    placement = Placement(
        device,
        dtype,
        config.context_length,
        config.weight_format,
        rank.shard,
        rank.stage,
        whole_experts=deals,
        whole_attention=args.enable_dp_attention,
        composed_positions=max(args.max_prefill_tokens, config.max_running_requests) if has_places else 0,
        keeps_floats=checkpoint.kind != "dummy" and keeps_codes(model_config.quantization, config.quantization),
    )
    types = checkpoint.stored_types(config.quantization)
    stored = checkpoint.file_format, checkpoint.stored_precision, types, fingerprint
    setup = Setup(args, model_config, pooling, spec, config, placement, *stored)
    if model_config.encoder is None:
        check_asked_pool(setup, rank)
    return setup


def check_asked_pool(setup: Setup, rank: Rank) -> None:
    """Raises ConfigError if a KV cache of --max-total-tokens does not fit into memory."""
    if setup.args.max_total_tokens is not None:
        num_tokens = whole_pages(setup.args, setup.config.page_size)
        available = available_bytes(setup.placement.device)
        check_pool_fits(num_tokens, setup.kv_shape(rank.stage).bytes_per_token, available)


def choose_kernels(setup: Setup, resources: ExitStack) -> None:
    """Choose the kernels of this process until `resources` are closed, and their threads. Raises ConfigError."""
    config = setup.config
    if setup.is_cpu and not config.native_kernels:
        resources.enter_context(kernels.prefer("torch"))
    if config.deterministic:
        if not setup.spec.batch_invariant:
            raise ConfigError(
                f"--enable-deterministic-inference: model type {setup.model_config.model_type} runs transformers' code, "
                "whose bits depend on the batch"
            )
        resources.enter_context(kernels.batch_invariant())
    if setup.is_cpu:
        kernels.set_num_threads(config.num_threads)


def _spec(model_config: ModelConfig, pooling: PoolingConfig | None, args: ServerArgs) -> FamilySpec[Any]:
    """Raises ModelError when nothing here can serve the model."""
    if pooling is None:
        return model_class_for(model_config, args.model_impl)
    if model_config.encoder is not None:
        return encoder_class_for(model_config, pooling)
    return pooled_class_for(model_config, pooling)


def load_checkpoint(
    setup: Setup,
    checkpoint: Checkpoint,
    resources: ExitStack,
    decisions: list[str],
    progress: Progress = lambda done, total: None,
    ahead: ReadAhead = NOTHING_AHEAD,
) -> tuple[Setup, Any, WeightCache | None]:
    """Load the model of `setup.spec`, from the weight cache where that has it, and let the checkpoint go. Returns both, behind the setup with what
    ranks made of the file's types.

    resources: get what must end with the worker. Raises ModelError.
    """
    decisions += checkpoint.notes
    use_cache = setup.config.native_kernels and not setup.args.disable_weight_cache
    cache = open_cache(checkpoint, setup.spec.name, setup.placement, ahead) if use_cache else None
    with load_threads(setup.config.num_threads) if setup.is_cpu else nullcontext(IN_THIS_THREAD) as threads:
        model = load_model(
            checkpoint,
            setup.spec,
            setup.placement,
            config=setup.model_config,
            seed=setup.args.random_seed,
            progress=progress,
            cache=cache,
            threads=threads,
        )
    if setup.config.native_kernels:
        # Torch has little left to do, and its spinning OpenMP threads would take cores from the kernels' threads.
        resources.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
    check_unchanged(checkpoint, setup.fingerprint)
    if setup.stored_types:
        cut = (
            straddled(model.weights(), checkpoint, setup.spec)
            if setup.placement.format.facts.blocks
            else Counter[str]()
        )
        types = tuple(kind._replace(num_straddled=cut[kind.type]) for kind in setup.stored_types)
        setup = replace(setup, stored_types=types)
        decisions.append(f"tensors of the file: {', '.join(map(str, types))}")
    checkpoint.release()
    give_back_free_memory()
    if cache is not None and cache.needs_writing:
        resources.callback(cache.write_in_background(model.weights()))
    if cache is not None:
        decisions.append(f"weight cache: {cache.outcome}")
    return setup, model, cache


def device_facts() -> DeviceFacts:
    has_cuda = torch.cuda.is_available()
    reason = native_cpu.why_not()
    return DeviceFacts(
        has_cuda=has_cuda,
        native_kernels=not reason,
        native_reason=reason,
        num_cpus=default_num_threads(),
        cpu_isa=native_cpu.isa(),
        cuda_bfloat16=has_cuda and torch.cuda.is_bf16_supported(),
        cuda_capability=torch.cuda.get_device_capability() if has_cuda else (0, 0),
    )


def fingerprint_of(checkpoint: Checkpoint) -> str:
    """Fingerprint of the weight files (see `weight_cache.files_fingerprint`) and of the config; empty for random weights. Raises ModelError."""
    if checkpoint.kind == "dummy":
        return ""
    try:
        return files_fingerprint(checkpoint.files(), {"config": checkpoint.config.raw})
    except OSError as error:
        raise ModelError(f"{checkpoint.path.name} cannot be read: {error.strerror}") from error


def check_unchanged(checkpoint: Checkpoint, fingerprint: str) -> None:
    """Raises ModelError if the files have changed since they were opened, so that some tensors may be old and some new."""
    if fingerprint_of(checkpoint) != fingerprint:
        raise ModelError(f"{checkpoint.path.name} changed while it was read; load it again when it is complete")


def model_bytes(model: Model) -> int:
    """Bytes of the model's weights, by their shapes and precision in memory."""
    return round(sum(weight.num_bytes for weight in model.weights()))


def check_can_be_split(args: ServerArgs, spec: ModelSpec, config: Config) -> None:
    """Raises ConfigError if several ranks cannot run the model."""
    option = "--tp-size above 1" if args.tp_size > 1 else "--pp-size above 1"
    if args.enable_dp_attention:
        option = "--enable-dp-attention"
    if spec.name == "transformers":
        raise ConfigError(f"{option}: this model runs through transformers' code, which is not split over ranks")
    if config.device == "cpu" and not config.native_kernels:
        raise ConfigError(f"{option} needs the native kernels")
    if args.enable_torch_compile:
        raise ConfigError(f"{option} cannot be combined with --enable-torch-compile")
    if config.device == "cpu":
        return
    for name, size in (("--pp-size", args.pp_size), ("--nnodes", args.num_nodes)):
        if size > 1:
            raise ConfigError(f"{name} above 1 works on CPUs only so far, and the device is {config.device}")
    if args.enable_dp_attention:
        raise ConfigError(f"{option} works on CPUs only so far, and the device is {config.device}")
    if args.enable_two_batch_overlap:
        raise ConfigError(f"--enable-two-batch-overlap works on CPUs only so far, and the device is {config.device}")
    if config.deterministic:
        raise ConfigError(
            f"--enable-deterministic-inference cannot be combined with {option} on GPUs: the order of sums over ranks depends on the batch"
        )


def own_device(args: ServerArgs, config: Config, rank: Rank) -> torch.device:
    """Where this process runs its part of the model: rank r of a replica on the GPU with index r of those that the replica sees.

    Raises ConfigError if there are fewer GPUs than ranks.
    """
    if config.device == "cpu" or rank.group is None:
        return torch.device(config.device)
    count = torch.cuda.device_count()
    if count < args.tp_size:
        raise ConfigError(
            f"--tp-size {args.tp_size} needs {args.tp_size} GPUs, one for each rank, and {count} can be used here"
            f"{f' by each of --dp-size {args.dp_size} replicas' if args.num_replicas > 1 else ''}; see CUDA_VISIBLE_DEVICES"
        )
    device = torch.device(config.device, rank.number)
    torch.cuda.set_device(device)
    return device


def updatable_weights(
    setup: Setup, model: Model, attention: AttentionBackend, pool: KvPool, draft: DraftMemory | None = None
) -> ModelWeights:
    """The weights of `model`, for updates and saving. The arguments are those of `ModelWeights`."""
    args, spec, model_config = setup.args, setup.spec, setup.model_config

    def load(operation: UpdateFromDisk) -> tuple[Model, str]:
        other = open_model(args_of_update(args, operation))
        before = fingerprint_of(other)
        theirs = override_model(other.config, args.json_model_override_args)
        if not model_config.tie_word_embeddings:  # their output projection may be a copy of their embedding
            theirs = msgspec.structs.replace(theirs, tie_word_embeddings=False)
        check_same_model(model_config, theirs)
        if read_pooling(other.path, theirs, args.is_embedding) != setup.pooling:
            raise ModelError(
                "the checkpoint makes something else of its hidden states than the served model (modules.json, labels)"
            )
        model = load_model(other, spec, setup.placement, config=model_config)
        if operation.keep_at:
            copy_checkpoint(other.path, other.files(), operation.keep_at, args.keep_updates == "reflink")
        check_unchanged(other, before)
        other.release()
        return model, before

    rename = spec.renaming(model_config)
    weights = ModelWeights(model, attention, pool, rename, spec.ignored, load, draft=draft)
    # transformers changes the default dtype of the whole process while it builds a model. On a CPU that is the usual one.
    weights.holds_steps = spec.name == "transformers" and not setup.is_cpu
    stored = partial(stored_name, model_config)
    weights.saver = WeightSaver(args.save_dir, model_config.as_file(), setup.config.quantization, stored)
    return weights
