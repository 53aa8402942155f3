"""`retain bench prefix`: how soon the first token comes where prompts begin alike.

Every workload is asked one request after the other, first by computing everything, then with the prefix tree, from
empty; so the first request of a prefix is cold. What is not known here: how prefixes are found and kept.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retain.bench.tasks import records
from retain.bench.tasks.choice import SETS
from retain.engine.request import SamplingParams
from retain.llm import LLM

Line = dict[str, Any]
WORKLOADS = (*SETS, "document", "trace")
QUESTIONS = (
    "Who speaks first?",
    "Where does it take place?",
    "What happens then?",
    "What is it about?",
    "How does it end?",
)
TRACE_BLOCK = 512  # tokens that one hash of the trace stands for
FIRST = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


@dataclass(frozen=True)
class Asked:
    """`items` requests of each workload, that have the first `shared` tokens in common (a trace has its own)."""

    workloads: Sequence[str]
    data: Path
    items: int = 20
    shared: int = 4000

    def __post_init__(self) -> None:
        for name in self.workloads:
            if name not in WORKLOADS:
                raise ValueError(f"unknown workload {name!r}: choose from {', '.join(WORKLOADS)}")
        if min(self.items, self.shared) < 1:
            raise ValueError("items and shared are at least 1")

    def prompts(self, llm: LLM, name: str) -> list[list[int]]:
        """Of a workload. Raises OSError or ValueError."""
        room = llm.context - 64
        if name == "trace":
            return [t for r in records(self.data, "mooncake_conversation_trace", self.items) if (t := _scaled(llm, r))]
        if name == "document":
            text = llm.encode(max((r["text"] for r in records(self.data, "books")), key=len)[: 8 * self.shared])
            asks = [f"\n\nQuestion {i}: {QUESTIONS[i % len(QUESTIONS)]}" for i in range(self.items)]
            return [text[: min(self.shared, room)] + llm.tokenizer.encode(q, ends=False) for q in asks]
        file, read = SETS[name]
        found = records(self.data, file)
        shown = [(*read(r), int(r["label"])) for r in found]
        examples, length, i = "", 0, 0
        while length < min(self.shared, room) and i < len(shown) - self.items:
            prompt, choices, label = shown[i]
            example = f"{prompt}{choices[label]}\n\n"
            examples, length, i = examples + example, length + len(llm.encode(example)), i + 1
        return [llm.encode(examples + prompt)[:room] for prompt, _, _ in shown[i : i + self.items]]


def _scaled(llm: LLM, r: dict[str, Any]) -> list[int]:
    """A request of the trace, made so much shorter that the longest (131,072) would just fit the context."""
    block = max(TRACE_BLOCK * llm.context // 131_072, 1)
    tokens = [t for h in r["hash_ids"] for t in random.Random(h).choices(range(llm.spec.vocab), k=block)]
    return tokens[: min(max(r["input_length"] * block // TRACE_BLOCK, 1), llm.context - 1)]


def run(llm: LLM, asked: Asked) -> Iterator[Line]:
    """Two lines for each workload. The engine must have a prefix tree."""
    reuse = llm.cache.reuse
    if not reuse:
        raise ValueError("bench prefix compares with the prefix tree: not with --prefix off")
    for name in asked.workloads:
        prompts = asked.prompts(llm, name)
        said, p50 = {}, {}
        for method in ("recompute", "memory"):
            reuse.tree.clear()
            llm.cache.reuse = reuse if method == "memory" else None
            try:
                answers = [llm.generate(p, FIRST)[0] for p in prompts]
            finally:
                llm.cache.reuse = reuse
            ms = np.array([1e3 * a.ttft_s for a in answers])
            later = ms[1:] if len(ms) > 1 else ms
            said[method], p50[method] = [a.token_ids for a in answers], float(np.median(later))
            tokens = sum(a.prompt_tokens for a in answers)
            yield {
                "workload": name,
                "method": method,
                "requests": len(prompts),
                "prompt_tokens": round(tokens / len(prompts)),
                "first_ms": round(ms[0], 1),
                "ttft_p50_ms": round(p50[method], 1),
                "ttft_p99_ms": round(float(np.quantile(later, 0.99)), 1),
                "hit": round(sum(a.cached_tokens for a in answers) / tokens, 3),
                "sooner": round(p50["recompute"] / p50[method], 2),
                "same": said[method] == said["recompute"],
            }
    reuse.tree.clear()


def write(lines: Sequence[Line], out: Path) -> None:
    """Every number as JSON."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "prefix.json").write_text(json.dumps(lines, indent=1))
