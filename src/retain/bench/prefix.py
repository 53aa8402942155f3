"""`retain bench prefix`: how soon the first token comes where prompts begin alike.

Every workload is asked one request after the other, by every method from empty, so the first request of a prefix is
cold: computing everything, from the pool, from memory beside it, from a disk after a restart (read past the page cache;
`ssd-200`: at 200 MB/s). What is not known here: how prefixes are found and kept.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from retain.answer import Answer
from retain.bench.tasks import records
from retain.bench.tasks.choice import SETS
from retain.engine.request import SamplingParams
from retain.kv.reuse import Reuse
from retain.kv.sleep import Sleep
from retain.kv.tiers import parse
from retain.llm import LLM

Line = dict[str, Any]
WORKLOADS = (*SETS, "document", "trace")
METHODS = {  # what is below the pool
    "recompute": "",
    "memory": "",
    "ram": "ram:capacity=4GiB",
    "ssd": "disk:path={store},capacity=20GB",
    "ssd-200": "disk:path={store},capacity=20GB,read=200MB",
    "lru": "ram:capacity=256MiB disk:path={store},capacity=20GB",
    "lfu": "ram:capacity=256MiB,evict=lfu disk:path={store},capacity=20GB",
}
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
    """`items` requests of each workload, that have the first `shared` tokens in common (a trace has its own).

    `store`: where stores are made, which go again.
    """

    workloads: Sequence[str]
    methods: Sequence[str]
    data: Path
    items: int = 20
    shared: int = 4000
    store: Path | None = None

    def __post_init__(self) -> None:
        for name in self.workloads:
            if name not in WORKLOADS:
                raise ValueError(f"unknown workload {name!r}: choose from {', '.join(WORKLOADS)}")
        for name in self.methods:
            if name not in METHODS:
                raise ValueError(f"unknown method {name!r}: choose from {', '.join(METHODS)}")
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
    """A line for each workload and method. The engine must have a prefix tree, and no tiers."""
    reuse = llm.cache.reuse
    if not reuse or reuse.sleep:
        raise ValueError("bench prefix says itself where prefixes are: not with --prefix off, nor with --tier")
    for name in asked.workloads:
        prompts, plain = asked.prompts(llm, name), None
        for method in asked.methods:
            reuse.tree.clear()
            with TemporaryDirectory(dir=asked.store) as store:
                llm.cache.reuse = None if method == "recompute" else reuse
                try:
                    answers, told = _ask(llm, reuse, method, prompts, store, name == "trace")
                finally:
                    llm.cache.reuse = reuse
                    reuse.close()
            found = _line(name, method, answers, told, len(prompts))
            plain = plain or (found, [a.token_ids for a in answers])
            found["sooner"] = round(plain[0]["ttft_p50_ms"] / found["ttft_p50_ms"], 2)
            found["same"] = [a.token_ids for a in answers] == plain[1]
            yield found
    reuse.tree.clear()


def _ask(
    llm: LLM, reuse: Reuse, method: str, prompts: Sequence[list[int]], store: str, flows: bool
) -> tuple[list[Answer], dict[str, Any]]:
    """One after the other. Before each what is asked for sleeps in the method's tier; unless it `flows`: then the pool
    gives up what it must, and no more.
    """
    answers: list[Answer] = []
    for i, prompt in enumerate(prompts):
        if i == 0 or (i == 1 and not flows):  # after the first there is a restart, as far as a disk is concerned
            _below(llm, reuse, METHODS[method].format(store=store), keep=i > 0)
        if reuse.sleep and i and not flows:
            reuse.tree.evict(reuse.tree.spare)
        answers += llm.generate(prompt, FIRST)
    return answers, {} if reuse.sleep is None else {"woken": reuse.sleep.woken, "stores": reuse.sleep.told()}


def _below(llm: LLM, reuse: Reuse, tiers: str, keep: bool) -> None:
    """Tiers below the pool, anew; a memory tier stays if asked."""
    if keep and "disk" not in tiers:
        return
    reuse.close()
    if tiers:
        stores = [parse(t).open() for t in tiers.split()]
        reuse.below(Sleep(stores, llm.cache.kv, llm.spec.kv_heads, b"bench"))


def _line(name: str, method: str, answers: Sequence[Answer], told: dict[str, Any], requests: int) -> Line:
    ms = np.array([1e3 * a.ttft_s for a in answers])
    later = ms[1:] if len(ms) > 1 else ms
    tokens, cached = sum(a.prompt_tokens for a in answers), sum(a.cached_tokens for a in answers)
    woken = told.get("woken", {})
    return {
        "workload": name,
        "method": method,
        "requests": requests,
        "prompt_tokens": round(tokens / requests),
        "first_ms": round(ms[0], 1),
        "ttft_p50_ms": round(float(np.median(later)), 1),
        "ttft_p99_ms": round(float(np.quantile(later, 0.99)), 1),
        "ttft_mean_ms": round(float(later.mean()), 1),
        "hit": round(cached / tokens, 3),
        **{f"hit_{name}": round(n / tokens, 3) for name, n in woken.items()},
        **{f"read_{s['tier']}_mb": round(s["read"] / 1e6, 1) for s in told.get("stores", ()) if "read" in s},
    }


def write(lines: Sequence[Line], out: Path) -> None:
    """Every number as JSON."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "prefix.json").write_text(json.dumps(lines, indent=1))
