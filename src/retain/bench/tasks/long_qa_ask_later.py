"""Task `long_qa_ask_later`: the documents of `long_qa`, evicted to their budget before each question is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retain.bench.documents import Document, ask
from retain.bench.tasks import ItemMetrics
from retain.bench.tasks.long_qa import METRICS, REQUESTS_PER_ITEM, load_items
from retain.llm import LLM

__all__ = ["METRICS", "REQUESTS_PER_ITEM", "load_items", "measure"]


def measure(
    llm: LLM, items: Sequence[Document], policy_specs: Sequence[str], full_state: Any
) -> tuple[list[ItemMetrics], Any]:
    """Return the share of the answers that name what the reference names, 0 to 100."""
    return ask(llm, items, policy_specs, after_eviction=True), None
