"""Drafters beside plain decoding: the same tokens, and figures that fit together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retain import LLM, SamplingParams
from retain.cli import main

STORY = "The miller's son set out at dawn with a loaf and a lantern. He walked north, past the weir and the burnt oak. "


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    files = {
        "humaneval": [{"prompt": f"def {n}(a, b):\n", "canonical_solution": "    return a"} for n in ("add", "sub")],
        "books": [{"text": STORY * 40}] * 2,
        "cnn_dailymail": [{"article": STORY, "highlights": "A son walked."}] * 2,
        "spec_bench": [
            {"category": "qa", "turns": ["Why?"]},
            {"category": "writing", "turns": ["Write a poem.", "Again."]},
        ],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_every_workload_and_drafter_has_a_line_equal_to_plain(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["ngram:k=1,min=1", "ngram:k=3,min=1", "self:k=2,budget=64,weights=int4"]
    workloads = "humaneval,editing,books,summaries,qa,conversation"
    asked = ["bench", "speculate", "--model", "smollm2", "--data", str(data), "--workloads", workloads, "--items", "2"]
    asked += ["--batch", "2", "--new", "24", "--contexts", "60,600", "--drafters", " ".join(names), "--json"]
    assert main.main([*asked, "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    sets = ["humaneval", "editing", "books-60", "books-600", "summaries", "qa", "conversation"]
    assert [(x["workload"], x["drafter"]) for x in lines] == [(w, n) for w in sets for n in names]
    assert json.loads((tmp_path / "speculate.json").read_text()) == lines
    for x in lines:
        assert x["same"]
        if "self" in x["drafter"]:
            assert x["tokens_per_round"] == pytest.approx(1 + x["accepted"] * x["drafted_per_round"], abs=0.02)
            assert x["accepted"] > 0.5 and x["theory"] > 0
    assert {p.name for p in tmp_path.glob("*.png")} == {"speculate-k.png", "speculate-context.png"}


def test_output_has_speculation_stats(capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM("smollm2", speculate="ngram:k=4,min=1")
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    answer = llm.generate(STORY, params)[0]
    told = answer.speculate
    assert told and told["rounds"] and told["drafted"] >= told["accepted"] > 0
    assert told["tokens_per_round"] == pytest.approx(1 + told["accepted"] / told["rounds"], abs=1e-3)
    assert answer.token_ids == LLM("smollm2").generate(STORY, params)[0].token_ids
    text = "".join(piece.text for piece in llm.stream(STORY, params))
    assert text == answer.text


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("guess", "unknown drafter 'guess': choose one of draft, ngram, self"),
        ("ngram:k=0", "k is auto or a number"),
        ("ngram:min=3,max=2", "min and max"),
        ("self:budget=0", "budget"),
        ("draft", "which model="),
        ("draft:model=gemma3", "another vocabulary"),
        ("draft:weights=int5", "weights 'int5'"),
        ("ngram:n=3", "has no option 'n'"),
    ],
)
def test_bad_drafter_specs_print_one_line(option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["run", "Hello", "--model", "smollm2", "--speculate", option]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error


@pytest.mark.parametrize("name", ["budget", "quality"])
def test_benches_without_drafting_reject_speculate(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", name, "--model", "smollm2", "--speculate", "ngram"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--speculate is for bench speed" in error


def test_bench_speculate_rejects_bad_options(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bench", "speculate", "--model", "smollm2", "--data", str(data)]
    for more, said in (
        (["--speculate", "ngram"], "--drafters"),
        (["--workloads", "poems"], "unknown workload 'poems'"),
        (["--contexts", "many"], "--contexts are numbers"),
        (["--items", "0"], "at least 1"),
        (["--drafters", "x"], "unknown drafter"),
    ):
        assert main.main([*asked, *more]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and said in error
