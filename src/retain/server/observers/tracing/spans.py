"""Traces by OpenTelemetry: a span for each request, with children for its queue, prefill, loads from tiers and decode.

A call whose texts are pooled has one span, without children: it may have thousands of texts.
Spans are made when a request has ended, from times that the engine keeps anyway; a thread of the SDK sends them. Names
of attributes are those of OpenTelemetry's conventions for generative AI, and `retain.*`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter, time
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from retain.engine.request import FinishReason, Request
from retain.files import quote
from retain.kv.eviction import policies
from retain.processing.tokenizer import Tokenizer
from retain.server.observers import Observer
from retain.server.request_group import REPORTED_REASONS, CallInfo, PooledCallStats, RequestGroup
from retain.server.usage import count_tokens

Attributes = dict[str, AttributeValue]
FAILURES = (FinishReason.FAILED, FinishReason.OUT_OF_MEMORY)
TRACES_PATH = "/v1/traces"  # of OTLP over HTTP
EXPORT_TIMEOUT_S = 3.0  # of a batch; a server that stops waits for one whose collector is down


def open_provider(endpoint: str) -> TracerProvider:
    """Return a tracer provider that sends spans to a collector. Raises ValueError for an address that is not HTTP."""
    known_name = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "retain"}
    provider = TracerProvider(resource=Resource.create(known_name))
    provider.add_span_processor(BatchSpanProcessor(create_exporter(endpoint)))
    return provider


def create_exporter(endpoint: str) -> SpanExporter:
    """Return a span exporter for the address of a collector. Raises ValueError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"--otlp-traces-endpoint: {quote(endpoint)} is not an address of OTLP over HTTP, "
            "such as http://localhost:4318/v1/traces"
        )
    address = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + TRACES_PATH
    return OTLPSpanExporter(endpoint=address, timeout=EXPORT_TIMEOUT_S)


class RequestTracer(Observer):
    """Makes the spans of requests. Everything runs in the engine thread (see Observer)."""

    def __init__(self, provider: TracerProvider, tokenizer: Tokenizer, model_name: str, has_content: bool):
        """`has_content`: spans have the texts of prompts and answers, too."""
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.has_content = has_content
        self._tracer = provider.get_tracer("retain")
        self._propagator = TraceContextTextMapPropagator()

    def on_finish(self, request: Request, group: RequestGroup) -> None:
        """Make the spans of a group whose last request has ended, unless it is a part of a call."""
        if group.call and not group.num_unfinished:
            self._trace(group, group.call)

    def on_pooled_call(self, stats: PooledCallStats) -> None:
        """Make the span of a call. It has no texts: those of the call are not kept."""
        attributes: Attributes = {
            **self._describe_call(stats.call),
            "gen_ai.usage.input_tokens": stats.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": stats.num_cached_tokens,
            "gen_ai.usage.output_tokens": 0,
            "gen_ai.response.finish_reasons": [REPORTED_REASONS[stats.finish_reason]],
            "retain.texts": stats.num_texts,
        }
        span = self._start_call(stats.call, stats.start_time, attributes, [stats.finish_reason])
        span.end(_to_epoch_ns(perf_counter()))

    def _start_call(
        self, call: CallInfo, start: float, attributes: Attributes, reasons: Iterable[FinishReason | None]
    ) -> Span:
        """Start the span of a call, which has failed where one of its requests has."""
        span = self._tracer.start_span(
            f"{call.operation} {self.model_name}",
            context=self._propagator.extract(call.trace_headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=_to_epoch_ns(start),
        )
        failures = [reason.value for reason in reasons if reason in FAILURES]
        if failures:
            span.set_attribute("error.type", failures[0])
            span.set_status(Status(StatusCode.ERROR))
        return span

    def _trace(self, group: RequestGroup, call: CallInfo) -> None:
        requests = group.requests
        attributes = {**self._describe(group, call), **(self._content(requests) if self.has_content else {})}
        arrival = min(r.stats.arrival_time for r in requests)
        parent = self._start_call(call, arrival, attributes, (r.finish_reason for r in requests))
        context = set_span_in_context(parent)
        for index, request in enumerate(requests):
            self._trace_phases(request, {"retain.choice.index": index} if len(requests) > 1 else {}, context)
        parent.end(_to_epoch_ns(max(r.stats.finish_time for r in requests)))

    def _trace_phases(self, request: Request, attributes: Attributes, context: Context) -> None:
        """Make the children of a request's span; a load is one of the prefill that waits for it."""
        stats = request.stats
        scheduled = stats.scheduled_time
        answered = stats.first_token_time
        self._add_span("queue", stats.arrival_time, scheduled or stats.finish_time, attributes, context)
        if not scheduled:
            return
        prefill = self._start_span("prefill", scheduled, attributes, context)
        inner = set_span_in_context(prefill)
        for load in stats.loads:
            load_attributes: Attributes = {
                "retain.load.tiers": list(load.bytes_by_tier),
                "retain.load.tokens": load.num_tokens,
                "retain.load.bytes": sum(load.bytes_by_tier.values()),
                "retain.load.failed": load.failed,
            }
            self._add_span("load", load.started_at, load.finished_at, {**attributes, **load_attributes}, inner)
        prefill.end(_to_epoch_ns(answered or stats.finish_time))
        if answered:
            self._add_span("decode", answered, stats.finish_time, attributes, context)

    def _start_span(self, name: str, start: float, attributes: Attributes, context: Context) -> Span:
        return self._tracer.start_span(name, context, attributes=attributes, start_time=_to_epoch_ns(start))

    def _add_span(self, name: str, start: float, end: float, attributes: Attributes, context: Context) -> None:
        self._start_span(name, start, attributes, context).end(_to_epoch_ns(end))

    # ---- attributes ----------------------------------------------------------------------------------------------

    def _describe_call(self, call: CallInfo) -> Attributes:
        """Return what the conventions name of every call."""
        return {
            "gen_ai.operation.name": call.operation,
            "gen_ai.provider.name": "retain",
            "gen_ai.request.model": call.model or self.model_name,
            "gen_ai.response.model": self.model_name,
        }

    def _describe(self, group: RequestGroup, call: CallInfo) -> Attributes:
        """Return what the conventions name of a request and its answer, and what is ours."""
        usage = count_tokens(group)
        first = group.requests[0]
        params = first.params
        attributes: Attributes = {
            **self._describe_call(call),
            "gen_ai.request.choice.count": len(group.requests),
            "gen_ai.request.stream": group.stream_interval is not None,
            "gen_ai.request.max_tokens": first.input.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.input_tokens": usage.prompt,
            "gen_ai.usage.cache_read.input_tokens": usage.cached,
            "gen_ai.usage.output_tokens": usage.output,
            "gen_ai.response.finish_reasons": list(_finish_reasons(group.requests)),
            "retain.kv_policy": policies.to_spec(first.policy),
            "retain.preemptions": sum(r.stats.num_preemptions for r in group.requests),
        }
        answered = [r.stats.first_token_time for r in group.requests if r.stats.first_token_time]
        if answered:
            attributes["gen_ai.response.time_to_first_chunk"] = min(answered) - first.stats.arrival_time
        return attributes

    def _content(self, requests: Sequence[Request]) -> Attributes:
        """Return the texts of a prompt, as the model reads it, and of its answers, in the form of the conventions."""
        prompts = {id(r.prompt): self.tokenizer.decode(r.prompt) for r in requests}
        answers = [self.tokenizer.decode(r.output_tokens) for r in requests]
        reasons = _finish_reasons(requests)
        output = [{**_message("assistant", x), "finish_reason": why} for x, why in zip(answers, reasons, strict=True)]
        return {
            "gen_ai.input.messages": json.dumps([_message("user", x) for x in prompts.values()]),
            "gen_ai.output.messages": json.dumps(output),
        }


def _message(role: str, text: str) -> dict[str, object]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _finish_reasons(requests: Sequence[Request]) -> Iterator[str]:
    return (REPORTED_REASONS[r.finish_reason or FinishReason.CANCELLED] for r in requests)


def _to_epoch_ns(seconds: float) -> int:
    """Return a time of perf_counter as nanoseconds since 1970."""
    return int((time() - perf_counter() + seconds) * 1e9)
