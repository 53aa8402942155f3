"""Traces by OpenTelemetry, sent to a collector."""

from __future__ import annotations

from contextlib import ExitStack

from retain.plugins import needs_extra
from retain.server.config import ServerConfig
from retain.server.observers import CreateObserver


def open_observer(config: ServerConfig, stack: ExitStack) -> CreateObserver | None:
    """Send spans to the address of the configuration until the stack is closed. Raises ValueError."""
    if not config.otlp_traces_endpoint:
        return None
    with needs_extra("--otlp-traces-endpoint", "otel"):
        from retain.server.observers.tracing import spans
    provider = spans.open_provider(config.otlp_traces_endpoint)
    stack.callback(provider.shutdown)
    name = config.served_model_name[0]
    return lambda llm: spans.RequestTracer(provider, llm.tokenizer, name, config.trace_content)
