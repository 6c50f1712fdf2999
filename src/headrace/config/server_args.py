"""User options, frozen, grouped. The command line and `Engine(**kwargs)` are made from this one table.

`ServerArgs` holds what the user said; `config.resolve` turns it, with the model and device, into what will be used.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from headrace.config.web import parse_hosts, parse_origins
from headrace.errors import ConfigError

MAX_INT = 2**63 - 1
LONGEST_S = 1e9
"""Thirty years: longer waits than any clock of the system can count are refused."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a number may be: least <= value <= most, above < value < below. Text: filled = not empty."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    filled: bool = False


_POSITIVE = Bounds(least=1)
_COUNT = Bounds(least=0)
_SECONDS = Bounds(least=0.0, most=LONGEST_S)
_FILLED = Bounds(filled=True)


def _opt(default: Any, group: str, help_text: str, bounds: Bounds = Bounds()) -> Any:
    return field(default=default, metadata={"group": group, "help": help_text, "bounds": bounds})


_M, _L, _S, _Q = "Model", "Adapters", "Serving", "Memory and schedule"
_K, _O = "Kernels", "Observability"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Options of a server or an Engine. Names are SGLang's where the meaning is the same."""

    model_path: str = _opt(
        "smollm2", _M, "A known name (see `headrace models`), a Hugging Face directory, or a .gguf file.", _FILLED
    )
    tokenizer_path: str | None = _opt(None, _M, "Directory or file of another tokenizer than the model's own.")
    skip_tokenizer_init: bool = _opt(
        False, _M, "Load no tokenizer: requests bring token ids and get token ids. What needs texts is refused (400)."
    )
    served_model_name: str | None = _opt(
        None, _M, "Name in /v1/models and in replies; default: the name or the file's stem."
    )
    chat_template: str | None = _opt(None, _M, "A Jinja file or text that replaces the model's chat template.")
    load_format: Literal["auto", "safetensors", "sharded_state", "gguf", "dummy"] = _opt(
        "auto", _M, "dummy = random weights from config.json alone; sharded_state = what /save_sharded_state wrote."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _opt(
        "auto", _M, "Weights and compute. On CPU, bfloat16 = bfloat16 weights with float32 activations (auto)."
    )
    disable_weight_cache: bool = _opt(
        False, _M, "Convert the weights at every start instead of keeping them packed in the cache folder."
    )
    device: Literal["auto", "cpu", "cuda"] = _opt("auto", _M, "Where the model runs.")
    model_impl: Literal["auto", "headrace", "transformers"] = _opt(
        "auto", _M, "Our own model code, or the transformers one with our attention; auto prefers ours."
    )
    context_length: int | None = _opt(None, _M, "Longest prompt + output in tokens; default: the model's.", _POSITIVE)
    sampling_defaults: Literal["model", "openai"] = _opt(
        "model",
        _M,
        "Sampling values of requests that name none: the model's own, or temperature 1 and nothing else (openai).",
    )
    random_seed: int = _opt(0, _M, "Seed of dummy weights, and of the seeds given to requests that bring none.", _COUNT)
    json_model_override_args: str = _opt("{}", _M, "JSON object merged into config.json.")

    lora_paths: str = _opt(
        "",
        _L,
        "Adapters to load at start: name=path, comma-separated. Paths are the operator's; requests name adapters.",
    )
    max_loras: int = _opt(
        8, _L, "Most adapters in memory; one more takes the place of the one that was not used longest.", _COUNT
    )
    max_lora_rank: int = _opt(64, _L, "Adapters of a higher rank are refused.", _POSITIVE)

    host: str = _opt("127.0.0.1", _S, "Address to listen on.", _FILLED)
    port: int = _opt(30000, _S, "Port to listen on; 0 = any free one.", Bounds(least=0, most=65535))
    api_key: str | None = _opt(None, _S, "Key for every route but health, ready and metrics.", _FILLED)
    admin_api_key: str | None = _opt(
        None, _S, "Key for the control routes; default: the api key guards them too.", _FILLED
    )
    api_key_file: str | None = _opt(
        None, _S, "TOML or JSON file of keys with a name, a weight and limits each; read again on SIGHUP.", _FILLED
    )
    allow_origins: str = _opt(
        "",
        _S,
        "Origins whose web pages may use this server (CORS), comma-separated: https://chat.example; * = any. Default: none but its own.",
    )
    allowed_hosts: str | None = _opt(
        None,
        _S,
        "Names that requests may give as Host, comma-separated, besides localhost and --host; * = any. Default: no others when --host is a "
        "loopback address, else any.",
        _FILLED,
    )
    warmups: str = _opt("", _S, "Comma-separated warm-up routines to run before ready: generate, chat.")
    skip_server_warmup: bool = _opt(False, _S, "Do not run the one-token warm-up request at start.")
    single_process: bool = _opt(False, _S, "Scheduler and detokenizer as threads of the main process.")
    tokenizer_worker_num: int = _opt(
        1,
        _S,
        "Processes that read requests, tokenize and write replies; more than one relieves the main process of many streams.",
        Bounds(least=1, most=64),
    )
    dp_size: int = _opt(
        1, _S, "Replicas of the model on this machine; they share its cores and memory.", Bounds(least=1, most=64)
    )
    load_balance_method: Literal["round_robin", "shortest_queue", "total_tokens", "cache_aware"] = _opt(
        "round_robin",
        _S,
        "With --dp-size: who gets a request: each in turn, fewest requests, fewest tokens, or who knows its prefix.",
    )
    disable_recovery: bool = _opt(
        False, _S, "Do not start a dead scheduler or detokenizer again: answer every waiter with an error and leave."
    )
    max_restarts: int = _opt(5, _S, "Leave when more than N restarts are needed within ten minutes.", _COUNT)
    max_n: int = _opt(64, _S, "Most samples of one prompt.", _POSITIVE)
    max_batch_prompts: int = _opt(1024, _S, "Most prompts of one request.", _POSITIVE)
    max_body_bytes: int = _opt(32 << 20, _S, "Largest request body.", _POSITIVE)
    stream_interval: int = _opt(1, _S, "Send a chunk every N tokens of a stream.", _POSITIVE)
    incremental_streaming_output: bool = _opt(
        False, _S, "Chunks of /generate streams hold what is new, not all so far."
    )
    drain_timeout_s: float = _opt(
        30.0, _S, "After SIGTERM, wait at most this many seconds for running requests.", _SECONDS
    )
    request_timeout_s: float = _opt(
        0.0,
        _S,
        "Abort a request after this many seconds (408, or the tokens made so far once it has begun to answer); 0 = never.",
        _SECONDS,
    )
    queue_timeout_s: float = _opt(
        0.0, _S, "Refuse a request (503) that has waited this many seconds without running; 0 = never.", _SECONDS
    )
    max_stream_buffer_bytes: int = _opt(
        1 << 20,
        _S,
        "Abort a stream whose client leaves more than N bytes of output unread, beyond what the socket holds.",
        _POSITIVE,
    )
    max_sessions: int = _opt(1000, _S, "Most sessions that are open at once.", _COUNT)
    max_session_tokens: int = _opt(4_000_000, _S, "Most tokens that all sessions together may hold.", _COUNT)
    session_timeout_s: float = _opt(
        3600.0, _S, "Close a session that nobody has used for this many seconds; 0 = never.", _SECONDS
    )
    keep_alive_timeout_s: int = _opt(30, _S, "Close an idle HTTP connection after N seconds.", _SECONDS)
    custom_logit_processors: str = _opt(
        "",
        _S,
        "Processors that requests may name: name=module:callable, comma-separated. Code of the operator, not of clients.",
    )
    child_env: str = _opt(
        "",
        _S,
        "Names of more environment variables for the engine's processes, comma-separated. They get those of libraries and devices, and none "
        "that may be a secret: name here what your logit processors read.",
    )
    disable_openapi: bool = _opt(False, _S, "No /openapi.json and /docs.")

    mem_fraction_static: float | None = _opt(
        None,
        _Q,
        "Share of free memory (container limits respected) for weights and KV pool; default: 0.5 on CPU, 0.85 on a GPU.",
        Bounds(above=0.0, below=1.0),
    )
    max_total_tokens: int | None = _opt(
        None, _Q, "KV pool size in tokens; default: from mem_fraction_static.", _POSITIVE
    )
    max_running_requests: int = _opt(64, _Q, "Most samples in a step.", _POSITIVE)
    max_queued_requests: int = _opt(
        2048, _Q, "Most samples that wait for a running slot; more are answered 503.", _POSITIVE
    )
    chunked_prefill_size: int | None = _opt(
        None,
        _Q,
        "Most prompt tokens in a step, of all requests together; -1 = as many as --max-prefill-tokens allows; "
        "default: 512 on CPU, 2048 on a GPU.",
    )
    max_prefill_tokens: int = _opt(
        2048,
        _Q,
        "Most tokens in a step, of all requests together; one token for each running request always fits.",
        _POSITIVE,
    )
    schedule_policy: Literal["fcfs", "lpm", "priority"] = _opt(
        "fcfs", _Q, "Order of the queue: arrival, longest cached prefix, or priority (higher first, ageing)."
    )
    schedule_conservativeness: float = _opt(1.0, _Q, "Larger = admit fewer, retract less.", Bounds(above=0.0, most=1e9))
    clip_max_new_tokens_estimate: int = _opt(
        4096, _Q, "Reserve KV for at most N output tokens of a request, however many it may make.", _POSITIVE
    )
    priority_ageing_s: float = _opt(
        10.0,
        _Q,
        "With policy priority: the priority of a waiting request rises by one each time it has waited this many seconds.",
        _SECONDS,
    )
    enable_priority_preemption: bool = _opt(
        False, _Q, "With policy priority: a waiting request takes the place of running ones of much lower priority."
    )
    priority_scheduling_preemption_threshold: int = _opt(
        10, _Q, "With --enable-priority-preemption: how much lower a priority must be.", _POSITIVE
    )
    page_size: int | None = _opt(
        None, _Q, "KV page in tokens, 1 or 16; default: what the attention backend prefers. On CPU 1 is much slower."
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "bf16", "float16", "int8", "fp8_e4m3"] = _opt(
        "auto",
        _Q,
        "Element type of the KV cache; auto = that of the weights; int8, or fp8_e4m3 on a GPU = half the bytes of bfloat16.",
    )
    disable_radix_cache: bool = _opt(False, _Q, "Share nothing between requests.")
    disable_overlap_schedule: bool = _opt(False, _Q, "Plan a step only when the one before has been processed.")
    enable_cache_report: bool = _opt(True, _Q, "Report cached tokens in usage details.")

    attention_backend: Literal["auto", "torch_native", "cpu", "triton", "flashinfer"] = _opt(
        "auto", _K, "Attention kernels; see `headrace doctor`."
    )
    enable_deterministic_inference: bool = _opt(
        False, _K, "On a GPU, bits that do not depend on the batch, at some cost in speed. On CPU they never do."
    )
    num_threads: int | None = _opt(None, _K, "Compute threads on CPU; default: what the container may use.", _POSITIVE)
    quantization: Literal["none", "int16", "int8", "int8-fast", "int4", "fp8"] = _opt(
        "none",
        _K,
        "Linear layers in integers, quantised at load: int16 (closer to the float weights than bfloat16), int8, int8-fast (quicker, less "
        "exact), int4 on CPU, fp8, int4 on a GPU; a checkpoint that is quantised is served as it is stored. See docs/quantization.md.",
    )
    disable_cuda_graph: bool = _opt(False, _K, "On a GPU, launch every kernel of a decode step instead of one graph.")
    cuda_graph_bs: str = _opt(
        "",
        _K,
        "Batch sizes that have a graph, comma-separated; default: 1, 2, 4, 8, then steps of 8, from 64 on of 16.",
    )
    cuda_graph_max_bs: int | None = _opt(
        None, _K, "Largest batch that has a graph; default: --max-running-requests, at most 256.", _POSITIVE
    )
    enable_torch_compile: bool = _opt(
        False, _K, "On a GPU, compile what lies between attentions with torch.compile instead of the project's kernels."
    )
    disable_native_kernels: bool = _opt(False, _K, "Torch fallbacks instead of the native CPU kernels.")

    log_level: Literal["debug", "info", "warning", "error"] = _opt("info", _O, "Least severe line that is logged.")
    log_requests: bool = _opt(False, _O, "One line per finished request, with counts and times.")
    log_requests_level: Literal[0, 1, 2, 3] = _opt(
        0,
        _O,
        "With --log-requests: 1 = also the sampling parameters, 2 = also the first 2,048 characters of input and output, 3 = all of them. "
        "Input and output are private.",
    )
    decode_log_interval: int = _opt(200, _O, "Log scheduler statistics every N steps; 0 = never.", _COUNT)
    disable_metrics: bool = _opt(False, _O, "No /metrics.")
    metrics_compat: Literal["none", "vllm", "sglang"] = _opt(
        "none", _O, "Export the metrics under the names of another server too, for its dashboards."
    )
    timeline_requests: int = _opt(
        1000, _O, "/v1/requests/{rid} has a timeline of each of the last N finished requests; 0 = none.", _COUNT
    )
    profile_dir: str | None = _opt(
        None, _O, "Folder that /start_profile may write traces to; without it there is no profiling.", _FILLED
    )
    crash_dump_dir: str | None = _opt(
        None, _O, "When a part of the engine dies, write what the last requests were to this folder.", _FILLED
    )
    dump_requests_dir: str | None = _opt(
        None,
        _O,
        "/dump_requests writes what the last requests were to this folder; without it there are no such dumps.",
        _FILLED,
    )
    crash_dump_prompts: bool = _opt(
        False, _O, "The beginnings of prompts in crash and request dumps, too. Off by default: they are private."
    )
    otlp_traces_endpoint: str | None = _opt(
        None, _O, "Send a span per request to this OTLP/HTTP URL; needs the extra `otel`.", _FILLED
    )
    save_dir: str | None = _opt(
        None, _S, "Folder below which /save_sharded_state may write the weights; without it nothing is saved.", _FILLED
    )
    weight_update_timeout_s: float = _opt(
        600.0,
        _S,
        "Give up a weight update, or the load of an adapter, that takes longer than this to read or receive; 0 = never.",
        _SECONDS,
    )
    watchdog_timeout_s: float = _opt(
        300.0, _O, "End the server when a step takes longer than this; 0 = never.", _SECONDS
    )
    soft_watchdog_timeout_s: float = _opt(
        30.0, _O, "Warn when a loop stands still for this many seconds; 0 = never.", _SECONDS
    )
    enable_fault_injection: bool = _opt(False, _O, "Test hook: accept fault requests. Never in production.")

    @property
    def served_name(self) -> str:
        """The model's name for clients; never a path."""
        if self.served_model_name:
            return self.served_model_name
        path = Path(self.model_path)
        return path.stem if path.suffix == ".gguf" else path.name or "model"

    def __post_init__(self) -> None:
        """Checks that need neither model nor device. Raises ConfigError."""
        for field_ in fields(self):
            option = "--" + field_.name.replace("_", "-")
            _check(option, getattr(self, field_.name), field_.type, field_.metadata["bounds"])
        parse_origins(self.allow_origins)
        parse_hosts(self.allowed_hosts or "")
        if self.chunked_prefill_size is not None and self.chunked_prefill_size != -1 and self.chunked_prefill_size < 1:
            raise ConfigError(f"--chunked-prefill-size must be -1 or at least 1, got {self.chunked_prefill_size}")
        for name in ("tokenizer_path", "chat_template"):
            if self.skip_tokenizer_init and getattr(self, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} does not go with --skip-tokenizer-init")
        if self.dp_size > 1 and self.single_process:
            raise ConfigError("--dp-size needs processes: it does not go with --single-process")
        if self.tokenizer_worker_num > 1 and self.single_process:
            raise ConfigError("--tokenizer-worker-num above 1 needs processes: it does not go with --single-process")
        if self.cuda_graph_bs and self.cuda_graph_max_bs is not None:
            raise ConfigError("--cuda-graph-bs names the largest size too: leave --cuda-graph-max-bs out")
        if self.cuda_graph_bs and self.disable_cuda_graph:
            raise ConfigError("--cuda-graph-bs does not go with --disable-cuda-graph")
        if self.page_size not in (None, 1, 16):
            raise ConfigError(f"--page-size must be 1 or 16, got {self.page_size}")
        if self.enable_priority_preemption and self.schedule_policy != "priority":
            raise ConfigError("--enable-priority-preemption needs --schedule-policy priority")
        if self.crash_dump_prompts and self.crash_dump_dir is None and self.dump_requests_dir is None:
            raise ConfigError("--crash-dump-prompts says what --crash-dump-dir or --dump-requests-dir holds: give both")
        if self.log_requests_level and not self.log_requests:
            raise ConfigError(
                f"--log-requests-level {self.log_requests_level} says what --log-requests writes: give both"
            )


def _check(option: str, value: object, annotation: Any, bounds: Bounds) -> None:
    """Raises ConfigError, naming the option, unless `value` has the field's type and is within its bounds."""
    if get_origin(annotation) is Literal:
        _check_choice(option, value, get_args(annotation))
        return
    kinds = get_args(annotation) or (annotation,)
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


def _check_choice(option: str, value: object, choices: Collection[object]) -> None:
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ConfigError(f"{option} must be one of {', '.join(map(str, choices))}, got {value!r:.80}")


def _check_number(option: str, value: float, bounds: Bounds) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{option} must be a finite number, got {value}")
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise ConfigError(f"{option} is too large a number")
    for holds, what in (
        (value >= bounds.least, f"at least {bounds.least:g}"),
        (value <= bounds.most, f"at most {bounds.most:g}"),
        (value > bounds.above, f"above {bounds.above:g}"),
        (value < bounds.below, f"below {bounds.below:g}"),
    ):
        if not holds:
            raise ConfigError(f"{option} must be {what}, got {value}")
