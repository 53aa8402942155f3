"""perplexity: books, teacher-forced; the cache forgets as it goes. A budget's percentage is of the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retain.bench.tasks import ForcedItem, ItemMetrics, load_records, teacher_force
from retain.llm import LLM

METRICS = ("loss",)
REQUESTS_PER_ITEM = 1
PROMPT_TOKENS = 16  # tokens: the text itself is the answer


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[ForcedItem]:
    """Pieces of `longest` tokens out of the middle of the books, from each book in turn."""
    books = [(b["text"], num_items // 4 + 1) for b in load_records(data, "books")]
    found = []
    for i in range(num_items):
        text, pieces = books[i % len(books)]
        start = len(text) * (1 + i // len(books)) // (pieces + 1)
        ids = llm.encode(text[start : start + 8 * max_prompt_len])[:max_prompt_len]
        found.append(ForcedItem(ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:], budget_base=len(ids)))
    return found


def measure(
    llm: LLM, items: list[ForcedItem], policy_specs: Sequence[str], full_state: Any
) -> tuple[list[ItemMetrics], Any]:
    """Loss in nats a token."""
    rows, memory = teacher_force(llm, items, policy_specs, full_state, compares_full=False)
    return [{"loss": row["loss"]} for row in rows], memory
