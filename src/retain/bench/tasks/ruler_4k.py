"""Task `ruler_4k`: the 13 tasks of RULER as kvpress asks them: the context is evicted first, then the question comes.

Records are those of the dataset simonjegou/ruler, configuration 4096, in `ruler_4096.jsonl`: context, question,
answer_prefix, answer, task, max_new_tokens. An answer counts where it contains a string, in any case: all of them, or
one of them for the tasks `qa`. Published tables of presses have these numbers (RULER, arXiv 2404.06654).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from retain.bench.documents import Document, Question, load_contexts, name_strings
from retain.bench.documents import measure_later as measure
from retain.bench.tasks import load_records
from retain.llm import LLM

__all__ = ["METRICS", "REQUESTS_PER_ITEM", "load_items", "measure"]

NEEDLES = ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery")
METRICS = ("mean", *(f"niah_{kind}" for kind in NEEDLES), "vt", "cwe", "fwe", "qa_1", "qa_2")
REQUESTS_PER_ITEM = 1


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[Document]:
    """Return contexts of at most `max_prompt_len` tokens with their question, of each task in turn."""
    return load_contexts(llm, load_records(data, "ruler_4096"), _ask_about, num_items, max_prompt_len)


def _ask_about(record: dict[str, Any], question: Question) -> Question:
    answers: list[str] = record["answer"]
    is_any = record["task"].startswith("qa")
    facts = (tuple(answers),) if is_any else tuple((answer,) for answer in answers)
    return replace(question, facts=facts, mark=name_strings)
