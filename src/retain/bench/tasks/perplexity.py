"""perplexity: books, teacher-forced; the cache forgets as it goes. A budget's percentage is of the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retain.bench.tasks import Given, Row, force, records
from retain.llm import LLM

METRICS = ("loss",)
ROWS = 1
PROMPT = 16  # tokens: the text itself is the answer


def items(llm: LLM, data: Path, n: int, longest: int) -> list[Given]:
    """Pieces of `longest` tokens out of the middle of the books, from each book in turn."""
    books = [(b["text"], n // 4 + 1) for b in records(data, "books")]
    found = []
    for i in range(n):
        text, pieces = books[i % len(books)]
        start = len(text) * (1 + i // len(books)) // (pieces + 1)
        ids = llm.encode(text[start : start + 8 * longest])[:longest]
        found.append(Given(ids[:PROMPT], ids[PROMPT:], whole=len(ids)))
    return found


def measure(llm: LLM, items: list[Given], chosen: Sequence[str], full: Any) -> tuple[list[Row], Any]:
    """Loss in nats a token."""
    rows, memory = force(llm, items, chosen, full, compare=False)
    return [{"loss": row["loss"]} for row in rows], memory
