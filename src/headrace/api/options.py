"""The types of the arguments of `Engine` and `Runtime`.

Owns no defaults and no checks: those are of the structs that the arguments become. A test compares the names and types with theirs.
"""

import functools
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields
from os import PathLike
from typing import Any, Literal, TypedDict

from headrace import log
from headrace.config.server_args import ServerArgs
from headrace.config.settings import from_arguments
from headrace.errors import ConfigError
from headrace.media_kinds import AudioRef, ImageRef, VideoRef
from headrace.sampling.params import SamplingParams

logger = log.get_logger(__name__)

Messages = Sequence[Mapping[str, Any]]
"""Messages of a chat completion: `{"role": ..., "content": ...}`. The URL of an image may also be the bytes of a file."""

Tools = Sequence[Mapping[str, Any]]
"""Tools of a chat completion: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


class _SamplingFields(TypedDict, total=False):
    """Fields that all have in which sampling parameters are given. None = not set."""

    json_schema: str | dict[str, object] | bool | None
    regex: str | None
    ebnf: str | None
    lark: str | None
    choice: list[str] | None
    structural_tag: str | dict[str, object] | None
    grammar_after: str | None
    stop: str | list[str] | None
    stop_token_ids: list[int] | None
    stop_regex: str | list[str] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    logit_bias: dict[str, float] | None
    bad_words: list[str] | None
    allowed_token_ids: list[int] | None
    seed: int | None


class ChatOptions(_SamplingFields, total=False):
    """Fields of a chat completion, those that are usual from Python; see docs/http-api.md. None = not set."""

    # sampling
    max_tokens: int | None
    min_tokens: int | None
    frequency_penalty: float | None
    presence_penalty: float | None
    ignore_eos: bool | None
    no_stop_trim: bool | None
    skip_special_tokens: bool | None
    # what the reply must match
    response_format: dict[str, Any] | None
    # tools and reasoning
    tool_choice: str | dict[str, object] | None
    parallel_tool_calls: bool | None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "default"] | None
    thinking_budget: int | None
    separate_reasoning: bool | None
    stream_reasoning: bool | None
    include_reasoning: bool | None
    # the prompt
    chat_template_kwargs: dict[str, object] | None
    continue_final_message: bool | None
    add_generation_prompt: bool | None
    truncate_prompt_tokens: int | None
    # routing
    model: str
    lora_path: str | None
    session_params: dict[str, Any] | None
    rid: str | None
    priority: int | None
    cache_salt: str | None


class ServerOptions(TypedDict, total=False):
    """Options of an engine: the fields of `ServerArgs`, see docs/cli.md."""

    model_path: str
    tokenizer_path: str | None
    skip_tokenizer_init: bool
    served_model_name: str | None
    chat_template: str | None
    tool_call_parser: str
    reasoning_parser: str
    mmproj: str
    load_format: Literal["auto", "safetensors", "sharded_state", "gguf", "dummy"]
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    disable_weight_cache: bool
    device: Literal["auto", "cpu", "cuda"]
    model_impl: Literal["auto", "headrace", "transformers"]
    is_embedding: bool
    allow_dimensions: bool
    context_length: int | None
    sampling_defaults: Literal["model", "openai"]
    default_max_tokens: int | None
    random_seed: int
    json_model_override_args: str
    lora_paths: str
    max_loras: int
    max_lora_rank: int
    host: str
    port: int
    api_key: str | None
    admin_api_key: str | None
    api_key_file: str | None
    allow_origins: str
    allowed_hosts: str | None
    warmups: str
    skip_server_warmup: bool
    single_process: bool
    detokenize_in: Literal["process", "main"]
    tokenizer_worker_num: int
    tp_size: int
    pp_size: int
    ep_size: int
    rank_timeout_s: float
    nnodes: int | None
    node_rank: int | None
    dist_init_addr: str | None
    dist_timeout: float
    dist_secret_file: str | None
    dp_size: int
    enable_dp_attention: bool
    load_balance_method: Literal["round_robin", "shortest_queue", "total_tokens", "cache_aware"]
    disable_recovery: bool
    max_restarts: int
    max_n: int
    max_batch_prompts: int
    max_body_bytes: int
    stream_interval: int
    incremental_streaming_output: bool
    drain_timeout_s: float
    request_timeout_s: float
    queue_timeout_s: float
    sse_ping_interval_s: float
    max_stream_buffer_bytes: int
    max_sessions: int
    max_session_tokens: int
    session_timeout_s: float
    max_stored_responses: int
    ssl_certfile: str | None
    ssl_keyfile: str | None
    keep_alive_timeout_s: int
    custom_logit_processors: str
    grammar_backend: Literal["llguidance", "none"]
    child_env: str
    disable_openapi: bool
    disable_ui: bool
    mem_fraction_static: float | None
    max_total_tokens: int | None
    max_running_requests: int | None
    max_inputs: int
    max_images: int
    max_image_bytes: int
    max_audios: int
    max_audio_bytes: int
    max_videos: int
    max_video_frames: int
    max_image_patches: int
    allowed_media_domains: str
    allowed_local_media_path: str | None
    image_processes: int
    image_cache_bytes: int
    encoder_cache_bytes: int
    max_queued_requests: int
    chunked_prefill_size: int | None
    max_prefill_tokens: int
    max_step_ms: int | None
    schedule_policy: Literal["fcfs", "lpm", "priority"]
    schedule_conservativeness: float
    clip_max_new_tokens_estimate: int
    priority_ageing_s: float
    enable_priority_preemption: bool
    priority_scheduling_preemption_threshold: int
    page_size: int | None
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "bf16", "float16", "int16", "int8", "fp8_e4m3"]
    disable_radix_cache: bool
    kv_cache_dir: str | None
    kv_cache_disk_size: int
    kv_cache_persist_tenants: bool
    disable_overlap_schedule: bool
    speculative_algorithm: Literal["off", "auto", "ngram", "draft", "eagle3"]
    speculative_num_draft_tokens: int
    speculative_shared_tokens: int
    speculative_draft_model_path: str | None
    speculative_draft_model_quantization: Literal["auto", "none", "gguf", "int16", "int8", "int8-fast", "int4", "fp8"]
    allow_auto_truncate: bool
    enable_cache_report: bool
    attention_backend: Literal["auto", "torch_native", "cpu", "triton", "flashinfer"]
    enable_deterministic_inference: bool
    num_threads: int | None
    numa_bind: bool
    activations: Literal["auto", "float32", "bfloat16"]
    quantization: Literal["auto", "none", "gguf", "int16", "int8", "int8-fast", "int4", "fp8"]
    disable_cuda_graph: bool
    cuda_graph_bs: str
    cuda_graph_max_bs: int | None
    enable_torch_compile: bool
    disable_native_kernels: bool
    log_level: Literal["debug", "info", "warning", "error"]
    log_format: Literal["text", "json"]
    log_requests: bool
    log_requests_level: Literal[0, 1, 2, 3]
    decode_log_interval: int
    disable_metrics: bool
    metrics_compat: Literal["none", "vllm", "sglang", "underscore"]
    timeline_requests: int
    profile_dir: str | None
    crash_dump_dir: str | None
    dump_requests_dir: str | None
    crash_dump_prompts: bool
    otlp_traces_endpoint: str | None
    kv_events_config: str | None
    ray: bool
    ray_address: str | None
    ray_min_replicas: int
    ray_max_replicas: int
    ray_target_ongoing_requests: float
    ray_num_cpus: int | None
    ray_num_gpus: int
    ray_placement: Literal["pack", "strict_spread"]
    save_dir: str | None
    weight_update_timeout_s: float
    watchdog_timeout_s: float
    soft_watchdog_timeout_s: float
    enable_fault_injection: bool


class EngineOptions(ServerOptions, total=False):
    """The options of an engine, also as SGLang and vLLM call them: docs/coming-from-sglang.md, docs/coming-from-vllm.md."""

    model: str
    tokenizer: str | None
    max_model_len: int | None
    seed: int
    hf_overrides: str | dict[str, Any]
    generation_config: str
    stream_output: bool
    allowed_origins: str | list[str]
    disable_fastapi_docs: bool
    api_server_count: int
    gpu_memory_utilization: float | None
    max_num_seqs: int | None
    max_num_batched_tokens: int
    block_size: int | None
    enable_priority_scheduling: bool
    enforce_eager: bool
    cudagraph_capture_sizes: str | list[int]
    cuda_graph_sizes: str | list[int]
    max_cudagraph_capture_size: int | None
    tensor_parallel_size: int
    tp: int
    pipeline_parallel_size: int
    pp: int
    expert_parallel_size: int
    ep: int
    data_parallel_size: int
    dp: int
    nccl_init_addr: str | None
    lora_modules: str | list[str]
    max_cpu_loras: int
    max_loaded_loras: int
    num_speculative_tokens: int
    enable_log_requests: bool
    enable_request_time_stats_logging: bool
    log_requests_format: Literal["text", "json"]
    disable_log_stats: bool
    crash_dump_folder: str | None
    watchdog_timeout: float
    soft_watchdog_timeout: float


def option_values(model: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ServerArgs` for the arguments of an `Engine` or a `Runtime`. Logs what differs from other servers. Raises ConfigError."""
    if not isinstance(model, str | PathLike | None):
        raise ConfigError(f"the model is a name or a path, got {model!r:.80}; other arguments are given by their names")
    if model is not None and not {"model", "model_path"}.isdisjoint(given):
        raise ConfigError("the model is given twice: by its place and by its name")
    found = from_arguments(given if model is None else {"model_path": model, **given})
    if found.notes:
        log.configure(found.values.get("log_level", "info"), "main", found.values.get("log_format", "text"))
        for note in found.notes:
            logger.info("%s", note)
    return found.values


@functools.cache
def options_text() -> str:
    """What `help(Engine)` says of each option."""
    blocks = []
    for option in fields(ServerArgs):
        lines = textwrap.wrap(option.metadata["help"], 100, initial_indent="    ", subsequent_indent="    ")
        blocks.append(
            "\n".join([f"{option.name}: {inspect.formatannotation(option.type)} = {option.default!r}", *lines])
        )
    return "\n".join(blocks)


class SamplingOptions(_SamplingFields, total=False):
    """How the output is sampled: the fields of `SamplingParams` but `n`, see docs/python.md. None = not set."""

    max_new_tokens: int | None
    min_new_tokens: int
    frequency_penalty: float
    presence_penalty: float
    ignore_eos: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    thinking_budget: dict[str, Any] | None
    sampling_seed: int | None
    stream_interval: int | None


class SeveralSamples(SamplingOptions, total=False):
    """The same for n samples of a prompt."""

    n: int


JsonSampling = SamplingOptions | SeveralSamples
"""Sampling parameters of a prompt, also for a server."""

Sampling = JsonSampling | SamplingParams
"""Sampling parameters of a prompt."""


Image = ImageRef | bytes | PathLike[str] | str | dict[str, str]
"""The bytes of a file, its path, or what is sent over HTTP: a `data:`, `http(s):` or `file:` URL, base64, or these with a detail. See
docs/images.md."""


Audio = AudioRef | bytes | PathLike[str] | str | dict[str, str]
"""Audio in the same forms."""

Video = VideoRef | str | dict[str, Any]
"""A video by its frames, each an `Image`: a dict with "frames" and "fps". See docs/images.md."""


class _CallFields(TypedDict, total=False):
    """Fields that `/generate` and `/encode` have."""

    rid: str | list[str] | None
    priority: int | None
    extra_key: str | list[str | None] | None
    cache_salt: str | list[str | None] | None
    lora_path: str | list[str | None] | None
    routed_dp_rank: int | None
    data_parallel_rank: int | None


class GenerateOptions(_CallFields, total=False):
    """The other fields of `/generate`, see docs/http-api.md; a list has one value for each prompt."""

    text: str | list[str] | None
    input_embeds: bytes | list[bytes | list[float | list[float]]] | None
    image_data: Image | Sequence[Image | Sequence[Image] | None] | None
    audio_data: Audio | Sequence[Audio | Sequence[Audio] | None] | None
    video_data: Video | Sequence[Video | Sequence[Video] | None] | None
    return_logprob: bool | list[bool]
    logprob_start_len: int | list[int]
    top_logprobs_num: int | list[int]
    token_ids_logprob: list[int | list[int]] | None
    return_text_in_logprobs: bool
    return_hidden_states: bool | list[bool]
    return_routed_experts: bool | list[bool]
    return_progress: bool
    custom_logit_processor: str | list[str | None] | None
    prediction: str | list[str | None] | None
    session_params: dict[str, Any] | list[dict[str, Any]] | None


class EncodeOptions(_CallFields, total=False):
    """The other fields of `/encode`, see docs/http-api.md; a list has one value for each input."""

    text: str | list[str | list[str]] | None
    is_cross_encoder_request: bool
    dimensions: int | None
    truncate_prompt_tokens: int | None
    truncation_side: Literal["right", "left"]
