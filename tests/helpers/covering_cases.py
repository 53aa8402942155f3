"""The cases of parametrized tests that `make check` runs: few, but with every value of every parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest


def mark_repetitions(items: Iterable[pytest.Item]) -> None:
    """Mark cases as slow until each that is left has a value which no other case of its test has.

    A test over 6 dtypes times 4 sizes then has 6 cases in `make check`, and all 24 in `make test`.
    """
    tests: dict[tuple[object, str], list[tuple[pytest.Function, set[str]]]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            tests[item.parent, item.originalname].append((item, values(item)))
    for cases in tests.values():
        missing = set().union(*(found for _, found in cases))
        while missing:
            chosen = max(cases, key=lambda case: len(case[1] & missing))  # the first of the best
            missing -= chosen[1]
            cases.remove(chosen)
        for item, _ in cases:
            item.add_marker(pytest.mark.slow)


def values(item: pytest.Function) -> set[str]:
    """Return what a case has of each `parametrize`, whose arguments belong together, and of each fixture."""
    params = dict(item.callspec.params)
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = [[n.strip() for n in name.split(",")] if isinstance(name, str) else list(name) for name in names]
    rows = [{name: params.pop(name) for name in group} for group in groups]
    return {repr(row) for row in [*rows, *({name: value} for name, value in params.items())]}
