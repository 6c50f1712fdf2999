"""Every metric, once.

Owns the registry and the names. Does not serve them (`metrics.export`). Lives in the main process and is fed by the tokenizer
manager, from its event loop; the scheduler's gauges come with its `SchedulerStats`.
"""

import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from headrace.messages.control import InternalState
from headrace.messages.grammar import GrammarStats
from headrace.messages.media import EncodingStats
from headrace.messages.outputs import SpeculationCounts
from headrace.metrics.media import LoadedMedia
from headrace.metrics.process_use import ProcessUse
from headrace.version import VERSION

_SECONDS_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_SECONDS_LONG = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 3, 5, 7.5, 10, 20, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Count(Collector):
    """A counter for what every step adds to: without a lock. Used and scraped in one event loop."""

    def __init__(self, name: str, text: str, model_name: str) -> None:
        self.value = 0
        self._name, self._text, self._model_name = name, text, model_name

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Called by the registry."""
        family = CounterMetricFamily(self._name, self._text, labels=["model_name"])
        family.add_metric([self._model_name], self.value)
        yield family


MAX_KEY_NAMES = 1000
OTHER_KEYS = "others"
"""Name for the keys beyond the first MAX_KEY_NAMES: a key file that changes for ever makes no series for ever."""


class CountByKey(Collector):
    """A counter for each name of a key in the key file. Callers without such a key are not counted."""

    def __init__(self, name: str, text: str, model_name: str) -> None:
        self._values: dict[str, int] = {}
        self._name, self._text, self._model_name = name, text, model_name

    def add(self, key_name: str, count: int) -> None:
        """Count for a key; an empty name counts nothing."""
        if key_name:
            if key_name not in self._values and len(self._values) >= MAX_KEY_NAMES:
                key_name = OTHER_KEYS
            self._values[key_name] = self._values.get(key_name, 0) + count

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Called by the registry."""
        family = CounterMetricFamily(self._name, self._text, labels=["model_name", "key_name"])
        for key_name, value in self._values.items():
            family.add_metric([self._model_name, key_name], value)
        yield family


class Tally(Collector):
    """A histogram for one observation per token: without a lock or a walk over the buckets. Used and scraped in one event loop."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], model_name: str) -> None:
        self._name, self._text, self._model_name = name, text, model_name
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int) -> None:
        """`count` observations of `value`."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Called by the registry."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        family.add_metric([self._model_name], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


class LoraRequests(Collector):
    """Which adapters are in use, as labels that routers read. The value is when that was first seen, seconds since 1970. See `watch`."""

    def __init__(self, name: str, text: str, model_name: str) -> None:
        self._name, self._text, self._model_name = name, text, model_name
        self._max_loras = 0
        self._read: Callable[[], tuple[Collection[str], Collection[str]]] = lambda: ((), ())
        self._seen: tuple[list[str], float] = ([], 0.0)

    def watch(self, max_loras: int, read: Callable[[], tuple[Collection[str], Collection[str]]]) -> None:
        """max_loras: most adapters in memory. read: names of the adapters of running samples, and of waiting ones."""
        self._max_loras, self._read = max_loras, read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Called by the registry."""
        labels = ["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        family = GaugeMetricFamily(self._name, self._text, labels=labels)
        names = [",".join(sorted(names)) for names in self._read()]
        if names != self._seen[0]:
            self._seen = (names, time.time())
        family.add_metric([self._model_name, str(self._max_loras), *names], self._seen[1])
        yield family


class Metrics:
    """Counters, histograms and gauges of one server."""

    def __init__(self, model_name: str) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._last_states: dict[int, InternalState] = {}

        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, once per prompt.")
        self.generation_tokens = Count("headrace:generation_tokens", "Tokens generated.", model_name)
        self.registry.register(self.generation_tokens)
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens found in the prefix cache.")
        self.prefix_query_tokens = self._counter("prefix_query_tokens", "Tokens looked up in the prefix cache.")
        self.pooled_requests = self._counter(
            "pooled_requests", "Inputs of embedding, rerank, score and classification requests."
        )
        self.aborted_requests = self._counter("aborted_requests", "Samples that were aborted.")
        self.retracted_requests = self._counter("retracted_requests", "Retractions (preemptions) of running samples.")
        self.replayed_requests = self._counter("replayed_requests", "Samples that were replayed after a process died.")
        self._restarts = Counter(
            "headrace:restarts", "Processes that were restarted.", ["model_name", "process"], registry=self.registry
        )
        self._requests = Counter(
            "headrace:requests", "Samples that ended.", ["model_name", "finish_reason"], registry=self.registry
        )
        self._rejected = Counter(
            "headrace:rejected_requests",
            "Requests rejected because the server was overloaded.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._replies = Counter(
            "headrace:http_requests",
            "HTTP requests, counted when the reply begins.",
            ["model_name", "route", "status"],
            registry=self.registry,
        )
        self.key_requests = self._count_by_key("key_requests", "Samples that ended, by the name of their key.")
        self.key_prompt_tokens = self._count_by_key("key_prompt_tokens", "Prompt tokens, by the name of their key.")
        self.key_generation_tokens = self._count_by_key(
            "key_generation_tokens", "Tokens generated, by the name of their key."
        )
        self.processes = ProcessUse(model_name)
        self.registry.register(self.processes)
        Gauge(
            "headrace:build_info",
            "Always 1; the labels are the versions.",
            ["model_name", "version", "python_version"],
            registry=self.registry,
        ).labels(model_name, VERSION, platform.python_version()).set(1)
        self._cache_config = Gauge(
            "headrace:cache_config_info",
            "Always 1; the labels are the page size and the number of pages of the KV cache.",
            ["model_name", "dp_rank", "block_size", "num_gpu_blocks"],
            registry=self.registry,
        )
        self.lora_requests = LoraRequests(
            "headrace:lora_requests_info", "Time since which the labels are the adapters in use.", model_name
        )
        self.registry.register(self.lora_requests)
        self.media = LoadedMedia(model_name)
        self.registry.register(self.media)
        self.time_to_first_token_s = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", _SECONDS_LONG
        )
        self.inter_token_latency_s = Tally(
            "headrace:inter_token_latency_seconds", "Time between two tokens of a sample.", _SECONDS_SHORT, model_name
        )
        self.registry.register(self.inter_token_latency_s)
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

        self.num_running = self._gauge("num_running_reqs", "Samples in the running batch.")
        self.num_queued = self._gauge("num_queue_reqs", "Samples in the queue.")
        self.num_grammar_queued = self._gauge("num_grammar_queue_reqs", "Samples whose grammar is being compiled.")
        self.gen_throughput = self._gauge("gen_throughput", "Recent generation throughput in tokens per second.")
        self.token_usage = self._gauge("token_usage", "Share of the KV cache in use, 0 to 1.")
        self.scheduler_host_s = self._counter("scheduler_host_seconds", "Time spent on planning and committing steps.")
        self.steps = self._counter("steps", "Steps of the model.")
        self.step_s = self._counter("step_seconds", "Time spent in steps.")
        self.prompt_steps = self._counter("prompt_steps", "Prefill steps with a predicted time.")
        self.prompt_step_s = self._counter("prompt_step_seconds", "Time spent in these steps.")
        self.prompt_step_expected_s = self._counter("prompt_step_expected_seconds", "Predicted time of these steps.")
        self.sat_out_rows = self._counter(
            "grammar_sat_out_rows", "Rows skipped because the mask of their grammar was not ready."
        )
        self.grammar_mask_s = self._counter("grammar_mask_seconds", "Time spent on filling grammar masks.")
        self.spec_rows = self._counter("spec_verify_rows", "Rows with draft tokens to verify.")
        self.spec_drafted = self._counter("spec_draft_tokens", "Draft tokens that were verified.")
        self.spec_right = self._counter("spec_accepted_tokens", "Draft tokens that were accepted.")
        self.spec_accept_length = self._gauge(
            "spec_accept_length", "Mean number of tokens of a row with draft tokens; 0 before the first."
        )
        self.grammar_compiles = self._counter("grammar_compiles", "Grammars that were compiled (cache misses).")
        self.grammar_cache_hits = self._counter(
            "grammar_cache_hits", "Samples whose grammar was cached, or already being compiled."
        )
        self.grammar_refusals = self._counter(
            "grammar_refusals", "Grammars that were rejected, each once while it is cached."
        )
        self.grammar_kills = self._counter(
            "grammar_kills", "Grammars that exceeded the limits of time or memory; they count as rejected, too."
        )
        self.grammar_cache_bytes = self._gauge("grammar_cache_bytes", "Bytes of cached compiled grammars.")
        self.media_encoded = self._counter("media_encoded", "Media items that were encoded.")
        self.media_failures = self._counter("media_encoding_failures", "Media items that could not be encoded.")
        self.media_hits = self._counter("media_encoding_hits", "Media items whose encoder output was cached.")
        self.media_tokens = self._counter("media_encoded_tokens", "Tokens of media items that were encoded.")
        self.media_encoding_s = self._counter("media_encoding_seconds", "Time spent on encoding, part of step_seconds.")
        self.kv_available = self._gauge("kv_available_tokens", "Free tokens of the KV cache.")
        self.kv_evictable = self._gauge("kv_evictable_tokens", "Evictable tokens of the prefix cache.")
        self.cache_hit_rate = self._gauge("cache_hit_rate", "Prefix cache hit rate over tokens, 0 to 1.")

    def set_cache_config(self, page_size: int, num_pages: int, num_replicas: int) -> None:
        """Set the size of each replica's KV pool."""
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
        """A process that died has been restarted."""
        self._restarts.labels(self._model_name, process).inc()

    def set_scheduler_state(self, state: InternalState) -> None:
        """Set a replica's gauges, and add to the counters what has changed since its last state."""
        pool = state.pool
        labels = (self._model_name, str(state.replica))
        self.num_running.labels(*labels).set(state.num_running)
        self.num_queued.labels(*labels).set(state.num_waiting)
        self.num_grammar_queued.labels(*labels).set(state.num_grammar_queue)
        self.grammar_cache_bytes.labels(*labels).set(state.grammars.cached_bytes)
        self.gen_throughput.labels(*labels).set(state.gen_throughput)
        self.kv_available.labels(*labels).set(pool.free_tokens)
        self.kv_evictable.labels(*labels).set(pool.evictable_tokens)
        used = pool.total_tokens - pool.free_tokens - pool.evictable_tokens
        self.token_usage.labels(*labels).set(used / pool.total_tokens if pool.total_tokens else 0.0)
        self.cache_hit_rate.labels(*labels).set(
            state.cached_tokens / state.prefix_query_tokens if state.prefix_query_tokens else 0.0
        )
        self.spec_accept_length.labels(*labels).set(state.speculation.accept_length)
        last = self._last_states.get(state.replica)
        # A restarted scheduler counts from zero.
        self.prefix_query_tokens.inc(_added(state.prefix_query_tokens, last.prefix_query_tokens if last else 0))
        self.retracted_requests.inc(_added(state.num_retracted, last.num_retracted if last else 0))
        self.grammar_mask_s.inc(_added(state.masks_s, last.masks_s if last else 0.0))
        self.sat_out_rows.inc(_added(state.num_sat_out, last.num_sat_out if last else 0))
        self.scheduler_host_s.inc(_added(state.host_s, last.host_s if last else 0.0))
        self.step_s.inc(_added(state.forward_s, last.forward_s if last else 0.0))
        self.steps.inc(_added(state.num_steps, last.num_steps if last else 0))
        self.prompt_steps.inc(_added(state.prompt_steps, last.prompt_steps if last else 0))
        self.prompt_step_s.inc(_added(state.prompt_steps_s, last.prompt_steps_s if last else 0.0))
        expected_s = last.prompt_steps_expected_s if last else 0.0
        self.prompt_step_expected_s.inc(_added(state.prompt_steps_expected_s, expected_s))
        guessed, so_far = state.speculation, last.speculation if last else SpeculationCounts()
        self.spec_rows.inc(_added(guessed.num_steps, so_far.num_steps))
        self.spec_drafted.inc(_added(guessed.num_drafted, so_far.num_drafted))
        self.spec_right.inc(_added(guessed.num_right, so_far.num_right))
        grammars, before = state.grammars, last.grammars if last else GrammarStats()
        self.grammar_compiles.inc(_added(grammars.num_compiled, before.num_compiled))
        self.grammar_cache_hits.inc(_added(grammars.num_cache_hits, before.num_cache_hits))
        self.grammar_refusals.inc(_added(grammars.num_refused, before.num_refused))
        self.grammar_kills.inc(_added(grammars.num_killed, before.num_killed))
        encoded, encoded_before = state.encodings, last.encodings if last else EncodingStats()
        self.media_encoded.inc(_added(encoded.num_encoded, encoded_before.num_encoded))
        self.media_failures.inc(_added(encoded.num_failed, encoded_before.num_failed))
        self.media_hits.inc(_added(encoded.num_hits, encoded_before.num_hits))
        self.media_tokens.inc(_added(encoded.num_tokens, encoded_before.num_tokens))
        self.media_encoding_s.inc(_added(encoded.seconds, encoded_before.seconds))
        self._last_states[state.replica] = state

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"headrace:{name}", text, ["model_name"], registry=self.registry).labels(self._model_name)

    def _count_by_key(self, name: str, text: str) -> CountByKey:
        made = CountByKey(f"headrace:{name}", text, self._model_name)
        self.registry.register(made)
        return made

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"headrace:{name}", text, ["model_name", "dp_rank"], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"headrace:{name}", text, ["model_name"], registry=self.registry, buckets=buckets).labels(
            self._model_name
        )


def _added(now: float, before: float) -> float:
    return now - before if now >= before else now
