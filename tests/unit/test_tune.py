"""`retain tune`: the smallest policy that holds the bound is found; a run continues; what is printed is an option."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.bench.tasks import ItemMetrics
from retain.kv.eviction import policies
from retain.tune.bound import Bound, Interval, parse_bound
from retain.tune.measure import Journal, Measurer
from retain.tune.tuner import Candidate, count_measurements, find_smallest, halve
from tests.helpers.cli import assert_one_line_error, run_cli
from tests.helpers.folders import save_tiny_smollm2
from tests.helpers.marks import slow

METRICS = st.fixed_dictionaries({m: st.floats(0.001, 4) for m in ("kl", "loss", "top1", "rouge")})
TEXT = "The miller's son set out at dawn with a loaf and a lantern. He walked north, past the weir and the oak. "


@pytest.mark.parametrize("text", ["loss=1%", *slow("kl=0.02", "loss=0.5", "top1=0.95", "rouge=0.9")])
@given(st.lists(METRICS, min_size=4, max_size=20))
def test_the_full_cache_has_no_excess(text: str, rows: list[ItemMetrics]) -> None:
    bound, full = parse_bound(text), [row | {"kl": 0.0} for row in rows]
    assert bound.interval(full, full) == Interval(0, 0, 0)
    found = bound.interval(rows, full)
    assert found.low <= found.mean + 1e-9 and found.mean <= found.high + 1e-9


def test_a_relative_bound_is_a_share_of_the_full_caches_mean() -> None:
    full, worse = [{"loss": 2.0}, {"loss": 4.0}], [{"loss": 2.3}, {"loss": 4.3}]
    assert parse_bound("loss=1%").interval(worse, full).mean == pytest.approx(0.1)
    assert parse_bound("loss=0.01").interval(worse, full).mean == pytest.approx(0.3)
    assert parse_bound("top1=0.95").limit == pytest.approx(0.05)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(0.1, 0.9), st.integers(4, 40))
def test_without_noise_the_smallest_that_holds_is_found(levels: list[float], limit: float, num_items: int) -> None:
    candidates = [Candidate(str(i), float(i)) for i in range(len(levels))]
    measured: dict[Candidate, int] = {}

    def measure(active: Sequence[Candidate], n: int) -> None:
        assert all(measured.get(c, 0) <= n <= num_items for c in active)
        measured.update(dict.fromkeys(active, n))

    def estimate(candidate: Candidate, n: int) -> Interval:
        assert measured[candidate] >= n
        level = levels[int(candidate.spec)]
        return Interval(level, level, level)

    found = find_smallest(candidates, num_items, limit, measure, estimate)
    assert found == next((c for c in candidates if levels[int(c.spec)] <= limit), None)
    assert found is None or measured[found] == num_items


@given(st.data(), st.integers(5, 40))
def test_the_winner_holds_with_its_whole_interval(data: st.DataObject, num_items: int) -> None:
    candidates = [Candidate(str(i), float(i)) for i in range(8)]
    means = {c: data.draw(st.lists(st.floats(0, 1), min_size=4, max_size=4)) for c in candidates}

    def estimate(candidate: Candidate, n: int) -> Interval:
        mean = means[candidate][-1 if n == num_items else n % 3]
        return Interval(mean, mean - 0.1, mean + 0.1)

    found = find_smallest(candidates, num_items, 0.5, lambda active, n: None, estimate)
    assert found is None or estimate(found, num_items).high <= 0.5


def test_half_of_the_candidates_is_kept_and_the_nearest_to_the_bound() -> None:
    candidates = [Candidate(str(i), float(i)) for i in range(6)]
    means = dict(zip(candidates, (0.9, 0.6, 0.8, 0.3, 0.2, 0.1), strict=True))
    assert [c.spec for c in halve(candidates, 0.5, means.__getitem__)] == ["3", "4", "5"]
    assert [c.spec for c in halve(candidates, 0.25, means.__getitem__)] == ["3", "4", "5"]
    assert [c.spec for c in halve(candidates, 0.85, means.__getitem__)] == ["1", "2", "3"]
    assert count_measurements(8, 16) == 8 * 4 + 4 * 4 + 2 * 8


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Prompts of some hundred tokens for the model of random weights; two have no answer."""
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": TEXT * (3 + i % 3) + str(i), "answer": TEXT} for i in range(6)]
    path.write_text("\n".join(map(json.dumps, [*rows, {"text": TEXT * 4}, {"text": TEXT * 5}])))
    return path


def run_tune(capsys: pytest.CaptureFixture[str], data: Path, *options: object, within: str = "kl=9"):
    args = ("tune", "--model", "random:tiny", "--data", data, "--within", within, "--output-len", 8)
    return run_cli(capsys, *args, "--policies", "h2o knorm", "--budgets", "60%,30%", *options)


@pytest.mark.slow
def test_the_option_is_printed_and_a_run_continues(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal.jsonl"
    first = run_tune(capsys, data, "--journal", journal)
    assert first.code == 0
    (line,) = first.out.splitlines()
    assert policies.to_spec(policies.parse(line)) == line and "30%" in line
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[: len(lines) // 2]) + lines[-1][:9])  # stopped within a line
    measured = []
    measure_item = Measurer._measure_item
    monkeypatch.setattr(Measurer, "_measure_item", lambda *args: (measured.append(args[1]), measure_item(*args)))
    again = run_tune(capsys, data, "--journal", journal)
    assert again.out == first.out and 0 < len(measured) < 8
    measured.clear()
    third = run_tune(capsys, data, "--journal", journal, "--json")
    assert not measured and json.loads(third.out)["best"]["spec"] == line
    assert set(journal.read_text().splitlines()) == {line.strip() for line in lines}
    result = run_tune(capsys, data, "--journal", journal, "--dtype", "float32")
    assert_one_line_error(result, "another dtype")


def test_nothing_holds_is_said_with_numbers(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_tune(capsys, data, within="kl=0.0000001")
    assert (result.code, result.out) == (1, "")
    assert "no policy holds KL <= 1e-07" in result.err.splitlines()[-1] and "[0." in result.err.splitlines()[-1]


@pytest.mark.slow
def test_answers_of_the_model_itself_are_compared_by_rouge(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_tune(capsys, data, "--first", 6, "--num-items", 4, within="rouge=0.5")
    assert_one_line_error(result, "2 prompts of at most")
    result = run_tune(capsys, data, "--budgets", "90%", within="rouge=0.01")
    assert result.code in (0, 1) and "ROUGE-L" in result.err


@pytest.mark.parametrize("content", ["", "[]", "{}\n", "nonsense\n", '{"subject": {}}\n{"item": 1}\n'])
def test_a_file_that_is_no_journal_is_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(content)
    if not content:
        assert Journal(path, {"model": "m"}).metrics == {}
        return
    with pytest.raises(ValueError, match="not a journal"):
        Journal(path, {"model": "m"})


def test_bounds_are_plain_numbers() -> None:
    assert parse_bound("loss=1%") == Bound("loss", 0.01, is_relative=True)
    assert parse_bound("kl=0.02") == Bound("kl", 0.02, is_relative=False)


@pytest.mark.slow
def test_a_model_with_states_is_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its layers with attention save memory. That the others do not is said at the start."""
    save_tiny_smollm2(tmp_path, "lfm2")
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": TEXT * 30 + str(i), "answer": TEXT}) for i in range(4)))
    options = ("--data", path, "--within", "kl=9", "--num-items", 4, "--output-len", 4, "--max-prompt-len", 4000)
    result = run_cli(capsys, "tune", "--model", tmp_path, *options, "--policies", "h2o", "--budgets", "30%")
    assert result.code == 0 and result.out.startswith("h2o:budget=30%")
