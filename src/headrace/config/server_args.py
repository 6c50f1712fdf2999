"""User options, frozen, grouped. The command line and `Engine(**kwargs)` are made from this one table.

`ServerArgs` holds what the user said; `config.resolve` turns it, with the model and device, into what will be used.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from headrace.errors import ConfigError


def _opt(default: Any, group: str, help_text: str) -> Any:
    return field(default=default, metadata={"group": group, "help": help_text})


_M, _S, _Q, _K, _O = "Model", "Serving", "Memory and schedule", "Kernels", "Observability"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Options of a server or an Engine. Names are SGLang's where the meaning is the same."""

    model_path: str = _opt(
        "smollm2", _M, "A known name (see `headrace models`), a Hugging Face directory, or a .gguf file."
    )
    tokenizer_path: str | None = _opt(None, _M, "Directory or file of another tokenizer than the model's own.")
    served_model_name: str | None = _opt(
        None, _M, "Name in /v1/models and in replies; default: the name or the file's stem."
    )
    chat_template: str | None = _opt(None, _M, "A Jinja file or text that replaces the model's chat template.")
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = _opt(
        "auto", _M, "dummy = random weights from config.json alone."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _opt(
        "auto", _M, "Weights and compute. On CPU, bfloat16 = bfloat16 weights with float32 activations (auto)."
    )
    device: Literal["auto", "cpu", "cuda"] = _opt("auto", _M, "Where the model runs.")
    model_impl: Literal["auto", "headrace", "transformers"] = _opt(
        "auto", _M, "Our own model code, or the transformers one with our attention; auto prefers ours."
    )
    context_length: int | None = _opt(None, _M, "Longest prompt + output in tokens; default: the model's.")
    sampling_defaults: Literal["model", "openai"] = _opt(
        "model", _M, "Where sampling defaults come from: the model's generation_config, or plain 1.0 / off."
    )
    random_seed: int = _opt(0, _M, "Seed of dummy weights and of requests that bring none.")
    json_model_override_args: str = _opt("{}", _M, "JSON object merged into config.json.")

    host: str = _opt("127.0.0.1", _S, "Address to listen on.")
    port: int = _opt(30000, _S, "Port to listen on; 0 = any free one.")
    api_key: str | None = _opt(None, _S, "Key for every route but health, ready and metrics.")
    admin_api_key: str | None = _opt(None, _S, "Key for the control routes; default: the api key guards them too.")
    allow_origins: str = _opt("*", _S, "CORS origins, comma-separated; empty = no CORS.")
    warmups: str = _opt("", _S, "Comma-separated warm-up routines to run before ready: generate, chat.")
    skip_server_warmup: bool = _opt(False, _S, "Do not run the one-token warm-up request at start.")
    single_process: bool = _opt(False, _S, "Scheduler and detokenizer as threads of the main process.")
    max_n: int = _opt(64, _S, "Most samples of one prompt.")
    max_batch_prompts: int = _opt(1024, _S, "Most prompts of one request.")
    max_body_bytes: int = _opt(32 << 20, _S, "Largest request body.")
    stream_interval: int = _opt(1, _S, "Send a chunk every so many tokens of a stream.")
    incremental_streaming_output: bool = _opt(False, _S, "/generate streams deltas instead of the text so far.")
    drain_timeout_s: float = _opt(30.0, _S, "After SIGTERM, wait so long for running requests.")
    request_timeout_s: float = _opt(0.0, _S, "Abort a request after so long; 0 = never.")
    keep_alive_timeout_s: int = _opt(30, _S, "Close an idle HTTP connection after so long.")
    custom_logit_processors: str = _opt(
        "",
        _S,
        "Processors that requests may name: name=module:callable, comma-separated. Code of the operator, not of clients.",
    )
    disable_openapi: bool = _opt(False, _S, "No /openapi.json and /docs.")

    mem_fraction_static: float = _opt(
        0.5, _Q, "Share of free memory (container limits respected) for weights and KV pool."
    )
    max_total_tokens: int | None = _opt(None, _Q, "KV pool size in tokens; default: from mem_fraction_static.")
    max_running_requests: int = _opt(64, _Q, "Most samples in a step.")
    max_queued_requests: int = _opt(2048, _Q, "Most samples that wait; more are answered 503.")
    chunked_prefill_size: int = _opt(512, _Q, "Most prompt tokens of one request in a step; -1 = whole prompts.")
    max_prefill_tokens: int = _opt(2048, _Q, "Most tokens in a step over all requests.")
    schedule_policy: Literal["fcfs", "lpm", "priority"] = _opt(
        "fcfs", _Q, "Order of the queue: arrival, longest cached prefix, or priority (higher first, ageing)."
    )
    schedule_conservativeness: float = _opt(1.0, _Q, "Larger = admit fewer, retract less.")
    priority_ageing_s: float = _opt(10.0, _Q, "With policy priority: waiting so long raises the priority by one.")
    page_size: int | None = _opt(None, _Q, "KV page in tokens, 1 or 16; default: what the attention backend prefers.")
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = _opt(
        "auto", _Q, "Element type of the KV cache."
    )
    disable_radix_cache: bool = _opt(False, _Q, "Share nothing between requests.")
    disable_overlap_schedule: bool = _opt(False, _Q, "Plan a step only when the one before has been processed.")
    enable_cache_report: bool = _opt(True, _Q, "Report cached tokens in usage details.")

    attention_backend: Literal["auto", "torch_native", "cpu"] = _opt(
        "auto", _K, "Attention kernels; see `headrace doctor`."
    )
    num_threads: int | None = _opt(None, _K, "Compute threads on CPU; default: what the container may use.")
    quantization: Literal["none", "int8", "int8-fast", "int4"] = _opt(
        "none",
        _K,
        "Linear layers in 8 or 4 bits, quantised at load, on CPU; a checkpoint that is quantised is served as it is stored. "
        "int8-fast is quicker and less exact. See docs/quantization.md.",
    )
    disable_native_kernels: bool = _opt(False, _K, "Torch fallbacks instead of the native CPU kernels.")

    log_level: Literal["debug", "info", "warning", "error"] = _opt("info", _O, "Least severe line that is logged.")
    log_requests: bool = _opt(False, _O, "One line per finished request, with counts and times.")
    log_requests_level: Literal[0, 1] = _opt(
        0, _O, "1 = also the beginning of prompt and text. Off by default: they are private."
    )
    decode_log_interval: int = _opt(200, _O, "Log scheduler statistics every so many steps; 0 = never.")
    disable_metrics: bool = _opt(False, _O, "No /metrics.")
    watchdog_timeout_s: float = _opt(300.0, _O, "End the server when a step takes longer than this; 0 = never.")
    soft_watchdog_timeout_s: float = _opt(30.0, _O, "Warn when a loop stands still for so long; 0 = never.")
    enable_fault_injection: bool = _opt(False, _O, "Test hook: accept fault requests. Never in production.")

    def __post_init__(self) -> None:
        """Checks that need neither model nor device. Raises ConfigError."""
        positive = ("max_n", "max_batch_prompts", "max_body_bytes", "stream_interval", "max_running_requests",
                    "max_queued_requests", "max_prefill_tokens")  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        for name in ("max_total_tokens", "context_length", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.chunked_prefill_size != -1 and self.chunked_prefill_size < 1:
            raise ConfigError(f"--chunked-prefill-size must be -1 or at least 1, got {self.chunked_prefill_size}")
        if self.page_size not in (None, 1, 16):
            raise ConfigError(f"--page-size must be 1 or 16, got {self.page_size}")
        if not 0.0 < self.mem_fraction_static < 1.0:
            raise ConfigError(f"--mem-fraction-static must be between 0 and 1, got {self.mem_fraction_static}")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}")
        if self.schedule_conservativeness <= 0:
            raise ConfigError(f"--schedule-conservativeness must be above 0, got {self.schedule_conservativeness}")
        for field_ in fields(self):
            choices = getattr(field_.type, "__args__", ())
            if (
                choices
                and getattr(field_.type, "__origin__", None) is Literal
                and getattr(self, field_.name) not in choices
            ):
                raise ConfigError(
                    f"--{field_.name.replace('_', '-')} must be one of {', '.join(map(str, choices))}, "
                    f"got {getattr(self, field_.name)!r}"
                )
