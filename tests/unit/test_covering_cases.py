"""`make check` runs few cases of a test, which have many of its values; `make test` runs every pair of values."""

import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from tests.helpers import covering_cases
from tests.helpers.covering_cases import find_repeated_pairs, mark_repetitions

SAMPLE = """
import pytest

@pytest.fixture(params=["x", "y"])
def fixture(request): ...

@pytest.mark.parametrize("a", range(6))
@pytest.mark.parametrize(("b", "c"), [(1, 2), (2, 1), (1, 1), (2, 2)])
def test_product(a, b, c, fixture): ...

@pytest.mark.parametrize("family", range(20))
@pytest.mark.parametrize("dtype", range(4))
@pytest.mark.parametrize("size", range(3))
def test_many(family, dtype, size): ...

@pytest.mark.checked_cases(4)
@pytest.mark.parametrize("a", range(6))
@pytest.mark.parametrize("b", range(3))
def test_matrix(a, b): ...

@pytest.mark.parametrize("a", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_rows(a): ...

def test_plain(): ...
"""


@pytest.fixture
def items(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[pytest.Function]:
    """The cases of the sample."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # collecting a file adds its folder
    path = tmp_path / f"sample_of_{request.function.__name__}.py"
    path.write_text(SAMPLE)
    module = pytest.Module.from_parent(request.session, path=path)
    return [item for item in module.collect() if isinstance(item, pytest.Function)]


def test_each_value_stays_in_a_case_and_repetitions_are_slow(
    items: list[pytest.Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(covering_cases, "MAX_CHECKED_CASES", 6)
    mark_repetitions(items)
    fast = [item for item in items if not item.get_closest_marker("slow")]
    params = [item.callspec.params for item in fast if item.originalname == "test_product"]
    assert len(items) == 48 + 240 + 18 + 3 + 1 and len(params) == 6
    assert {p["a"] for p in params} == {*range(6)} and {p["fixture"] for p in params} == {"x", "y"}
    assert {(p["b"], p["c"]) for p in params} == {(1, 2), (2, 1), (1, 1), (2, 2)}
    others = [item for item in fast if item.originalname not in ("test_product", "test_many", "test_matrix")]
    assert [item.name for item in others] == ["test_rows[1]", "test_rows[2]", "test_plain"]


def test_no_test_has_more_fast_cases_than_the_limit(
    items: list[pytest.Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that stay have as many values as so many cases can."""
    assert covering_cases.MAX_CHECKED_CASES == 1
    monkeypatch.setattr(covering_cases, "MAX_CHECKED_CASES", 2)
    mark_repetitions(items)
    fast = [item for item in items if not item.get_closest_marker("slow")]
    params = [item.callspec.params for item in fast if item.originalname == "test_product"]
    assert len(params) == 2 == len({p["a"] for p in params})
    assert {p["fixture"] for p in params} == {"x", "y"} and len({(p["b"], p["c"]) for p in params}) == 2
    assert len(fast) == 2 + 2 + 4 + 2 + 1


def test_each_pair_of_values_stays_in_a_case(items: list[pytest.Function]) -> None:
    """And each case that `make check` runs."""

    def params(cases: list[pytest.Function]) -> list[tuple[object, ...]]:
        found = [item.callspec.params for item in cases if item.originalname == "test_product"]
        return [(p["a"], (p["b"], p["c"]), p["fixture"]) for p in found]

    mark_repetitions(items)
    repeated = find_repeated_pairs(items)
    left = [item for item in items if item not in repeated]
    assert 24 <= len(params(left)) <= 28
    for i, j in combinations(range(3), 2):
        assert {(p[i], p[j]) for p in params(left)} == {(p[i], p[j]) for p in params(items)}
    assert not any(
        item.originalname in ("test_rows", "test_plain") or not item.get_closest_marker("slow") for item in repeated
    )


def test_values_without_pairs_are_each_in_a_case(items: list[pytest.Function]) -> None:
    mark_repetitions(items)
    repeated = find_repeated_pairs(items, lambda case: case.originalname == "test_matrix")
    left = [item.callspec.params for item in items if item.originalname == "test_matrix" and item not in repeated]
    assert len(left) == 6 and {p["a"] for p in left} == {*range(6)} and {p["b"] for p in left} == {*range(3)}
    assert set(repeated) > {item for item in find_repeated_pairs(items) if item.originalname != "test_matrix"}


def test_values_of_a_long_parameter_take_turns_with_the_others(items: list[pytest.Function]) -> None:
    """Each of them is in one case; all pairs of the other parameters stay."""
    mark_repetitions(items)
    repeated = find_repeated_pairs(items)
    left = [item.callspec.params for item in items if item.originalname == "test_many" and item not in repeated]
    assert len(left) == 20 and {p["family"] for p in left} == {*range(20)}
    assert len({(p["dtype"], p["size"]) for p in left}) == 12
    assert {sum(p["dtype"] == dtype for p in left) for dtype in range(4)} <= {4, 5, 6}


def test_a_mark_says_how_many_cases_are_checked(items: list[pytest.Function]) -> None:
    mark_repetitions(items)
    counts = Counter(item.originalname for item in items if not item.get_closest_marker("slow"))
    assert (counts["test_matrix"], counts["test_product"]) == (4, covering_cases.MAX_CHECKED_CASES)
