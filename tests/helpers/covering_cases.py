"""The cases of parametrized tests that run: `make check` has few with many values, `make test` each pair of values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations

import pytest

MAX_CHECKED_CASES = 2  # of a test in `make check`: the first that together have the most values
Parts = frozenset[str]  # what a case must share with another to be a repetition of it


def mark_repetitions(items: Iterable[pytest.Item]) -> None:
    """Mark cases as slow until each that is left has a value which no other case of its test has.

    A test over 3 dtypes times 2 sizes then has 3 cases in `make check` at most, and all 6 in `make test`. No test has
    more than MAX_CHECKED_CASES.
    """
    for cases in cases_of_tests(item for item in items if not item.get_closest_marker("slow")):
        for item in find_repetitions(cases, values, (), MAX_CHECKED_CASES):
            item.add_marker(pytest.mark.slow)


def find_repeated_pairs(items: Iterable[pytest.Item]) -> list[pytest.Function]:
    """Return cases until each that is left has a pair of values which no other case of its test has.

    A test over 6 dtypes times 4 sizes times 3 families keeps 24 of 72 cases or few more. Those of `make check` stay.
    """
    found = list[pytest.Function]()
    for cases in cases_of_tests(items):
        found += find_repetitions(cases, pairs, [item for item in cases if not item.get_closest_marker("slow")])
    return found


def cases_of_tests(items: Iterable[pytest.Item]) -> Iterator[list[pytest.Function]]:
    """Yield the cases of each parametrized test."""
    tests: dict[tuple[object, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.parent, item.originalname].append(item)
    yield from tests.values()


def find_repetitions(
    cases: list[pytest.Function],
    parts_of: Callable[[pytest.Function], Parts],
    kept: Iterable[pytest.Function],
    limit: int | None = None,
) -> list[pytest.Function]:
    """Return the cases that are not needed for every part of any case to be in one; those `kept` are not among them.

    With a `limit`, all but so many cases are returned.
    """
    left = {item: parts_of(item) for item in cases}
    missing = set[str]().union(*left.values())
    for item in kept:
        missing -= left.pop(item)
    while missing and (limit is None or len(cases) - len(left) < limit):
        chosen = max(left, key=lambda item: len(left[item] & missing))  # the first of the best
        missing -= left.pop(chosen)
    return list(left)


def pairs(item: pytest.Function) -> Parts:
    """Return each pair of values of a case, or its only value."""
    found = sorted(values(item))
    return frozenset(map(repr, combinations(found, 2))) if len(found) > 1 else frozenset(found)


def values(item: pytest.Function) -> Parts:
    """Return what a case has of each `parametrize`, whose arguments belong together, and of each fixture."""
    params = dict(item.callspec.params)
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = [[n.strip() for n in name.split(",")] if isinstance(name, str) else list(name) for name in names]
    rows = [{name: params.pop(name) for name in group} for group in groups]
    return frozenset(repr(row) for row in [*rows, *({name: value} for name, value in params.items())])
