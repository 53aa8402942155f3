"""The examples that a gate is fitted on: prompts, and the answers that are expected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retain.files import quote
from retain.fit.config import FitConfig
from retain.processing.tokenizer import Tokenizer

MAX_ANSWER_TOKENS = 128
MIN_PROMPT_TOKENS = 32
SUMMARIZE = "Summarize the following news article:"


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of its answer, which may be empty."""

    prompt: list[int]
    answer: list[int]


def load_examples(tokenizer: Tokenizer, config: FitConfig) -> list[Example]:
    """Return the first examples that are short enough. Raises ValueError or OSError."""
    found: list[Example] = []
    for number, record in _read_records(config.data):
        if number <= config.first:
            continue
        prompt, answer = _to_texts(record, f"{config.data}:{number}")
        ids = _encode_prompt(tokenizer, prompt)
        answer_ids = tokenizer.encode(answer, add_special_tokens=False)[:MAX_ANSWER_TOKENS] if answer else []
        if config.target != "reread" and len(answer_ids) < 2:
            raise ValueError(f"{config.data}:{number}: target={config.target} needs an answer: give --target reread")
        if MIN_PROMPT_TOKENS <= len(ids) <= config.max_prompt_len:
            found.append(Example(ids, answer_ids))
        if len(found) == config.num_items:
            break
    if len(found) < 7:
        raise ValueError(f"{config.data}: {len(found)} prompts of at most {config.max_prompt_len} tokens, 7 are needed")
    return found


def _read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise ValueError(f"{path}:{number}: not JSON") from None
            if not isinstance(record, dict):
                raise ValueError(f"{path}:{number}: not an object")
            yield number, record


def _to_texts(record: dict[str, Any], place: str) -> tuple[str, str]:
    """Return the texts of prompt and answer. Raises ValueError."""
    prompt, answer = record.get("prompt", record.get("text")), record.get("answer", record.get("highlights", ""))
    if "article" in record:
        prompt = f"{SUMMARIZE}\n\n{record['article']}"
    if isinstance(prompt, str) and isinstance(answer, str):
        return prompt, answer
    raise ValueError(f"{place}: needs article and highlights, prompt and answer, or text; it has {quote([*record])}")


def _encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return tokenizer.encode_chat([{"role": "user", "content": text}])
