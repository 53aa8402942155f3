"""Task `fidelity`: the distance from the full cache's distributions, over reference summaries of news articles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retain.bench.tasks import ForcedItem, ItemMetrics, load_articles, teacher_force
from retain.llm import LLM

METRICS = ("loss", "kl", "top1_agreement")
REQUESTS_PER_ITEM = 1
MAX_SUMMARY_TOKENS = 128


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[ForcedItem]:
    """Return articles of at most `max_prompt_len` tokens with their reference summaries."""
    encode = llm.tokenizer.encode
    return [
        ForcedItem(prompt, encode(summary, add_special_tokens=False)[:MAX_SUMMARY_TOKENS])
        for prompt, summary in load_articles(llm, data, num_items, max_prompt_len)
    ]


def measure(
    llm: LLM, items: list[ForcedItem], policy_specs: Sequence[str], full_state: Any
) -> tuple[list[ItemMetrics], Any]:
    """Return the loss and the distance from the full cache."""
    rows, state = teacher_force(llm, items, policy_specs, full_state, compares_full=True)
    return [{name: row[name] for name in METRICS} for row in rows], state
