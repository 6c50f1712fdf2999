"""Builds the worker of an encoder. `build` makes that of a model that generates, or of a decoder that pools.

Runs once, in the scheduler's process.
"""

import math
import time
from contextlib import ExitStack

from headrace.attention.base import KvPool
from headrace.checkpoint.base import Checkpoint
from headrace.config.server_args import ServerArgs
from headrace.distributed.rank import ALONE
from headrace.errors import ConfigError
from headrace.execution.embedding_runner import EmbeddingRunner
from headrace.execution.faults import FaultyEmbeddingRunner
from headrace.execution.memory import naming_memory
from headrace.execution.profiler import StepProfiler
from headrace.execution.setup import (
    Setup,
    choose_kernels,
    fingerprint_of,
    load_checkpoint,
    set_up,
    updatable_weights,
)
from headrace.execution.weight_cache import Progress
from headrace.execution.worker import InlineLane, ModelWorker, ThreadedLane
from headrace.log import get_logger
from headrace.messages.control import ReadyInfo
from headrace.messages.step import Worker
from headrace.models.spec import EncoderModel

_logger = get_logger(__name__)

_STEPS_OF_SLOTS = 4
"""The scheduler has slots for the texts of so many steps, two of which may be in flight."""


def build_embedding_worker(args: ServerArgs, checkpoint: Checkpoint, progress: Progress) -> tuple[Worker, ReadyInfo]:
    """A worker for the encoder in `checkpoint`, ready for its first step, and its description.

    progress: called with (bytes loaded, total bytes). Raises ConfigError or ModelError.
    """
    begin = time.perf_counter()
    fingerprint = fingerprint_of(checkpoint)
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
            model, _ = load_checkpoint(setup, checkpoint, fingerprint, progress, resources, decisions)
        attention = setup.make_attention()
        reason = model.fuse(attention)
        decisions.append(
            f"fused encoder: no, because {reason}" if reason else "fused encoder: yes, one call for all layers"
        )
        page_size = setup.config.page_size
        weights = updatable_weights(setup, model, attention, KvPool([], [], 0, page_size))
        make_runner = FaultyEmbeddingRunner if args.enable_fault_injection else EmbeddingRunner
        runner = make_runner(model, attention, setup.placement.device)
        ready = _ready_info(setup, model, decisions, fingerprint, time.perf_counter() - begin)
        lane = ThreadedLane if setup.config.overlap else InlineLane
        worker = ModelWorker(runner, lane, weights, resources.pop_all(), StepProfiler(args.profile_dir))
    for decision in decisions:
        _logger.debug("%s", decision)
    return worker, ready


def _ready_info(setup: Setup, model: EncoderModel, decisions: list[str], fingerprint: str, load_s: float) -> ReadyInfo:
    config = setup.config
    page_size, rows = config.page_size, config.max_running_requests
    most_tokens = max(config.chunked_prefill_size, page_size * rows)
    return ReadyInfo(
        max_total_tokens=_STEPS_OF_SLOTS * -(-most_tokens // page_size) * page_size,
        max_running_requests=rows,
        context_length=config.context_length,
        vocab_size=setup.model_config.vocab_size,
        hidden_size=setup.model_config.hidden_size,
        page_size=page_size,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        device=config.device,
        attention_backend=config.attention_backend,
        model_class=setup.spec.name,
        weight_bytes=round(sum(weight.whole_bytes for weight in model.weights())),
        num_parameters=sum(math.prod(weight.shape) for weight in model.weights()),
        file_format=setup.file_format,
        stored_precision=setup.stored_precision,
        kv_bytes=0,
        load_s=load_s,
        quantization=config.quantization,
        activations=config.activations,
        chunked_prefill_size=config.chunked_prefill_size,
        max_step_ms=config.max_step_ms,
        decisions=tuple(decisions),
        fingerprint=fingerprint,
    )
