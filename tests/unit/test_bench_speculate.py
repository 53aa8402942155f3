"""The bench of drafters beside plain decoding: the same tokens, and figures that fit together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from retain import LLM, SamplingParams
from retain.config import Config
from tests.helpers.cli import run_cli

pytestmark = pytest.mark.usefixtures("shared_engines")
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "workloads"),
    [
        ("random:tiny", "humaneval,books,summaries"),  # those that need no chat template
        pytest.param("tiny_smollm2", "humaneval,editing,books,summaries,qa,conversation", marks=pytest.mark.slow),
        pytest.param("smollm2", "humaneval,qa", marks=pytest.mark.slow),
    ],
)
def test_every_workload_and_drafter_has_a_line_equal_to_plain(
    model: str, workloads: str, data: Path, tiny_smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_smollm2 if model == "tiny_smollm2" else model
    names = ["ngram:k=1,min=1", "ngram:k=3,min=1", "self:k=2,budget=64,weights=int4"]
    options = ("--data-dir", data, "--workloads", workloads, "--num-prompts", 2, "--output-dir", tmp_path, "--json")
    sizes = ("--batch-size", 2, "--output-len", 16, "--context-lens", "60,300", "--drafters", " ".join(names))
    result = run_cli(capsys, "bench", "speculate", "--model", path, *options, *sizes)
    assert result.code == 0
    lines = [json.loads(line) for line in result.out.splitlines()]
    sets = workloads.replace("books", "books-60,books-300").split(",")
    assert [(x["workload"], x["drafter"]) for x in lines] == [(w, n) for w in sets for n in names]
    assert json.loads((tmp_path / "speculate.json").read_text()) == lines
    for x in lines:
        assert x["tokens_equal"]
        if "self" in x["drafter"]:
            expected_length = 1 + x["acceptance_rate"] * x["mean_draft_len"]
            assert x["mean_acceptance_length"] == pytest.approx(expected_length, abs=0.02)
            assert (x["acceptance_rate"] > 0.5 or model != "smollm2") and x["expected_speedup"] > 0


@pytest.mark.slow
def test_output_has_speculation_stats(load_shared_llm: Callable[[Config], LLM]) -> None:
    llm = load_shared_llm(Config("smollm2", speculate="ngram:k=4,min=1"))
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    output = llm.generate(STORY, params)[0]
    stats = output.speculate
    assert stats and stats["rounds"] and stats["drafted"] >= stats["accepted"] > 0
    assert stats["mean_acceptance_length"] == pytest.approx(1 + stats["accepted"] / stats["rounds"], abs=1e-3)
    assert output.token_ids == load_shared_llm(Config("smollm2")).generate(STORY, params)[0].token_ids
    text = "".join(chunk.text for chunk in llm.stream(STORY, params))
    assert text == output.text
