"""Task `long_qa`: questions about a document of many passages, each asked together with the document.

Like the multi-document questions of LongBench (Bai et al., arXiv 2308.14508). The passages and questions are those of
group `rag` in Spec-Bench: each document has the passages of several questions. Prompts are raw text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retain.bench.documents import Document, Question, measure
from retain.bench.tasks import load_records
from retain.llm import LLM

__all__ = ["METRICS", "REQUESTS_PER_ITEM", "load_items", "measure"]

METRICS = ("mean",)
REQUESTS_PER_ITEM = 5


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[Document]:
    """Return documents of at most `max_prompt_len` tokens with at most five questions."""
    records = [r for r in load_records(data, "spec_bench") if r["category"] == "rag" and r.get("reference")]
    return list(_join_passages(llm, records, max_prompt_len))[:num_items]


def _join_passages(llm: LLM, records: list[dict[str, Any]], max_prompt_len: int) -> Iterator[Document]:
    encode = llm.tokenizer.encode
    text = llm.tokenizer.encode("")
    questions = list[Question]()
    for record in records:
        passages, _, question = record["turns"][0].rpartition("\n")
        ids = encode(f"{passages}\n\n", add_special_tokens=False)
        if questions and len(text) + len(ids) > max_prompt_len:
            yield Document(text, tuple(questions[:REQUESTS_PER_ITEM]))
            text = llm.tokenizer.encode("")
            questions = []
        if len(text) + len(ids) > max_prompt_len:
            continue
        asked = encode(f"Question: {question}\nAnswer:", add_special_tokens=False)
        text = text + ids
        questions.append(Question("mean", asked, (tuple(record["reference"][0]),)))
    if questions:
        yield Document(text, tuple(questions[:REQUESTS_PER_ITEM]))
