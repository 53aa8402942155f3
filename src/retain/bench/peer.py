"""Run another engine on a workload, by a command that prints JSON lines of the shape of `retain bench speed --json`."""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import Any

RATES = ("prefill_tok_s", "decode_tok_s")
TIME_LIMIT_S = 1800.0  # of one workload, loading included


def measure_peer(command: str, workload: str) -> dict[str, Any] | None:
    """Run `command workload`, and return its line of that workload; None where the engine skips it.

    Raises ValueError if the command cannot be run, fails, takes too long, or prints no such figures.
    """
    shown = f"--peer {command!r}"
    try:
        words = [*shlex.split(command), workload]
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    except (OSError, ValueError) as e:
        raise ValueError(f"{shown} cannot be run: {e}") from None
    except subprocess.TimeoutExpired:
        raise ValueError(f"{shown} takes more than {TIME_LIMIT_S:.0f} s for {workload}") from None
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise ValueError(f"{shown} ends with exit code {done.returncode} on {workload}: {last_line[:200]}")
    for line in done.stdout.splitlines():
        row = _parse(line)
        if row.get("workload") == workload:
            if not all(isinstance(row.get(name), int | float) and row[name] > 0 for name in RATES):
                raise ValueError(f"{shown} prints no {' and '.join(RATES)} for {workload}")
            return row
    return None


def compare(ours: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    """Return how many times as fast as the peer this engine is."""
    ratios = {name.replace("tok_s", "ratio"): round(ours[name] / peer[name], 3) for name in RATES}
    return {"workload": ours["workload"], "peer": peer.get("engine", "peer"), **ratios}


def _parse(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
