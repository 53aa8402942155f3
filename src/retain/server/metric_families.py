"""Families of Prometheus' metrics, with the labels of one engine; and pages of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from retain.server.observers import Observer

Values = float | Mapping[Any, float]  # by the value of a label, or by those of several


class MetricFamilies:
    """Makes metrics whose values are read at each scrape. Every metric has vLLM's labels `model_name` and `engine`."""

    def __init__(self, model_name: str):
        self.labels = {"model_name": model_name, "engine": "0"}

    def gauge(self, name: str, documentation: str, values: Values, *labels: str) -> Metric:
        """Return a metric that goes up and down: one value, or one for each value of its own labels."""
        return self._fill(GaugeMetricFamily(name, documentation, labels=[*self.labels, *labels]), values)

    def counter(self, name: str, documentation: str, values: Values, *labels: str) -> Metric:
        """Return a metric that only grows: one value, or one for each value of its own labels."""
        return self._fill(CounterMetricFamily(name, documentation, labels=[*self.labels, *labels]), values)

    def _fill(self, family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
        by_labels: Mapping[Any, float] = values if isinstance(values, Mapping) else {(): values}
        for key, value in by_labels.items():
            family.add_metric([*self.labels.values(), *([key] if isinstance(key, str) else key)], value)
        return family


class _Collected(Collector):
    def __init__(self, observers: Sequence[Observer]):
        self.observers = observers

    def collect(self) -> Iterator[Metric]:
        for observer in self.observers:
            yield from observer.collect()


def render_page(observers: Sequence[Observer]) -> bytes:
    """Return the metrics of observers in Prometheus' text format."""
    return generate_latest(_Collected(observers))
