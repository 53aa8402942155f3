"""First tokens where prompts begin alike: the same ones, and hits where there must be some."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retain.cli import main

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


def test_every_workload_and_method_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rows in FILES.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = ["bench", "prefix", "--model", "smollm2", "--data", str(tmp_path), "--items", "3", "--shared", "150"]
    assert main.main([*asked, "--json", "--out", str(tmp_path / "out")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    sets, methods = ["copa", "document", "trace"], ["recompute", "memory", "ram", "ssd", "ssd-200", "important-200"]
    assert [(x["workload"], x["method"]) for x in lines] == [(w, m) for w in sets for m in methods]
    assert json.loads((tmp_path / "out" / "prefix.json").read_text()) == lines
    for x in lines:
        assert (x["same"] == 1 or "important" in x["method"]) and x["requests"] in (3, 5)
        assert x["hit"] > 0.35 if x["method"] == "memory" else x["method"] != "recompute" or x["hit"] == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--workloads", "copa,chess"], "unknown workload 'chess'"),
        (["--items", "0"], "at least 1"),
        (["--prefix", "off"], "bench prefix says itself"),
        (["--data", "/nowhere"], "no such file"),
    ],
)
def test_bad_input_gets_one_line(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "prefix", "--model", "smollm2", *options]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
