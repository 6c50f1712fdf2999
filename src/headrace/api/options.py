"""The types of the arguments of `Engine` and `Runtime`.

Owns no defaults and no checks: those are of the structs that the arguments become. A test compares the names and types with theirs. Those of an
engine's options are taken from `ServerOptions` itself.
"""

import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from os import PathLike
from typing import Any, Concatenate, Literal, ParamSpec, TypedDict

from headrace import log
from headrace.config.server_args import ServerArgs
from headrace.config.server_options import ServerOptions
from headrace.config.settings import from_arguments
from headrace.errors import ConfigError
from headrace.media_kinds import AudioRef, ImageRef, VideoRef
from headrace.sampling.params import SamplingParams

logger = log.get_logger(__name__)

P = ParamSpec("P")
_UNSET: Any = None

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


@dataclass(frozen=True, slots=True)
class EngineOptions(ServerOptions):
    """The arguments of an `Engine`: its options, also as SGLang and vLLM call them (docs/coming-from-sglang.md, docs/coming-from-vllm.md).

    None is ever made: `takes` gives its signature to type checkers and editors.
    """

    model: str | None = None
    _: KW_ONLY
    tokenizer: str | None = _UNSET
    max_model_len: int | None = _UNSET
    seed: int = _UNSET
    hf_overrides: str | dict[str, Any] = _UNSET
    generation_config: str = _UNSET
    stream_output: bool = _UNSET
    allowed_origins: str | list[str] = _UNSET
    disable_fastapi_docs: bool = _UNSET
    api_server_count: int = _UNSET
    gpu_memory_utilization: float | None = _UNSET
    max_num_seqs: int | None = _UNSET
    max_num_batched_tokens: int = _UNSET
    block_size: int | None = _UNSET
    enable_priority_scheduling: bool = _UNSET
    enforce_eager: bool = _UNSET
    cudagraph_capture_sizes: str | list[int] = _UNSET
    cuda_graph_sizes: str | list[int] = _UNSET
    max_cudagraph_capture_size: int | None = _UNSET
    tensor_parallel_size: int = _UNSET
    tp: int = _UNSET
    pipeline_parallel_size: int = _UNSET
    pp: int = _UNSET
    enable_dbo: bool = _UNSET
    expert_parallel_size: int = _UNSET
    ep: int = _UNSET
    data_parallel_size: int = _UNSET
    dp: int = _UNSET
    nccl_init_addr: str | None = _UNSET
    hicache_size: float = _UNSET
    hicache_write_policy: str = _UNSET
    kv_offloading_size: float = _UNSET
    cache_ram: float = _UNSET
    slot_save_path: str = _UNSET
    lora_modules: str | list[str] = _UNSET
    max_cpu_loras: int = _UNSET
    max_loaded_loras: int = _UNSET
    num_speculative_tokens: int = _UNSET
    enable_log_requests: bool = _UNSET
    enable_request_time_stats_logging: bool = _UNSET
    log_requests_format: Literal["text", "json"] = _UNSET
    disable_log_stats: bool = _UNSET
    crash_dump_folder: str | None = _UNSET
    watchdog_timeout: float = _UNSET
    soft_watchdog_timeout: float = _UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions(EngineOptions):
    """The arguments of a `Runtime`."""

    start_timeout_s: float = 600.0


def takes(options: Callable[P, ServerOptions]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Declares that an `__init__` has the parameters of `options`, which its own annotation names for people only. It stays as it is."""

    def same(init: Callable[..., None]) -> Any:
        return init

    return same


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
    return_normalized_logprob: bool | list[bool]
    normalized_logprob_start_len: int | list[int] | None
    return_hidden_states: bool | list[bool]
    return_routed_experts: bool | list[bool]
    return_progress: bool
    custom_logit_processor: str | list[str | None] | None
    prediction: str | list[str | None] | None
    session_params: dict[str, Any] | list[dict[str, Any]] | None
    bootstrap_host: str | list[str | None] | None
    bootstrap_port: int | list[int | None] | None
    bootstrap_room: int | list[int | None] | None
    disagg_prefill_dp_rank: int | None
    kv_transfer_params: dict[str, object] | None


class EncodeOptions(_CallFields, total=False):
    """The other fields of `/encode`, see docs/http-api.md; a list has one value for each input."""

    text: str | list[str | list[str]] | None
    is_cross_encoder_request: bool
    dimensions: int | None
    truncate_prompt_tokens: int | None
    truncation_side: Literal["right", "left"]
