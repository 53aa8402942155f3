"""What forgetting costs: a budget that holds everything costs nothing; files and pictures say what was measured."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain import LLM, SamplingParams
from retain.bench import budget, plots, quality, tasks
from retain.cli import main

STORY = "The miller's son set out at dawn with a loaf and a lantern. He walked north, past the weir and the burnt oak. "


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", kv_memory="512MiB", kv_policy="h2o:budget=50%,heads=query")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all files, two or more records in each, our own words."""
    folder = tmp_path_factory.mktemp("data")
    pair = {
        "choice1": "He was hungry.",
        "choice2": "It was red.",
        "question": "cause",
        "premise": "He ate.",
        "label": 0,
    }
    files = {
        "cnn_dailymail": [{"article": STORY * n, "highlights": "The son walked north at dawn."} for n in (2, 3, 60)],
        "books": [{"text": STORY * 40}] * 4,
        "paul_graham_essays": [{"text": STORY * 30}],
        "copa": [pair] * 8,
        "piqa_valid": [{"goal": "Boil water.", "sol1": "Heat it.", "sol2": "Freeze it.", "label": 0}] * 8,
        "openbookqa": [{"question_stem": "Ice is", "choices": ["cold", "hot", "loud", "green"], "label": 0}] * 8,
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.mark.parametrize("name", tasks.task_names())
def test_budget_covering_everything_equals_full(llm: LLM, data: Path, name: str) -> None:
    chosen = ["h2o:budget=4096", "window:budget=40%"]
    (results,) = quality.run(llm, quality.QualityBenchConfig([tasks.load_task(name)], data, 7, 300), chosen, None)
    assert len({len(rows) for rows in results.item_metrics.values()}) == 1
    for metric in results.metrics:
        same, full = results.paired_values(chosen[0], metric)
        less, _ = results.paired_values(chosen[1], metric)
        assert len(full) and same == pytest.approx(full, abs=5e-3)
        if metric == "kl":
            assert full == pytest.approx(0) and (less > 0.05).all()
    assert all(policy in quality.format_table(results) for policy in ("full", *chosen))


def test_json_and_plots_are_written(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    asked = ["bench", "quality", "--model", "smollm2", "--data", str(data), "--items", "2", "--out", str(out), "--json"]
    assert main.main([*asked, "--policies", "window h2o ring:window=90", "--budgets", "50%,25%", "--kept"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["policy"] for line in lines} == {
        "full",
        "ring:window=90",
        *(f"{name}:budget={b}%" for name in ("window", "h2o") for b in (25, 50)),
    }
    rows = json.loads((out / "fidelity.json").read_text())
    for line in lines:
        values = [row[line["metric"]] for row in rows[line["policy"]]]
        assert line["items"] == 2 and line["mean"] == pytest.approx(np.mean(values), abs=1e-4)
        assert line["interval"][0] - 1e-4 <= line["less_full"] <= line["interval"][1] + 1e-4
    pictures = {"fidelity-loss.png", "fidelity-kl.png", "fidelity-top1.png", "kept-layer.png", "kept-head.png"}
    assert {p.name for p in out.glob("*.png")} == pictures
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in out.glob("*.png"))


@pytest.mark.parametrize(
    "options",
    [
        ["--tasks", "chess"],
        ["--policies", "lru"],
        ["--budgets", "x"],
        ["--budgets", "0%"],
        ["--data", "/nowhere"],
        ["--longest", "3"],
        ["--kv-policy", "full"],
        ["--items", "0"],
        ["--tasks", "summarize", "--longest", "2"],
    ],
)
def test_bad_input_prints_one_line(data: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bench", "quality", "--model", "smollm2", "--data", str(data), *options]
    assert main.main(asked) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("retain: ")


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=40))
def test_bootstrap_interval_lies_within_differences(differences: list[float]) -> None:
    x = np.array(differences)
    lo, hi = quality.bootstrap_interval(x, 200)
    assert x.min() - 1e-9 <= lo <= hi <= x.max() + 1e-9


def test_bootstrap_interval_has_nominal_coverage() -> None:
    rng = np.random.default_rng(1)
    drawn = [quality.bootstrap_interval(rng.normal(3, 1, 60), 400) for _ in range(200)]
    assert 0.88 <= np.mean([lo <= 3 <= hi for lo, hi in drawn]) <= 0.99


def test_percentage_budgets_become_absolute() -> None:
    assert quality.expand_policies("h2o", "50") == ["h2o:budget=50"]
    assert tasks.absolute_budget("h2o:budget=25%,recent=10", 4000) == "h2o:budget=1000,recent=10"
    assert (
        tasks.absolute_budget("full", 4000) == "full" and tasks.absolute_budget("h2o:budget=25%", 0) == "h2o:budget=25%"
    )


def test_kept_positions_follow_the_policy(llm: LLM, tmp_path: Path) -> None:
    ids = llm.encode(STORY * 8)
    n, kept = len(ids), llm.kept_positions(ids, "sinks:budget=40")
    assert kept == [[[0, 1, 2, 3, *range(n - 36, n)]] * 3] * 30
    assert llm.kept_positions(ids, "full") == [[list(range(n))] * 3] * 30
    assert llm.cache.free_pages == llm.cache.total_pages
    assert len(plots.plot_kept_positions({"sinks": kept}, n, tmp_path)) == 2


def test_lm_eval_adapter_equals_llm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval itself is not needed: only its base class is stood in for."""
    module = types.ModuleType("lm_eval.api.model")
    module.LM = object  # type: ignore[attr-defined]
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", module)
    monkeypatch.delitem(sys.modules, "retain.bench.lm_eval", raising=False)
    from retain.bench.lm_eval import RetainLM

    policy = "h2o:budget=20"
    harness = RetainLM(llm, policy, batch_size=2)
    asked = [types.SimpleNamespace(args=(STORY, end)) for end in ("He slept.", "Soon it rained.", "Stop")]
    greedy = SamplingParams(max_tokens=5, temperature=0)
    said = llm.generate(STORY.rstrip(), greedy, policy)[0].token_ids
    asked.append(types.SimpleNamespace(args=(STORY.rstrip(), llm.tokenizer.decode(said))))
    found = harness.loglikelihood(asked)
    for (text, end), (total, _) in zip((r.args for r in asked), found, strict=True):
        blank = text[len(text.rstrip()) :]
        ids = llm.tokenizer.encode(blank + end, add_special_tokens=False)
        assert total == pytest.approx(sum(llm.score([text.rstrip()], [ids], policy)[0]), abs=0.05)
    assert [greedy for _, greedy in found] == [False, False, False, True]
    (whole,) = harness.loglikelihood_rolling([types.SimpleNamespace(args=(STORY,))])
    ids, start = llm.tokenizer.encode(STORY, add_special_tokens=False), min(llm.tokenizer.stop_token_ids)
    assert whole == pytest.approx(sum(llm.score([[start]], [ids], policy)[0]), abs=0.05)
    (text,) = harness.generate_until([types.SimpleNamespace(args=(STORY, {"max_gen_toks": 5, "until": []}))])
    assert text == llm.generate(STORY, greedy, policy)[0].text


def test_malformed_records_are_reported(
    llm: LLM, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "copa.jsonl").write_text("{}\n" * 9)
    with pytest.raises(ValueError, match=r"choice: a record in .* has no 'question'"):
        quality.QualityBenchConfig([tasks.load_task("choice")], tmp_path, 3, 300).load_items(
            llm, tasks.load_task("choice")
        )
    (tmp_path / "books.jsonl").write_text("{")
    with pytest.raises(ValueError):
        quality.QualityBenchConfig([tasks.load_task("perplexity")], tmp_path, 3, 300).load_items(
            llm, tasks.load_task("perplexity")
        )
    assert (
        len(
            quality.QualityBenchConfig([tasks.load_task("choice")], data, 10**4, 300).load_items(
                llm, tasks.load_task("choice")
            )
        )
        == 18
    )


def test_budget_benchmarks_run(llm: LLM) -> None:
    names = ["full", "h2o:budget=50%", "h2o:budget=90"]
    times = budget.time_side_by_side(llm, names, prompt_len=100, batch_size=2, num_steps=20)
    assert [len(t) for t in times] == [20] * 3 and all(t > 0 for each in times for t in each)
    assert llm.cache.free_pages == llm.cache.total_pages
    assert main.main(["bench", "budget", "--model", "smollm2", "--parts", "colour"]) == 2
    assert main.main(["bench", "budget", "--model", "smollm2", "--kv-policy", "full"]) == 2
    lines = list(budget.measure_throughput(llm, prompt_len=100, output_len=8, num_requests=5))
    assert lines[0]["policy"] == "full" and all(line["tok_s"] > 0 for line in lines)
    assert llm.cache.free_pages == llm.cache.total_pages
