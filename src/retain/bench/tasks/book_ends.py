"""Task `book_ends`: the distance from the full cache's distributions, over the last tokens of pieces of books."""

from __future__ import annotations

from pathlib import Path

from retain.bench.tasks import ForcedItem
from retain.bench.tasks.fidelity import METRICS, REQUESTS_PER_ITEM, measure
from retain.bench.tasks.perplexity import load_pieces
from retain.llm import LLM

__all__ = ["METRICS", "REQUESTS_PER_ITEM", "load_items", "measure"]
END_TOKENS = 128


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[ForcedItem]:
    """Return pieces of `max_prompt_len` tokens out of the middle of the books; all before their end is the prompt."""
    pieces = load_pieces(llm, data, num_items, max_prompt_len)
    return [ForcedItem(ids[:-END_TOKENS], ids[-END_TOKENS:], budget_base=len(ids)) for ids in pieces]
