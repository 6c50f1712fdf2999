"""The table of the user's options: frozen and grouped. The command line and `Engine(**kwargs)` are both made from it.

`config.server_args.ServerArgs` is the same with its values checked.
"""

from dataclasses import dataclass
from typing import Any, Literal

from headrace.checkpoint.weight_formats import Quantization, help_text
from headrace.config.bounds import COUNT, FILLED, POSITIVE, SECONDS, Bounds, group
from headrace.media_kinds import DEFAULT_FILE_BYTES, MediaKind


def flag(name: str) -> str:
    """The option of a field: `max_total_tokens` -> `--max-total-tokens`."""
    return "--" + name.replace("_", "-")


_model = group("Model")
_adapters = group("Adapters")
_serving = group("Serving")
_memory = group("Memory and schedule")
_media = group("Images, audio and videos")
_kernels = group("Kernels")
_observability = group("Observability")
_ray = group("Ray")


def _max_items(kind: MediaKind) -> Any:
    return _media(kind.default_limit, f"Maximum number of {kind.many} in one prompt.", POSITIVE)


def _max_file_bytes(kind: MediaKind, others: str = "") -> Any:
    return _media(DEFAULT_FILE_BYTES, f"Maximum size of an {kind} file{others}, in bytes.", POSITIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of a server or an Engine, as given. Names are SGLang's where the meaning is the same."""

    model_path: str = _model(
        "smollm2",
        "A known name, a model of the Hugging Face cache (`org/name`, see `headrace models`), a Hugging Face folder, or a GGUF file.",
        FILLED,
    )
    tokenizer_path: str | None = _model(None, "Folder, file or model whose tokenizer is used instead of its own.")
    skip_tokenizer_init: bool = _model(
        False, "Load no tokenizer: requests send and receive token ids. Requests that need text are refused (400)."
    )
    served_model_name: str | None = _model(
        None,
        "Name of the model, or several words, or names with commas; replies have the first; default: last part of --model-path, without .gguf.",
    )
    chat_template: str | None = _model(None, "A Jinja file or text that replaces the model's chat template.")
    tool_call_parser: str = _model(
        "auto",
        "How the model writes tool calls, see docs/tools.md; auto: as its checkpoint says; none: tools are refused.",
    )
    reasoning_parser: str = _model(
        "auto",
        "How the model marks its reasoning, see docs/tools.md; auto: as its checkpoint says; none: it is content.",
    )
    mmproj: str = _model(
        "auto",
        "Of a GGUF model, the file with its vision encoder (mmproj-*.gguf), see docs/images.md; auto: the one in the same folder; none: text only.",
        FILLED,
    )
    load_format: Literal["auto", "safetensors", "sharded_state", "gguf", "dummy"] = _model(
        "auto",
        "Format of the weights. dummy: random weights, config.json is enough; sharded_state: a folder written by /save_sharded_state.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _model(
        "auto",
        "Precision of weights and compute. On CPU, auto = bfloat16; what the weights are multiplied with, --activations says.",
    )
    disable_weight_cache: bool = _model(
        False, "Pack the weights again at every start instead of keeping the packed copy in the cache folder."
    )
    device: Literal["auto", "cpu", "cuda"] = _model("auto", "Device that runs the model; auto: a GPU if there is one.")
    model_impl: Literal["auto", "headrace", "transformers"] = _model(
        "auto",
        "Headrace's own model code, or that of transformers with Headrace's attention; auto prefers the former.",
    )
    is_embedding: bool = _model(
        False,
        "Serve a model that generates for its embeddings instead: the last token's hidden state, normalised. Encoders, and checkpoints "
        "that say how they pool (modules.json), need no option.",
    )
    allow_dimensions: bool = _model(
        False,
        "Let requests shorten embeddings (dimensions) of models that do not say that they were made for it (Matryoshka).",
    )
    context_length: int | None = _model(
        None, "Longest prompt plus output, in tokens; default: the model's own limit.", POSITIVE
    )
    sampling_defaults: Literal["model", "openai"] = _model(
        "model",
        "Sampling parameters that a request leaves out: the model's own defaults, or OpenAI's (temperature 1, no filters).",
    )
    default_max_tokens: int | None = _model(
        None,
        "Most tokens of a chat's reply whose request gives no limit; 0 = as many as fit; default: 1024 for the models of `headrace models` with "
        "names of their own, else 0.",
        COUNT,
    )
    random_seed: int = _model(0, "Seed for dummy weights, and for requests that set no seed.", COUNT)
    json_model_override_args: str = _model("{}", "JSON object whose fields override those of the model's config.json.")

    lora_paths: str = _adapters(
        "",
        "LoRA adapters to load at start, comma-separated: name=path. Requests select an adapter by its name.",
    )
    max_loras: int = _adapters(8, "Most adapters in memory; loading one more evicts the least recently used.", COUNT)
    max_lora_rank: int = _adapters(64, "Highest rank of an adapter; adapters of a higher rank are refused.", POSITIVE)

    host: str = _serving("127.0.0.1", "Address to listen on.", FILLED)
    port: int = _serving(30000, "Port to listen on; 0 = any free port.", Bounds(least=0, most=65535))
    api_key: str | None = _serving(None, "Key that every route needs, except health, readiness and metrics.", FILLED)
    admin_api_key: str | None = _serving(None, "Key for the control routes; default: --api-key opens them too.", FILLED)
    api_key_file: str | None = _serving(
        None,
        "TOML or JSON file of further keys, each with a name, a weight and limits; read again on SIGHUP.",
        FILLED,
    )
    allow_origins: str = _serving(
        "",
        "Origins whose pages may use this server (CORS), comma-separated: https://chat.example, http://localhost:*, app://*; local-apps = "
        "desktop applications and extensions; * = any. Default: only the server's own.",
    )
    allowed_hosts: str | None = _serving(
        None,
        "Host names that requests may use besides localhost and --host, comma-separated; * = any. Default: no others when --host is a "
        "loopback address, otherwise any.",
        FILLED,
    )
    trusted_proxies: str | None = _serving(
        None,
        "Reverse proxies in front of this server, addresses and networks, comma-separated: clients without a key of --api-key-file take turns by "
        "the address in their X-Forwarded-For.",
        FILLED,
    )
    warmups: str = _serving(
        "", "Warm-up routines to run before the server reports ready, comma-separated: generate, chat."
    )
    skip_server_warmup: bool = _serving(False, "Do not run the one-token warm-up request at start.")
    single_process: bool = _serving(False, "Run the scheduler and the detokenizer as threads of the main process.")
    detokenize_in: Literal["process", "main"] = _serving(
        "process",
        "Where token ids become text: in a process of its own, or in the main process, which costs less with few streams and leaves the "
        "HTTP server less time with many.",
    )
    tokenizer_worker_num: int = _serving(
        1,
        "Number of processes that read requests, tokenize and write replies. Above 1, they take this load off the main process; useful with "
        "many streams.",
        Bounds(least=1, most=64),
    )
    tp_size: int = _serving(
        1,
        "Number of processes that run one model together, each with a part of every layer (tensor parallel); they share its cores and memory, and "
        "each has a GPU of its own.",
        Bounds(least=1, most=64),
    )
    pp_size: int = _serving(
        1,
        "Number of stages, processes that each have some of the model's layers (pipeline parallel) and work on different steps at a time. With "
        "--tp-size too, each stage has that many processes.",
        Bounds(least=1, most=64),
    )
    ep_size: int = _serving(
        1,
        "Expert parallel: with the value of --tp-size, each of its processes has some of a mixture's experts whole; with 1, a part of each.",
        Bounds(least=1, most=64),
    )
    rank_timeout_s: float = _serving(
        10.0,
        "With --tp-size or --pp-size, restart the ranks when one keeps the others waiting for more than N seconds.",
        SECONDS,
    )
    nnodes: int | None = _serving(
        None,
        "Number of hosts that run one model together: each has some of the stages of --pp-size or, without stages, some of the processes of "
        "--tp-size. Default: LWS_GROUP_SIZE, else 1. See docs/parallel.md.",
        Bounds(least=1, most=64),
    )
    node_rank: int | None = _serving(
        None,
        "With --nnodes, which host this is; 0 serves, the others answer only /health. Default: LWS_WORKER_INDEX.",
        Bounds(least=0, most=63),
    )
    dist_init_addr: str | None = _serving(
        None,
        "With --nnodes, HOST:PORT at which node 0 listens for the others. Default: LWS_LEADER_ADDRESS and port 20000.",
        FILLED,
    )
    dist_timeout: float = _serving(
        300.0, "With --nnodes, wait at most this many seconds for the other nodes when starting.", SECONDS
    )
    dist_secret_file: str | None = _serving(
        None, "File with the secret that all nodes share; default: the variable HEADRACE_DIST_SECRET.", FILLED
    )
    disaggregation_mode: Literal["null", "prefill", "decode"] = _serving(
        "null",
        "prefill: compute prompts for other servers; decode: go on with prompts that a prefill server has computed, which each request names. "
        "See docs/disaggregation.md.",
    )
    disaggregation_bootstrap_port: int = _serving(
        8998,
        "Port at which a prefill server sends KV, of replica r this + r; where a request names none.",
        Bounds(least=1, most=65535),
    )
    disaggregation_transfer_backend: Literal["tcp", "shm", "nixl"] = _serving(
        "tcp", "How KV comes to a decode server; shm: from a prefill server on this machine through shared memory."
    )
    disaggregation_prefill_hosts: str | None = _serving(
        None,
        "Prefill servers that requests may name: hosts, addresses and networks such as 10.0.0.0/8, comma-separated; * = any. Default: those of "
        "this machine and of private networks.",
        FILLED,
    )
    dp_size: int = _serving(
        1,
        "Number of replicas of the model on this machine, which share its cores (data parallel); with --enable-dp-attention, of ranks instead.",
        Bounds(least=1, most=64),
    )
    enable_dp_attention: bool = _serving(
        False,
        "MoE models: data-parallel attention, each process of --tp-size for requests of its own. Give --dp-size the same value.",
    )
    enable_two_batch_overlap: bool = _serving(
        False,
        "With --tp-size, compute one half of a step's rows while the processes sum the other half's layers: for slow connections between them.",
    )
    load_balance_method: Literal["round_robin", "shortest_queue", "total_tokens", "cache_aware"] = _serving(
        "round_robin",
        "With --dp-size, which replica gets a request: the next in turn, the one with the fewest requests, the one with the fewest tokens, or "
        "the one that has cached the longest prefix of its prompt.",
    )
    disable_recovery: bool = _serving(
        False, "Do not restart a scheduler or detokenizer that died: fail the requests in flight and exit."
    )
    max_restarts: int = _serving(5, "Exit when more than N restarts are needed within ten minutes.", COUNT)
    max_n: int = _serving(64, "Most samples (`n`) of one prompt.", POSITIVE)
    max_batch_prompts: int = _serving(1024, "Most prompts in one request.", POSITIVE)
    max_body_bytes: int = _serving(32 << 20, "Largest request body, in bytes.", POSITIVE)
    max_reply_bytes: int = _serving(128 << 20, "Most bytes of a request's logprobs and hidden states.", POSITIVE)
    stream_interval: int = _serving(1, "Send a chunk of a stream every N tokens.", POSITIVE)
    incremental_streaming_output: bool = _serving(
        False, "Send only new output in each chunk of a /generate stream, not all output so far."
    )
    drain_timeout_s: float = _serving(
        30.0, "After SIGTERM, wait at most this many seconds for running requests to finish.", SECONDS
    )
    request_timeout_s: float = _serving(
        0.0,
        "Abort a request that takes longer than this many seconds: 408 before its first token, later it ends with its output so far; 0 = never.",
        SECONDS,
    )
    queue_timeout_s: float = _serving(
        0.0, "Refuse a request (503) that has waited in the queue for this many seconds; 0 = never.", SECONDS
    )
    sse_ping_interval_s: float = _serving(
        15.0, "A stream that has said nothing for this many seconds sends a comment, or a ping; 0 = never.", SECONDS
    )
    max_stream_buffer_bytes: int = _serving(
        1 << 20,
        "Abort a stream when its client leaves more than N bytes unread, not counting the socket's own buffers.",
        POSITIVE,
    )
    max_sessions: int = _serving(1000, "Most sessions open at once.", COUNT)
    max_session_tokens: int = _serving(4_000_000, "Most tokens held by all sessions together.", COUNT)
    session_timeout_s: float = _serving(
        3600.0, "Close a session that has not been used for this many seconds; 0 = never.", SECONDS
    )
    session_dir: str | None = _serving(
        None, "Private folder that keeps open sessions, so that they go on after a restart.", FILLED
    )
    max_stored_responses: int = _serving(
        0, "Keep the last N responses of /v1/responses in memory, at most 64 MiB, for later reading; 0 = none.", COUNT
    )
    ssl_certfile: str | None = _serving(
        None,
        "Serve HTTPS with this certificate (PEM, with its intermediate certificates). A proxy is the usual way, see docs/proxies.md.",
        FILLED,
    )
    ssl_keyfile: str | None = _serving(
        None, "Private key of --ssl-certfile (PEM, not encrypted); default: the key is in the same file.", FILLED
    )
    keep_alive_timeout_s: int = _serving(30, "Close an idle HTTP connection after this many seconds.", SECONDS)
    custom_logit_processors: str = _serving(
        "",
        "Logit processors that requests may select by name, comma-separated: name=module:callable.",
    )
    grammar_backend: Literal["llguidance", "none"] = _serving(
        "llguidance",
        "Library that makes outputs match a schema or a grammar, see docs/structured-output.md; none: requests that ask for it are refused (400).",
    )
    child_env: str = _serving(
        "",
        "Environment variables to pass to the engine's processes, comma-separated, e.g. those that your logit processors read. By default they "
        "get only the variables of libraries and devices, so that no secret reaches them.",
    )
    disable_openapi: bool = _serving(False, "Do not serve /openapi.json and /docs.")
    disable_ui: bool = _serving(False, "Do not serve the web pages below /ui and /docs, and send no browser there.")

    mem_fraction_static: float | None = _memory(
        None,
        "Fraction of free memory for weights and KV cache (a container's limit counts); default: 0.5 on CPU, 0.85 on a GPU.",
        Bounds(above=0.0, below=1.0),
    )
    max_total_tokens: int | None = _memory(
        None,
        "Size of the KV cache, in tokens, with --enable-dp-attention of all ranks together; default: what --mem-fraction-static leaves.",
        POSITIVE,
    )
    max_running_requests: int | None = _memory(None, "Most running samples; default: 64, encoders 256.", POSITIVE)
    max_inputs: int = _memory(1 << 14, "Most inputs of one embedding, rerank, score or classify request.", POSITIVE)
    max_queued_requests: int = _memory(2048, "Most samples that wait to run; further requests get a 503.", POSITIVE)
    max_images: int = _max_items(MediaKind.IMAGE)
    max_image_bytes: int = _max_file_bytes(MediaKind.IMAGE, " or video frame")
    max_audios: int = _max_items(MediaKind.AUDIO)
    max_audio_bytes: int = _max_file_bytes(MediaKind.AUDIO)
    max_videos: int = _max_items(MediaKind.VIDEO)
    max_video_frames: int = _media(64, "Maximum number of frames of a video.", POSITIVE)
    max_image_patches: int = _media(
        4096,
        "Maximum number of patches of an image, for models without a fixed image size: larger ones are scaled down. A video may have "
        "four times as many.",
        Bounds(least=16),
    )
    allowed_media_domains: str = _media(
        "",
        "Hosts from which files may be fetched by URL, comma-separated; none by default. An IP address needs its port.",
    )
    allowed_local_media_path: str | None = _media(
        None, "Folder below which files may be read by file: URL; none by default.", FILLED
    )
    image_processes: int = _media(
        1, "Processes that decode a client's images and audio, and one more for videos.", Bounds(least=1, most=64)
    )
    image_cache_bytes: int = _media(256 << 20, "Bytes of the cache of decoded images, audio and videos.", COUNT)
    encoder_cache_bytes: int = _media(
        256 << 20, "Size of the cache of encoder outputs of images, audio and videos, in bytes.", POSITIVE
    )
    chunked_prefill_size: int | None = _memory(
        None,
        "Most prompt tokens in one step, over all requests; -1 = up to --max-prefill-tokens; default: 512 on CPU, 2048 on a GPU.",
    )
    max_prefill_tokens: int = _memory(
        2048,
        "Most tokens in one step, over all requests; one token per running request is always allowed.",
        POSITIVE,
    )
    max_step_ms: int | None = _memory(
        None,
        "How long a step should take at most, in milliseconds, when prompts share it with running streams; without any it is 800. "
        "-1 = no bound in either case. Default: 200 where tokens do not depend on how prompts are cut (on CPU), up to 250 where prompts then get "
        "5 tokens for each stream; else no bound.",
    )
    schedule_policy: Literal["fcfs", "lpm", "priority"] = _memory(
        "fcfs",
        "Order of the queue. fcfs: by arrival; lpm: longest cached prefix first; priority: highest first, see --priority-ageing-s.",
    )
    schedule_conservativeness: float = _memory(
        1.0,
        "Above 1, admit fewer requests and retract less often; below 1, the opposite.",
        Bounds(above=0.0, most=1e9),
    )
    clip_max_new_tokens_estimate: int = _memory(
        4096,
        "When admitting a request, reserve KV cache for at most N output tokens, even if it may generate more.",
        POSITIVE,
    )
    priority_ageing_s: float = _memory(
        10.0,
        "With --schedule-policy priority: raise the priority of a waiting request by one every this many seconds; 0 = never.",
        SECONDS,
    )
    enable_priority_preemption: bool = _memory(
        False,
        "With --schedule-policy priority: a waiting request may displace running requests of much lower priority.",
    )
    priority_scheduling_preemption_threshold: int = _memory(
        10, "With --enable-priority-preemption: displace requests whose priority is lower by at least N.", POSITIVE
    )
    page_size: int | None = _memory(
        None,
        "Tokens per page of the KV cache, 1 or 16; default: what the attention backend prefers. On CPU, 1 is much slower.",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "bf16", "float16", "int16", "int8", "fp8_e4m3"] = _memory(
        "auto",
        "Element type of the KV cache; auto: on a CPU int16 with --quantization int16 or gguf, int8 with int8, int8-fast or int4 if heads "
        "have at most 128 elements, unless a short text shows that they cost the model too much quality; else that of the "
        "weights. int8, and fp8_e4m3 on a GPU, take half the bytes of bfloat16.",
    )
    disable_radix_cache: bool = _memory(False, "Disable prefix caching: requests share no KV cache.")
    kv_cache_dir: str | None = _memory(
        None, "Private folder that keeps computed KV, also after a restart. See docs/kv-cache.md.", FILLED
    )
    kv_cache_disk_size: int = _memory(
        16 << 30, "Most bytes that --kv-cache-dir takes; what was not used for longest goes first.", POSITIVE
    )
    kv_pin_share: float = _memory(
        0.25, "Share of the KV cache that pins may hold; 0: nothing may be pinned.", Bounds(least=0.0, most=0.9)
    )
    kv_cache_host_size: int = _memory(
        0, "Bytes of pinned host memory for KV of a GPU, before the files of --kv-cache-dir; 0 = none.", COUNT
    )
    kv_cache_write: Literal["through", "back"] = _memory(
        "through", "through: KV is kept when it is computed; back: before it is evicted, and at the end."
    )
    kv_cache_persist_tenants: bool = _memory(
        False, "Keep also the KV of requests with a cache_salt or a key of --api-key-file below --kv-cache-dir."
    )
    kv_on_update: Literal["flush", "recompute", "keep"] = _memory(
        "flush",
        "At a weight update, flush: requests that have begun end first, and cached KV is dropped; recompute: requests go on at once, and compute "
        "their KV again with the new weights; keep: they go on at once, with the KV of the old weights. See docs/weights.md.",
    )
    keep_updates: Literal["copy", "reflink", "off"] = _memory(
        "copy", "Keep the files of the last weight update for a scheduler that dies. See docs/weights.md."
    )
    enable_double_sparsity: bool = _memory(False, "Long outputs attend to part of the KV cache. See docs/kv-cache.md.")
    ds_channel_config_path: str | None = _memory(None, "File of `headrace quantize --calibrate-sparsity`.", FILLED)
    ds_heavy_channel_num: int = _memory(32, "Channels that tell which pages matter, of a KV head.", Bounds(least=16))
    ds_heavy_token_num: int = _memory(1024, "Tokens that such an output attends to, in pages of 16.", POSITIVE)
    ds_heavy_channel_type: Literal["qk", "q", "k"] = _memory("qk", "Which order of channels in the file counts.")
    ds_sparse_decode_threshold: int = _memory(4096, "Outputs before this position attend to all tokens.", COUNT)
    disable_overlap_schedule: bool = _memory(False, "Plan a step only after the previous one has finished.")
    speculative_algorithm: Literal["off", "auto", "ngram", "draft", "eagle3"] = _memory(
        "auto",
        "Speculative decoding, where it is faster; the output is unchanged. ngram: draft tokens are what followed the last tokens where they "
        "came before, in the prompt or the output; auto: on a CPU all that needs no weights of its own, where steps as measured at start make it "
        "worth it, else off; draft: a smaller model; eagle3: an EAGLE-3 head; off, none: no draft tokens. See docs/speculation.md.",
    )
    speculative_num_draft_tokens: int = _memory(16, "Most draft tokens at a time.", Bounds(least=1, most=63))
    speculative_shared_tokens: int = _memory(
        0,
        "With ngram and auto: draft also from the last N output tokens of other requests with the same key, salt and adapter; 0 = none.",
        Bounds(least=0, most=1 << 18),
    )
    speculative_draft_model_path: str | None = _memory(
        None, "The draft model, which has the same vocabulary, or the EAGLE-3 head.", FILLED
    )
    speculative_draft_model_quantization: Quantization = _memory(  # noqa: RUF009, it gives a field
        "auto", "As --quantization, of the draft model; auto: the same."
    )
    allow_auto_truncate: bool = _memory(False, "Cut too long prompts at their end, and limits of output to the room.")
    anthropic_cache_control: Literal["ignore", "pin"] = _memory(
        "ignore",
        "What cache_control of Anthropic's messages does. pin: the prompt up to a marked block is pinned for its ttl.",
    )
    enable_cache_report: bool = _memory(True, "Report the number of cached prompt tokens in the usage of replies.")

    attention_backend: Literal["auto", "torch_native", "cpu", "triton", "flashinfer"] = _kernels(
        "auto", "Attention backend; `headrace doctor` shows which ones run on this machine."
    )
    enable_deterministic_inference: bool = _kernels(
        False, "On a GPU, make results independent of the batch, at some cost in speed. On CPU they always are."
    )
    num_threads: int | None = _kernels(
        None, "Compute threads on CPU; default: the cores that this process may use.", POSITIVE
    )
    numa_bind: bool = _kernels(
        False,
        "On CPU, bind each process that computes to a NUMA node: its threads to the node's cores, its memory to the node's.",
    )
    activations: Literal["auto", "float32", "bfloat16"] = _kernels(
        "auto",
        "On CPU, activation dtype of unquantised linear layers. auto: the fastest on this processor (bfloat16, 16-bit integers or float32); "
        "float32 rounds nothing. See docs/quantization.md.",
    )
    quantization: Quantization = _kernels(  # noqa: RUF009, it gives a field
        "auto",
        f"Quantise the linear layers at load. {help_text()} auto: as the checkpoint is, GGUF files on a CPU in their own "
        "bits (on a GPU dequantised). See docs/quantization.md.",
    )
    disable_cuda_graph: bool = _kernels(
        False, "On a GPU, launch the kernels of a decode step one by one instead of replaying a CUDA graph."
    )
    cuda_graph_bs: str = _kernels(
        "",
        "Batch sizes to capture as CUDA graphs, comma-separated; default: 1, 2, 4, 8, then every 8 up to 64 and every 16 above.",
    )
    cuda_graph_max_bs: int | None = _kernels(
        None,
        "Largest batch size to capture as a CUDA graph; default: --max-running-requests, at most 256.",
        POSITIVE,
    )
    enable_torch_compile: bool = _kernels(
        False,
        "On a GPU, compile the layers between the attention calls with torch.compile instead of using Headrace's kernels.",
    )
    disable_native_kernels: bool = _kernels(False, "Use PyTorch instead of the native CPU kernels.")

    log_level: Literal["debug", "info", "warning", "error"] = _observability("info", "Lowest level of log lines.")
    log_format: Literal["text", "json"] = _observability("text", "Lines of the log as text, or each as a JSON object.")
    log_requests: bool = _observability(False, "Log a line for each finished request, with token counts and times.")
    log_requests_level: Literal[0, 1, 2, 3] = _observability(
        0,
        "With --log-requests: 1 adds the sampling parameters, 2 the first 2,048 characters of input and output, 3 all of input and output. "
        "Levels 2 and 3 log what users wrote.",
    )
    decode_log_interval: int = _observability(200, "Log scheduler statistics every N steps; 0 = never.", COUNT)
    disable_metrics: bool = _observability(False, "Do not serve /metrics.")
    metrics_compat: Literal["none", "vllm", "sglang", "underscore"] = _observability(
        "none",
        "Export the metrics under the names of this other server as well, for its dashboards. underscore: the names begin with "
        "`headrace_` instead of `headrace:`.",
    )
    timeline_requests: int = _observability(
        1000, "Keep the timelines of the last N finished requests for /v1/requests/{rid}; 0 = none.", COUNT
    )
    profile_dir: str | None = _observability(
        None, "Folder for the traces of /start_profile; without it, profiling is off.", FILLED
    )
    crash_dump_dir: str | None = _observability(
        None, "Write a dump of the most recent requests to this folder when a process of the engine dies.", FILLED
    )
    dump_requests_dir: str | None = _observability(
        None,
        "Folder for the dumps of /dump_requests; without it, the route is off.",
        FILLED,
    )
    crash_dump_prompts: bool = _observability(
        False,
        "Include the beginnings of prompts in crash and request dumps. Off by default, since prompts are private.",
    )
    otlp_traces_endpoint: str | None = _observability(
        None, "Send one span per request to this OTLP/HTTP URL; needs the `otel` extra.", FILLED
    )
    kv_events_config: str | None = _observability(
        None,
        "JSON that says where to publish what the prefix cache stores and evicts, for routers; see docs/kv-events.md.",
        FILLED,
    )
    save_dir: str | None = _serving(
        None, "Folder below which /save_sharded_state may write the weights; without it, the route is off.", FILLED
    )
    weight_update_timeout_s: float = _serving(
        600.0,
        "Give up on a weight update or an adapter that takes longer than this many seconds to read or receive; 0 = never.",
        SECONDS,
    )
    watchdog_timeout_s: float = _observability(
        300.0, "Kill and restart a scheduler whose step takes longer than this many seconds; 0 = never.", SECONDS
    )
    soft_watchdog_timeout_s: float = _observability(
        30.0,
        "Log a warning when the detokenizer or the front end makes no progress for this many seconds; 0 = never.",
        SECONDS,
    )
    enable_fault_injection: bool = _observability(False, "For tests only: serve /inject_fault.")

    ray: bool = _ray(
        False,
        "Serve with replicas of the whole engine on the nodes of a Ray cluster, behind Ray Serve; needs the `ray` extra, see docs/clusters.md.",
    )
    ray_address: str | None = _ray(
        None,
        "Cluster to join, e.g. auto or 10.0.0.1:6379; default: the one in RAY_ADDRESS, else one that is started on this machine.",
        FILLED,
    )
    ray_min_replicas: int = _ray(1, "Fewest replicas.", Bounds(least=1, most=10_000))
    ray_max_replicas: int = _ray(1, "Most replicas.", Bounds(least=1, most=10_000))
    ray_target_ongoing_requests: float = _ray(
        8.0,
        "Add a replica when there are more running and waiting requests for each than this, remove one when fewer.",
        Bounds(above=0.0),
    )
    ray_num_cpus: int | None = _ray(
        None,
        "CPUs that a replica reserves, and its compute threads; default: --num-threads, else the cores of this machine over --ray-max-replicas.",
        POSITIVE,
    )
    ray_num_gpus: int = _ray(0, "GPUs that a replica reserves.", COUNT)
    ray_placement: Literal["pack", "strict_spread"] = _ray(
        "pack",
        "pack: fill a node with replicas before the next one; strict_spread: at most one replica on a node.",
    )

    @property
    def num_nodes(self) -> int:
        """Hosts that run one model together."""
        return self.nnodes or 1

    @property
    def num_ranks(self) -> int:
        """Processes that run one model together."""
        return self.tp_size * self.pp_size

    @property
    def num_replicas(self) -> int:
        """Models that run beside each other, each in its own ranks."""
        return 1 if self.enable_dp_attention else self.dp_size

    @property
    def num_kv_parts(self) -> int:
        """Parts of a model's KV cache that have different sequences, one on each rank; 1: all ranks have all sequences."""
        return self.tp_size if self.enable_dp_attention else 1
