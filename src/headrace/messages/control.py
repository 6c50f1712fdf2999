"""What control operations ask and answer (their table is `operations`), and messages without a reply, such as the status of processes."""

from typing import Literal

import msgspec

from headrace.messages.grammar import GrammarStats
from headrace.messages.media import EncodingStats
from headrace.messages.outputs import SpeculationCounts


class _Control(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of control messages."""


class AbortReq(_Control, frozen=True, tag=True, array_like=True, gc=False):
    """Abort these samples (exact rids), or all. No reply: each aborted sample ends with its own output. status_code: see `FinishReason`; 0 = the
    client asked for it, so it is not an error."""

    rids: tuple[str, ...] = ()
    abort_all: bool = False
    message: str = "aborted"
    status_code: int = 0


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """Result of an operation. If the status is not 200 it failed, and the message says why."""

    success: bool
    message: str


class PoolState(msgspec.Struct, frozen=True, gc=False):
    """Accounting in tokens: free + evictable + leased == total always holds (`consistent`).

    leased counts tokens under a lease in the tree and those that running requests own outside the tree.
    """

    total_tokens: int
    free_tokens: int
    evictable_tokens: int
    leased_tokens: int
    request_slots_total: int
    request_slots_free: int
    consistent: bool


class TierStats(msgspec.Struct, frozen=True, gc=False):
    """Totals of a tier behind the prefix cache since start. stored_tokens, loaded_tokens: whose KV was copied to and from it. dropped: prefixes that
    were not stored for want of room or time. damaged: files that were removed because of their content."""

    stored_tokens: int = 0
    loaded_tokens: int = 0
    dropped: int = 0
    damaged: int = 0


class TransferStats(msgspec.Struct, frozen=True, gc=False):
    """Totals of --disaggregation-mode since start. rooms: whose KV was sent or has come; failed: those without. Tokens are in whole pages."""

    rooms: int = 0
    failed: int = 0
    sent_tokens: int = 0
    sent_bytes: int = 0
    received_tokens: int = 0
    received_bytes: int = 0


class PinStats(msgspec.Struct, frozen=True, gc=False):
    """Pinned prefixes: how many, the tokens of the tree that they hold, and how many owners they have. released: those that gave way to a request
    that was alone, since start."""

    count: int = 0
    tokens: int = 0
    owners: int = 0
    released: int = 0


class InternalState(msgspec.Struct, frozen=True, gc=False):
    """Counters since start, and current gauges; `gen_throughput` is in tokens per second over the last interval.

    forward_s: seconds the worker spent in steps since start. host_s: seconds the scheduler spent on planning and committing them; with
    overlap mostly while a step ran. prompt_steps, prompt_steps_s, prompt_steps_expected_s: number of the steps with prompt tokens whose time
    was predicted, the seconds they took, and the seconds predicted (see --max-step-ms). num_grammar_queue: requests whose grammar is being compiled;
    they do not count as waiting. num_sat_out: rows that were not sampled because the mask of their grammar was not ready.
    masks_s: seconds that were spent on masks of grammars, beside the layers. grammars: what became of them. tier: of --kv-cache-dir.
    pins: of the prefix cache. encodings: what was done for media. speculation: what draft tokens have brought. paused: the pause mode, empty while
    generation runs. released: tags of released memory. replica: its index; clients see it as `dp_rank`, the name that routers expect.
    """

    pool: PoolState
    num_running: int
    num_waiting: int
    num_in_flight_steps: int
    num_steps: int
    num_retracted: int
    num_aborted: int
    num_finished: int
    prompt_tokens: int
    generation_tokens: int
    cached_tokens: int
    computed_prefill_tokens: int
    prefix_query_tokens: int
    memory_repairs: int
    dropped_frames: int
    gen_throughput: float
    new_token_ratio: float
    waiting_tokens: int
    forward_s: float = 0.0
    host_s: float = 0.0
    prompt_steps: int = 0
    prompt_steps_s: float = 0.0
    prompt_steps_expected_s: float = 0.0
    num_grammar_queue: int = 0
    num_sat_out: int = 0
    masks_s: float = 0.0
    speculation: SpeculationCounts = SpeculationCounts()
    grammars: GrammarStats = GrammarStats()
    encodings: EncodingStats = EncodingStats()
    tier: TierStats = TierStats()
    transfer: TransferStats = TransferStats()
    pins: PinStats = PinStats()
    paused: str = ""
    released: tuple[str, ...] = ()
    weight_version: str = "default"
    replica: int = msgspec.field(default=0, name="dp_rank")


class HealthCheckReply(msgspec.Struct, frozen=True, gc=False):
    """The loop is running. `busy`: requests run, which proves that it generates; `held`: it was told not to generate now."""

    busy: bool
    held: bool = False


class SchedulerStats(_Control, frozen=True, tag=True, array_like=True, gc=False):
    """Gauges for /metrics, pushed by the scheduler about once a second while it works and when it becomes idle."""

    state: InternalState


class Heartbeat(_Control, frozen=True, tag=True, array_like=True, gc=False):
    """Sent by a thread of each child about twice a second. dropped_frames: by its receiver so far."""

    process: str
    dropped_frames: int = 0


class ConfigureLoggingReq(_Control, frozen=True, tag=True, array_like=True, gc=False):
    """Log lines of this level and above. No reply."""

    level: Literal["debug", "info", "warning", "error"]


class FreezeGCReq(_Control, frozen=True, tag=True, array_like=True, gc=False):
    """Exclude all objects that exist now from garbage collection. No reply."""


class SetLimitsReq(_Control, frozen=True, tag=True, array_like=True, gc=False):
    """To a scheduler: change limits from the next step on. No reply; see `SchedulerConfig`.

    max_running: at most the value at start. conservativeness: > 0.
    """

    max_running: int
    max_queued: int
    chunk_tokens: int
    conservativeness: float
    max_step_s: float


class ShutdownReq(_Control, frozen=True, tag=True, array_like=True, gc=False):
    """Leave the loop now. The sender has drained or given up the running requests."""


class ResetReq(_Control, frozen=True, tag=True, array_like=True, gc=False):
    """To a scheduler: drop every request without an output, and mark outputs with `source` from now on. Cached KV stays."""

    source: int


class SourceGone(_Control, frozen=True, tag=True, array_like=True, gc=False):
    """To the detokenizer: ignore outputs marked with `source` from now on."""

    source: int


class FaultReq(_Control, frozen=True, tag=True, array_like=True, gc=False):
    """Test hook, accepted only under --enable-fault-injection: do `kind` at `stage` when `rid` has `at_token` output tokens.

    stage admission: before it is queued. forward: the whole batched step. sampling: that row. detokenize: in the detokenizer.
    kind raise: an exception. nan: the row's logits become NaN. sleep: `seconds`. crash: the process ends at once.
    """

    stage: Literal["admission", "forward", "sampling", "detokenize"]
    kind: Literal["raise", "nan", "sleep", "crash"]
    rid: str
    at_token: int = 0
    seconds: float = 0.0


class EncoderInfo(msgspec.Struct, frozen=True):
    """The media encoder of a model. num_rows: rows of its output that are kept. num_slices: into which the work for a part of a batch is cut.
    whole_images: all tokens of an image are computed in one step."""

    num_rows: int
    num_slices: int
    whole_images: bool = False


class ReadyInfo(msgspec.Struct, frozen=True):
    """What a scheduler reports about its model and memory when it is ready (JSON on the ready pipe). fingerprint: of the checkpoint's files.

    lora_fingerprints: of the adapters of --lora-paths, in their order. max_step_ms: None = no bound. encoder: of a multimodal model. weight_bytes,
    kv_bytes: of all ranks. kv_cache_added_error: what a quantised KV cache adds to the error of a token's logprob, taken or not; None = unknown.
    stored_precision: what a GGUF file calls its own, such as Q4_K_M; "" elsewhere. stored_types: of a GGUF file, as
    `StoredType` has them. speculative_algorithm: what drafts tokens, with what was measured here; speculation: that and
    why, for people.
    """

    max_total_tokens: int
    max_running_requests: int
    context_length: int
    vocab_size: int
    hidden_size: int
    page_size: int
    dtype: str
    kv_cache_dtype: str
    device: str
    attention_backend: str
    model_class: str
    weight_bytes: int
    kv_bytes: int
    load_s: float
    quantization: str = "none"
    activations: str = "float32"
    chunked_prefill_size: int = 512
    max_step_ms: int | None = None
    decisions: tuple[str, ...] = ()
    encoder: EncoderInfo | None = None
    fingerprint: str = ""
    lora_fingerprints: tuple[str, ...] = ()
    kv_cache_added_error: float | None = None
    num_parameters: int = 0
    file_format: Literal["gguf", "safetensors"] = "safetensors"
    stored_precision: str = ""
    stored_types: tuple[dict[str, str | int], ...] = ()
    has_experts: bool = False
    speculative_algorithm: str = "off"
    speculation: str = "off"

    @property
    def attention(self) -> str:
        """The attention backend, and what the native kernels multiply, for people: "cpu, multiplies 16-bit integers"."""
        if self.attention_backend != "cpu":
            return self.attention_backend
        floats = "bfloat16" if self.kv_cache_dtype == self.activations == "bfloat16" else "floats"
        kind = {"int8": "8-bit integers", "int16": "16-bit integers"}.get(self.kv_cache_dtype, floats)
        return f"cpu, multiplies {kind}"

    @property
    def precision(self) -> str:
        """The precision of weights and of what they multiply, for people: "bfloat16 weights and activations", "int8 weights"."""
        if self.quantization != "none":
            return f"{self.quantization} weights"
        if self.dtype == self.activations:
            return f"{self.dtype} weights and activations"
        return f"{self.dtype} weights, {self.activations} activations"


class CacheNode(msgspec.Struct, frozen=True, gc=False):
    """A node: the tokens of the edge that leads to it.

    parent: index of its parent among the nodes listed; -1: it begins a prompt. num_tokens: of the edge. num_children: also those that are not
    listed. num_leases: how many running requests pin it.
    """

    parent: int
    num_tokens: int
    num_children: int
    num_leases: int


class CacheTree(msgspec.Struct, frozen=True):
    """The upper part of a replica's tree; parents come before their children. num_nodes, num_tokens: of the whole tree."""

    replica: int = msgspec.field(name="dp_rank")
    num_nodes: int
    num_tokens: int
    nodes: list[CacheNode]


class CacheUse(msgspec.Struct, frozen=True):
    """What a replica has cached. tokens: in its tree, of who asks. pinned: tokens of each pin of who asks, by its id.
    pinned_tokens: of all these pins, each once. disk: of --kv-cache-dir, None
    without; disk_bytes: what all its files take."""

    replica: int = msgspec.field(name="dp_rank")
    pool: PoolState
    tokens: int
    pinned: dict[str, int]
    pinned_tokens: int
    disk: TierStats | None = None
    disk_bytes: int = 0


class ExpertCountsReq(msgspec.Struct, frozen=True, gc=False):
    """Start recording from zero, stop, or return the counts and start again from zero."""

    action: Literal["start", "stop", "dump"]


class ExpertCountsReply(msgspec.Struct, frozen=True, gc=False):
    """layers: layer number -> tokens per expert; empty but for a dump."""

    layers: dict[int, list[int]] = {}
