"""Every metric, once.

Owns the registry, the names, metrics that are read when they are scraped, and counters without a lock. Does not serve them (`metrics.export`).
Lives in the main process and is fed by the tokenizer manager, from its event loop; the scheduler's gauges come with its `InternalState`.
"""

import os
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import prometheus_client
import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from headrace.media_kinds import MediaKind
from headrace.messages.control import InternalState
from headrace.messages.media import MediaStats
from headrace.version import VERSION

MAX_KEY_NAMES = 1000
OTHER_KEYS = "others"
"""Name for the keys beyond the first MAX_KEY_NAMES: a key file that changes for ever makes no series for ever."""

Processes = Callable[[], Iterable[tuple[str, int]]]
"""Name and process id of each process that lives now."""

F = TypeVar("F", CounterMetricFamily, GaugeMetricFamily)


def _family(kind: type[F], name: str, text: str, model_name: str, values: Mapping[str, float], label: str = "") -> F:
    """values: by the value of the label, if there is one."""
    family = kind(name, text, labels=["model_name", label] if label else ["model_name"])
    for of_label, value in values.items():
        family.add_metric([model_name, of_label] if label else [model_name], value)
    return family


class _OwnMetric(Collector):
    def __init__(self, name: str, text: str, model_name: str) -> None:
        self._name, self._text, self._model_name = name, text, model_name


class Count(_OwnMetric):
    """A counter for what every step adds to."""

    value = 0

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield _family(CounterMetricFamily, self._name, self._text, self._model_name, {"": self.value})


class CountByKey(_OwnMetric):
    """A counter for each name of a key in the key file. Callers without such a key are not counted."""

    def __init__(self, name: str, text: str, model_name: str) -> None:
        super().__init__(name, text, model_name)
        self._values: dict[str, int] = {}

    def add(self, key_name: str, count: int) -> None:
        """Count for a key; an empty name counts nothing."""
        if key_name:
            if key_name not in self._values and len(self._values) >= MAX_KEY_NAMES:
                key_name = OTHER_KEYS
            self._values[key_name] = self._values.get(key_name, 0) + count

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield _family(CounterMetricFamily, self._name, self._text, self._model_name, self._values, "key_name")


class Tally(_OwnMetric):
    """A histogram for one observation per token: without a walk over the buckets."""

    def __init__(self, name: str, text: str, model_name: str, buckets: Sequence[float]) -> None:
        super().__init__(name, text, model_name)
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        family.add_metric([self._model_name], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


class LoraRequests(_OwnMetric):
    """Which adapters are in use, as labels that routers read. The value is when that was first seen, seconds since 1970."""

    _max_loras = 0
    _seen: tuple[list[str], float] = ([], 0.0)

    def __init__(self, name: str, text: str, model_name: str) -> None:
        super().__init__(name, text, model_name)
        self._read: Callable[[], tuple[Collection[str], Collection[str]]] = lambda: ((), ())

    def watch(self, max_loras: int, read: Callable[[], tuple[Collection[str], Collection[str]]]) -> None:
        """max_loras: most adapters in memory. read: names of the adapters of running samples, and of waiting ones."""
        self._max_loras, self._read = max_loras, read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        family = GaugeMetricFamily(self._name, self._text, labels=labels)
        names = [",".join(sorted(names)) for names in self._read()]
        if names != self._seen[0]:
            self._seen = (names, time.time())
        family.add_metric([self._model_name, str(self._max_loras), *names], self._seen[1])
        yield family


class LoadedMedia(Collector):
    """The media that clients send: what was loaded, refused and kept."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._read: Callable[[], MediaStats] = MediaStats

    def watch(self, read: Callable[[], MediaStats]) -> None:
        """read: gives the counts of a loader so far."""
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        stats = self._read()
        loaded: dict[str, float] = {kind: stats.num_loaded.get(kind, 0) for kind in MediaKind}
        cached = "Media items that had been prepared for an earlier request, or were being prepared for one."
        decoded = "Time spent on decoding and preparing media items, waiting included."
        killed = "Processes that were lost while they prepared an item: it exceeded a limit, or they were killed."
        yield self._counter("loaded", "Media items that were given to requests.", loaded, "kind")
        yield self._counter("refused", "Media items that were refused, by reason.", stats.num_refused, "reason")
        yield self._counter("cache_hits", cached, {"": stats.num_cache_hits})
        yield self._counter("fetch_seconds", "Time spent on fetching files, waiting included.", {"": stats.fetch_s})
        yield self._counter("decode_seconds", decoded, {"": stats.decode_s})
        yield self._counter("processes_killed", killed, {"": stats.num_killed})
        name, text = "headrace:media_cache_bytes", "Bytes of cached media items."
        yield _family(GaugeMetricFamily, name, text, self._model_name, {"": stats.cache_bytes})

    def _counter(self, name: str, text: str, values: Mapping[str, float], label: str = "") -> CounterMetricFamily:
        return _family(CounterMetricFamily, f"headrace:media_{name}", text, self._model_name, values, label)


class ProcessUse(Collector):
    """Processor time, memory and open files of the main process, and of those that `watch` names; as the system tells them.

    The names are the usual ones of Prometheus' clients, without our prefix, with a label `process`.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._sources: list[Processes] = [lambda: [("main", os.getpid())]]

    def watch(self, processes: Processes) -> None:
        """Include these processes. Asked at every scrape; one that has ended is left out."""
        self._sources.append(processes)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        labels = ["model_name", "process"]
        cpu_s = CounterMetricFamily("process_cpu_seconds", "Processor time, user and system.", labels=labels)
        memory = GaugeMetricFamily("process_resident_memory_bytes", "Resident memory.", labels=labels)
        files = GaugeMetricFamily("process_open_fds", "Open file descriptors.", labels=labels)
        started = GaugeMetricFamily("process_start_time_seconds", "Unix time of the start.", labels=labels)
        for name, pid in [each for source in self._sources for each in source()]:
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    times, used, opened = process.cpu_times(), process.memory_info().rss, process.num_fds()
                    began_s = process.create_time()
            except psutil.Error:
                continue  # it has ended meanwhile
            values = [self._model_name, name]
            cpu_s.add_metric(values, times.user + times.system)
            memory.add_metric(values, used)
            files.add_metric(values, opened)
            started.add_metric(values, began_s)
        yield from (cpu_s, memory, files, started)


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
