"""Evaluate the part of PromQL that dashboards use, over two scrapes of a server."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
TOKEN = re.compile(r'"(?:\\.|[^"])*"|[a-zA-Z_:][\w:]*|\d[\d.]*[smhd]?|=~|!~|!=|[/(){}\[\],=]')
MATCHES: dict[str, Callable[[str, str], bool]] = {
    "=": lambda value, wanted: value == wanted,
    "!=": lambda value, wanted: value != wanted,
    "=~": lambda value, wanted: re.fullmatch(wanted, value) is not None,
    "!~": lambda value, wanted: re.fullmatch(wanted, value) is None,
}


@dataclass
class Scrapes:
    """Two pages of metrics, `seconds` apart. `target_labels` are those that Prometheus adds to every sample."""

    before: str
    after: str
    seconds: float
    target_labels: Mapping[str, str] = field(default_factory=dict)

    def samples(self, page: str, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yield the labels and the value of each sample of this name."""
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == name:
                    yield {**sample.labels, **self.target_labels}, sample.value

    def label_values(self, name: str, label: str) -> set[str]:
        """Return the values of a label of the samples of this name."""
        return {labels[label] for labels, _ in self.samples(self.after, name) if label in labels}

    def evaluate(self, query: str) -> Vector:
        """Return the values of a query by labels. A series that is on one page only has no rate."""
        return _Query(self, query).evaluate()


class _Query:
    """A parser by recursive descent, which computes as it goes."""

    def __init__(self, scrapes: Scrapes, text: str):
        self.scrapes = scrapes
        self.tokens = TOKEN.findall(text)
        assert "".join(self.tokens) == re.sub(r"\s", "", text), f"not understood: {text}"

    def evaluate(self) -> Vector:
        found = self.quotient()
        assert not self.tokens, f"left over: {self.tokens}"
        return found

    def take(self, expected: str = "") -> str:
        token = self.tokens.pop(0)
        assert expected in ("", token), f"{token} where {expected} is expected"
        return token

    def takes(self, token: str) -> bool:
        return self.tokens[:1] == [token] and bool(self.take())

    def quotient(self) -> Vector:
        found = self.operand()
        while self.takes("/"):
            divisors = self.operand()
            found = {k: _divide(x, divisors[k]) for k, x in found.items() if k in divisors}
        return found

    def operand(self) -> Vector:
        name = self.take()
        if name in ("sum", "avg"):
            return self.aggregation(name)
        if name in ("rate", "increase"):
            return self.rate(1 / self.scrapes.seconds if name == "rate" else 1)
        if name == "histogram_quantile":
            return self.quantile()
        return self.selection(self.scrapes.after, name, self.matchers())

    def aggregation(self, name: str) -> Vector:
        by = []
        if self.takes("by"):
            self.take("(")
            while not self.takes(")"):
                by.append(self.take())
                self.takes(",")
        self.take("(")
        members: dict[Labels, list[float]] = {}
        for labels, value in self.quotient().items():
            members.setdefault(frozenset((k, v) for k, v in labels if k in by), []).append(value)
        self.take(")")
        return {k: sum(x) / (len(x) if name == "avg" else 1) for k, x in members.items()}

    def rate(self, factor: float) -> Vector:
        self.take("(")
        name, matchers = self.take(), self.matchers()
        self.take("[")
        assert re.fullmatch(r"\d+[smhd]", self.take())
        self.take("]")
        self.take(")")
        before, after = (self.selection(page, name, matchers) for page in (self.scrapes.before, self.scrapes.after))
        return {k: (x - before[k]) * factor for k, x in after.items() if k in before}

    def quantile(self) -> Vector:
        self.take("(")
        q = float(self.take())
        self.take(",")
        buckets: dict[Labels, list[tuple[float, float]]] = {}
        for labels, value in self.quotient().items():
            bound = float(dict(labels)["le"])
            buckets.setdefault(frozenset(x for x in labels if x[0] != "le"), []).append((bound, value))
        self.take(")")
        return {k: _quantile(q, sorted(x)) for k, x in buckets.items()}

    def matchers(self) -> list[tuple[str, str, str]]:
        found = []
        if self.takes("{"):
            while not self.takes("}"):
                found.append((self.take(), self.take(), self.take().strip('"')))
                self.takes(",")
        return found

    def selection(self, page: str, name: str, matchers: list[tuple[str, str, str]]) -> Vector:
        return {
            frozenset(labels.items()): value
            for labels, value in self.scrapes.samples(page, name)
            if all(MATCHES[how](labels.get(label, ""), wanted) for label, how, wanted in matchers)
        }


def _divide(a: float, b: float) -> float:
    return a / b if b else math.nan


def _quantile(q: float, buckets: list[tuple[float, float]]) -> float:
    """Return the quantile of cumulative counts by upper bound, linear inside a bucket; NaN where nothing was seen."""
    rank = q * buckets[-1][1]
    if not rank:
        return math.nan
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    raise AssertionError("counts of a histogram do not grow")
