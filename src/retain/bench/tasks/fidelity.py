"""fidelity: the reference summary of a news article, token by token, beside what the full cache thinks of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retain.bench.tasks import ForcedItem, ItemMetrics, load_articles, teacher_force
from retain.llm import LLM

METRICS = ("loss", "kl", "top1")
REQUESTS_PER_ITEM = 1
MAX_SUMMARY_TOKENS = 128  # tokens at most


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[ForcedItem]:
    """Articles that are no longer than `longest` tokens, and their reference summaries."""
    encode = llm.tokenizer.encode
    return [
        ForcedItem(p, encode(told, add_special_tokens=False)[:MAX_SUMMARY_TOKENS])
        for p, told in load_articles(llm, data, num_items, max_prompt_len)
    ]


def measure(
    llm: LLM, items: list[ForcedItem], policy_specs: Sequence[str], full_state: Any
) -> tuple[list[ItemMetrics], Any]:
    """Loss, and the distance from the full cache."""
    rows, memory = teacher_force(llm, items, policy_specs, full_state, compares_full=True)
    return [{name: row[name] for name in METRICS} for row in rows], memory
