"""What `retain bench quality` asks a model. One task is one file here, found by its name.

A file defines `METRICS`, the names of its numbers, `ROWS`, how many requests an item is, and

    items(llm, data, n, longest) -> list    n questions out of the files of a folder, of at most so many tokens each
    measure(llm, items, chosen, full) -> (rows, memory)

where rows are {metric: number} of every item under the first policy, then under the next (their texts; all at once, so
that prompts are computed once). `full` is the memory that the same items left under the full cache; None when it is
that cache's turn. What is not known here: which policies, tables, plots.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.llm import LLM
from retain.plugins import Amount, plugin_names

ItemMetrics = dict[str, float]


def task_names() -> list[str]:
    """The tasks in this folder."""
    return plugin_names(__name__)


def load_task(name: str) -> ModuleType:
    """The task of that name. Raises ValueError."""
    if name not in task_names():
        raise ValueError(f"unknown task {name!r}: choose from {', '.join(task_names())}")
    return importlib.import_module(f"{__name__}.{name}")


def load_records(data: Path, name: str, num_records: int | None = None) -> list[dict[str, Any]]:
    """The first n records of data/name.jsonl. Raises OSError or ValueError."""
    path = data / f"{name}.jsonl"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; --data names a folder with the files of this task")
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in islice(lines, num_records)]


def build_prompt(llm: LLM, text: str, instruction: str, cue: str) -> list[int]:
    """Ids of a prompt about a text: a conversation, or where the model has no template the text and a cue."""
    if llm.tokenizer.chat_template is None:
        return llm.encode(f"{text}\n\n{cue}")
    return llm.tokenizer.encode_chat([{"role": "user", "content": f"{instruction}\n\n{text}"}])


def load_articles(llm: LLM, data: Path, num_articles: int, max_prompt_len: int) -> list[tuple[list[int], str]]:
    """Up to n news articles as prompts of at most `longest` tokens, each with the summary of its editors."""
    found: list[tuple[list[int], str]] = []
    for record in load_records(data, "cnn_dailymail"):
        prompt = build_prompt(llm, record["article"], "Summarize the following news article:", "Summary:")
        if len(prompt) <= max_prompt_len and len(found) < num_articles:
            found.append((prompt, record["highlights"]))
    return found


@dataclass(frozen=True)
class ForcedItem:
    """A prompt and the answer that is given, as ids.

    Percentages are of `whole` tokens; of the prompt where it is 0. The last `counts` of the answer count, all where it
    is 0: its first token is drawn before anything is forgotten.
    """

    prompt: list[int]
    continuation: list[int]
    budget_base: int = 0
    num_scored_tokens: int = 0


def absolute_budget(policy: str, budget_base: int) -> str:
    """The policy with its percentage made one of so many tokens."""
    parsed = policies.parse(policy)
    if not budget_base or not isinstance(parsed, BudgetPolicy):
        return policy
    return policies.to_spec(replace(parsed, budget=Amount(tokens=parsed.budget.resolve(budget_base))))


def teacher_force(
    llm: LLM,
    items: list[ForcedItem],
    policy_specs: Sequence[str],
    full_log_probs: list[Tensor] | None,
    compares_full: bool,
) -> tuple[list[ItemMetrics], list[Tensor]]:
    """Answers that are given: `loss` in nats a token, `exact` (1 where a greedy model would have given it).

    With `compare` also the distance from the full cache's distributions, a token: `kl` in nats, `top1` as the share
    of tokens where the likeliest is the same; memory holds those distributions.
    """
    pairs = [(item, absolute_budget(policy, item.budget_base)) for policy in policy_specs for item in items]
    likeliest: list[list[Tensor]] = [[] for _ in pairs]
    kept: list[list[Tensor]] = [[] for _ in pairs]
    kl, same, done = [0.0] * len(pairs), [0] * len(pairs), [0] * len(pairs)

    def read(i: int, logits: Tensor) -> None:
        likeliest[i].append(logits.argmax(-1).cpu())
        if not compares_full:
            return
        log_p = logits.log_softmax(-1)  # [n, V]
        if full_log_probs is None:
            kept[i].append(log_p.half().cpu())
            return
        want = full_log_probs[i % len(items)][done[i] : done[i] + len(log_p)].to(log_p.device).float()
        done[i] += len(log_p)
        kl[i] += float((want.exp() * (want - log_p)).sum())
        same[i] += int((want.argmax(-1) == log_p.argmax(-1)).sum())

    prompts, answers = [i.prompt for i, _ in pairs], [i.continuation for i, _ in pairs]
    found = llm.score(prompts, answers, [p for _, p in pairs], read)
    rows = []
    for i, ((item, _), logprobs) in enumerate(zip(pairs, found, strict=True)):
        n = len(item.continuation)
        tail = n - (item.num_scored_tokens or n)
        said = torch.cat(likeliest[i]).tolist()[tail:] == item.continuation[tail:]
        row = {"loss": -sum(logprobs[tail:]) / (n - tail), "exact": float(said)}
        if compares_full:
            row |= {"kl": kl[i] / n, "top1": 1.0 if full_log_probs is None else same[i] / n}
        rows.append(row)
    return rows, [torch.cat(k) for k in kept if k]
