"""Examples of a user's work: prompts and, where they are known, the answers that are expected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retain.files import quote
from retain.processing.tokenizer import Tokenizer

MAX_ANSWER_TOKENS = 128
MIN_PROMPT_TOKENS = 32
SUMMARIZE = "Summarize the following news article:"


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of its answer, which may be empty; the line of the file that it is from."""

    prompt: list[int]
    answer: list[int]
    line: int = 0


def load_examples(
    tokenizer: Tokenizer, path: Path, first: int, num_items: int, max_prompt_len: int
) -> Iterator[Example]:
    """Yield the first `num_items` examples behind `first` records, of prompts of at most `max_prompt_len` tokens.

    Raises ValueError or OSError.
    """
    found = 0
    for number, record in read_records(path):
        if number <= first or found == num_items:
            continue
        prompt, answer = _to_texts(record, f"{path}:{number}")
        ids = _encode_prompt(tokenizer, prompt)
        if MIN_PROMPT_TOKENS <= len(ids) <= max_prompt_len:
            found += 1
            answer_ids = tokenizer.encode(answer, add_special_tokens=False)[:MAX_ANSWER_TOKENS] if answer else []
            yield Example(ids, answer_ids, number)


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a JSON Lines file with the numbers of their lines. Raises ValueError or OSError."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError):
                raise ValueError(f"{path}:{number}: not JSON") from None
            if not isinstance(record, dict):
                raise ValueError(f"{path}:{number}: not an object")
            yield number, record


def _to_texts(record: dict[str, Any], place: str) -> tuple[str, str]:
    """Return the texts of prompt and answer. Raises ValueError."""
    prompt = record.get("prompt", record.get("text"))
    answer = record.get("answer", record.get("highlights", ""))
    if "article" in record:
        prompt = f"{SUMMARIZE}\n\n{record['article']}"
    if isinstance(prompt, str) and isinstance(answer, str):
        return prompt, answer
    raise ValueError(f"{place}: needs article and highlights, prompt and answer, or text; it has {quote([*record])}")


def _encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return tokenizer.encode_chat([{"role": "user", "content": text}])
