"""`retain bench prefix`: how soon the first token comes where prompts begin alike.

Every workload is asked one request after the other, by every method from empty, so the first request of a prefix is
cold: computing everything, from the pool, from memory beside it, from a disk after a restart (read past the page cache;
`-200`: at 200 MB/s), everything or what is important. What is not known here: how prefixes are found and kept.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from retain.answer import Answer
from retain.bench.below import METHODS, Below
from retain.bench.tasks import records
from retain.bench.tasks.choice import SETS, Question
from retain.engine.request import SamplingParams
from retain.llm import LLM

Line = dict[str, Any]
WORKLOADS = (*SETS, "document", "documents", "trace")
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

    `store`: where stores are made, which go again. `ratio`: of tokens, where only the important ones are loaded.
    """

    workloads: Sequence[str]
    methods: Sequence[str]
    data: Path
    items: int = 20
    shared: int = 4000
    store: Path | None = None
    ratio: float = 0.25
    accuracy: bool = False
    hot: str = "64MiB"

    def __post_init__(self) -> None:
        for name in self.workloads:
            if name not in WORKLOADS:
                raise ValueError(f"unknown workload {name!r}: choose from {', '.join(WORKLOADS)}")
        for name in self.methods:
            if name not in METHODS:
                raise ValueError(f"unknown method {name!r}: choose from {', '.join(METHODS)}")
        if min(self.items, self.shared) < 1 or not 0 < self.ratio <= 1:
            raise ValueError("items and shared are at least 1, ratio above 0 and at most 1")

    def questions(self, llm: LLM, name: str) -> tuple[list[Question], int]:
        """Of a workload, those of a task with the answers that can be chosen; and how many prefixes they have in common
        (a trace has none of that kind: 0). Raises OSError or ValueError.
        """
        room, encode = llm.context - 64, partial(llm.tokenizer.encode, add_special_tokens=False)
        n = min(self.shared, room)
        if name == "trace":
            found = records(self.data, "mooncake_conversation_trace", self.items)
            return [Question(name, t, [], 0) for r in found if (t := _scaled(llm, r))], 0
        if name in ("document", "documents"):
            books = sorted((r["text"] for r in records(self.data, "books")), key=len, reverse=True)
            parts = [llm.encode(text[: 16 * n]) for text in (books[:1] if name == "document" else books)]
            texts = [
                p[at : at + n] for p in parts for at in ((0,) if name == "document" else (0, n)) if len(p) >= at + n
            ]
            # Each is computed, and loaded once; then the first is asked about most, the k-th k times less.
            each, weights = range(len(texts)), [1 / (k + 1) for k in range(len(texts))]
            order = [*each, *each, *random.Random(1).choices(each, weights, k=self.items)]
            asks = [encode(f"\n\nQuestion {i}: {QUESTIONS[i % len(QUESTIONS)]}") for i in range(len(order))]
            return [Question(name, texts[t] + ask, [], 0) for t, ask in zip(order, asks, strict=True)], len(texts)
        file, read = SETS[name]
        shown = [(*read(r), int(r["label"])) for r in records(self.data, file)]
        examples, length, i = "", 0, 0
        while length < n and i < len(shown) - self.items:
            prompt, choices, label = shown[i]
            example = f"{prompt}{choices[label]}\n\n"
            examples, length, i = examples + example, length + len(llm.encode(example)), i + 1
        return [
            Question(name, llm.encode(examples + prompt)[:room], list(map(encode, choices)), label)
            for prompt, choices, label in shown[i : i + self.items]
        ], 1


def _scaled(llm: LLM, r: dict[str, Any]) -> list[int]:
    """A request of the trace, made so much shorter that the longest (131,072) would just fit the context."""
    block = max(TRACE_BLOCK * llm.context // 131_072, 1)
    tokens = [t for h in r["hash_ids"] for t in random.Random(h).choices(range(llm.spec.vocab_size), k=block)]
    return tokens[: min(max(r["input_length"] * block // TRACE_BLOCK, 1), llm.context - 1)]


def run(llm: LLM, asked: Asked) -> Iterator[Line]:
    """A line for each workload and method. The engine must have a prefix tree, and no tiers."""
    reuse = llm.cache.prefix_cache
    if not reuse or reuse.offloader:
        raise ValueError("bench prefix says itself where prefixes are: not with --prefix off, nor with --tier")
    for name in asked.workloads:
        (questions, prefixes), plain = asked.questions(llm, name), None
        for method in asked.methods:
            with TemporaryDirectory(dir=asked.store) as store:
                below = Below(llm, reuse, method, asked.ratio, store, asked.hot)
                try:
                    line, said = _ask(llm, below, questions, prefixes, asked.accuracy)
                finally:
                    below.close()
            plain = plain or (line["ttft_p50_ms"], said)
            line["sooner"] = round(plain[0] / line["ttft_p50_ms"], 2)
            line["same"] = round(float(np.mean([a == b for a, b in zip(said, plain[1], strict=True)])), 3)
            yield {"workload": name, "method": method, **line}


def _ask(
    llm: LLM, below: Below, questions: Sequence[Question], prefixes: int, accuracy: bool
) -> tuple[Line, list[list[int]]]:
    """One after the other; and what was answered. Before each what is asked for goes to sleep, and there is a restart
    when every prefix was computed, and when it was loaded once: by then it is packed. Figures are of the requests after
    that. A trace flows: the pool gives up what it must, and figures are of all requests.
    """
    answers: list[Answer] = []
    read, right, woken = [], [], dict[str, int]()
    for i, q in enumerate(questions):
        if prefixes and i in (prefixes, 2 * prefixes):
            below.restart()
        if prefixes and i:
            below.sleep()
        before = below.read
        answers += llm.generate(q.prompt, FIRST)
        read.append(below.read - before)
        if below.reuse.offloader:
            woken = dict(below.reuse.offloader.num_loaded_tokens)
        if accuracy and q.choices and i >= 2 * prefixes:
            likely = [sum(x) for x in llm.score([q.prompt] * len(q.choices), q.choices)]
            right.append(likely.index(max(likely)) == q.label)
        below.settle()
    later = 2 * prefixes if len(questions) > 2 * prefixes else 0
    ms = np.array([1e3 * a.ttft_s for a in answers])
    tokens = [a.prompt_tokens for a in answers]
    line: Line = {
        "requests": len(questions),
        "prompt_tokens": round(sum(tokens) / len(questions)),
        "first_ms": round(ms[0], 1),
        "ttft_p50_ms": round(float(np.median(ms[later:])), 1),
        "ttft_p99_ms": round(float(np.quantile(ms[later:], 0.99)), 1),
        "ttft_mean_ms": round(float(ms[later:].mean()), 1),
        "hit": round(sum(a.cached_tokens for a in answers[later:]) / sum(tokens[later:]), 3),
    }
    if not prefixes:
        line |= {f"hit_{name}": round(n / sum(tokens), 3) for name, n in woken.items()}
    if below.tiers:
        line["read_mb"] = round(float(np.mean(read[later:])) / 1e6, 1)  # of a request
    if right:
        line["accuracy"] = round(float(np.mean(right)), 3)
    return line, [a.token_ids for a in answers]


def write(lines: Sequence[Line], out: Path) -> None:
    """Every number as JSON."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "prefix.json").write_text(json.dumps(lines, indent=1))
