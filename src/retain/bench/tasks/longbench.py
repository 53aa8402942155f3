"""Task `longbench`: the English tasks of LongBench and its code, asked after the context was evicted, as kvpress asks.

Records are those of the dataset Xnhyacinth/LongBench in `longbench.jsonl`, all tasks in one file: context, question,
answer_prefix, answers, all_classes, task, max_new_tokens. Those in Chinese are left out: their marks need a word list.
The best answer counts. Marks follow LongBench (Bai et al., arXiv 2308.14508, table 2): F1 of words, ROUGE-L of
summaries, edit similarity of code, the share of the right class or number among those named.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

from retain.bench.documents import Document, Question, load_contexts
from retain.bench.documents import measure_later as measure
from retain.bench.tasks import load_records
from retain.llm import LLM
from retain.plugins import needs_extra

__all__ = ["METRICS", "REQUESTS_PER_ITEM", "load_items", "measure"]

REQUESTS_PER_ITEM = 1
FIRST_LINE_ONLY = ("trec", "triviaqa", "samsum")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[Document]:
    """Return contexts of at most `max_prompt_len` tokens with their question, of each task in turn."""
    records = [r for r in load_records(data, "longbench") if r["task"] in SIMILARITIES]
    return load_contexts(llm, records, _ask_about, num_items, max_prompt_len)


def _ask_about(record: dict[str, Any], question: Question) -> Question:
    task = record["task"]
    mark = partial(mark_best, task=task, classes=tuple(record["all_classes"] or ()))
    return replace(question, facts=(tuple(record["answers"]),), mark=mark)


def mark_best(answer: str, facts: Sequence[Sequence[str]], task: str, classes: Sequence[str] = ()) -> float:
    """Return how much an answer is like the nearest right one, 0 to 100. Raises ValueError without an extra."""
    if task in FIRST_LINE_ONLY:
        answer = answer.lstrip().partition("\n")[0]
    return 100 * max(SIMILARITIES[task](answer, right, classes) for right in facts[0])


def share_words(answer: str, right: str, classes: Sequence[str]) -> float:
    """Return F1 of words, without case, punctuation and articles."""
    found, wanted = (Counter(_words(text)) for text in (answer, right))
    num_common = (found & wanted).total()
    return 2 * num_common / (found.total() + wanted.total()) if num_common else 0.0


def _words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(WITHOUT_PUNCTUATION)).split()


def share_subsequence(answer: str, right: str, classes: Sequence[str]) -> float:
    """Return F1 of the longest common subsequence of words (ROUGE-L)."""
    with needs_extra("longbench", "bench"):
        from rouge_score.rouge_scorer import RougeScorer
    return float(RougeScorer(["rougeL"]).score(right, answer)["rougeL"].fmeasure)


def share_class(answer: str, right: str, classes: Sequence[str]) -> float:
    """Return 1 over the classes that an answer names, where the right one is among them.

    A class whose name is a part of the right one's does not count.
    """
    named = [c for c in classes if c in answer and (c == right or c not in right)]
    return 1 / len(named) if right in named else 0.0


def share_number(answer: str, right: str, classes: Sequence[str]) -> float:
    """Return the share of the right number among those that an answer names."""
    numbers = re.findall(r"\d+", answer)
    wanted = re.search(r"\d+", right)
    return numbers.count(wanted[0]) / len(numbers) if numbers and wanted else 0.0


def share_code(answer: str, right: str, classes: Sequence[str]) -> float:
    """Return the edit similarity of the first line of code that is neither a comment nor a fence."""
    lines = answer.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    return SequenceMatcher(None, line, right).ratio()


SIMILARITIES: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"), share_words),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), share_subsequence),
    **{"trec": share_class, "triviaqa": share_words, "samsum": share_subsequence},
    **dict.fromkeys(("passage_count", "passage_retrieval_en"), share_number),
    **dict.fromkeys(("lcc", "repobench-p"), share_code),
}
METRICS = ("mean", *SIMILARITIES)
