"""An OpenTelemetry span per sample, made from its timeline when it has ended.

Owns the shape of the span (names after the semantic conventions for generative AI) and the parent taken from a W3C `traceparent`
header. The OpenTelemetry SDK is the extra `otel`: it batches and sends in a thread of its own, so nothing here waits for a network.
"""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from headrace.errors import ConfigError
from headrace.metrics.timeline import Timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_NANO = 1_000_000_000

AttributeValue = str | int | float


@dataclass(frozen=True, slots=True)
class Parent:
    """The caller's span (W3C Trace Context, section 3.2)."""

    trace_id: int
    span_id: int
    sampled: bool


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """Our form of a span. Times are Unix nanoseconds. error: message of a failed sample."""

    name: str
    parent: Parent | None
    start_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue]
    events: list[tuple[str, int, dict[str, AttributeValue]]] = field(default_factory=list)
    error: str = ""


class SpanExporter(Protocol):
    def export(self, span: RequestSpan) -> None:
        """Take a span. Must not block."""

    def close(self) -> None:
        """Send what is left."""


def parse_traceparent(value: str) -> Parent | None:
    """The caller's span; None for a header that is absent or malformed, as the standard asks."""
    found = _TRACEPARENT.fullmatch(value.strip())
    if found is None or (found[0][:2] == "00" and len(found[0]) != 55):
        return None
    trace_id, span_id, flags = int(found[1], 16), int(found[2], 16), int(found[3], 16)
    return Parent(trace_id, span_id, bool(flags & 1)) if trace_id and span_id else None


def build_span(timeline: Timeline, model: str) -> RequestSpan:
    """The span of a sample that has ended; no text of the request in it."""

    def nanoseconds(at_s: float) -> int:
        return round((timeline.created_unix_s + at_s) * _NANO)

    finish, stats = timeline.finish, timeline.stats
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.model": model,
        "gen_ai.response.id": timeline.shown_id,
        "gen_ai.usage.input_tokens": timeline.num_prompt_tokens,
        "gen_ai.usage.output_tokens": timeline.num_output_tokens,
        "gen_ai.response.finish_reasons": finish.type if finish is not None else "",
        "headrace.rid": timeline.own_rid,
        "headrace.cached_tokens": stats.cached_tokens,
        "headrace.num_retractions": stats.num_retractions,
        "headrace.queue_time_s": stats.queue_time_s,
    }
    if timeline.tenant:
        attributes["headrace.key_name"] = timeline.tenant
    if timeline.first_token_s:
        attributes["gen_ai.latency.time_to_first_token"] = timeline.first_token_s - timeline.created_s
    events = [
        (event["event"], nanoseconds(event["at_s"]), {k: v for k, v in event.items() if k not in ("event", "at_s")})
        for event in timeline.events()
    ]
    failed = finish is not None and finish.status_code >= 400
    return RequestSpan(
        "llm_request",
        parse_traceparent(timeline.traceparent),
        nanoseconds(0.0),
        nanoseconds(timeline.finished_s - timeline.created_s),
        attributes,
        events,
        finish.message if finish is not None and failed else "",
    )


@dataclass(frozen=True, slots=True)
class Spans:
    """Makes a span of every timeline it is given, unless the caller's trace is not sampled."""

    model: str
    exporter: SpanExporter

    def add(self, timeline: Timeline) -> None:
        span = build_span(timeline, self.model)
        if span.parent is None or span.parent.sampled:
            self.exporter.export(span)

    def close(self) -> None:
        self.exporter.close()


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Sends to an OTLP/HTTP collector, e.g. http://127.0.0.1:4318/v1/traces. Raises ConfigError without the extra `otel`."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            "--otlp-traces-endpoint must be an http:// or https:// URL, such as http://host:4318/v1/traces"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        packages = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        raise ConfigError(f"--otlp-traces-endpoint needs OpenTelemetry: pip install {packages}") from None
    return OpenTelemetrySpans(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


class OpenTelemetrySpans:
    """A `SpanExporter` over the OpenTelemetry SDK. processor: takes every span that ended."""

    def __init__(self, processor: "SpanProcessor") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        self._provider = TracerProvider(resource=Resource.create({"service.name": "headrace"}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("headrace")

    def export(self, span: RequestSpan) -> None:
        from opentelemetry import trace

        context = trace.set_span_in_context(trace.INVALID_SPAN)
        if (parent := span.parent) is not None:
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.sampled else trace.TraceFlags.DEFAULT)
            remote = trace.SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
            context = trace.set_span_in_context(trace.NonRecordingSpan(remote))
        made = self._tracer.start_span(
            span.name, context, trace.SpanKind.SERVER, attributes=span.attributes, start_time=span.start_ns
        )
        for name, at_ns, attributes in span.events:
            made.add_event(name, attributes, at_ns)
        if span.error:
            made.set_status(trace.Status(trace.StatusCode.ERROR, span.error))
        made.end(span.end_ns)

    def close(self) -> None:
        self._provider.shutdown()
