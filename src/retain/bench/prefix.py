"""`retain bench prefix`: time to first token where prompts share a prefix.

Each method answers the requests of a workload one after the other, from an empty cache, so the first request of a
prefix is cold. A method recomputes everything, or finds the prefix in the pool, in RAM, or on a disk after a restart
(read past the page cache; `-200`: at 200 MB/s), and loads all of it or only its important tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from retain import factory
from retain.bench import chats
from retain.bench.config import PrefixBenchConfig
from retain.bench.tasks import load_records
from retain.bench.tasks.choice import DATASETS, MultipleChoiceItem
from retain.kv.prefix.cache import PrefixCache
from retain.kv.prefix.config import PrefixConfig, SelectiveConfig
from retain.kv.stores.tiers import parse
from retain.kv.stores.tiers.disk import DiskStore
from retain.kv.stores.tiers.remote import RemoteStore
from retain.llm import LLM
from retain.outputs import RequestOutput
from retain.plugins import check_known, format_size
from retain.sampling_params import SamplingParams

Line = dict[str, Any]
WORKLOADS = (*DATASETS, "document", "documents", "trace", *chats.WORKLOADS)
QUESTIONS = (
    "Who speaks first?",
    "Where does it take place?",
    "What happens then?",
    "What is it about?",
    "How does it end?",
)
TOKENS_PER_TRACE_BLOCK = 512  # tokens that one hash of the trace stands for
LONGEST_TRACE_REQUEST = 131_072  # tokens
FIRST_TOKEN_PARAMS = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def check_names(config: PrefixBenchConfig) -> None:
    """Raise ValueError for an unknown workload or method."""
    check_known("workload", config.workloads, WORKLOADS)
    check_known("method", config.methods, METHODS)


def load_questions(llm: LLM, config: PrefixBenchConfig, workload: str) -> tuple[list[MultipleChoiceItem], int]:
    """Return the requests of a workload, and how many prefixes they share (0: a trace, which shares many).

    Requests of a task have the answers to choose from. Raises OSError or ValueError.
    """
    if llm.ranks:
        raise ValueError("bench prefix empties the cache of one rank: use tensor_parallel=1")
    room = llm.max_model_len - 64
    prefix_len = min(config.shared_prefix_len, room)
    if workload == "trace":
        records = load_records(config.data_dir, "mooncake_conversation_trace", config.num_prompts)
        prompts = [_scale_trace_prompt(llm, record) for record in records]
        return [MultipleChoiceItem(workload, prompt, [], 0) for prompt in prompts if prompt], 0
    if workload in ("document", "documents"):
        return _load_document_questions(llm, config, workload, prefix_len)
    return _load_task_questions(llm, config, workload, prefix_len, room), 1


def _load_document_questions(
    llm: LLM, config: PrefixBenchConfig, workload: str, prefix_len: int
) -> tuple[list[MultipleChoiceItem], int]:
    """Questions about one text, or about two texts of every book."""
    books = sorted((r["text"] for r in load_records(config.data_dir, "books")), key=len, reverse=True)
    books, starts = (books[:1], (0,)) if workload == "document" else (books, (0, prefix_len))
    ids_by_book = [llm.encode(text[: 16 * prefix_len]) for text in books]
    texts = [ids[at : at + prefix_len] for ids in ids_by_book for at in starts if len(ids) >= at + prefix_len]
    # Each text is computed once and loaded once; then text k is asked about with a frequency of 1 / (k + 1).
    indices = range(len(texts))
    weights = [1 / (k + 1) for k in range(len(texts))]
    order = [*indices, *indices, *random.Random(1).choices(indices, weights, k=config.num_prompts)]
    encode = partial(llm.tokenizer.encode, add_special_tokens=False)
    questions = [encode(f"\n\nQuestion {i}: {QUESTIONS[i % len(QUESTIONS)]}") for i in range(len(order))]
    items = [MultipleChoiceItem(workload, texts[t] + q, [], 0) for t, q in zip(order, questions, strict=True)]
    return items, len(texts)


def _load_task_questions(
    llm: LLM, config: PrefixBenchConfig, workload: str, prefix_len: int, room: int
) -> list[MultipleChoiceItem]:
    """Questions of a task behind the same solved examples."""
    file, format_record = DATASETS[workload]
    solved = [(*format_record(r), int(r["label"])) for r in load_records(config.data_dir, file)]
    examples = ""
    length = 0
    i = 0
    while length < prefix_len and i < len(solved) - config.num_prompts:
        prompt, choices, label = solved[i]
        example = f"{prompt}{choices[label]}\n\n"
        examples = examples + example
        length = length + len(llm.encode(example))
        i = i + 1
    encode = partial(llm.tokenizer.encode, add_special_tokens=False)
    return [
        MultipleChoiceItem(workload, llm.encode(examples + prompt)[:room], list(map(encode, choices)), label)
        for prompt, choices, label in solved[i : i + config.num_prompts]
    ]


def _scale_trace_prompt(llm: LLM, record: dict[str, Any]) -> list[int]:
    """Return a request of the trace, shortened so that the longest one would just fit the context."""
    block = max(TOKENS_PER_TRACE_BLOCK * llm.max_model_len // LONGEST_TRACE_REQUEST, 1)
    tokens = [t for h in record["hash_ids"] for t in random.Random(h).choices(range(llm.spec.vocab_size), k=block)]
    return tokens[: min(max(record["input_length"] * block // TOKENS_PER_TRACE_BLOCK, 1), llm.max_model_len - 1)]


def run(llm: LLM, config: PrefixBenchConfig) -> Iterator[Line]:
    """Yield a line for each workload and method, or of chats for each policy and size of the pool.

    The engine must have a prefix cache and no tiers.
    """
    prefix_cache = llm.cache.prefix_cache
    if not prefix_cache.enabled or prefix_cache.offloader:
        raise ValueError("bench prefix sets up prefixes itself: start it without --prefix-cache and --tier")
    for name in config.workloads:
        if name in chats.WORKLOADS:
            yield from chats.run(llm, prefix_cache, name, config)
            continue
        questions, num_prefixes = load_questions(llm, config, name)
        baseline: tuple[float, list[list[int]]] | None = None  # of the first method
        for method in config.methods:
            with TemporaryDirectory(dir=config.store_dir) as store:
                setup = OffloadSetup(llm, prefix_cache, method, config, store)
                try:
                    line, tokens = _run_questions(llm, setup, questions, num_prefixes, config.measure_accuracy)
                finally:
                    setup.close()
            baseline = baseline or (line["ttft_p50_ms"], tokens)
            line["ttft_speedup"] = round(baseline[0] / line["ttft_p50_ms"], 2)
            matches = [a == b for a, b in zip(tokens, baseline[1], strict=True)]
            line["token_match_rate"] = round(float(np.mean(matches)), 3)
            yield {"workload": name, "method": method, **line}


def _run_questions(
    llm: LLM, setup: OffloadSetup, questions: Sequence[MultipleChoiceItem], num_prefixes: int, measure_accuracy: bool
) -> tuple[Line, list[list[int]]]:
    """Answer the questions one after the other; return the line and the first tokens.

    Before each question the pool is offloaded. The tiers are opened anew when every prefix has been computed once, and
    again when each has been loaded once, which is when it is repacked. Figures are of the requests after that. With a
    trace the pool offloads what it must, and figures are of all requests.
    """
    outputs: list[RequestOutput] = []
    bytes_read = []
    correct = []
    num_loaded = dict[str, int]()
    for i, q in enumerate(questions):
        if num_prefixes and i in (num_prefixes, 2 * num_prefixes):
            setup.restart()
        if num_prefixes and i:
            setup.offload_all()
        before = setup.bytes_read
        outputs += llm.generate(q.prompt, FIRST_TOKEN_PARAMS)
        bytes_read.append(setup.bytes_read - before)
        if setup.prefix_cache.offloader:
            num_loaded = dict(setup.prefix_cache.offloader.num_loaded_tokens)
        if measure_accuracy and q.choices and i >= 2 * num_prefixes:
            log_probs = [sum(x) for x in llm.score([q.prompt] * len(q.choices), q.choices)]
            correct.append(log_probs.index(max(log_probs)) == q.label)
        setup.wait_for_writes()
    warm = 2 * num_prefixes if len(questions) > 2 * num_prefixes else 0
    ms = np.array([1e3 * output.ttft_s for output in outputs])
    tokens = [output.prompt_tokens for output in outputs]
    line: Line = {
        "requests": len(questions),
        "prompt_tokens": round(sum(tokens) / len(questions)),
        "cold_ttft_ms": round(ms[0], 1),
        "ttft_p50_ms": round(float(np.median(ms[warm:])), 1),
        "ttft_p99_ms": round(float(np.quantile(ms[warm:], 0.99)), 1),
        "ttft_mean_ms": round(float(ms[warm:].mean()), 1),
        "prefix_hit_rate": round(sum(output.cached_tokens for output in outputs[warm:]) / sum(tokens[warm:]), 3),
    }
    if not num_prefixes:
        line |= {f"prefix_hit_rate_{tier}": round(n / sum(tokens), 3) for tier, n in num_loaded.items()}
    if setup.tier_specs:
        line["read_mb_per_request"] = round(float(np.mean(bytes_read[warm:])) / 1e6, 1)
    if correct:
        line["accuracy"] = round(float(np.mean(correct)), 3)
    return line, [output.token_ids for output in outputs]


DISK_TIER = "disk:path={store},capacity=20GB"
SLOW_DISK_TIER = "disk:path={store},capacity=20GB,read=200MB"
METHODS = {
    "recompute": "",
    "memory": "",
    "ram": "ram:capacity=4GiB",
    "ssd": DISK_TIER,
    "selective": DISK_TIER,
    "ssd-200": SLOW_DISK_TIER,
    "selective-200": SLOW_DISK_TIER,
    "remote": "remote:{remote}",
    "remote-200": "remote:{remote},read=200MB",
    "selective-remote-200": "remote:{remote},read=200MB",
    "selective-lru": "ram:capacity={hot} " + SLOW_DISK_TIER,
    "selective-lfu": "ram:capacity={hot},evict=lfu " + SLOW_DISK_TIER,
    "selective-importance": "ram:capacity={hot},evict=importance " + SLOW_DISK_TIER,
    "lru": "ram:capacity=256MiB " + DISK_TIER,
    "lfu": "ram:capacity=256MiB,evict=lfu " + DISK_TIER,
}


class OffloadSetup:
    """The tiers of a method under an engine's pool. `store_dir` is an empty folder for them."""

    def __init__(self, llm: LLM, prefix_cache: PrefixCache, method: str, config: PrefixBenchConfig, store_dir: str):
        self.llm = llm
        self.prefix_cache = prefix_cache
        self.method = method
        self.ratio = config.selective_ratio
        remote = config.remote or f"url=file://{store_dir}"
        names = {"store": store_dir, "hot": format_size(config.ram_capacity), "remote": remote}
        self.tier_specs = METHODS[method].format(**names)
        self.fingerprint = f"bench {method} {store_dir}".encode()  # so that no run finds what another one stored
        self.bytes_before_restart = 0
        prefix_cache.tree.clear()
        self.config = prefix_cache.config
        if method == "recompute":
            prefix_cache.config = None
        self._attach_tiers()

    def _attach_tiers(self) -> None:
        if self.tier_specs:
            selects = self.method.startswith("selective")
            config = SelectiveConfig(ratio=self.ratio) if selects else PrefixConfig()
            tiers = [parse(t) for t in self.tier_specs.split()]
            offloader = factory.open_offload_tiers(config, tiers, self.llm.cache, self.llm.spec, self.fingerprint)
            self.prefix_cache.set_offloader(offloader)

    def restart(self) -> None:
        """Open the tiers anew, if one of them outlives a process."""
        if "disk" in self.tier_specs or "remote" in self.tier_specs:
            self.bytes_before_restart = self.bytes_read
            self.prefix_cache.close_offloader()
            self._attach_tiers()

    def offload_all(self) -> None:
        """Offload every page of the pool, if there is a tier."""
        if self.tier_specs:
            self.prefix_cache.tree.evict(self.prefix_cache.tree.num_evictable_pages)

    def wait_for_writes(self) -> None:
        """Wait until background writes are done."""
        if self.prefix_cache.offloader:
            self.prefix_cache.offloader.sync()

    @property
    def bytes_read(self) -> int:
        """Bytes read from disks and object stores."""
        stores = self.prefix_cache.offloader.stores if self.prefix_cache.offloader else ()
        found = (s.counts["read"] for s in stores if isinstance(s, (DiskStore, RemoteStore)))
        return self.bytes_before_restart + sum(found)

    def close(self) -> None:
        """Give the engine its own prefix cache settings back, and empty the tree."""
        self.prefix_cache.config = self.config
        self.prefix_cache.close_offloader()
        self.prefix_cache.tree.clear()
