"""Builds a worker from options: resolve, load, measure memory, allocate the pools.

Owns the order of start-up in the scheduler's process, and `ReadyInfo`. Runs once, in the scheduler's process.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import msgspec
import torch

from headrace import kernels
from headrace.attention.base import AttentionBackend, KvPool
from headrace.attention.sparsity import read_sparsity
from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.weight_cache import NOTHING_AHEAD, ReadAhead, content_of
from headrace.config.checks import guesses_by_text
from headrace.config.server_args import ServerArgs, lora_paths
from headrace.distributed.base import Stage, length
from headrace.distributed.device_group import DeviceGroup
from headrace.distributed.rank import ALONE, Rank
from headrace.errors import ConfigError, ModelError
from headrace.execution.build_draft import LoadedDraft, load_draft, make_drafts
from headrace.execution.device import CudaDevice, Device, WatchedDevice
from headrace.execution.device_runner import DeviceRunner
from headrace.execution.drafting import DeviceDraftSteps, DraftSteps
from headrace.execution.faults import FaultyEmbeddingRunner, FaultyRunner, FaultySampler
from headrace.execution.forward_batch import SequenceTable
from headrace.execution.graphs import GraphPool, verifying_sizes
from headrace.execution.kv_precision import Tokenize, settle_kv_cache, unmeasured
from headrace.execution.lora import LoraPool
from headrace.execution.media import MediaRows
from headrace.execution.memory import available_bytes, check_pool_fits, naming_memory
from headrace.execution.model_runner import ModelRunner
from headrace.execution.model_source import open_model
from headrace.execution.page_transfer import LeaderPages, PoolPages, page_transfer
from headrace.execution.pool_plan import PoolPlan, RankNeeds, agreed_plan, reserved_bytes
from headrace.execution.pooling import EmbeddingRunner
from headrace.execution.profiler import ExpertRecorder, StepProfiler
from headrace.execution.rank_jobs import LeaderExperts, LeaderProfiler, LeaderWeights, without_pages
from headrace.execution.ranks import (
    NO_OTHER_RANKS,
    FollowerQueue,
    FollowerRunner,
    LeaderRunner,
    OtherRanks,
    group_of,
    received_ids,
)
from headrace.execution.released import DraftMemory
from headrace.execution.setup import (
    Setup,
    check_asked_pool,
    choose_kernels,
    load_checkpoint,
    model_bytes,
    set_up,
    updatable_weights,
)
from headrace.execution.step_times import paced
from headrace.execution.update_weights import ModelWeights
from headrace.execution.weight_files import Progress, WeightCache
from headrace.execution.worker import InlineLane, ModelWorker, QueuedLane, ThreadedLane, warm_up
from headrace.layers.embedding import vocabulary_part
from headrace.log import get_logger
from headrace.messages.control import EncoderInfo, ReadyInfo
from headrace.messages.step import PageTransfer, Worker
from headrace.messages.weights import WeightExecutor
from headrace.models.decoder import DecoderLM
from headrace.models.media import WORK_BYTES
from headrace.models.spec import CausalLM, Model, kv_shape
from headrace.sampling.draw import greedy_ids
from headrace.sampling.logit_processors import load_processors
from headrace.sampling.penalties import DevicePenalties
from headrace.sampling.sampler import Sampler
from headrace.speculative.base import Drafts
from headrace.speculative.ngram import BYTES_PER_TOKEN

_logger = get_logger(__name__)

_STEPS_OF_SLOTS = 4
"""The scheduler has slots for the texts of so many steps of an encoder, two of which may be in flight."""
_NOT_IN_GRAPHS = "decode steps run as CUDA graphs, which do not tell what is chosen in them: start the server with --disable-cuda-graph"
_NOT_OF_STAGES = "with --pp-size the experts of other stages are not seen: start the server without it"


@dataclass(frozen=True, slots=True)
class _Memory:
    """What takes memory beside the weights: the KV pool, allocated, with its backend, and CUDA graphs of these sizes, which are still to capture.

    verifying_sizes: as graph_sizes, of steps that verify drafts. draft: what a draft model or head holds, with a pool of its own.
    """

    plan: PoolPlan
    graph_sizes: tuple[int, ...]
    verifying_sizes: tuple[int, ...]
    attention: AttentionBackend
    pool: KvPool
    draft: DraftMemory | None = None


@dataclass(frozen=True, slots=True)
class _Built:
    """A runner with its model loaded, and what was found on the way. leader: over the runner, where it leads other ranks; weights: of its part."""

    setup: Setup
    rank: Rank
    memory: _Memory
    link: Device | None
    runner: ModelRunner
    leader: LeaderRunner | None
    weights: ModelWeights
    profiler: StepProfiler
    decisions: list[str]
    lora_fingerprints: tuple[str, ...]
    cache: WeightCache | None


def build_worker(
    args: ServerArgs,
    progress: Progress = lambda done, total: None,
    rank: Rank = ALONE,
    others: OtherRanks = NO_OTHER_RANKS,
    tokenize: Tokenize = lambda text: (),
    ahead: ReadAhead = NOTHING_AHEAD,
) -> tuple[Worker, ReadyInfo]:
    """A worker for the model of `args`, ready for its first step, and its description.

    progress: called with (bytes loaded, total bytes). rank: the leader's; the others are built meanwhile (`build_follower`), and are ready, too,
    when this returns. tokenize: see `settle_kv_cache`. ahead: packed weights that are being read; the caller closes it.
    Raises ConfigError or ModelError, and the errors of the others.
    """
    begin = time.perf_counter()
    checkpoint = open_model(args)
    if checkpoint.config.encoder is not None:
        return _build_encoder_worker(args, checkpoint, progress)
    with ExitStack() as resources:
        built = _build(args, checkpoint, progress, rank, others, resources, tokenize, others.wait_loaded, ahead)
        if built.leader is not None:
            built.leader.on_broken = others.give_up
            resources.callback(built.leader.stop)
        others.wait_ready()
        if built.link is None:
            worker = _cpu_worker(built, resources)
        else:
            worker = _device_worker(built, built.link, resources)
    info = paced(built.runner, worker, _ready_info(built, time.perf_counter() - begin), built.setup, built.cache)
    if built.setup.placement.device.type == "cuda" and built.setup.pooling is None:
        warm_up(worker, info)
    return worker, info


def _build_encoder_worker(args: ServerArgs, checkpoint: Checkpoint, progress: Progress) -> tuple[Worker, ReadyInfo]:
    begin = time.perf_counter()
    setup = set_up(args, checkpoint, ALONE)
    decisions = [f"model class {setup.spec.name}: an encoder, whose texts are computed whole", *setup.config.decisions]
    longest, most = setup.config.context_length, setup.config.chunked_prefill_size
    if longest > most:
        raise ConfigError(
            f"a text of up to {longest} tokens is computed in one step, but a step has at most {most}: lower --context-length"
        )
    with ExitStack() as resources:
        choose_kernels(setup, resources)
        with naming_memory("the weights", "use --quantization int8, a smaller model, or a machine with more memory"):
            setup, model, _ = load_checkpoint(setup, checkpoint, resources, decisions, progress)
        attention = setup.make_attention()
        reason = model.fuse(attention)
        decisions.append(
            f"fused encoder: no, because {reason}" if reason else "fused encoder: yes, one call for all layers"
        )
        page_size = setup.config.page_size
        weights = updatable_weights(setup, model, attention, KvPool([], [], 0, page_size))
        make_runner = FaultyEmbeddingRunner if args.enable_fault_injection else EmbeddingRunner
        runner = make_runner(model, attention, setup.placement.device)
        worker = ModelWorker(runner, _lane(args), weights, resources.pop_all(), StepProfiler(args.profile_dir))
    most_tokens = max(most, page_size * setup.config.max_running_requests)
    info = _model_info(setup, model, decisions, time.perf_counter() - begin)
    num_tokens = _STEPS_OF_SLOTS * -(-most_tokens // page_size) * page_size
    return worker, msgspec.structs.replace(info, max_total_tokens=num_tokens)


def build_follower(
    args: ServerArgs, rank: Rank, on_loaded: Callable[[], None] = lambda: None
) -> tuple[FollowerRunner, ExitStack]:
    """The runner of a rank that is not the leader, and what to close after it.

    on_loaded: called where the leader waits for the weights. Raises ConfigError or ModelError.
    """
    with ExitStack() as resources:
        built = _build(
            args,
            open_model(args),
            lambda done, total: None,
            rank,
            NO_OTHER_RANKS,
            resources,
            lambda text: (),
            on_loaded,
        )
        link, devices = built.link, built.rank.devices
        pages = _pages(built)
        do_pages = without_pages if isinstance(pages, str) else pages.do
        runner = FollowerRunner(built.runner, rank, built.weights, built.profiler, do_pages)
        if link is not None:
            assert devices is not None, rank
            own_ids = length(vocabulary_part(built.setup.model_config.vocab_size, built.setup.placement))
            graphs = _graph_pool(built, link, own_ids, lambda logits: received_ids(devices, logits))
            runner.queued = FollowerQueue(built.runner, link, graphs, devices)
        return runner, resources.pop_all()


def _build(
    args: ServerArgs,
    checkpoint: Checkpoint,
    progress: Progress,
    rank: Rank,
    others: OtherRanks,
    resources: ExitStack,
    tokenize: Tokenize,
    wait_loaded: Callable[[], None],
    ahead: ReadAhead = NOTHING_AHEAD,
) -> _Built:
    """Everything up to the runner, for a decoder.

    resources: get what must end with it. tokenize, wait_loaded: see `settle_kv_cache`. Raises ConfigError or ModelError.
    """
    setup = set_up(args, checkpoint, rank)
    if rank.group is not None and not setup.is_cpu:
        devices = DeviceGroup.join(group_of(rank), setup.placement.device, args.rank_timeout_s, others.check)
        resources.callback(devices.close)
        rank = rank.on(devices)
        setup = replace(setup, placement=replace(setup.placement, shard=rank.shard))
    processors = load_processors(args.custom_logit_processors)
    choose_kernels(setup, resources)
    of_load: list[str] = []
    with naming_memory(
        "the weights", "use --quantization int8 or int4, a smaller model, or a machine with more memory"
    ):
        setup, model, cache = load_checkpoint(setup, checkpoint, resources, of_load, progress, ahead)
    checked, setup = setup.config, settle_kv_cache(setup, model, rank, cache, tokenize, wait_loaded)
    if setup.config.kv_cache_dtype != checked.kv_cache_dtype:
        check_asked_pool(setup, rank)
    decisions = [_model_decision(setup.spec.name, setup.model_config.model_type), *setup.config.decisions, *of_load]
    if args.enable_torch_compile:
        reason = f"the model class {setup.spec.name} has other layers"
        if isinstance(model, DecoderLM):
            reason = model.compile_pieces()
        if reason:
            raise ConfigError(f"--enable-torch-compile: {reason}")
    draft = load_draft(setup, model, resources, decisions, tokenize)
    memory = _allocate(setup, model, rank, others, decisions, draft)
    link: Device | None = None if setup.is_cpu else CudaDevice(setup.placement.device)
    if link is not None and rank.devices is not None and rank.leads:
        # It does not wait for the device longer than for the other ranks.
        link = WatchedDevice(link, rank.devices, args.rank_timeout_s, others.give_up)
    table = _sequence_table(setup, memory, link, rank)
    vocab_size = setup.model_config.vocab_size
    penalties = None if link is None else DevicePenalties(table.tokens, vocab_size, link.upload)
    make_sampler = FaultySampler if args.enable_fault_injection else Sampler
    sampler = make_sampler(vocab_size, setup.config.max_running_requests, setup.placement.device, processors, penalties)
    resources.callback(sampler.grammars.close)
    rename = setup.spec.renaming(setup.model_config)
    weights = updatable_weights(setup, model, memory.attention, memory.pool, memory.draft)
    if rank.leads:
        weights.at_first_update = unmeasured(setup)
    loras = LoraPool(model, setup.placement, args.max_loras, args.max_lora_rank, rename)
    lora_fingerprints = _load_adapters(args, loras, rank)
    profiler = StepProfiler(args.profile_dir, f"-rank{rank.number}")
    make_runner = FaultyRunner if args.enable_fault_injection and rank.leads else ModelRunner
    runner = make_runner(
        model,
        memory.attention,
        table,
        sampler,
        loras,
        rank.stage,
        _drafts(setup, model, memory, draft, table, sampler) if rank.leads else None,
        None if setup.pooling is None else model.pooler,
        _media(setup, model, memory.attention, rank),
    )
    leader = LeaderRunner(runner, rank) if rank.group is not None and rank.leads else None
    if leader is not None and isinstance(link, WatchedDevice):
        leader.settle = link.settle
    return _Built(setup, rank, memory, link, runner, leader, weights, profiler, decisions, lora_fingerprints, cache)


def _drafts(
    setup: Setup, model: CausalLM, memory: _Memory, draft: LoadedDraft | None, table: SequenceTable, sampler: Sampler
) -> Drafts | None:
    if draft is None:
        return make_drafts(setup.config.speculative_algorithm, setup.args, sampler, on_host=setup.is_cpu)
    assert memory.draft is not None
    attention, link = memory.draft.attention, table.link
    steps = DraftSteps(attention, table, sampler) if link is None else DeviceDraftSteps(attention, table, sampler, link)
    return Drafts([draft.make(steps)], draft.needs.weight_bytes / model_bytes(model))


def _media(setup: Setup, model: CausalLM, attention: AttentionBackend, rank: Rank) -> MediaRows | None:
    """What keeps the encoder's outputs; None of a model that has none, where several ranks run it, and with attention that is not made for it."""
    if rank.group is not None or not isinstance(model, DecoderLM) or model.media_encoder is None:
        return None
    if model.media_encoder.sees_ahead and not attention.sees_ahead:
        return None
    synchronize = (lambda: None) if setup.is_cpu else torch.cuda.synchronize
    media = setup.model_config.media
    return MediaRows(
        model.media_encoder,
        setup.placement.device,
        synchronize,
        model.sectioned,
        merge_size=1 if media is None else media.vision.merge_size,
        places_per_second=0.0 if media is None else media.vision.places_per_second,
        deep=model.deep,
    )


def _allocate(
    setup: Setup, model: CausalLM, rank: Rank, others: OtherRanks, decisions: list[str], draft: LoadedDraft | None
) -> _Memory:
    """Measure the memory that is left and allocate the KV pool; let the model fuse its layers with the backend where it can. Raises ConfigError."""
    config, model_config, device = setup.config, setup.model_config, setup.placement.device
    shape = setup.kv_shape(rank.stage)
    graph_sizes = _graph_sizes(setup, decisions)
    verifying: tuple[int, ...] = ()
    if graph_sizes and config.speculative_algorithm != "off":
        verifying = verifying_sizes(config.max_running_requests, setup.args.speculative_num_draft_tokens)
    reserved = reserved_bytes(config, model_config, graph_sizes, verifying, gathers=rank.devices is not None)
    if isinstance(model, DecoderLM) and model.media_encoder is not None:
        reserved += setup.args.encoder_cache_bytes + WORK_BYTES
    needs = _needs(setup, model, rank)
    if draft is not None:
        needs[0] = needs[0].beside(draft.needs)
    if setup.is_cpu and guesses_by_text(config.speculative_algorithm):
        needs[0] = needs[0].beside(RankNeeds(0, BYTES_PER_TOKEN))
    plan = agreed_plan(rank, setup.args, config, needs, reserved, device, decisions, others.check)
    if rank.group is not None and rank.group.spans_hosts:  # the leader's plan is for its own host's memory
        check_pool_fits(plan.num_tokens, shape.bytes_per_token, available_bytes(device))
    attention = setup.make_attention()
    # The padding of a graph writes to a page of its own.
    num_slots = plan.num_tokens + (config.page_size if graph_sizes else 0)
    size = f"a KV cache of {plan.num_tokens} tokens ({plan.num_tokens * shape.bytes_per_token / 2**30:.1f} GiB)"
    with naming_memory(size, "lower --max-total-tokens or --mem-fraction-static"):
        pool = attention.make_kv_pool(shape, num_slots, config.page_size, device)
    sparsity = read_sparsity(setup.args, model_config.num_layers, model_config.num_kv_heads, model_config.head_dim)
    if (kv := attention.paged_kv()) is not None:
        kv.sparsity = sparsity
    reason = model.fuse(attention) if setup.is_cpu else f"the device is {config.device}"
    decisions.append(
        f"fused decoder: no, because {reason}" if reason else "fused decoder: yes, one call for all layers"
    )
    if sparsity is not None:
        if not reason and model_config.media is not None:
            reason = "media reach the layers one by one"
        if reason:
            raise ConfigError(f"--enable-double-sparsity needs the fused decoder, and {reason}")
        decisions.append(str(sparsity))
    if halves_from := rank.shard.halves_from:
        decisions.append(f"two-batch overlap: in steps of {halves_from} tokens or more, unless a row has an adapter")
    draft_attention = None if draft is None else draft.with_cache(num_slots)
    return _Memory(plan, graph_sizes, verifying, attention, pool, draft_attention)


def _needs(setup: Setup, model: CausalLM, rank: Rank) -> list[RankNeeds]:
    """Of this rank, and of one of each other stage, where nothing is loaded here."""

    def of(model: CausalLM, stage: Stage) -> RankNeeds:
        return RankNeeds(model_bytes(model), setup.kv_shape(stage).bytes_per_token)

    places = ((stage, replace(setup.placement, stage=stage)) for stage in rank.stage.others)
    others = [of(setup.spec.build(setup.model_config, place), stage) for stage, place in places]
    return [of(model, rank.stage), *others]


def _sequence_table(setup: Setup, memory: _Memory, link: Device | None, rank: Rank) -> SequenceTable:
    config = setup.config
    part = rank.number if setup.args.enable_dp_attention else 0
    return SequenceTable(
        config.max_running_requests,
        memory.plan.context_length,
        setup.placement.device,
        page_size=config.page_size if memory.attention.paged_kv() is not None else 0,
        link=link,
        part=part,
        first_slot=part * memory.plan.num_tokens,
        sparse_from=setup.args.ds_sparse_decode_threshold if setup.args.enable_double_sparsity else None,
    )


_Beside = tuple[WeightExecutor, ExitStack, StepProfiler, ExpertRecorder, PageTransfer | str]
"""What a `ModelWorker` has beside its steps, in every rank, in the order of its arguments."""


def _lane(args: ServerArgs) -> type[InlineLane | ThreadedLane]:
    return InlineLane if args.disable_overlap_schedule else ThreadedLane


def _cpu_worker(built: _Built, resources: ExitStack) -> Worker:
    """It takes over `resources`."""
    runner, leader = built.runner, built.leader
    beside = _beside_steps(built, resources, "" if runner.stage.is_whole else _NOT_OF_STAGES)
    if leader is not None and not runner.stage.is_whole:
        return ModelWorker(leader, QueuedLane, *beside)
    return ModelWorker(leader or runner, _lane(built.setup.args), *beside)


def _device_worker(built: _Built, link: Device, resources: ExitStack) -> Worker:
    """The worker of a GPU, with its graphs captured, in every rank. It takes over `resources`. Raises ConfigError."""
    leader = built.leader
    greedy = greedy_ids if leader is None else leader.greedy_ids
    graphs = _graph_pool(built, link, built.setup.model_config.vocab_size, greedy)
    runner = DeviceRunner(built.runner, link, graphs, leader)
    if graphs is not None:
        begin = time.perf_counter()
        try:
            runner.capture()
        except RuntimeError as error:
            raise ConfigError(
                f"a decode step could not be captured in a CUDA graph ({error}); start with --disable-cuda-graph"
            ) from error
        count = len(graphs.sizes) + len(graphs.verifying_sizes)
        _logger.info("captured %d CUDA graphs in %.1f s", count, time.perf_counter() - begin)
        built.weights.moved = graphs.capture if leader is None else runner.capture_later
    return ModelWorker(runner, QueuedLane, *_beside_steps(built, resources, "" if graphs is None else _NOT_IN_GRAPHS))


def _graph_pool(
    built: _Built, link: Device, vocab_size: int, greedy: Callable[[torch.Tensor], torch.Tensor]
) -> GraphPool | None:
    """The graphs of decode steps, not captured; None without. vocab_size: columns of this rank's logits. greedy: see `GraphPool`."""
    memory, runner = built.memory, built.runner
    if not memory.graph_sizes:
        return None
    return GraphPool(
        runner.model,
        runner.attention,
        runner.table,
        link,
        memory.graph_sizes,
        vocab_size,
        memory.plan.num_tokens,
        greedy,
        memory.verifying_sizes,
    )


def _beside_steps(built: _Built, resources: ExitStack, refusal: str) -> _Beside:
    """It takes over `resources`. refusal: why the choice of experts cannot be recorded; "" if it can."""
    leader, folder, device = built.leader, built.setup.args.profile_dir, built.setup.placement.device
    counts = built.runner.model.expert_counts()
    pages = _pages(built)
    if leader is None:
        experts = ExpertRecorder(counts, device, refusal)
        return built.weights, resources.pop_all(), StepProfiler(folder), experts, pages
    size = group_of(built.rank).size
    weights = LeaderWeights(built.weights, leader.jobs, size)
    experts = LeaderExperts(counts, device, leader.jobs, refusal)
    of_all = pages if isinstance(pages, str) else LeaderPages(pages, leader.jobs, size, not built.rank.shard.is_whole)
    return weights, resources.pop_all(), LeaderProfiler(folder, leader.jobs), experts, of_all


def _pages(built: _Built) -> PoolPages | str:
    runner, tensors = built.runner, None if built.cache is None else built.cache.digests
    memory = built.memory
    return page_transfer(built.setup, runner.model, memory.pool, built.rank, runner.loras, tensors, memory.draft)


def _ready_info(built: _Built, load_s: float) -> ReadyInfo:
    setup, memory = built.setup, built.memory
    num_parts = setup.args.num_kv_parts
    of_all = kv_shape(setup.model_config, getattr(torch, setup.config.kv_cache_dtype)).bytes_per_token
    of_this = setup.kv_shape(built.rank.stage).bytes_per_token
    info = _model_info(setup, built.runner.model, built.decisions, load_s)
    return msgspec.structs.replace(
        info,
        max_total_tokens=num_parts * memory.plan.num_tokens,
        context_length=memory.plan.context_length,
        kv_cache_added_error=setup.config.kv_cache_added_error,
        kv_bytes=num_parts * memory.pool.num_bytes * of_all // of_this,
        encoder=_encoder_info(built),
        lora_fingerprints=built.lora_fingerprints,
        has_experts=setup.model_config.moe is not None,
    )


def _model_info(setup: Setup, model: Model, decisions: list[str], load_s: float) -> ReadyInfo:
    """Of any model, as if it had no KV cache. Logs the decisions."""
    for decision in decisions:
        _logger.debug("%s", decision)
    config = setup.config
    return ReadyInfo(
        max_total_tokens=0,
        max_running_requests=config.max_running_requests,
        context_length=config.context_length,
        vocab_size=setup.model_config.vocab_size,
        hidden_size=setup.model_config.hidden_size,
        page_size=config.page_size,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        device=config.device,
        attention_backend=config.attention_backend,
        model_class=setup.spec.name,
        weight_bytes=round(sum(weight.whole_bytes for weight in model.weights())),
        num_parameters=sum(math.prod(weight.shape) for weight in model.weights()),
        file_format=setup.file_format,
        stored_precision=setup.stored_precision,
        stored_types=tuple(kind._asdict() for kind in setup.stored_types),
        kv_bytes=0,
        load_s=load_s,
        quantization=config.quantization,
        activations=config.activations,
        chunked_prefill_size=config.chunked_prefill_size,
        max_step_ms=config.max_step_ms,
        decisions=tuple(decisions),
        fingerprint=setup.fingerprint,
    )


def _encoder_info(built: _Built) -> EncoderInfo | None:
    """Of a multimodal model, here."""
    media, setup = built.runner.media, built.setup
    if media is None:
        return None
    encoder = media.encoder
    row_bytes = (1 + encoder.num_deep) * setup.model_config.hidden_size * setup.placement.compute_dtype.itemsize
    return EncoderInfo(max(1, setup.args.encoder_cache_bytes // row_bytes), encoder.num_slices, encoder.sees_ahead)


def _load_adapters(args: ServerArgs, loras: LoraPool, rank: Rank) -> tuple[str, ...]:
    """Load the adapters of --lora-paths, numbered from 1. Returns the fingerprints of their files. Raises ModelError that names the adapter.

    Followers load after the leader, from the same files.
    """
    named = lora_paths(args)
    if not named:
        return ()
    expected = [""] * len(named)
    if rank.group is not None and not rank.leads:
        expected = rank.group.receive().decode().split("\n")
    fingerprints = []
    for lora_id, ((name, path), fingerprint) in enumerate(zip(named, expected, strict=True), start=1):
        try:
            fingerprints.append(loras.load(lora_id, path, fingerprint))
        except ModelError as error:
            raise ModelError(f"--lora-paths: adapter {name!r:.80}: {error.message}") from None
    if rank.group is not None and rank.leads:
        told = map(content_of, fingerprints) if rank.group.spans_hosts else fingerprints
        rank.group.send("\n".join(told).encode())
    return tuple(fingerprints)


def _model_decision(model_class: str, model_type: str) -> str:
    if model_class != "transformers":
        return f"model class {model_class}: Headrace's own for model type {model_type}"
    return (
        f"model class transformers: its code for model type {model_type} with Headrace's attention and linear layers; the last bits of a "
        "row may depend on the rest of the batch"
    )


def _graph_sizes(setup: Setup, decisions: list[str]) -> tuple[int, ...]:
    """`cuda_graph_sizes` of the config, or none for a model that has no decode steps, or waits for the device within a step."""
    config = setup.config
    if not config.cuda_graph_sizes:
        return ()
    if setup.pooling is not None:
        reason = "an embedding model has no decode steps"
    elif setup.spec.name == "transformers":
        reason = "the model class transformers may wait for the device"
    elif setup.model_config.moe is not None and not kernels.runs_fused_moe(config.device):
        reason = "torch's mixture of experts waits for the device"
    else:
        return config.cuda_graph_sizes
    decisions.append(f"cuda graphs: none, {reason}")
    return ()
