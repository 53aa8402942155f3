"""The bench of shared prefixes: the same first tokens, and hits where there must be some."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from tests.helpers.cli import run_cli

pytestmark = pytest.mark.usefixtures("shared_engines")
FILES = {
    "copa": [
        {
            "question": "cause",
            "premise": f"The cup {i} fell.",
            "choice1": "It was hit.",
            "choice2": "It sang.",
            "label": 0,
        }
        for i in range(12)
    ],
    "books": [{"text": "The miller's son set out at dawn with a loaf and a lantern. " * 30}],
    "mooncake_conversation_trace": [
        {"input_length": 1500 + i, "output_length": 5, "hash_ids": [0, 1, i + 2]} for i in range(3)
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["random:tiny", pytest.param("tiny_smollm2", marks=pytest.mark.slow)])
def test_every_workload_and_method_has_a_line(
    model: str, tiny_smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_smollm2 if model == "tiny_smollm2" else model
    for name, rows in FILES.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ("--data-dir", tmp_path, "--num-prompts", 3, "--shared-prefix-len", 150, "--json")
    result = run_cli(capsys, "bench", "prefix", "--model", model, *options, "--output-dir", tmp_path / "out")
    assert result.code == 0
    lines = [json.loads(line) for line in result.out.splitlines()]
    methods = ["recompute", "memory", "ram", "ssd", "ssd-200", "selective-200"]
    assert [(x["workload"], x["method"]) for x in lines] == list(product(("copa", "document", "trace"), methods))
    assert json.loads((tmp_path / "out" / "prefix.json").read_text()) == lines
    for x in lines:
        assert (x["token_match_rate"] == 1 or "selective" in x["method"]) and x["requests"] in (3, 5)
        hit_rate = x["prefix_hit_rate"]
        assert hit_rate > 0.35 if x["method"] == "memory" else x["method"] != "recompute" or hit_rate == 0
