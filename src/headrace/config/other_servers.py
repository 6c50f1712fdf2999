"""How options of SGLang and vLLM are written here: data only.

`TABLE` has what is spelled differently, is already so, or is not supported; an option that is not in it and has one of ours' name means
the same as ours (docs/coming-from-sglang.md and docs/coming-from-vllm.md name the exceptions). `config.translate` reads it.
`config.option_pages` makes the tables of those two pages from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Server = Literal["sglang", "vllm"]
SGLANG: tuple[Server, ...] = ("sglang",)
VLLM: tuple[Server, ...] = ("vllm",)
BOTH: tuple[Server, ...] = ("sglang", "vllm")


@dataclass(frozen=True, slots=True)
class Alias:
    """An option that one or more of ours say as well.

    sets: fields of ServerArgs and their values as typed; None = the value that is given. The option is a switch if no value is None.
    says: what differs; logged when the option is used.
    """

    servers: tuple[Server, ...]
    names: tuple[str, ...]
    sets: Mapping[str, str | None]
    says: str = ""

    @property
    def is_switch(self) -> bool:
        return None not in self.sets.values()


@dataclass(frozen=True, slots=True)
class Already:
    """An option that asks for what is already so: accepted with a line of log.

    values: those that are accepted; none = the option is a switch. says: how it is here. otherwise: why other values are refused.
    unless: field and value of ours that contradict the option.
    """

    servers: tuple[Server, ...]
    names: tuple[str, ...]
    says: str
    values: tuple[str, ...] = ()
    otherwise: str = ""
    unless: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """An option that is not supported. says: the nearest of ours, or how it is here. is_prefix: so are all that begin with a name."""

    servers: tuple[Server, ...]
    names: tuple[str, ...]
    says: str
    is_prefix: bool = False


Entry = Alias | Already | Refused


def _alias(servers: tuple[Server, ...], names: str, to: str, says: str = "") -> Alias:
    return Alias(servers, tuple(names.split()), {to: None}, says)


def _switch(servers: tuple[Server, ...], names: str, to: str, says: str = "") -> Alias:
    return Alias(servers, tuple(names.split()), {to: "true"}, says)


def _already(
    servers: tuple[Server, ...],
    names: str,
    says: str,
    values: str = "",
    otherwise: str = "",
    unless: tuple[str, str] | None = None,
) -> Already:
    return Already(servers, tuple(names.split()), says, tuple(values.split()), otherwise, unless)


def _refused(servers: tuple[Server, ...], names: str, says: str, is_prefix: bool = False) -> Refused:
    return Refused(servers, tuple(names.split()), says, is_prefix)


_ONE_DEVICE = "the ranks of a model are those of --tp-size and --pp-size"
_NO_SHARDS = (
    "--tp-size shares every layer, --pp-size shares the layers out, --dp-size starts replicas; there are no other ways"
)
_NO_DEALING = "--ep-size deals whole experts evenly to the ranks of --tp-size; copies of experts are not supported"
_NUMA = "--numa-bind deals the ranks to the NUMA nodes in their order, and gives each the cores of its node"
_ONE_MACHINE = "replicas run on one machine"
_HUB = "a model is named org/name@REVISION, and `headrace pull` brings it, by HF_HOME and HF_TOKEN"
_IMAGES = (
    "--max-images, --max-audios, --max-videos, --max-image-bytes and --image-cache-bytes bound them; see docs/images.md"
)
_NO_OFFLOAD = "weights and KV cache stay on the device"
_DRAFTS = "guesses follow each other in one line, --speculative-num-draft-tokens at most (docs/speculation.md)"
_OWN_WINDOW = "the n-grams that are looked up have 2 to 4 tokens (docs/speculation.md)"
_NO_TRANSFER = "prefill and decode on different servers are not supported"
_NO_TIERS = "the prefix cache has one level; --max-total-tokens sets its size"
_PROXY = "put a proxy in front of the server, see docs/proxies.md"
_NO_ALL_REDUCE = "CPU ranks share memory on one machine and use TCP between several; GPUs use nccl"
_EXPERTS = "kernels of experts cannot be chosen; `headrace doctor` shows what runs"

_POOLS = "encoders, classifiers and checkpoints that say how they pool are recognised; --is-embedding serves any other model for its embeddings"

TABLE: tuple[Entry, ...] = (
    # --- the model
    _alias(VLLM, "--tokenizer", "tokenizer_path"),
    _already(BOTH, "--tokenizer-mode", "the tokenizer is the checkpoint's own", "auto fast", "there is one tokenizer"),
    _already(BOTH, "--trust-remote-code", "code in a checkpoint is never run; models that need theirs are refused"),
    _alias(VLLM, "--max-model-len", "context_length"),
    _alias(VLLM, "--seed", "random_seed"),
    _alias(
        VLLM, "--hf-overrides", "json_model_override_args", "whole fields of config.json are replaced, nested ones too"
    ),
    _refused(BOTH, "--revision --tokenizer-revision --code-revision --download-dir --hf-token", _HUB),
    _refused(BOTH, "--model-loader-extra-config", "loading has no further settings; see --load-format"),
    _refused(VLLM, "--hf-config-path", "config.json is read from --model-path; see --json-model-override-args"),
    _already(VLLM, "--config-format", "the checkpoint is recognised by its files", "auto hf", "config.json is read"),
    _already(VLLM, "--task --runner", "the checkpoint says whether it generates", "auto generate", _POOLS),
    _already(VLLM, "--convert", "the model runs as it is", "auto none", _POOLS),
    _refused(
        SGLANG,
        "--prefill-attention-backend --decode-attention-backend --mm-attention-backend",
        "one backend does both: --attention-backend",
    ),
    _refused(SGLANG, "--sampling-backend", "there is one sampler for each device"),
    _refused(
        BOTH, "--quantization-param-path --calculate-kv-scales", "scales of the KV cache are computed while running"
    ),
    _refused(SGLANG, "--torchao-config", "see --quantization"),
    _refused(VLLM, "--max-logprobs", "the bound is fixed: 20 on OpenAI's routes"),
    _alias(VLLM, "-q", "quantization"),
    # --- APIs and output
    _already(
        VLLM, "--enable-auto-tool-choice", "models call tools when they want to", unless=("tool_call_parser", "none")
    ),
    _already(
        VLLM, "--enable-reasoning", "reasoning is found by --reasoning-parser", unless=("reasoning_parser", "none")
    ),
    _refused(VLLM, "--tool-parser-plugin --reasoning-parser-plugin", "see docs/adding/output-format.md"),
    _refused(BOTH, "--tool-server", "tools are called by clients"),
    _already(
        VLLM,
        "--chat-template-content-format",
        "the template decides how it reads content",
        "auto",
        "it follows from the template",
    ),
    _already(VLLM, "--response-role", "replies have this role", "assistant", "replies have the role assistant"),
    _refused(SGLANG, "--hf-chat-template-name --completion-template", "give the template itself: --chat-template"),
    _refused(VLLM, "--default-chat-template-kwargs", "send chat_template_kwargs in requests, or see --chat-template"),
    _alias(VLLM, "--generation-config", "sampling_defaults", "auto is --sampling-defaults model, vllm is openai"),
    _refused(
        BOTH,
        "--override-generation-config --preferred-sampling-params",
        "--sampling-defaults takes the model's own or OpenAI's; requests may set each",
    ),
    _already(
        VLLM,
        "--guided-decoding-backend",
        "outputs are constrained by llguidance",
        "auto guidance llguidance",
        "the library is llguidance, see --grammar-backend",
        ("grammar_backend", "none"),
    ),
    _refused(VLLM, "--structured-outputs-config", "see --grammar-backend"),
    _refused(
        SGLANG,
        "--constrained-json-whitespace-pattern --constrained-json-disable-any-whitespace",
        "JSON has its own spaces",
    ),
    _refused(SGLANG, "--enable-custom-logit-processor", "name those that requests may use: --custom-logit-processors"),
    _refused(VLLM, "--logits-processors --logits-processor-pattern", "see --custom-logit-processors"),
    _already(
        VLLM,
        "--enable-prompt-tokens-details",
        "usage has cached tokens",
        unless=("enable_cache_report", "false"),
    ),
    _already(VLLM, "--enable-request-id-headers", "every reply has x-request-id"),
    _refused(VLLM, "--enable-force-include-usage", 'requests ask for it: "stream_options": {"include_usage": true}'),
    _refused(VLLM, "--return-tokens-as-token-ids", "requests may ask for token ids, see docs/http-api.md"),
    _switch(SGLANG, "--stream-output", "incremental_streaming_output"),
    _refused(
        SGLANG, "--enable-return-hidden-states --enable-return-routed-experts", "replies have tokens and logprobs"
    ),
    # --- HTTP
    _alias(VLLM, "--allowed-origins", "allow_origins"),
    _already(
        VLLM, "--allowed-methods --allowed-headers", "--allow-origins allows all", '["*"] *', "see --allow-origins"
    ),
    _refused(VLLM, "--allow-credentials", "the server has no cookies; keys are sent in a header"),
    _refused(BOTH, "--ssl-ca-certs", f"clients have no certificates; for these, {_PROXY}"),
    _refused(VLLM, "--ssl-cert-reqs --ssl-ciphers", f"Python's defaults apply; for others, {_PROXY}"),
    _refused(SGLANG, "--ssl-keyfile-password", "the key must not be encrypted"),
    _refused(VLLM, "--enable-ssl-refresh", f"a new certificate needs a restart, or {_PROXY}"),
    _refused(BOTH, "--root-path --fastapi-root-path", _PROXY),
    _refused(VLLM, "--middleware --uds", "the server listens on --host and --port only"),
    _switch(VLLM, "--disable-fastapi-docs", "disable_openapi"),
    _alias(VLLM, "--api-server-count -asc", "tokenizer_worker_num"),
    _refused(VLLM, "--headless", "a node above 0 serves nothing by itself: --node-rank"),
    _refused(SGLANG, "--grpc-mode --smg-grpc-mode", "the API is HTTP"),
    _refused(SGLANG, "--file-storage-path", "files are not supported"),
    # --- memory and schedule
    _alias(VLLM, "--gpu-memory-utilization", "mem_fraction_static", "a fraction of the free memory, not of all memory"),
    _alias(VLLM, "--max-num-seqs", "max_running_requests"),
    Alias(
        VLLM,
        ("--max-num-batched-tokens",),
        {"max_prefill_tokens": None, "chunked_prefill_size": "-1"},
        "prompts are cut by this bound alone (and by --max-step-ms)",
    ),
    _refused(VLLM, "--kv-cache-memory-bytes --num-gpu-blocks-override", "the size in tokens is --max-total-tokens"),
    _alias(VLLM, "--block-size", "page_size"),
    _already(BOTH, "--enable-prefix-caching", "prefixes are always cached", unless=("disable_radix_cache", "true")),
    _refused(VLLM, "--prefix-caching-hash-algo", "the prefix cache compares tokens and has no hashes"),
    _already(VLLM, "--enable-chunked-prefill", "prompts are always cut", otherwise="see --chunked-prefill-size"),
    _already(SGLANG, "--enable-mixed-chunk", "prompts and running streams always share steps"),
    _already(
        VLLM,
        "--async-scheduling",
        "steps are planned ahead",
        unless=("disable_overlap_schedule", "true"),
    ),
    _refused(
        VLLM,
        "--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold",
        "see --chunked-prefill-size and --max-step-ms",
    ),
    _refused(
        SGLANG, "--prefill-max-requests --enable-dynamic-chunking", "see --chunked-prefill-size and --max-step-ms"
    ),
    _already(
        BOTH,
        "--num-scheduler-steps --num-continuous-decode-steps",
        "each step is planned",
        "1",
        "steps are planned one by one",
    ),
    _already(
        VLLM,
        "--scheduling-policy",
        "the queue is served in order of arrival",
        "fcfs",
        "--schedule-policy priority serves the highest number first; vLLM serves the lowest first",
    ),
    Alias(
        SGLANG,
        ("--enable-priority-scheduling",),
        {"schedule_policy": "priority"},
        "running requests are displaced only with --enable-priority-preemption",
    ),
    _refused(SGLANG, "--schedule-low-priority-values-first", "the highest number is served first"),
    _already(
        SGLANG, "--radix-eviction-policy", "the least recently used goes first", "lru", "the cache evicts by last use"
    ),
    _already(BOTH, "--swap-space --cpu-offload-gb", _NO_OFFLOAD, "0", _NO_OFFLOAD),
    _already(SGLANG, "--hicache-size", _NO_TIERS, "0", _NO_TIERS),
    _refused(SGLANG, "--hicache- --enable-hierarchical-cache --enable-lmcache", _NO_TIERS, is_prefix=True),
    _refused(VLLM, "--kv-offloading-", _NO_TIERS, is_prefix=True),
    _already(BOTH, "--enable-memory-saver --enable-sleep-mode", "memory can always be released (docs/weights.md)"),
    _already(SGLANG, "--sleep-on-idle", "an idle server waits on its sockets"),
    # --- kernels
    _switch(VLLM, "--enforce-eager", "disable_cuda_graph", "on a CPU there are none"),
    _alias(VLLM, "--cudagraph-capture-sizes --cuda-graph-sizes", "cuda_graph_bs"),
    _alias(VLLM, "--max-cudagraph-capture-size", "cuda_graph_max_bs"),
    _refused(
        VLLM, "--compilation-config -cc -O --max-seq-len-to-capture", "see --enable-torch-compile and --cuda-graph-bs"
    ),
    _refused(
        SGLANG,
        "--torch-compile-max-bs --piecewise-cuda-graph- --disable-piecewise-cuda-graph",
        "see --cuda-graph-bs",
        is_prefix=True,
    ),
    _already(BOTH, "--disable-custom-all-reduce --enable-p2p-check", _NO_ALL_REDUCE),
    _already(SGLANG, "--disable-outlines-disk-cache", "outlines is not used"),
    _refused(BOTH, "--moe- --fp8-gemm-backend --fp4-gemm-backend --flashinfer-mxfp4-", _EXPERTS, is_prefix=True),
    # --- several devices and machines
    _alias(BOTH, "--tensor-parallel-size --tp -tp", "tp_size"),
    _alias(BOTH, "--pipeline-parallel-size --pp -pp", "pp_size"),
    _alias(SGLANG, "--expert-parallel-size --ep", "ep_size"),
    _refused(VLLM, "--enable-expert-parallel", "give --ep-size the value of --tp-size"),
    _refused(
        BOTH,
        "--ep-num- --ep-dispatch- --enable-eplb --eplb- --deepep- --elastic-ep-",
        _NO_DEALING,
        is_prefix=True,
    ),
    _alias(BOTH, "--data-parallel-size --dp -dp", "dp_size"),
    _refused(VLLM, "--data-parallel-", f"{_ONE_MACHINE}; --dp-size is the number of replicas", is_prefix=True),
    _already(
        VLLM, "--distributed-executor-backend", "ranks are processes", "mp uni", "ranks are processes; see --nnodes"
    ),
    _alias(SGLANG, "--nccl-init-addr", "dist_init_addr"),
    _refused(BOTH, "--nccl-port --master-addr --master-port", "node 0 listens at --dist-init-addr HOST:PORT"),
    _already(
        SGLANG,
        "--base-gpu-id",
        "the first GPU that CUDA_VISIBLE_DEVICES names is used",
        "0",
        "set CUDA_VISIBLE_DEVICES",
    ),
    _refused(BOTH, "--disaggregation- --kv-transfer-config", _NO_TRANSFER, is_prefix=True),
    # --- adapters
    _already(BOTH, "--enable-lora", "adapters can be loaded at any time (docs/lora.md)", unless=("max_loras", "0")),
    _alias(VLLM, "--lora-modules", "lora_paths"),
    _alias(BOTH, "--max-cpu-loras --max-loaded-loras", "max_loras"),
    _refused(
        SGLANG, "--max-loras-per-batch", "a batch may use all loaded adapters; --max-loras bounds how many are loaded"
    ),
    _already(SGLANG, "--lora-eviction-policy", "the least recently used goes first", "lru", "adapters go by last use"),
    _already(VLLM, "--lora-dtype", "adapters are in the model's dtype", "auto", "adapters are in the model's dtype"),
    _refused(
        BOTH,
        "--lora-target-modules --lora-backend --lora-extra-vocab-size --fully-sharded-loras",
        "adapters say which modules they change; see docs/lora.md",
    ),
    # --- drafts and media
    _refused(SGLANG, "--speculative-ngram-", _OWN_WINDOW, is_prefix=True),
    _refused(VLLM, "--ngram-prompt-lookup-", _OWN_WINDOW, is_prefix=True),
    _alias(VLLM, "--num-speculative-tokens", "speculative_num_draft_tokens"),
    _refused(
        SGLANG,
        "--speculative-num-steps --speculative-eagle-topk",
        _DRAFTS,
    ),
    _refused(SGLANG, "--speculative-draft-model-revision", _HUB),
    _refused(SGLANG, "--speculative-draft-load-format", "--load-format holds for the draft model, too"),
    _refused(SGLANG, "--speculative-token-map", "the ids that a head can guess are in its checkpoint (d2t)"),
    _refused(
        SGLANG,
        "--speculative-accept-threshold-single --speculative-accept-threshold-acc",
        "a guess is right if it is the token that is drawn anyway, so there is no threshold",
    ),
    _refused(
        VLLM,
        "--speculative-config --speculative-model -sc",
        "--speculative-algorithm says what guesses, --speculative-draft-model-path with which model (docs/speculation.md)",
    ),
    _refused(
        BOTH,
        "--limit-mm-per-prompt --mm- --disable-mm-preprocessor-cache",
        _IMAGES,
        is_prefix=True,
    ),
    _refused(SGLANG, "--mamba- --max-mamba-cache-size", "models with Mamba layers are not supported", is_prefix=True),
    # --- logs and metrics
    _already(SGLANG, "--enable-metrics", "metrics are always served", unless=("disable_metrics", "true")),
    _already(VLLM, "--disable-log-requests", "requests are not logged", unless=("log_requests", "true")),
    _switch(VLLM, "--enable-log-requests", "log_requests"),
    _switch(SGLANG, "--enable-request-time-stats-logging", "log_requests", "the line of a request has its times"),
    _refused(VLLM, "--max-log-len --enable-log-outputs --enable-log-deltas", "see --log-requests-level"),
    _alias(SGLANG, "--log-requests-format", "log_format", "all of the log is written so"),
    _refused(SGLANG, "--log-requests-target", "the log goes to standard error"),
    Alias(
        VLLM,
        ("--disable-log-stats",),
        {"decode_log_interval": "0"},
        "metrics stay on; --disable-metrics turns them off",
    ),
    _already(VLLM, "--disable-uvicorn-access-log", "there is no access log; see --log-requests"),
    _already(
        BOTH,
        "--uvicorn-log-level --log-level-http",
        "there is no access log",
        "warning error critical",
        "there is one level, --log-level, and no access log",
    ),
    _refused(SGLANG, "--enable-trace", "leave it out: --otlp-traces-endpoint alone turns traces on"),
    _refused(VLLM, "--collect-detailed-traces", "--otlp-traces-endpoint sends one span per request"),
    _refused(VLLM, "--enable-server-load-tracking --enable-per-request-metrics", "see /metrics and /v1/requests/{rid}"),
    _alias(SGLANG, "--crash-dump-folder", "crash_dump_dir"),
    _alias(SGLANG, "--watchdog-timeout", "watchdog_timeout_s"),
    _alias(SGLANG, "--soft-watchdog-timeout", "soft_watchdog_timeout_s"),
    _refused(
        SGLANG,
        "--bucket- --prompt-tokens-buckets --generation-tokens-buckets",
        "histograms have fixed buckets",
        is_prefix=True,
    ),
    _refused(SGLANG, "--debug-tensor-dump-", "see docs/adding/model.md for how layers are compared", is_prefix=True),
    # --- what no model or machine here has use for
    _refused(VLLM, "--rope-scaling --rope-theta", "see --json-model-override-args"),
    _refused(VLLM, "--pooler-config --override-pooler-config --io-processor-plugin", "the server only generates text"),
    _refused(
        BOTH,
        "--max-parallel-loading-workers --safetensors-load-strategy --use-tqdm-on-load --ignore-patterns --pt-load-map-location "
        "--weight-loader- --custom-weight-loader --remote-instance- --checkpoint-engine- --delete-ckpt-after-loading --model-checksum",
        "loading has no further settings; see --load-format",
        is_prefix=True,
    ),
    _refused(
        VLLM,
        "--worker-cls --worker-extension-cls --scheduler-cls --additional-config",
        "parts of the engine cannot be replaced",
    ),
    _already(VLLM, "--decode-context-parallel-size -dcp", _ONE_DEVICE, "1", _NO_SHARDS),
    _already(
        SGLANG,
        "--attention-context-parallel-size --attn-cp-size --moe-data-parallel-size --moe-dp-size",
        _ONE_DEVICE,
        "1",
        _NO_SHARDS,
    ),
    _refused(
        BOTH,
        "--all2all-backend --enable-dbo --dbo- --expert-placement-strategy --num-redundant-experts --pp-max- --pp-async- --tbo- "
        "--enable-two-batch-overlap --enable-single-batch-overlap --init-expert-location",
        _NO_SHARDS,
        is_prefix=True,
    ),
    _refused(SGLANG, "--numa-node", _NUMA),
    _refused(VLLM, "--numa-bind-nodes --numa-bind-cpus", _NUMA),
    _refused(SGLANG, "--enable-nccl-nvls --enable-symm-mem --enable-mscclpp --enable-torch-symm-mem", _NO_ALL_REDUCE),
    _already(
        SGLANG,
        "--gpu-id-step",
        "the first GPU that CUDA_VISIBLE_DEVICES names is used",
        "1",
        "set CUDA_VISIBLE_DEVICES",
    ),
    _refused(
        BOTH,
        "--media-io-kwargs --interleave-mm-strings --enable-mm-embeds --skip-mm-profiling --video-pruning-rate "
        "--encoder-only --encoder-transfer-backend --encoder-urls "
        "--language-only --language-model-only --default-mm-loras",
        "images are decoded and encoded by the server itself, as docs/images.md says",
        is_prefix=True,
    ),
    _already(SGLANG, "--enable-multimodal", "multimodal models need no option"),
    _refused(VLLM, "--guided-decoding-disable-", "see --grammar-backend", is_prefix=True),
    _refused(
        VLLM,
        "--disable-sliding-window --disable-cascade-attn --disable-hybrid-kv-cache-manager",
        "layers run as the model has them",
    ),
    _refused(
        SGLANG,
        "--swa-full-tokens-ratio --disable-hybrid-swa-memory",
        "all layers have as many KV tokens: --max-total-tokens",
    ),
    _refused(
        SGLANG,
        "--enable-prefill-delayer --prefill-delayer- --scheduler-recv-interval --num-reserved-decode-tokens",
        "see --max-step-ms and --schedule-conservativeness",
        is_prefix=True,
    ),
    _refused(
        BOTH,
        "--triton-attention- --flashinfer- --disable-flashinfer- --enable-flashinfer- --dsa- --nsa- --enable-fused-",
        "kernels have no settings; see --attention-backend",
        is_prefix=True,
    ),
    _refused(
        SGLANG, "--disable-cuda-graph-padding --enable-profile-cuda-graph --enable-cudagraph-gc", "see --cuda-graph-bs"
    ),
    _refused(
        SGLANG,
        "--modelopt- --quantize-and-serve --rl-quant-profile",
        "see --quantization and `headrace quantize`",
        is_prefix=True,
    ),
    _refused(
        SGLANG,
        "--enable-weights-cpu-backup --enable-draft-weights-cpu-backup",
        "released weights are loaded again (docs/weights.md)",
    ),
    _refused(
        SGLANG, "--enable-pdmux --pdmux- --sm-group-num", "steps are not split over parts of a GPU", is_prefix=True
    ),
    _refused(
        SGLANG, "--enable-lora-overlap-loading --lora-drain-wait-threshold --max-lora-chunk-size", "see docs/lora.md"
    ),
    _refused(SGLANG, "--uvicorn-access-log-exclude-prefixes", "there is no access log"),
    _refused(VLLM, "--disable-access-log-for-endpoints", "there is no access log"),
    _refused(
        VLLM,
        "--log-config-file --log-error-stack --show-hidden-metrics-for-version",
        "see --log-level and --log-format",
    ),
    _refused(
        SGLANG,
        "--tokenizer-metrics- --enable-metrics-for-all-schedulers --enable-mfu-metrics --collect-tokens-histogram --export-metrics-to-file "
        "--export-metrics-to-file-dir --show-time-cost --gc-warning-threshold-secs",
        "see docs/operations.md for what is measured",
        is_prefix=True,
    ),
    _refused(VLLM, "--h11-", "see --max-body-bytes", is_prefix=True),
)

VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {
        "half": "float16",
        "fp16": "float16",
        "bf16": "bfloat16",
        "float": "float32",
        "fp32": "float32",
    },
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "model_impl": {"sglang": "headrace", "vllm": "headrace"},
    "load_balance_method": {"auto": "round_robin", "total_requests": "shortest_queue"},
    "attention_backend": {
        "FLASHINFER": "flashinfer",
        "TRITON_ATTN": "triton",
        "TORCH_SDPA": "torch_native",
    },
    "sampling_defaults": {"auto": "model", "vllm": "openai"},
    "speculative_algorithm": {"NGRAM": "ngram", "STANDALONE": "draft", "EAGLE3": "eagle3"},
}
"""Values of options of ours, by field, as others write them."""

CHECKPOINT_FORMATS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "gguf", "compressed-tensors")
"""Values of --quantization that say what a checkpoint is: accepted, since checkpoints are served in the format that they have."""

LISTS: Mapping[str, str] = {
    "lora_paths": r"[^-].*=.*",
    "cuda_graph_bs": r"\d+",
    "allow_origins": r"[a-z][a-z0-9+.-]*://.*|local-apps",
    "served_model_name": r"[^-].*",
}
"""Fields whose option takes several words or a JSON list elsewhere, and one word with commas here; and what further words look like."""


COUNTS = frozenset({"context_length", "max_prefill_tokens"})
"""Fields whose aliases also take `32k` (thousands) and `32K` (times 1,024)."""


@dataclass(frozen=True, slots=True)
class _Found:
    exact: dict[str, Entry] = field(default_factory=dict)
    prefixes: list[tuple[str, Refused]] = field(default_factory=list)


def _index() -> _Found:
    found = _Found()
    for entry in TABLE:
        for name in entry.names:
            if isinstance(entry, Refused) and entry.is_prefix and name.endswith("-"):
                found.prefixes.append((name, entry))
            else:
                found.exact[name] = entry
    return found


_FOUND = _index()


def find(name: str) -> Entry | None:
    """The entry of an option as typed, e.g. `--max-model-len`; an exact name comes before a prefix."""
    exact = _FOUND.exact.get(name)
    return exact or next((entry for prefix, entry in _FOUND.prefixes if name.startswith(prefix)), None)


def names() -> list[str]:
    """Every name, prefixes left out."""
    return list(_FOUND.exact)
