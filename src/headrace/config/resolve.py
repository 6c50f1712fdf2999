"""Resolves the user's options for a model and a device into one frozen `Config`.

Pure: no torch, no files, no globals. Owns every automatic choice that does not need a measurement, describes each in `decisions` for the
start-up log, and refuses combinations that cannot work. In which bits a model runs is `config.precision`. Does not size the KV pool (that needs
the loaded weights).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.checkpoint.families import native_types
from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.weight_formats import FORMATS, Scheme
from headrace.config.checks import speculative_algorithm
from headrace.config.machine import MEM_FRACTION, DeviceFacts, check_memory, least_weight_bytes, most_running
from headrace.config.precision import check_compile, choose_activations, choose_dtype, choose_quantization
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError

_KV_NAMES = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}

CHUNKED_PREFILL_SIZE = {"cpu": 512, "cuda": 2048}
"""--chunked-prefill-size by device: larger steps are hardly faster per token."""

MAX_STEP_MS = 200
"""--max-step-ms by default."""

_WIDEST_HEAD_IN_BYTES = 128
"""Elements of a head that `--kv-cache-dtype auto` gives to one scale of an int8 cache. 64 cost 0.1 % of perplexity, 256 about 0.3 %."""

_LEAST_OF_BLOCKS = 84 / 256
"""Bytes of a weight in Q2_K."""

_LARGEST_GRAPH = 256
_GRAPH_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, _LARGEST_GRAPH + 1, 16))


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """Requirements on an attention backend. page_size: None = what the backend prefers. deterministic: the bits of a row must depend only on its
    position and its own sequence, even on a GPU."""

    device: str
    native_kernels: bool
    head_dim: int
    kv_cache_dtype: str
    page_size: int | None
    deterministic: bool = False


class AttentionFacts(Protocol):
    """The facts of an attention backend that the choice needs; `attention.base.AttentionBackend` documents them."""

    name: str
    page_size: int
    verified: frozenset[str]
    captures: bool

    def reasons_against(self, needs: AttentionNeeds) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Config:
    """What the options leave open. Counts of tokens; chunked_prefill_size is the most prompt tokens in a step; max_step_ms: None = no bound.

    cuda_graph_sizes: captured batch sizes of decode steps, ascending; empty = none.
    deterministic: results on a GPU do not depend on the batch. On CPU they never do. speculative_algorithm: auto may still turn out not to pay.
    activations: dtype of what linear layers that are not quantised multiply with their weights.
    kv_cache_fallback: what the KV cache gets instead if the model loses too much in kv_cache_dtype, which is still to be measured; empty = it stays.
    kv_cache_added_error: what was measured, see `execution.kv_precision`; None = nothing.
    decisions: one sentence per choice that the user did not make.
    """

    device: str
    dtype: str
    kv_cache_dtype: str
    attention_backend: str
    page_size: int
    context_length: int
    max_running_requests: int
    chunked_prefill_size: int
    max_step_ms: int | None
    num_threads: int
    native_kernels: bool
    deterministic: bool
    activations: str
    quantization: Scheme
    mem_fraction_static: float
    cuda_graph_sizes: tuple[int, ...]
    speculative_algorithm: str
    decisions: tuple[str, ...]
    kv_cache_fallback: str = ""
    kv_cache_added_error: float | None = None

    @property
    def weight_format(self) -> Scheme:
        is_rounded = self.device == "cpu" and self.quantization == "none" and self.activations == "bfloat16"
        return "bfloat16" if is_rounded else self.quantization


def resolve(
    args: ServerArgs,
    model: ModelConfig,
    facts: DeviceFacts,
    backends: Sequence[AttentionFacts],
    *,
    batch_invariant: bool = True,
    most_tokens: int | None = None,
    generates: bool = True,
) -> Config:
    """Decide every setting. backends: the fastest first. batch_invariant: of the model, see `ModelSpec`. most_tokens: of a text, see `PoolingConfig`.
    Raises ConfigError, which says what does not fit and what to change.
    """
    _check_experts(args, model)
    decisions: list[str] = []
    device = _device(args, facts, decisions)
    native = device == "cpu" and facts.native_kernels and not args.disable_native_kernels
    if device == "cpu" and not native:
        reason = "--disable-native-kernels" if args.disable_native_kernels else facts.native_reason
        decisions.append(f"native kernels off, torch runs every CPU op (slower): {reason}")
    dtype = choose_dtype(args, model, device, facts, decisions)
    quantization = choose_quantization(args, model, device, dtype, facts, decisions)
    quantization, activations = choose_activations(
        args, device, dtype, quantization, facts if native else None, decisions
    )
    deterministic = _deterministic(args, device, quantization, decisions)
    check_compile(args, device, quantization, deterministic)
    kv_floats = _kv_cache_dtype(args, device, dtype)
    needs = AttentionNeeds(device, native, model.head_dim, kv_floats, args.page_size, deterministic)
    backend = _attention_backend(args, needs, backends, decisions)
    is_chosen = args.kv_cache_dtype != "auto"
    kv_cache_dtype = kv_floats if is_chosen else _kv_cache_beside(needs, quantization, backend, decisions)
    page_size = args.page_size
    if page_size is None:
        page_size = backend.page_size
        decisions.append(f"page_size {page_size}: preferred by attention backend {backend.name}")
    context_length = _context_length(args, model, decisions, most_tokens)
    cuda_graph_sizes = _cuda_graph_sizes(args, device, backend, decisions)
    num_threads = args.num_threads or facts.num_cpus
    if args.num_threads is None and device == "cpu":
        decisions.append(f"num_threads {num_threads}: the cores that this process may use")
    return Config(
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        attention_backend=backend.name,
        page_size=page_size,
        context_length=context_length,
        max_running_requests=most_running(args),
        chunked_prefill_size=_chunked_prefill_size(args, device, decisions),
        max_step_ms=_max_step_ms(args, device, deterministic, batch_invariant),
        num_threads=num_threads,
        native_kernels=native,
        deterministic=deterministic,
        activations=activations,
        quantization=quantization,
        mem_fraction_static=args.mem_fraction_static or MEM_FRACTION[device],
        cuda_graph_sizes=cuda_graph_sizes,
        speculative_algorithm=speculative_algorithm(args, device, batch_invariant, generates, decisions),
        decisions=tuple(decisions),
        kv_cache_fallback="" if kv_cache_dtype == kv_floats else kv_floats,
    )


def with_kv_cache(config: Config, kv_cache_dtype: str, reason: str) -> Config:
    """`config` with this KV precision for good, and the reason as its decision."""
    others = (decision for decision in config.decisions if not decision.startswith("kv_cache_dtype "))
    return replace(
        config,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_fallback="",
        decisions=(*others, f"kv_cache_dtype {kv_cache_dtype}: {reason}"),
    )


def refuse_early(args: ServerArgs, model: ModelConfig, has_cuda: bool | None, memory_bytes: int) -> None:
    """Refuse what `resolve` would refuse anyway, from what is known before torch is imported. Raises ConfigError.

    has_cuda: False = there is surely no GPU; None = torch will tell. memory_bytes: of the machine in all. What depends on kernels and
    attention backends is left to `resolve`.
    """
    if args.model_impl == "headrace" and model.model_type not in native_types():
        raise ConfigError(
            f"--model-impl headrace: model type {model.model_type} has no implementation in Headrace; try --model-impl transformers"
        )
    _check_experts(args, model)
    facts = DeviceFacts(has_cuda=has_cuda is not False, native_kernels=True, native_reason="", num_cpus=1)
    device = _device(args, facts, [])
    _context_length(args, model, [])
    if device != "cpu":
        return
    dtype = choose_dtype(args, model, device, facts, [])
    quantization = choose_quantization(args, model, device, dtype, facts, [])
    choose_activations(args, device, dtype, quantization, facts, [])
    check_compile(args, device, quantization, deterministic=False)
    _kv_cache_dtype(args, device, dtype)
    least = (
        _LEAST_OF_BLOCKS
        if FORMATS[quantization].blocks
        else FORMATS[quantization].itemsize(4 if dtype == "float32" else 2)
    )
    weight_bytes = least_weight_bytes(model, least)
    if model.encoder is None:
        check_memory(args, model, weight_bytes, memory_bytes)


def _check_experts(args: ServerArgs, model: ModelConfig) -> None:
    """Raises ConfigError if --ep-size has nothing to deal, or --enable-dp-attention no experts to share."""
    if args.enable_dp_attention and model.moe is None:
        raise ConfigError(
            f"--enable-dp-attention is for mixtures of experts, and model type {model.model_type} has none here: leave the option out, "
            "and --dp-size starts replicas"
        )
    if args.ep_size > 1 and model.moe is None:
        raise ConfigError(f"--ep-size {args.ep_size}: this model has no experts; leave the option out")
    if model.moe is not None and args.ep_size > model.moe.num_experts:
        raise ConfigError(
            f"--ep-size {args.ep_size}: the model has {model.moe.num_experts} experts, and each rank needs one; leave the option out"
        )


def _device(args: ServerArgs, facts: DeviceFacts, decisions: list[str]) -> str:
    if args.device == "cuda" and not facts.has_cuda:
        raise ConfigError("--device cuda: torch finds no GPU here; use --device cpu")
    if args.device != "auto":
        return args.device
    device = "cuda" if facts.has_cuda else "cpu"
    decisions.append(f"device {device}: {'a GPU is present' if facts.has_cuda else 'torch finds no GPU'}")
    return device


def _kv_cache_dtype(args: ServerArgs, device: str, dtype: str) -> str:
    """What the option says; for auto the dtype of the weights, which every backend can do."""
    if args.kv_cache_dtype == "auto":
        return dtype
    if device == "cpu" and args.kv_cache_dtype == "float16":
        raise ConfigError("--kv-cache-dtype float16 is not supported on CPU; use bfloat16 or float32")
    if device == "cpu" and args.kv_cache_dtype == "fp8_e4m3":
        raise ConfigError("--kv-cache-dtype fp8_e4m3 is not supported on CPU; use int8")
    return _KV_NAMES.get(args.kv_cache_dtype, args.kv_cache_dtype)


def _kv_cache_beside(needs: AttentionNeeds, quantization: Scheme, backend: AttentionFacts, decisions: list[str]) -> str:
    """Integers beside weights of integers on CPU, if the backend has such a cache and, of 8 bits, heads are not wide; else the dtype of the weights.
    The model may still refuse integers, see `Config.kv_cache_fallback`.

    needs: with the dtype of the weights.
    """
    wanted = FORMATS[quantization].kv_cache if needs.device == "cpu" else ""
    why = {
        "int8": "at half the bytes of bfloat16; --kv-cache-dtype bfloat16 is the exact one",
        "int16": "attention multiplies 16-bit integers, too; closer to floats than bfloat16",
    }
    found = needs.kv_cache_dtype
    if not wanted:
        reason = "that of the weights"
    elif wanted == "int8" and needs.head_dim > _WIDEST_HEAD_IN_BYTES:
        reason = f"heads of {needs.head_dim} elements lose too much in {wanted}"
    elif against := backend.reasons_against(replace(needs, kv_cache_dtype=wanted)):
        reason = f"{backend.name} cannot have {wanted}: {'; '.join(against)}"
    else:
        found, reason = wanted, f"goes with {quantization} weights, {why[wanted]}"
    decisions.append(f"kv_cache_dtype {found}: {reason}")
    return found


def _deterministic(args: ServerArgs, device: str, quantization: Scheme, decisions: list[str]) -> bool:
    if not args.enable_deterministic_inference:
        return False
    if device == "cpu":
        decisions.append(
            "deterministic inference: the option has no effect on CPU, where every kernel is deterministic"
        )
        return False
    if FORMATS[quantization].quantizes:
        raise ConfigError(
            f"--enable-deterministic-inference: {quantization} linear layers depend on the batch on {device}"
        )
    decisions.append(
        "deterministic inference: attention and linear layers use shapes that do not depend on the batch (slower)"
    )
    return True


def _attention_backend(
    args: ServerArgs, needs: AttentionNeeds, backends: Sequence[AttentionFacts], decisions: list[str]
) -> AttentionFacts:
    """The requested backend; else the fastest one verified on this type of device; else the fastest."""
    if args.attention_backend != "auto":
        (backend,) = [backend for backend in backends if backend.name == args.attention_backend]
        if reasons := backend.reasons_against(needs):
            raise ConfigError(f"--attention-backend {backend.name}: {'; '.join(reasons)}")
        return backend
    refusals = {backend.name: backend.reasons_against(needs) for backend in backends}
    able = [backend for backend in backends if not refusals[backend.name]]
    if not able:
        refused = "; ".join(f"{name} cannot: {', '.join(reasons)}" for name, reasons in refusals.items())
        raise ConfigError(f"no attention backend can run this model on this machine: {refused}")
    chosen = next((backend for backend in able if needs.device in backend.verified), able[0])
    why = _why(chosen, backends, refusals, needs.device)
    decisions.append(f"attention_backend {chosen.name}: {'; '.join(why) or 'the fastest for this device'}")
    return chosen


def _why(
    chosen: AttentionFacts, backends: Sequence[AttentionFacts], refusals: Mapping[str, list[str]], device: str
) -> list[str]:
    """What speaks against each faster backend, and what is to be known of the chosen one."""
    why = []
    for backend in backends[: backends.index(chosen)]:
        reasons = refusals[backend.name]
        says = f"cannot: {', '.join(reasons)}" if reasons else f"is not verified on {device}"
        why.append(f"{backend.name} {says}")
    if device not in chosen.verified:
        why.append(f"not verified on {device} yet, nor is any other that supports the model")
    return why


def _cuda_graph_sizes(args: ServerArgs, device: str, backend: AttentionFacts, decisions: list[str]) -> tuple[int, ...]:
    asked = args.cuda_graph_bs or args.cuda_graph_max_bs is not None
    if device != "cuda":
        if asked:
            raise ConfigError(f"--cuda-graph-bs and --cuda-graph-max-bs are for GPUs; the device is {device}")
        return ()
    if args.disable_cuda_graph:
        return ()
    if not backend.captures:
        if asked:
            raise ConfigError(
                f"attention backend {backend.name} cannot be captured in a CUDA graph; leave --cuda-graph-* out"
            )
        decisions.append(f"cuda graphs: none, attention backend {backend.name} cannot be captured")
        return ()
    if args.cuda_graph_bs:
        return _sizes(args.cuda_graph_bs, most_running(args))
    largest = min(args.cuda_graph_max_bs or _LARGEST_GRAPH, most_running(args))
    sizes = (*(size for size in _GRAPH_SIZES if size < largest), largest)
    decisions.append(f"cuda graphs: {len(sizes)} batch sizes up to {largest}")
    return sizes


def _sizes(text: str, largest: int) -> tuple[int, ...]:
    try:
        sizes = {int(part) for part in text.split(",")}
    except ValueError:
        raise ConfigError(f"--cuda-graph-bs takes comma-separated whole numbers, got {text!r:.80}") from None
    if not all(1 <= size <= largest for size in sizes):
        raise ConfigError(f"--cuda-graph-bs {text}: sizes must be from 1 to --max-running-requests ({largest})")
    return tuple(sorted(sizes))


def _chunked_prefill_size(args: ServerArgs, device: str, decisions: list[str]) -> int:
    size = args.chunked_prefill_size
    if size is None:
        size = CHUNKED_PREFILL_SIZE[device]
        decisions.append(
            f"chunked_prefill_size {size}: larger chunks are hardly faster on {device} and delay running streams"
        )
    return args.max_prefill_tokens if size == -1 else min(size, args.max_prefill_tokens)


def _max_step_ms(args: ServerArgs, device: str, deterministic: bool, batch_invariant: bool) -> int | None:
    """How prompts are cut then depends on the machine's speed, so tokens must not depend on how they are cut."""
    asked = args.max_step_ms
    if batch_invariant and (device == "cpu" or deterministic):
        return MAX_STEP_MS if asked is None else asked if asked > 0 else None
    if asked is not None and asked > 0:
        raise ConfigError(
            f"--max-step-ms {asked}: tokens would depend on the machine's speed, since "
            + ("transformers' code" if not batch_invariant else f"{device} without --enable-deterministic-inference")
            + " gives other bits when prompts are cut in another way; bound steps by --chunked-prefill-size"
        )
    return None


def _context_length(args: ServerArgs, model: ModelConfig, decisions: list[str], most_tokens: int | None = None) -> int:
    trained = model.max_position_embeddings
    if args.context_length is None:
        own = most_tokens or trained
        decisions.append(f"context_length {own}: the model's")
        return own
    if args.context_length > trained:
        is_dynamic = model.rope.rope_type == "dynamic"
        why = "; dynamic NTK scaling beyond them would change keys that are in the cache already" if is_dynamic else ""
        raise ConfigError(
            f"--context-length {args.context_length} is longer than the {trained} positions that the model was trained for{why}"
        )
    return args.context_length
