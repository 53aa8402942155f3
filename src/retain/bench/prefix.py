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

from retain.bench.offload_setup import METHODS, OffloadSetup
from retain.bench.tasks import load_records
from retain.bench.tasks.choice import DATASETS, MultipleChoiceItem
from retain.llm import LLM
from retain.outputs import RequestOutput
from retain.sampling_params import SamplingParams

Line = dict[str, Any]
WORKLOADS = (*DATASETS, "document", "documents", "trace")
QUESTIONS = (
    "Who speaks first?",
    "Where does it take place?",
    "What happens then?",
    "What is it about?",
    "How does it end?",
)
TOKENS_PER_TRACE_BLOCK = 512  # tokens that one hash of the trace stands for
FIRST_TOKEN_PARAMS = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


@dataclass(frozen=True)
class PrefixBenchConfig:
    """`items` requests of each workload, that have the first `shared` tokens in common (a trace has its own).

    `store`: where stores are made, which go again. `ratio`: of tokens, where only the important ones are loaded.
    """

    workloads: Sequence[str]
    methods: Sequence[str]
    data: Path
    num_requests: int = 20
    shared_prefix_len: int = 4000
    store_dir: Path | None = None
    ratio: float = 0.25
    measures_accuracy: bool = False
    ram_capacity: str = "64MiB"

    def __post_init__(self) -> None:
        for name in self.workloads:
            if name not in WORKLOADS:
                raise ValueError(f"unknown workload {name!r}: choose from {', '.join(WORKLOADS)}")
        for name in self.methods:
            if name not in METHODS:
                raise ValueError(f"unknown method {name!r}: choose from {', '.join(METHODS)}")
        if min(self.num_requests, self.shared_prefix_len) < 1 or not 0 < self.ratio <= 1:
            raise ValueError("items and shared are at least 1, ratio above 0 and at most 1")

    def load_questions(self, llm: LLM, workload: str) -> tuple[list[MultipleChoiceItem], int]:
        """Of a workload, those of a task with the answers that can be chosen; and how many prefixes they have in common
        (a trace has none of that kind: 0). Raises OSError or ValueError.
        """
        room, encode = llm.max_model_len - 64, partial(llm.tokenizer.encode, add_special_tokens=False)
        n = min(self.shared_prefix_len, room)
        if workload == "trace":
            found = load_records(self.data, "mooncake_conversation_trace", self.num_requests)
            return [MultipleChoiceItem(workload, t, [], 0) for r in found if (t := _scale_trace_prompt(llm, r))], 0
        if workload in ("document", "documents"):
            books = sorted((r["text"] for r in load_records(self.data, "books")), key=len, reverse=True)
            parts = [llm.encode(text[: 16 * n]) for text in (books[:1] if workload == "document" else books)]
            texts = [
                p[at : at + n] for p in parts for at in ((0,) if workload == "document" else (0, n)) if len(p) >= at + n
            ]
            # Each is computed, and loaded once; then the first is asked about most, the k-th k times less.
            each, weights = range(len(texts)), [1 / (k + 1) for k in range(len(texts))]
            order = [*each, *each, *random.Random(1).choices(each, weights, k=self.num_requests)]
            asks = [encode(f"\n\nQuestion {i}: {QUESTIONS[i % len(QUESTIONS)]}") for i in range(len(order))]
            return [
                MultipleChoiceItem(workload, texts[t] + ask, [], 0) for t, ask in zip(order, asks, strict=True)
            ], len(texts)
        file, read = DATASETS[workload]
        shown = [(*read(r), int(r["label"])) for r in load_records(self.data, file)]
        examples, length, i = "", 0, 0
        while length < n and i < len(shown) - self.num_requests:
            prompt, choices, label = shown[i]
            example = f"{prompt}{choices[label]}\n\n"
            examples, length, i = examples + example, length + len(llm.encode(example)), i + 1
        return [
            MultipleChoiceItem(workload, llm.encode(examples + prompt)[:room], list(map(encode, choices)), label)
            for prompt, choices, label in shown[i : i + self.num_requests]
        ], 1


def _scale_trace_prompt(llm: LLM, record: dict[str, Any]) -> list[int]:
    """A request of the trace, made so much shorter that the longest (131,072) would just fit the context."""
    block = max(TOKENS_PER_TRACE_BLOCK * llm.max_model_len // 131_072, 1)
    tokens = [t for h in record["hash_ids"] for t in random.Random(h).choices(range(llm.spec.vocab_size), k=block)]
    return tokens[: min(max(record["input_length"] * block // TOKENS_PER_TRACE_BLOCK, 1), llm.max_model_len - 1)]


def run(llm: LLM, config: PrefixBenchConfig) -> Iterator[Line]:
    """A line for each workload and method. The engine must have a prefix tree, and no tiers."""
    reuse = llm.cache.prefix_cache
    if not reuse or reuse.offloader:
        raise ValueError("bench prefix says itself where prefixes are: not with --prefix off, nor with --tier")
    for name in config.workloads:
        (questions, prefixes), plain = config.load_questions(llm, name), None
        for method in config.methods:
            with TemporaryDirectory(dir=config.store_dir) as store:
                below = OffloadSetup(llm, reuse, method, config.ratio, store, config.ram_capacity)
                try:
                    line, said = _run_questions(llm, below, questions, prefixes, config.measures_accuracy)
                finally:
                    below.close()
            plain = plain or (line["ttft_p50_ms"], said)
            line["sooner"] = round(plain[0] / line["ttft_p50_ms"], 2)
            line["same"] = round(float(np.mean([a == b for a, b in zip(said, plain[1], strict=True)])), 3)
            yield {"workload": name, "method": method, **line}


def _run_questions(
    llm: LLM, offload: OffloadSetup, questions: Sequence[MultipleChoiceItem], num_prefixes: int, measures_accuracy: bool
) -> tuple[Line, list[list[int]]]:
    """One after the other; and what was answered. Before each what is asked for goes to sleep, and there is a restart
    when every prefix was computed, and when it was loaded once: by then it is packed. Figures are of the requests after
    that. A trace flows: the pool gives up what it must, and figures are of all requests.
    """
    answers: list[RequestOutput] = []
    read, right, woken = [], [], dict[str, int]()
    for i, q in enumerate(questions):
        if num_prefixes and i in (num_prefixes, 2 * num_prefixes):
            offload.restart()
        if num_prefixes and i:
            offload.offload_all()
        before = offload.bytes_read
        answers += llm.generate(q.prompt, FIRST_TOKEN_PARAMS)
        read.append(offload.bytes_read - before)
        if offload.prefix_cache.offloader:
            woken = dict(offload.prefix_cache.offloader.num_loaded_tokens)
        if measures_accuracy and q.choices and i >= 2 * num_prefixes:
            likely = [sum(x) for x in llm.score([q.prompt] * len(q.choices), q.choices)]
            right.append(likely.index(max(likely)) == q.label)
        offload.wait_for_writes()
    later = 2 * num_prefixes if len(questions) > 2 * num_prefixes else 0
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
    if not num_prefixes:
        line |= {f"hit_{name}": round(n / sum(tokens), 3) for name, n in woken.items()}
    if offload.tier_specs:
        line["read_mb"] = round(float(np.mean(read[later:])) / 1e6, 1)  # of a request
    if right:
        line["accuracy"] = round(float(np.mean(right)), 3)
    return line, [a.token_ids for a in answers]


def write_results(results: Sequence[Line], out: Path) -> None:
    """Every number as JSON."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "prefix.json").write_text(json.dumps(results, indent=1))
