"""`make check` runs every value of every parameter, and rows that are written out; `make test` runs every case."""

import sys
from pathlib import Path

import pytest

from tests.helpers.covering_cases import mark_repetitions

SAMPLE = """
import pytest

@pytest.fixture(params=["x", "y"])
def fixture(request): ...

@pytest.mark.parametrize("a", range(6))
@pytest.mark.parametrize(("b", "c"), [(1, 2), (2, 1), (1, 1), (2, 2)])
def test_product(a, b, c, fixture): ...

@pytest.mark.parametrize("a", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_rows(a): ...

def test_plain(): ...
"""


def test_each_value_stays_in_a_case_and_repetitions_are_slow(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # collecting a file adds its folder
    (tmp_path / "sample_of_covering_cases.py").write_text(SAMPLE)
    module = pytest.Module.from_parent(request.session, path=tmp_path / "sample_of_covering_cases.py")
    items = [item for item in module.collect() if isinstance(item, pytest.Function)]
    mark_repetitions(items)
    fast = [item for item in items if not item.get_closest_marker("slow")]
    params = [item.callspec.params for item in fast if item.originalname == "test_product"]
    assert len(items) == 48 + 3 + 1 and len(params) == 6
    assert {p["a"] for p in params} == {*range(6)} and {p["fixture"] for p in params} == {"x", "y"}
    assert {(p["b"], p["c"]) for p in params} == {(1, 2), (2, 1), (1, 1), (2, 2)}
    assert [item.name for item in fast[len(params) :]] == ["test_rows[1]", "test_rows[2]", "test_plain"]
