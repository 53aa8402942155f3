"""fidelity: the reference summary of a news article, token by token, beside what the full cache thinks of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retain.bench.tasks import Given, Row, articles, force
from retain.llm import LLM

METRICS = ("loss", "kl", "top1")
ROWS = 1
ANSWER = 128  # tokens at most


def items(llm: LLM, data: Path, n: int, longest: int) -> list[Given]:
    """Articles that are no longer than `longest` tokens, and their reference summaries."""
    encode = llm.tokenizer.encode
    return [Given(p, encode(told, add_special_tokens=False)[:ANSWER]) for p, told in articles(llm, data, n, longest)]


def measure(llm: LLM, items: list[Given], chosen: Sequence[str], full: Any) -> tuple[list[Row], Any]:
    """Loss, and the distance from the full cache."""
    rows, memory = force(llm, items, chosen, full, compare=True)
    return [{name: row[name] for name in METRICS} for row in rows], memory
