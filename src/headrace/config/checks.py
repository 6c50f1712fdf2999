"""Which values options may have, and which can be combined: with each other, with the device, with the kind of model.

Each check raises ConfigError that names the options. Pure, but for `private_folder`; any process.
"""

import math
from dataclasses import fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

from headrace.config.bounds import Bounds
from headrace.config.kv_events import read_kv_events
from headrace.config.server_options import ServerOptions, flag
from headrace.errors import ConfigError

_MAX_INT = 2**63 - 1
_MAX_RANKS = 64

_ALGORITHM = "--speculative-algorithm"

ENCODER_STEP_TOKENS = 2048
"""Tokens of a step of an encoder, if its longest text is shorter: more are hardly faster per token, and others wait for the step."""

ENCODER_RUNNING = 256
"""Default of --max-running-requests for an encoder: most texts are short, and two steps are prepared at a time."""

_NOT_OF_ENCODERS = {
    "lora_paths": "encoders take no adapters",
    "enable_torch_compile": "its layers are one native call, or not compiled",
    "max_total_tokens": "an encoder has no KV cache",
    "kv_cache_dtype": "an encoder has no KV cache",
    "kv_events_config": "an encoder has no KV cache",
    "enable_double_sparsity": "an encoder has no KV cache",
    "cuda_graph_bs": "an encoder has no decode steps",
    "cuda_graph_max_bs": "an encoder has no decode steps",
}
"""Options that an encoder has no use for, and why."""

Args = TypeVar("Args", bound=ServerOptions)


def check_value(option: str, value: object, annotation: Any, bounds: Bounds) -> None:
    """Raises ConfigError, naming the option, unless `value` has the field's type and is within its bounds."""
    kinds = get_args(annotation) or (annotation,)
    if get_origin(annotation) is Literal:
        if not any(type(value) is type(choice) and value == choice for choice in kinds):
            raise ConfigError(f"{option} must be one of {', '.join(map(str, kinds))}, got {value!r:.80}")
        return
    if value is None and NoneType in kinds:
        return
    kind = kinds[0]
    # An int is a fine float; a bool is neither.
    if type(value) is not kind and not (kind is float and type(value) is int):
        what = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
        raise ConfigError(f"{option} must be {what}, got {value!r:.80}")
    if isinstance(value, str) and bounds.filled and not value.strip():
        raise ConfigError(f"{option} must not be empty; leave it out instead")
    if isinstance(value, int | float) and kind is not bool:
        _check_number(option, value, bounds)


def _check_number(option: str, value: float, bounds: Bounds) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{option} must be a finite number, got {value}")
    if isinstance(value, int) and abs(value) > _MAX_INT:
        raise ConfigError(f"{option} is too large a number")
    for holds, what in (
        (value >= bounds.least, f"at least {bounds.least:g}"),
        (value <= bounds.most, f"at most {bounds.most:g}"),
        (value > bounds.above, f"above {bounds.above:g}"),
        (value < bounds.below, f"below {bounds.below:g}"),
    ):
        if not holds:
            raise ConfigError(f"{option} must be {what}, got {value}")


def check_combinations(args: ServerOptions) -> None:
    _check_processes(args)
    _check_speculation(args)
    for field in fields(args) if not args.ray else ():
        if field.metadata["group"] == "Ray" and getattr(args, field.name) != field.default:
            raise ConfigError(f"{flag(field.name)} needs --ray")
    if read_kv_events(args.kv_events_config, args.num_replicas) is not None and args.disable_radix_cache:
        raise ConfigError("--kv-events-config needs the prefix cache: it cannot be combined with --disable-radix-cache")
    if (args.kv_cache_dir is not None or args.kv_cache_host_size) and args.disable_radix_cache:
        option = "--kv-cache-dir" if args.kv_cache_dir is not None else "--kv-cache-host-size"
        raise ConfigError(f"{option} is behind the prefix cache: it cannot be combined with --disable-radix-cache")
    _check_sparsity(args)
    _check_disaggregation(args)
    for option, value in (("--chunked-prefill-size", args.chunked_prefill_size), ("--max-step-ms", args.max_step_ms)):
        if value is not None and value != -1 and value < 1:
            raise ConfigError(f"{option} must be -1 or at least 1, got {value}")
    for option, given in (("--tokenizer-path", args.tokenizer_path), ("--chat-template", args.chat_template)):
        if args.skip_tokenizer_init and given is not None:
            raise ConfigError(f"{option} cannot be combined with --skip-tokenizer-init")
    if args.tokenizer_worker_num > 1 and args.max_stored_responses:
        raise ConfigError(
            "--max-stored-responses cannot be combined with --tokenizer-worker-num above 1: each worker would keep its own"
        )
    if args.cuda_graph_bs and args.cuda_graph_max_bs is not None:
        raise ConfigError("--cuda-graph-bs lists all sizes; leave --cuda-graph-max-bs out")
    if args.cuda_graph_bs and args.disable_cuda_graph:
        raise ConfigError("--cuda-graph-bs cannot be combined with --disable-cuda-graph")
    if args.page_size not in (None, 1, 16):
        raise ConfigError(f"--page-size must be 1 or 16, got {args.page_size}")
    if args.enable_priority_preemption and args.schedule_policy != "priority":
        raise ConfigError("--enable-priority-preemption needs --schedule-policy priority")
    if args.crash_dump_prompts and args.crash_dump_dir is None and args.dump_requests_dir is None:
        raise ConfigError("--crash-dump-prompts needs --crash-dump-dir or --dump-requests-dir")
    if args.log_requests_level and not args.log_requests:
        raise ConfigError(f"--log-requests-level {args.log_requests_level} needs --log-requests")


def _check_disaggregation(args: ServerOptions) -> None:
    mode, backend = args.disaggregation_mode, args.disaggregation_transfer_backend
    if mode == "null":
        return
    option = f"--disaggregation-mode {mode}"
    if backend == "nixl":
        raise ConfigError("--disaggregation-transfer-backend nixl is not there yet: use tcp, or shm on one machine")
    if backend == "shm" and not Path("/dev/shm").is_dir():
        raise ConfigError("--disaggregation-transfer-backend shm: this system has no /dev/shm; use tcp")
    if args.disaggregation_bootstrap_port + args.num_replicas > 65536:
        raise ConfigError("--disaggregation-bootstrap-port: each replica needs a port of its own above it")
    beside = {
        "--disable-radix-cache: KV that is sent is that of the prefix cache": args.disable_radix_cache,
        "--kv-on-update recompute or keep": args.kv_on_update != "flush",
        "--enable-double-sparsity": args.enable_double_sparsity,
        "--enable-dp-attention": args.enable_dp_attention,
        "--ray": args.ray,
        "--nnodes": (args.nnodes or 1) > 1,
    }
    for other, given in beside.items():
        if given:
            raise ConfigError(f"{option} cannot be combined with {other}")


def _check_sparsity(args: ServerOptions) -> None:
    option = "--enable-double-sparsity"
    for field in fields(args):
        if (
            field.name.startswith("ds_")
            and not args.enable_double_sparsity
            and getattr(args, field.name) != field.default
        ):
            raise ConfigError(f"{flag(field.name)} needs {option}")
    if not args.enable_double_sparsity:
        return
    if args.ds_channel_config_path is None:
        raise ConfigError(
            f"{option} needs --ds-channel-config-path: make the file by headrace quantize --calibrate-sparsity"
        )
    for name, value in (("channel", args.ds_heavy_channel_num), ("token", args.ds_heavy_token_num)):
        if value % 16:
            raise ConfigError(f"--ds-heavy-{name}-num must be a multiple of 16, got {value}")
    beside = {
        "--device cuda": args.device == "cuda",
        "--tp-size, --pp-size or --dp-size": args.num_ranks > 1 or args.num_replicas > 1,
        "adapters: give --max-loras 0": args.max_loras > 0,
        "--kv-cache-dir or --kv-cache-host-size": args.kv_cache_dir is not None or args.kv_cache_host_size > 0,
    }
    for other, given in beside.items():
        if given:
            raise ConfigError(
                f"{option} runs on one CPU process that keeps its KV to itself: it cannot be combined with {other}"
            )


def _check_processes(args: ServerOptions) -> None:
    sizes = {"--dp-size": args.num_replicas, "--tp-size": args.tp_size, "--pp-size": args.pp_size}
    for name, size in sizes.items():
        if size > 1 and args.single_process:
            raise ConfigError(f"{name} needs processes: it cannot be combined with --single-process")
    if args.numa_bind and args.single_process:
        raise ConfigError(
            "--numa-bind binds processes of the engine: it cannot be combined with --single-process, whose caller would be bound"
        )
    if args.numa_bind and args.device == "cuda":
        raise ConfigError("--numa-bind binds ranks that compute on the CPU: it cannot be combined with --device cuda")
    if args.num_ranks > _MAX_RANKS:
        raise ConfigError(f"--tp-size times --pp-size may be at most {_MAX_RANKS}, got {args.num_ranks}")
    if args.ep_size not in (1, args.tp_size):
        raise ConfigError(
            f"--ep-size must be 1 or the value of --tp-size ({args.tp_size}), whose ranks share the experts, got {args.ep_size}"
        )
    if args.enable_dp_attention:
        _check_dp_attention(args)
    if args.enable_two_batch_overlap:
        _check_two_batches(args)
    if args.tokenizer_worker_num > 1 and args.single_process:
        raise ConfigError("--tokenizer-worker-num above 1 needs processes: it cannot be combined with --single-process")


def _check_dp_attention(args: ServerOptions) -> None:
    option = "--enable-dp-attention"
    if args.tp_size == 1:
        raise ConfigError(f"{option} needs --tp-size: the ranks that requests are dealt to")
    if args.dp_size != args.tp_size:
        raise ConfigError(
            f"{option}: --dp-size is the number of ranks here, not of replicas: it must be the value of --tp-size, {args.tp_size}, got {args.dp_size}"
        )
    if args.pp_size > 1:
        raise ConfigError(f"{option} cannot be combined with --pp-size: use --tp-size alone")
    if args.lora_paths:
        raise ConfigError(f"{option} cannot be combined with --lora-paths: adapters are not supported with it")


def _check_two_batches(args: ServerOptions) -> None:
    option = "--enable-two-batch-overlap"
    if args.tp_size == 1:
        raise ConfigError(f"{option} needs --tp-size above 1: it hides the sums over those processes")
    if args.enable_dp_attention:
        raise ConfigError(f"{option} cannot be combined with --enable-dp-attention")


def guesses_by_text(algorithm: str) -> bool:
    """Whether tokens are guessed from those that are known, without a model."""
    return algorithm in ("ngram", "auto")


def _check_speculation(args: ServerOptions) -> None:
    algorithm, path = args.speculative_algorithm, args.speculative_draft_model_path
    has_weights = algorithm in ("draft", "eagle3")
    if has_weights and path is None:
        raise ConfigError(f"{_ALGORITHM} {algorithm} needs --speculative-draft-model-path")
    if path is not None and not has_weights:
        raise ConfigError(f"--speculative-draft-model-path needs {_ALGORITHM} draft or eagle3")
    if args.speculative_draft_model_quantization != "auto" and algorithm != "draft":
        raise ConfigError(f"--speculative-draft-model-quantization needs {_ALGORITHM} draft")
    if args.speculative_shared_tokens and not guesses_by_text(algorithm):
        raise ConfigError(f"--speculative-shared-tokens needs {_ALGORITHM} ngram or auto")
    if has_weights and (args.num_ranks > 1 or args.enable_dp_attention):
        raise ConfigError(
            f"{_ALGORITHM} {algorithm} cannot be combined with --tp-size, --pp-size and --enable-dp-attention so far: use ngram or auto"
        )
    if algorithm == "eagle3" and args.enable_torch_compile:
        raise ConfigError(f"{_ALGORITHM} eagle3 cannot be combined with --enable-torch-compile")


def speculative_algorithm(
    args: ServerOptions, device: str, batch_invariant: bool, generates: bool, decisions: list[str]
) -> str:
    """What drafts tokens there: as asked, but `auto` is off where it is not supported. Raises ConfigError if another one is not.

    batch_invariant: whether, on a CPU, a token has the same logits in a step of several tokens as alone. generates: it is no embedding model.
    """
    if args.speculative_algorithm != "auto":
        _check_guesses_on(device, args, batch_invariant)
        return args.speculative_algorithm
    if not generates:
        reason = "an embedding model generates no tokens"
    elif device != "cpu":
        reason = "auto drafts on CPUs only; ngram drafts on a GPU, too"
    elif not batch_invariant:
        reason = "the bits of models that run through transformers' code depend on the batch"
    else:
        return "auto"
    if args.speculative_shared_tokens:
        raise ConfigError(f"--speculative-shared-tokens: nothing is drafted: {reason}; leave the option out")
    decisions.append(f"speculative_algorithm off: {reason}")
    return "off"


def _check_guesses_on(device: str, args: ServerOptions, batch_invariant: bool) -> None:
    algorithm = args.speculative_algorithm
    if algorithm == "off":
        return
    if device != "cpu" and args.num_ranks > 1:
        raise ConfigError(
            f"{_ALGORITHM} {algorithm} with several ranks works on CPUs only so far, and the device is {device}"
        )
    if not batch_invariant:
        raise ConfigError(
            f"{_ALGORITHM} {algorithm}: the bits of models that run through transformers' code depend on the batch, so the output would change"
        )


def check_pooling(args: ServerOptions, is_encoder: bool) -> None:
    """Raises ConfigError for an option of the user's that a model without outputs has no use for."""
    if is_encoder:
        default: dict[str, Any] = {field.name: field.default for field in fields(args)}
        for name, why in _NOT_OF_ENCODERS.items():
            if getattr(args, name) != default[name]:
                raise ConfigError(f"{flag(name)}: {why}; leave the option out")
    if args.speculative_algorithm not in ("off", "auto"):
        raise ConfigError(
            f"{_ALGORITHM} {args.speculative_algorithm}: an embedding model generates no tokens; leave the option out"
        )
    if args.model_impl == "transformers":
        raise ConfigError("--model-impl transformers is for models that generate; leave the option out")
    if args.num_ranks > 1 or args.num_nodes > 1:
        raise ConfigError(
            "--tp-size, --pp-size and --nnodes are for models that generate; to use more cores or GPUs for this one, start replicas with --dp-size"
        )


def encoder_args(args: Args, context_length: int) -> Args:
    """The options with which an encoder is served: its texts are computed whole, there is no KV to cache, and no text to make of tokens.

    context_length: of the model. Raises ConfigError for options that cut texts.
    """
    longest = min(args.context_length or context_length, context_length)
    given = args.chunked_prefill_size
    if given is not None and 0 < given < longest:
        raise ConfigError(
            f"--chunked-prefill-size {given}: each token of this model sees all others, so a text of up to {longest} tokens is computed in one "
            "step; raise it, or lower --context-length"
        )
    step_tokens = max(given or 0, ENCODER_STEP_TOKENS, longest)
    return replace(
        args,
        chunked_prefill_size=step_tokens,
        max_prefill_tokens=max(args.max_prefill_tokens, step_tokens),
        max_running_requests=args.max_running_requests or ENCODER_RUNNING,
        disable_radix_cache=True,
        detokenize_in="main",
    )


def private_folder(option: str, name: str) -> Path:
    """The folder of an option, made if need be, which only its owner may read: it will hold what people wrote. Raises ConfigError."""
    path = Path(name)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{option}: {error.strerror}: {name!r:.200}") from None
    if mode & 0o077:
        raise ConfigError(
            f"{option}: others may read {name!r:.200}, which will hold prompts; make it private with chmod 700"
        )
    return path
