"""Task `perplexity`: the loss on teacher-forced books. A budget in percent is of the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retain.bench.tasks import ForcedItem, ItemMetrics, load_records, teacher_force
from retain.llm import LLM

METRICS = ("loss",)
REQUESTS_PER_ITEM = 1
PROMPT_TOKENS = 16  # the rest of the text is the continuation


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[ForcedItem]:
    """Return pieces of `max_prompt_len` tokens out of the middle of the books, with short prompts."""
    pieces = load_pieces(llm, data, num_items, max_prompt_len)
    return [ForcedItem(ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:], budget_base=len(ids)) for ids in pieces]


def load_pieces(llm: LLM, data: Path, num_items: int, length: int) -> list[list[int]]:
    """Return pieces of `length` tokens out of the middle of the books, from each book in turn."""
    books = [(b["text"], num_items // 4 + 1) for b in load_records(data, "books")]
    found = []
    for i in range(num_items):
        text, pieces = books[i % len(books)]
        start = len(text) * (1 + i // len(books)) // (pieces + 1)
        found.append(llm.encode(text[start : start + 8 * length])[:length])
    return found


def measure(
    llm: LLM, items: list[ForcedItem], policy_specs: Sequence[str], full_state: Any
) -> tuple[list[ItemMetrics], Any]:
    """Return the loss in nats a token."""
    rows, state = teacher_force(llm, items, policy_specs, full_state, compares_full=False)
    return [{"loss": row["loss"]} for row in rows], state
