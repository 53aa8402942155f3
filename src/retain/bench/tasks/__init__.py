"""Tasks of `retain bench quality`. One task is one file here, found by its name.

A file defines `METRICS`, the names of its numbers, `REQUESTS_PER_ITEM`, how many requests an item takes, and

    load_items(llm, data, num_items, max_prompt_len) -> list
        items from the files of the folder `data`, each prompt of at most `max_prompt_len` tokens
    measure(llm, items, policy_specs, full_state) -> (rows, state)
        {metric: number} of every item under the first policy, then under the next; all run together, so that prompts
        are computed once. `full_state` is the state that the same items left under the full cache, None for that cache.

Does not depend on: which policies are compared, tables, plots.
"""

from __future__ import annotations

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
from retain.plugins import Amount, load_module, plugin_names

ItemMetrics = dict[str, float]


def task_names() -> list[str]:
    """Return the names of the tasks that `retain bench quality` can run."""
    return plugin_names(__name__)


def load_task(name: str) -> ModuleType:
    """Return the task of that name. Raises ValueError."""
    return load_module(__name__, name, task_names(), "task")


def load_records(data: Path, name: str, num_records: int | None = None) -> list[dict[str, Any]]:
    """Return the first records of data/name.jsonl. Raises OSError or ValueError."""
    path = data / f"{name}.jsonl"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; --data-dir names a folder with the files of this task")
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in islice(lines, num_records)]


def build_prompt(llm: LLM, text: str, instruction: str, cue: str) -> list[int]:
    """Return the ids of a prompt about a text: a conversation, or the text and a cue without a chat template."""
    if llm.tokenizer.chat_template is None:
        return llm.encode(f"{text}\n\n{cue}")
    return llm.tokenizer.encode_chat([{"role": "user", "content": f"{instruction}\n\n{text}"}])


def load_essays(llm: LLM, data: Path, num_essays: int | None = None) -> list[int]:
    """Return the first essays of Paul Graham as the ids of one text."""
    return llm.encode("\n\n".join(r["text"] for r in load_records(data, "paul_graham_essays", num_essays)))


def load_articles(llm: LLM, data: Path, num_articles: int, max_prompt_len: int) -> list[tuple[list[int], str]]:
    """Return news articles as prompts of at most `max_prompt_len` tokens, each with its reference summary."""
    found: list[tuple[list[int], str]] = []
    for record in load_records(data, "cnn_dailymail"):
        prompt = build_prompt(llm, record["article"], "Summarize the following news article:", "Summary:")
        if len(prompt) <= max_prompt_len and len(found) < num_articles:
            found.append((prompt, record["highlights"]))
    return found


@dataclass(frozen=True)
class ForcedItem:
    """A prompt and the continuation that is forced on the model, as ids.

    Budgets in percent are of `budget_base` tokens, or of the prompt where it is 0. Only the last `num_scored_tokens`
    are scored, all where it is 0: the first token of a continuation is sampled before anything is evicted.
    """

    prompt: list[int]
    continuation: list[int]
    budget_base: int = 0
    num_scored_tokens: int = 0


def absolute_budget(policy: str, budget_base: int) -> str:
    """Return the spec with amounts in percent of the prompt replaced by tokens, as shares of `budget_base`."""
    if not budget_base:
        return policy
    parsed = policies.parse(policy)
    if not isinstance(parsed, BudgetPolicy):
        return policy
    modes = replace(parsed.modes, demote=parsed.modes.demote and parsed.modes.demote.resolve(budget_base))
    return policies.to_spec(replace(parsed, budget=Amount(tokens=parsed.budget.resolve(budget_base)), modes=modes))


def teacher_force(
    llm: LLM,
    items: list[ForcedItem],
    policy_specs: Sequence[str],
    full_log_probs: list[Tensor] | None,
    compares_full: bool,
) -> tuple[list[ItemMetrics], list[Tensor]]:
    """Score given continuations: `loss` in nats a token, `exact` (1 where greedy decoding would give it).

    With `compares_full` also the distance from the full cache's distributions, per token: `kl` in nats, and
    `top1_agreement`, the share of tokens with the same likeliest one. Both leave out the first token, which is sampled
    before anything is evicted. Returns the rows, and those distributions where
    `full_log_probs` is None, which is when the full cache runs.
    """
    pairs = [(item, absolute_budget(policy, item.budget_base)) for policy in policy_specs for item in items]
    likeliest: list[list[Tensor]] = [[] for _ in pairs]
    log_probs: list[list[Tensor]] = [[] for _ in pairs]
    kl = [0.0] * len(pairs)
    num_agreed = [0] * len(pairs)
    num_read = [0] * len(pairs)

    def read_logits(i: int, logits: Tensor) -> None:
        likeliest[i].append(logits.argmax(-1).cpu())
        if not compares_full:
            return
        log_p = logits.log_softmax(-1)  # [n, V]
        if full_log_probs is None:
            log_probs[i].append(log_p.half().cpu())
            return
        full = full_log_probs[i % len(items)][num_read[i] : num_read[i] + len(log_p)].to(log_p.device).float()
        if not num_read[i]:  # the first token follows the whole prompt
            full = full[1:]
            log_p = log_p[1:]
            num_read[i] = 1
        num_read[i] += len(log_p)
        kl[i] += float((full.exp() * (full - log_p)).sum())
        num_agreed[i] += int((full.argmax(-1) == log_p.argmax(-1)).sum())

    prompts = [i.prompt for i, _ in pairs]
    continuations = [i.continuation for i, _ in pairs]
    scores = llm.score(prompts, continuations, [p for _, p in pairs], read_logits)
    rows = []
    for i, ((item, _), token_scores) in enumerate(zip(pairs, scores, strict=True)):
        n = len(item.continuation)
        start = n - (item.num_scored_tokens or n)
        is_exact = torch.cat(likeliest[i]).tolist()[start:] == item.continuation[start:]
        row = {"loss": -sum(token_scores[start:]) / (n - start), "exact": float(is_exact)}
        if compares_full:
            after = max(n - 1, 1)
            row |= {"kl": kl[i] / after, "top1_agreement": 1.0 if full_log_probs is None else num_agreed[i] / after}
        rows.append(row)
    return rows, [torch.cat(parts) for parts in log_probs if parts]
