"""The cases of parametrized tests that run: `make check` has few with many values, `make test` each pair of values.

Of a parameter with very many values, such as the family, `make test` has each value once. So has a test of the Triton
backend alone where Triton's interpreter runs it, which is slow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import combinations

import pytest

MAX_CHECKED_CASES = 1  # of a test in `make check`: the first of those that have the most values
MAX_PAIRED_VALUES = 12  # of a parameter whose values `make test` runs with each of another
Parts = frozenset[str]  # what a case must share with another to be a repetition of it
Values = dict[str, str]  # by the names of the parameters


def mark_repetitions(items: Iterable[pytest.Item]) -> None:
    """Mark cases as slow until each that is left has a value which no other case of its test has.

    A test over 3 dtypes times 2 sizes then has 3 cases in `make check` at most, and all 6 in `make test`. No test has
    more than MAX_CHECKED_CASES.
    """
    for cases in cases_of_tests(item for item in items if not item.get_closest_marker("slow")):
        mark = cases[0].get_closest_marker("checked_cases")
        for item in find_repetitions(cases, values, (), mark.args[0] if mark else MAX_CHECKED_CASES):
            item.add_marker(pytest.mark.slow)


def is_of_triton_alone(case: pytest.Function) -> bool:
    """Return whether a test is of the Triton backend and of no other."""
    return case.path.name.startswith("test_triton") or case.originalname.startswith("test_triton")


def find_repeated_pairs(
    items: Iterable[pytest.Item], has_values_once: Callable[[pytest.Function], bool] = lambda case: False
) -> list[pytest.Function]:
    """Return cases until each that is left has a pair of values which no other case of its test has.

    A test over 6 dtypes times 4 sizes times 3 layouts keeps 24 of 72 cases or few more. A test over 40 families times 5
    dtypes keeps 40 of 200: a parameter of more than MAX_PAIRED_VALUES is in no pair. Those of `make check` stay. Of a
    test that `has_values_once` no parameter is in a pair.
    """
    found = list[pytest.Function]()
    for cases in cases_of_tests(items):
        kept = [item for item in cases if not item.get_closest_marker("slow")]
        parts = values if has_values_once(cases[0]) else partial(pairs, unpaired=find_long_parameters(cases))
        found += find_repetitions(cases, parts, kept)
    return found


def find_long_parameters(cases: Iterable[pytest.Function]) -> set[str]:
    """Return the names of the parameters that have more than MAX_PAIRED_VALUES."""
    found = defaultdict[str, set[str]](set)
    for item in cases:
        for name, value in named_values(item).items():
            found[name].add(value)
    return {name for name, seen in found.items() if len(seen) > MAX_PAIRED_VALUES}


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
    own = {item: values(item) for item in cases}
    missing = set[str]().union(*left.values())
    uses = Counter[str]()
    for item in kept:
        missing -= left.pop(item)
        uses.update(own[item])
    while missing and (limit is None or len(cases) - len(left) < limit):
        gain = {item: len(parts & missing) for item, parts in left.items()}
        best = max(gain.values())
        # Of the best the first whose values were used least, so that families take turns with dtypes.
        chosen = min((item for item in left if gain[item] == best), key=lambda item: sum(uses[v] for v in own[item]))
        missing -= left.pop(chosen)
        uses.update(own[chosen])
    return list(left)


def pairs(item: pytest.Function, unpaired: Collection[str] = ()) -> Parts:
    """Return each pair of values of a case but those `unpaired`, and each value."""
    found = named_values(item)
    paired = sorted(value for name, value in found.items() if name not in unpaired)
    return frozenset([*found.values(), *map(repr, combinations(paired, 2))])


def values(item: pytest.Function) -> Parts:
    """Return the values of a case."""
    return frozenset(named_values(item).values())


def named_values(item: pytest.Function) -> Values:
    """Return what a case has of each `parametrize`, whose arguments belong together, and of each fixture."""
    params = dict(item.callspec.params)
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = [[n.strip() for n in name.split(",")] if isinstance(name, str) else list(name) for name in names]
    rows = [{name: params.pop(name) for name in group} for group in groups]
    return {",".join(row): repr(row) for row in [*rows, *({name: value} for name, value in params.items())]}
