"""A trace of a request has its tokens, times and phases; there are none unless they are asked for."""

import json
import sys
import threading
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from retain.kv.row import Row
from retain.server.config import Limits, ServerConfig
from retain.server.observers.tracing import open_observer
from retain.server.observers.tracing import spans as tracing
from tests.helpers.folders import save_tiny_smollm2
from tests.server.conftest import HTTP, run_server, run_tiny_server, wait_until

ENDPOINT = "http://localhost:4318"
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
SECRET = "the secret of the house "
TEXTS = [f"{i} " * 200 for i in range(8)]


class MemoryExporter(InMemorySpanExporter):
    """Keeps spans until they are taken; a batch arrives within milliseconds."""

    def take(self, count: int):
        wait_until(lambda: len(self.get_finished_spans()) >= count)
        spans = self.get_finished_spans()
        self.clear()
        return spans


@pytest.fixture(scope="module")
def exporter() -> SpanExporter:
    return MemoryExporter()


@contextmanager
def traced(running, exporter):
    """Run a server whose spans go to the exporter."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
            patch.setattr(tracing, "create_exporter", lambda endpoint: exporter)
            server = stack.enter_context(running)
        yield server


@pytest.fixture(scope="module")
def server(exporter, tmp_path_factory):
    """A server with a tier on a disk, that holds all that its small pool evicts."""
    tier = f"disk:path={tmp_path_factory.mktemp('tier')},capacity=64MiB"
    options = {"kv_memory": "1MiB", "tier": [tier], "max_model_len": 1024}
    with traced(run_tiny_server(engine_options=options, otlp_traces_endpoint=ENDPOINT), exporter) as running:
        yield running


def complete(server, prompt, path="completions", **fields):
    body = {"model": "smollm2", "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}
    body |= {"messages": [{"role": "user", "content": prompt}]} if path == "chat/completions" else {"prompt": prompt}
    with HTTP.stream("POST", f"{server.url}/{path}", json=body, headers=HEADERS) as response:
        assert response.status_code == 200
        return "".join(response.iter_text())


def children(spans, parent):
    return [s for s in spans if s.parent and s.parent.span_id == parent.context.span_id]


def test_a_streamed_request_with_a_load_from_disk_shows_its_spans(server, exporter):
    for text in TEXTS:
        complete(server, text)
    exporter.take(4 * len(TEXTS))
    text = complete(server, TEXTS[0], stream=True, stream_options={"include_usage": True})
    usage = next(u for line in text.split("\n") if line.startswith("data: {") and (u := json.loads(line[6:])["usage"]))
    spans = exporter.take(5)
    (parent,) = (s for s in spans if s.kind.name == "SERVER")
    assert f"{parent.context.trace_id:032x}" == TRACE_ID and f"{parent.parent.span_id:016x}" == SPAN_ID
    attributes = parent.attributes
    assert parent.name == "text_completion smollm2" and attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "smollm2"
    assert (
        attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        and attributes["gen_ai.usage.output_tokens"] == 6
    )
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == cached > 0
    assert attributes["gen_ai.response.finish_reasons"] == ("length",) and attributes["gen_ai.request.stream"]
    assert attributes["retain.kv_policy"] == "full" and attributes["gen_ai.request.max_tokens"] == 6
    queue, prefill, decode = sorted(children(spans, parent), key=lambda s: s.start_time)
    assert (queue.name, prefill.name, decode.name) == ("queue", "prefill", "decode")
    (load,) = children(spans, prefill)
    assert load.name == "load" and load.attributes["retain.load.tiers"] == ("disk",)
    assert load.attributes["retain.load.tokens"] == cached and load.attributes["retain.load.bytes"] > 0
    # The phases follow each other, from the start of the request to its end, but for rounding.
    times = [parent.start_time, queue.start_time, queue.end_time, prefill.start_time, prefill.end_time]
    times += [decode.start_time, decode.end_time, parent.end_time]
    assert all(later >= earlier - 1e6 for earlier, later in pairwise(times))
    assert all(abs(times[i + 1] - times[i]) < 1e6 for i in (0, 2, 4, 6))
    assert prefill.start_time - 1e6 <= load.start_time < load.end_time <= prefill.end_time + 1e6
    first = attributes["gen_ai.response.time_to_first_chunk"]
    assert first == pytest.approx((prefill.end_time - parent.start_time) / 1e9, abs=1e-3)


def test_choices_have_their_own_phases(server, exporter):
    complete(server, "a b c", "chat/completions", n=2, temperature=1, logprobs=True)
    spans = exporter.take(7)
    (parent,) = (s for s in spans if s.kind.name == "SERVER")
    assert parent.name == "chat smollm2" and parent.attributes["gen_ai.request.choice.count"] == 2
    assert parent.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    phases = sorted((s.attributes["retain.choice.index"], s.name) for s in children(spans, parent))
    assert phases == [(i, name) for i in (0, 1) for name in ("decode", "prefill", "queue")]


def test_texts_are_in_no_trace_unless_asked_for(server, exporter):
    answers = [json.loads(complete(server, SECRET))["choices"][0]["text"]]
    assert not any("secret" in json.dumps(dict(s.attributes)) for s in exporter.take(4))
    tracer = next(o for o in server.service.engine_thread.observers if isinstance(o, tracing.RequestTracer))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracer, "has_content", True)
        answers.append(json.loads(complete(server, SECRET))["choices"][0]["text"])
        spans = exporter.take(4)
    attributes = next(s.attributes for s in spans if s.kind.name == "SERVER")
    (asked,), (answered,) = (json.loads(attributes[f"gen_ai.{x}.messages"]) for x in ("input", "output"))
    assert asked == {"role": "user", "parts": [{"type": "text", "content": SECRET}]}
    assert answered["parts"][0]["content"] == answers[0] == answers[1] and answered["finish_reason"] == "length"


def test_a_hang_up_is_an_abort(server, exporter):
    body = {"model": "smollm2", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", f"{server.url}/completions", json=body) as response:
        next(response.iter_text())
    spans = exporter.take(4)
    (parent,) = (s for s in spans if s.kind.name == "SERVER")
    assert parent.attributes["gen_ai.response.finish_reasons"] == ("abort",) and parent.parent is None


# ---- pooled texts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["last", "off"])
def pooling_server(request, tmp_path_factory):
    """A server that embeds, or that reranks, with the texts of its requests in traces; and its exporter."""
    folder = save_tiny_smollm2(tmp_path_factory.mktemp("qwen3"), "qwen3")
    options = {"kv_memory": "32MiB", "dtype": "float32", "max_model_len": 1024, "pooling": request.param}
    limits = Limits(max_choices=4)
    settings = {"limits": limits, "otlp_traces_endpoint": ENDPOINT, "trace_content": True}
    exporter = MemoryExporter()  # ends with its server
    with traced(run_server(str(folder), options, **settings), exporter) as running:
        yield running, exporter


def counters(server):
    """Return the samples of the page of metrics by name, and by reason where they have one."""
    page = HTTP.get(f"{server.url.removesuffix('/v1')}/metrics").text
    samples = (s for family in text_string_to_metric_families(page) for s in family.samples)
    return {(s.name, s.labels.get("finished_reason", "")): s.value for s in samples if s.name.startswith("vllm:")}


def test_a_call_of_pooled_texts_is_one_span_and_generates_nothing(pooling_server):
    server, exporter = pooling_server
    texts = [f"{SECRET}{i}" for i in range(10)]
    if server.service.llm.pooling:
        path, fields = "embeddings", {"input": texts}
    else:
        path, fields = "rerank", {"query": "which?", "documents": texts}
    before = counters(server)
    response = HTTP.post(f"{server.url}/{path}", json={"model": "smollm2", **fields}, headers=HEADERS)
    usage = response.json()["usage"]
    wait_until(exporter.get_finished_spans)
    HTTP.post(f"{server.url}/{path}", json={"model": "smollm2", **fields})
    spans = exporter.take(2)
    assert len(spans) == 2 and all(s.name == f"{path} smollm2" and s.kind.name == "SERVER" for s in spans)
    span = spans[0]
    assert f"{span.context.trace_id:032x}" == TRACE_ID and f"{span.parent.span_id:016x}" == SPAN_ID
    assert span.start_time < span.end_time < spans[1].start_time + 1e6 and span.status.is_unset
    attributes = span.attributes
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"] > 0
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == 0 and attributes["retain.texts"] == len(texts)
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert not any("first_chunk" in name or "messages" in name for name in attributes)
    counted = {k: v - before.get(k, 0) for k, v in counters(server).items()}
    requests = 2 * len(texts)
    assert counted["vllm:prompt_tokens_total", ""] == 2 * usage["prompt_tokens"]
    assert counted["vllm:request_success_total", "stop"] == requests
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_inference_time"):
        assert counted[f"vllm:{name}_seconds_count", ""] == requests
    unused = ["generation_tokens_total", "request_generation_tokens_count", "request_params_max_tokens_count"]
    unused += [
        f"{name}_seconds_count" for name in ("time_to_first_token", "request_decode_time", "inter_token_latency")
    ]
    assert [counted[f"vllm:{name}", ""] for name in unused] == [0] * len(unused)


def test_a_failed_call_of_pooled_texts_is_an_error(pooling_server):
    server, exporter = pooling_server
    body = {"model": "smollm2", "text_1": "a", "text_2": ["b", "c"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Row, "reserve", lambda *_, **__: False)
        assert HTTP.post(f"{server.url}/score", json=body).status_code == 500
    (span,) = exporter.take(1)
    assert span.attributes["gen_ai.response.finish_reasons"] == ("error",) and not span.status.is_ok
    assert span.attributes["error.type"] == "out_of_memory"


def test_a_hang_up_ends_a_call_of_pooled_texts(pooling_server):
    server, exporter = pooling_server
    body = {"model": "smollm2", "text_1": "a", "text_2": [f"{i} " * 200 for i in range(2000)]}
    with pytest.raises(httpx.ReadTimeout):
        HTTP.post(f"{server.url}/score", json=body, timeout=1)
    (span,) = exporter.take(1)
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert 0 < span.attributes["retain.texts"] < 2000


# ---- configuration ---------------------------------------------------------------------------------------------------


def test_spans_reach_a_collector_over_http():
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, self.headers["content-type"], body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        provider = tracing.open_provider(f"http://127.0.0.1:{collector.server_port}")
        provider.get_tracer("x").start_span("chat m").end()
        provider.shutdown()
        collector.shutdown()
    ((path, kind, body),) = received
    (spans,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
    assert spans.scope_spans[0].spans[0].name == "chat m"
    assert {a.key: a.value.string_value for a in spans.resource.attributes}["service.name"] == "retain"


@pytest.mark.parametrize("endpoint", ["grpc://localhost:4317", "localhost:4317", "http://", "x"])
def test_other_addresses_are_refused(endpoint):
    with pytest.raises(ValueError, match="is not an address of OTLP over HTTP"):
        tracing.open_provider(endpoint)


def test_nothing_is_traced_by_default(tiny_server):
    assert not ServerConfig().otlp_traces_endpoint
    observers = tiny_server.service.engine_thread.observers
    assert not any(isinstance(o, tracing.RequestTracer) for o in observers)


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "retain.server.observers.tracing.spans")
    monkeypatch.delattr("retain.server.observers.tracing.spans")
    with pytest.raises(ValueError, match=r"needs the package opentelemetry.*: pip install 'retain\[otel\]'"):
        open_observer(ServerConfig(otlp_traces_endpoint=ENDPOINT), ExitStack())
