"""The tool that draws: every kind of JSON that it is told of becomes pictures."""

import json
from pathlib import Path

import pytest

from tools import plots

INTERVAL = {"mean": 0.2, "low": 0.1, "high": 0.3}
QUALITY = [
    {"task": "fidelity", "metric": "kl", "policy": policy, "memory": memory, "mean": 0.2, "ci95": [-0.1, 0.1]}
    for policy, memory in (("full", 1.0), ("h2o:budget=50%", 0.5), ("h2o:budget=25%", 0.25))
]
SPEEDUPS = [
    {"workload": f"books-{context}", "drafter": f"ngram:k={k}", "speedup": 1.5} for k in (1, 2) for context in (60, 300)
]
TUNING = {
    "bound": {"metric": "kl", "limit": 0.1},
    "best": {"spec": "h2o:budget=50%"},
    "lines": [{"spec": f"h2o:budget={n}%", "memory": n / 100, "excess": INTERVAL} for n in (25, 50)],
}
SESSIONS = [
    {"method": method, "sessions": n, "found_share": found, "min_found": 0.9, "kl": kl, "kl_ci95": [kl / 2, 2 * kl]}
    for method, kl in (("full", 0.0), ("full int8", 0.01))
    for n, found in ((2, 1.0), (4, 0.8 if kl == 0 else 0.95))
] + [{"method": "full", "most_sessions": 2}]
FIT = {"r2": 0.5, "r2_by_layer": [0.4, 0.6], "kl": {"gate": [0.01, 0.02, 0.04]}}


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (QUALITY, {"fidelity-kl.png"}),
        (SPEEDUPS, {"speculate-k.png", "speculate-context.png"}),
        ([TUNING], {"tune.png"}),
        (SESSIONS, {"agent.png"}),
        ([FIT], {"fit.png"}),
    ],
    ids=["quality", "speculate", "tune", "agent", "fit"],
)
def test_json_becomes_pictures(lines: list[plots.Json], names: set[str], tmp_path: Path) -> None:
    file = tmp_path / "lines.json"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    plots.main([str(file), str(tmp_path)])
    assert {p.name for p in tmp_path.glob("*.png")} == names
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in tmp_path.glob("*.png"))


def test_kept_positions_become_a_picture(tmp_path: Path) -> None:
    assert plots.plot_kept_positions({"sinks": [[[0, 3], [1, 3]]] * 2}, 4, tmp_path).exists()
