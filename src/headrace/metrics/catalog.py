"""Every metric, once.

Owns the registry and the names. Does not serve them (`metrics.export`). Lives in the main process and is fed by the tokenizer
manager, from its event loop; the scheduler's gauges come with its `InternalState`.
"""

import platform
from collections.abc import Callable
from typing import TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.registry import Collector

from headrace.messages.control import InternalState
from headrace.metrics.collectors import Count, CountByKey, LoadedMedia, LoraRequests, ProcessUse, Tally
from headrace.version import VERSION

_SECONDS_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_SECONDS_LONG = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 3, 5, 7.5, 10, 20, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

C = TypeVar("C", bound=Collector)
Reading = Callable[[InternalState], float]


class Metrics:
    """Counters, histograms and gauges of one server."""

    def __init__(self, model_name: str) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._last_states: dict[int, InternalState] = {}
        self._state_gauges: list[tuple[Gauge, Reading]] = []
        self._state_counters: list[tuple[Counter, Reading]] = []

        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, once per prompt.")
        self.generation_tokens = self._own(Count("headrace:generation_tokens", "Tokens generated.", model_name))
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens found in the prefix cache.")
        self._counter_of_state(
            "prefix_query_tokens", "Tokens looked up in the prefix cache.", lambda s: s.prefix_query_tokens
        )
        self.pooled_requests = self._counter(
            "pooled_requests", "Inputs of embedding, rerank, score and classification requests."
        )
        self.aborted_requests = self._counter("aborted_requests", "Samples that were aborted.")
        self._counter_of_state(
            "retracted_requests", "Retractions (preemptions) of running samples.", lambda s: s.num_retracted
        )
        self.replayed_requests = self._counter("replayed_requests", "Samples that were replayed after a process died.")
        self._restarts = self._counter("restarts", "Processes that were restarted.", "process")
        self._requests = self._counter("requests", "Samples that ended.", "finish_reason")
        self._rejected = self._counter(
            "rejected_requests", "Requests rejected because the server was overloaded.", "reason"
        )
        self._replies = self._counter(
            "http_requests", "HTTP requests, counted when the reply begins.", "route", "status"
        )
        self.key_requests = self._count_by_key("requests", "Samples that ended, by the name of their key.")
        self.key_prompt_tokens = self._count_by_key("prompt_tokens", "Prompt tokens, by the name of their key.")
        self.key_generation_tokens = self._count_by_key(
            "generation_tokens", "Tokens generated, by the name of their key."
        )
        lost = "Processes that were lost while they rendered a chat template: it exceeded a limit, or they were killed."
        self.template_kills = self._counter("template_kills", lost)
        self.processes = self._own(ProcessUse(model_name))
        versions = ("version", "python_version")
        build = self._gauge("build_info", "Always 1; the labels are the versions.", *versions)
        build.labels(model_name, VERSION, platform.python_version()).set(1)
        self._cache_config = self._gauge(
            "cache_config_info",
            "Always 1; the labels are the page size and the number of pages of the KV cache.",
            "dp_rank",
            "block_size",
            "num_gpu_blocks",
        )
        self.lora_requests = self._own(
            LoraRequests(
                "headrace:lora_requests_info", "Time since which the labels are the adapters in use.", model_name
            )
        )
        self.media = self._own(LoadedMedia(model_name))
        self.time_to_first_token_s = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", _SECONDS_LONG
        )
        latency = "Time between two tokens of a sample."
        self.inter_token_latency_s = self._own(
            Tally("headrace:inter_token_latency_seconds", latency, model_name, _SECONDS_SHORT)
        )
        self.e2e_latency_s = self._histogram(
            "e2e_request_latency_seconds", "Time from arrival to the end.", _SECONDS_LONG
        )
        self.queue_time_s = self._histogram(
            "queue_time_seconds", "Time from arrival at the scheduler to the first step.", _SECONDS_LONG
        )
        self.grammar_compile_s = self._histogram(
            "grammar_compile_seconds", "Time until the grammar of a sample is compiled.", _SECONDS_SHORT
        )
        # Not `prompt_tokens` and `generation_tokens`: Prometheus does not allow a histogram and a counter with the same name.
        self.prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a sample.", _TOKENS)
        self.generation_length = self._histogram("request_generation_tokens", "Tokens generated by a sample.", _TOKENS)
        self._metrics_of_state()

    def _metrics_of_state(self) -> None:
        """What the schedulers' states say, each beside the part of a state that it is."""
        gauge, counter = self._gauge_of_state, self._counter_of_state
        gauge("num_running_reqs", "Samples in the running batch.", lambda s: s.num_running)
        gauge("num_queue_reqs", "Samples in the queue.", lambda s: s.num_waiting)
        gauge("num_grammar_queue_reqs", "Samples whose grammar is being compiled.", lambda s: s.num_grammar_queue)
        gauge("gen_throughput", "Recent generation throughput in tokens per second.", lambda s: s.gen_throughput)
        gauge("token_usage", "Share of the KV cache in use, 0 to 1.", _token_usage)
        counter("scheduler_host_seconds", "Time spent on planning and committing steps.", lambda s: s.host_s)
        counter("steps", "Steps of the model.", lambda s: s.num_steps)
        counter("step_seconds", "Time spent in steps.", lambda s: s.forward_s)
        counter("prompt_steps", "Prefill steps with a predicted time.", lambda s: s.prompt_steps)
        counter("prompt_step_seconds", "Time spent in these steps.", lambda s: s.prompt_steps_s)
        counter("prompt_step_expected_seconds", "Predicted time of these steps.", lambda s: s.prompt_steps_expected_s)
        skipped = "Rows skipped because the mask of their grammar was not ready."
        counter("grammar_sat_out_rows", skipped, lambda s: s.num_sat_out)
        counter("grammar_mask_seconds", "Time spent on filling grammar masks.", lambda s: s.masks_s)
        counter("spec_verify_rows", "Rows with draft tokens to verify.", lambda s: s.speculation.num_steps)
        counter("spec_draft_tokens", "Draft tokens that were verified.", lambda s: s.speculation.num_drafted)
        counter("spec_accepted_tokens", "Draft tokens that were accepted.", lambda s: s.speculation.num_right)
        accepted = "Mean number of tokens of a row with draft tokens; 0 before the first."
        gauge("spec_accept_length", accepted, lambda s: s.speculation.accept_length)
        counter("grammar_compiles", "Grammars that were compiled (cache misses).", lambda s: s.grammars.num_compiled)
        hits = "Samples whose grammar was cached, or already being compiled."
        counter("grammar_cache_hits", hits, lambda s: s.grammars.num_cache_hits)
        refused = "Grammars that were rejected, each once while it is cached."
        counter("grammar_refusals", refused, lambda s: s.grammars.num_refused)
        killed = "Processes that were lost while they compiled a grammar: it exceeded a limit, or they were killed."
        counter("grammar_kills", killed, lambda s: s.grammars.num_killed)
        gauge("grammar_cache_bytes", "Bytes of cached compiled grammars.", lambda s: s.grammars.cached_bytes)
        counter(
            "kv_tier_stored_tokens", "Tokens whose KV was copied to --kv-cache-dir.", lambda s: s.tier.stored_tokens
        )
        counter("kv_tier_loaded_tokens", "Tokens whose KV was copied from there.", lambda s: s.tier.loaded_tokens)
        counter("kv_tier_dropped", "Prefixes not stored for want of room or time.", lambda s: s.tier.dropped)
        counter("kv_tier_damaged_files", "Files removed because of what was in them.", lambda s: s.tier.damaged)
        counter("transfer_rooms", "Rooms whose KV was sent or has come.", lambda s: s.transfer.rooms)
        without = "Rooms without KV: on the decode side their prompts were computed there, or ended with an error."
        counter("transfer_failures", without, lambda s: s.transfer.failed)
        counter("transfer_sent_tokens", "Tokens whose KV was sent.", lambda s: s.transfer.sent_tokens)
        counter("transfer_received_tokens", "Tokens whose KV has come.", lambda s: s.transfer.received_tokens)
        gauge("kv_pins", "Pinned prefixes.", lambda s: s.pins.count)
        gauge("kv_pinned_tokens", "Tokens of the prefix cache that pins hold.", lambda s: s.pins.tokens)
        gauge("kv_pin_owners", "Keys that have pins.", lambda s: s.pins.owners)
        counter("kv_pins_released", "Pins that gave way to a request that was alone.", lambda s: s.pins.released)
        counter("media_encoded", "Media items that were encoded.", lambda s: s.encodings.num_encoded)
        counter("media_encoding_failures", "Media items that could not be encoded.", lambda s: s.encodings.num_failed)
        found = "Media items whose encoder output was cached."
        counter("media_encoding_hits", found, lambda s: s.encodings.num_hits)
        counter("media_encoded_tokens", "Tokens of media items that were encoded.", lambda s: s.encodings.num_tokens)
        spent = "Time spent on encoding, part of step_seconds."
        counter("media_encoding_seconds", spent, lambda s: s.encodings.seconds)
        gauge("kv_available_tokens", "Free tokens of the KV cache.", lambda s: s.pool.free_tokens)
        gauge("kv_evictable_tokens", "Evictable tokens of the prefix cache.", lambda s: s.pool.evictable_tokens)
        gauge("cache_hit_rate", "Prefix cache hit rate over tokens, 0 to 1.", _cache_hit_rate)

    def set_cache_config(self, page_size: int, num_pages: int, num_replicas: int) -> None:
        for replica in range(num_replicas):
            self._cache_config.labels(self._model_name, str(replica), str(page_size), str(num_pages)).set(1)

    def count_end(self, finish_type: str) -> None:
        """A sample ended: stop, length or abort."""
        self._requests.labels(self._model_name, finish_type).inc()
        if finish_type == "abort":
            self.aborted_requests.inc()

    def count_rejected(self, reason: str) -> None:
        """A request was refused: queue_full, key_limit or queue_timeout."""
        self._rejected.labels(self._model_name, reason).inc()

    def count_reply(self, route: str, status: int) -> None:
        """An HTTP reply has begun. route: the declared path."""
        self._replies.labels(self._model_name, route, str(status)).inc()

    def count_restart(self, process: str) -> None:
        self._restarts.labels(self._model_name, process).inc()

    def set_scheduler_state(self, state: InternalState) -> None:
        """Set a replica's gauges, and add to the counters what has changed since its last state."""
        for gauge, read in self._state_gauges:
            gauge.labels(self._model_name, str(state.replica)).set(read(state))
        last = self._last_states.get(state.replica)
        for counter, read in self._state_counters:
            now, before = read(state), 0 if last is None else read(last)
            # A restarted scheduler counts from zero.
            counter.inc(now - before if now >= before else now)
        self._last_states[state.replica] = state

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(f"headrace:{name}", text, ["model_name", *labels], registry=self.registry)
        return made if labels else made.labels(self._model_name)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"headrace:{name}", text, ["model_name", *labels], registry=self.registry)

    def _counter_of_state(self, name: str, text: str, read: Reading) -> None:
        self._state_counters.append((self._counter(name, text), read))

    def _gauge_of_state(self, name: str, text: str, read: Reading) -> None:
        self._state_gauges.append((self._gauge(name, text, "dp_rank"), read))

    def _own(self, made: C) -> C:
        self.registry.register(made)
        return made

    def _count_by_key(self, name: str, text: str) -> CountByKey:
        return self._own(CountByKey(f"headrace:key_{name}", text, self._model_name))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"headrace:{name}", text, ["model_name"], registry=self.registry, buckets=buckets).labels(
            self._model_name
        )


def _token_usage(state: InternalState) -> float:
    pool = state.pool
    used = pool.total_tokens - pool.free_tokens - pool.evictable_tokens
    return used / pool.total_tokens if pool.total_tokens else 0.0


def _cache_hit_rate(state: InternalState) -> float:
    return state.cached_tokens / state.prefix_query_tokens if state.prefix_query_tokens else 0.0
