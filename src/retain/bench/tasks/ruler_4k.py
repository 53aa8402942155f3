"""Task `ruler_4k`: the 13 tasks of RULER as kvpress asks them: the context is evicted first, then the question comes.

Records are those of the dataset simonjegou/ruler, configuration 4096, in `ruler_4096.jsonl`: context, question,
answer_prefix, answer, task, max_new_tokens. An answer counts where it contains a string, in any case: all of them, or
one of them for the tasks `qa`. Published tables of presses have these numbers (RULER, arXiv 2404.06654).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from retain.bench.documents import Document, Question, measure_later, name_strings
from retain.bench.tasks import load_records
from retain.llm import LLM
from retain.processing.tokenizer import Tokenizer

__all__ = ["METRICS", "REQUESTS_PER_ITEM", "load_items", "measure"]

NEEDLES = ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery")
METRICS = ("mean", *(f"niah_{kind}" for kind in NEEDLES), "vt", "cwe", "fwe", "qa_1", "qa_2")
REQUESTS_PER_ITEM = 1
measure = partial(measure_later, mark=name_strings)


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[Document]:
    """Return contexts of at most `max_prompt_len` tokens with their question, of each task in turn."""
    records = take_in_turn(load_records(data, "ruler_4096"))
    documents = (_make_document(llm.tokenizer, record) for record in records)
    return list(itertools.islice((d for d in documents if len(d.text) <= max_prompt_len), num_items))


def take_in_turn(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the first record of each task, then the second ones."""
    by_task: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_task.setdefault(record["task"], []).append(record)
    yield from (r for turn in itertools.zip_longest(*by_task.values()) for r in turn if r)


def _make_document(tokenizer: Tokenizer, record: dict[str, Any]) -> Document:
    before, after = split_turn(tokenizer)
    answers: list[str] = record["answer"]
    is_any = record["task"].startswith("qa")
    facts = (tuple(answers),) if is_any else tuple((answer,) for answer in answers)
    text = tokenizer.encode(before + record["context"], add_special_tokens=not before)
    asked = tokenizer.encode(record["question"] + after + record["answer_prefix"], add_special_tokens=False)
    num_tokens = int(record["max_new_tokens"])
    return Document(text, (Question(record["task"], asked, facts, num_tokens, tokenizer.stop_token_ids),))


def split_turn(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the text of a conversation before and behind what the user says; two empty ones without a template."""
    if tokenizer.chat_template is None:
        return "", ""
    user = "What the user says."
    before, _, after = tokenizer.apply_chat_template([{"role": "user", "content": user}]).partition(user)
    return before, after
