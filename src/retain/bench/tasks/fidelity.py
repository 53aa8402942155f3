"""fidelity: the reference summary of a news article, token by token, beside what the full cache thinks of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retain.bench.tasks import Given, Row, ask, force, records
from retain.llm import LLM

METRICS = {"loss": False, "kl": False, "top1": True}
ROWS = 1
ANSWER = 128  # tokens at most


def items(llm: LLM, data: Path, n: int, longest: int) -> list[Given]:
    """Articles that are no longer than `longest` tokens, and their reference summaries."""
    found: list[Given] = []
    for record in records(data, "cnn_dailymail"):
        prompt = ask(llm, record["article"], "Summarize the following news article:", "Summary:")
        answer = llm.tokenizer.encode(record["highlights"], ends=False)[:ANSWER]
        if len(prompt) <= longest and len(found) < n:
            found.append(Given(prompt, answer))
    return found


def measure(llm: LLM, items: list[Given], chosen: Sequence[str], full: Any) -> tuple[list[Row], Any]:
    """Loss, and the distance from the full cache."""
    rows, memory = force(llm, items, chosen, full, compare=True)
    return [{name: row[name] for name in METRICS} for row in rows], memory
