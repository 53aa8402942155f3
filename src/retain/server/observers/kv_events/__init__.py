"""What is cached here, told to gateways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing

from prometheus_client import Metric

from retain.llm import LLM
from retain.plugins import needs_extra
from retain.server.config import ServerConfig
from retain.server.metric_families import MetricFamilies
from retain.server.observers import CreateObserver, Observer
from retain.server.observers.kv_events import config as kv_events_config


def open_observer(config: ServerConfig, stack: ExitStack) -> CreateObserver | None:
    """Bind the addresses of the configuration until the stack is closed. Raises ValueError."""
    if not config.kv_events:
        return None
    events_config = kv_events_config.parse(config.kv_events)
    with needs_extra("--kv-events", "events"):
        from retain.server.observers.kv_events.publisher import KVEventPublisher
    publisher = stack.enter_context(closing(KVEventPublisher(events_config)))

    def follow(llm: LLM) -> PublishedEvents:
        publisher.follow(llm.cache)
        return PublishedEvents(publisher.counts, MetricFamilies(config.served_model_name[0]))

    return follow


class PublishedEvents(Observer):
    """Counts the events that a publisher sends."""

    def __init__(self, count: Callable[[], Mapping[str, int]], families: MetricFamilies):
        """`count` returns numbers of events by what became of them."""
        self.count = count
        self.families = families

    def collect(self) -> Iterator[Metric]:
        """Yield how many events there were."""
        yield self.families.counter("retain_kv_events", "Events about cached pages", self.count(), "outcome")
