"""`retain bench speculate`: what drafters give, on real prompts, beside plain decoding.

Prompts are computed once. Then plain decoding and every drafter go on from copies of their slots, one after the other,
greedily and past the end of text, so that all do the same work; ratios are of such runs side by side. What is not known
here: how drafts are made and chosen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from retain.bench.tasks import load_articles, load_records
from retain.engine import drafters
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kv.eviction import policies
from retain.llm import LLM
from retain.sampling_params import SamplingParams

Line = dict[str, Any]
PLAIN = "plain"
SPEC_BENCH_CATEGORIES = (
    "translation",
    "summarization",
    "qa",
    "math_reasoning",
    "rag",
)  # of Spec-Bench; all others are conversation
WORKLOADS = ("humaneval", "editing", "summaries", "books", "conversation", *SPEC_BENCH_CATEGORIES)


@dataclass(frozen=True)
class SpeculateBenchConfig:
    """`items` prompts of each workload, `batch` at once, `new` tokens each; books are cut to `contexts` tokens."""

    workloads: Sequence[str]
    drafters: Sequence[str]
    data: Path
    num_prompts: int = 8
    batch_size: int = 1
    output_len: int = 128
    context_lens: Sequence[int] = (4000,)

    def __post_init__(self) -> None:
        for name in self.workloads:
            if name not in WORKLOADS:
                raise ValueError(f"unknown workload {name!r}: choose from {', '.join(WORKLOADS)}")
        for name in self.drafters:
            drafters.parse(name)
        if min(self.num_prompts, self.batch_size, self.output_len, *self.context_lens) < 1:
            raise ValueError("items, batch, new and contexts are at least 1")

    def iter_workloads(self, llm: LLM) -> Iterator[tuple[str, list[list[int]]]]:
        """Names and prompts."""
        for name in self.workloads:
            for context in self.context_lens if name == "books" else [0]:
                room = llm.max_model_len - self.output_len - 32
                found = [
                    p for p in load_prompts(llm, name, self.data, self.num_prompts, context or room) if len(p) <= room
                ]
                yield (f"books-{context}" if context else name), found[: self.num_prompts]


def load_prompts(llm: LLM, workload: str, data: Path, num_prompts: int, max_prompt_len: int) -> list[list[int]]:
    """At least n prompts of a workload, where there are as many. Raises OSError or ValueError."""
    if workload == "humaneval":
        return [llm.encode(r["prompt"]) for r in load_records(data, "humaneval", 2 * num_prompts)]
    if workload == "editing":
        ask = "Repeat this Python function in full, with the parameters renamed to x, y and z.\n\n"
        code = [r["prompt"] + r["canonical_solution"] for r in load_records(data, "humaneval", 2 * num_prompts)]
        return [llm.tokenizer.encode_chat([{"role": "user", "content": ask + c}]) for c in code]
    if workload == "summaries":
        return [p for p, _ in load_articles(llm, data, num_prompts, min(max_prompt_len, 2000))]
    if workload == "books":
        texts = [llm.encode(r["text"][: 8 * max_prompt_len * num_prompts]) for r in load_records(data, "books")]
        return [
            t[i : i + max_prompt_len]
            for i in range(0, max_prompt_len * num_prompts, max_prompt_len)
            for t in texts
            if len(t) >= i + max_prompt_len
        ]
    found = load_records(data, "spec_bench")
    mine = [
        r for r in found if (r["category"] if r["category"] in SPEC_BENCH_CATEGORIES else "conversation") == workload
    ]
    return [llm.tokenizer.encode_chat([{"role": "user", "content": r["turns"][0]}]) for r in mine[: 2 * num_prompts]]


@dataclass
class DecodeTotals:
    """Of one way to decode, over all groups of a workload."""

    speedups: list[float] = field(default_factory=list)  # as fast as plain
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    fully_accepted_rounds: int = 0  # in which every draft was right
    tokens_equal: bool = True  # tokens as plain's

    def to_json(self, baseline: DecodeTotals) -> Line:
        """What is printed; times in milliseconds, of a step of the whole batch."""
        rounds, plain_ms = max(self.rounds, 1), 1e3 * baseline.seconds / max(baseline.steps, 1)
        draft, verify = (1e3 * s / rounds for s in (self.draft_s, self.verify_s))
        line = {
            "tok_s": round(self.tokens / self.seconds, 1),
            "times_plain": round(median(self.speedups), 3),
            "worst": round(min(self.speedups), 3),
            "accepted": round(self.accepted / max(self.drafted, 1), 3),
            "drafted_per_round": round(self.drafted / rounds, 2),
            "tokens_per_round": round(1 + self.accepted / rounds, 2),
            "plain_ms": round(plain_ms, 2),
            "draft_ms": round(draft, 2),
            "verify_ms": round(verify, 2),
        }
        # With K drafts a round gives 1 + a + ... + a^K tokens, and takes K c + v plain steps (section 3 of the paper,
        # where v is 1): acceptance and costs say no more than that.
        if self.rounds:
            right = self.accepted / max(self.accepted + rounds - self.fully_accepted_rounds, 1)
            K = self.drafted / rounds
            gives = K + 1 if right == 1 else (1 - right ** (K + 1)) / (1 - right)
            line["theory"] = round(gives * plain_ms / (draft + verify), 3)
        return line | {"same": self.tokens_equal}


def run(llm: LLM, config: SpeculateBenchConfig) -> Iterator[Line]:
    """A line for each workload and drafter."""
    engines = {name: _make_engine(llm, name) for name in (PLAIN, *config.drafters)}
    for workload, texts in config.iter_workloads(llm):
        sums = {name: DecodeTotals() for name in engines}
        for i in range(0, len(texts), config.batch_size):
            leaders = _prefill(llm, texts[i : i + config.batch_size], config.output_len)
            said: dict[str, list[list[int]]] = {}
            speed: dict[str, float] = {}
            for name, engine in engines.items():
                made = [_fork_request(llm, r, config.output_len) for r in leaders]
                engine.scheduler.running, started = made.copy(), perf_counter()
                while engine.has_unfinished_requests:
                    engine.step()
                    sums[name].steps += 1
                seconds, tokens = perf_counter() - started, sum(len(r.output_tokens) - 1 for r in made)
                said[name], speed[name] = [r.output_tokens for r in made], tokens / seconds
                _accumulate(sums[name], made, seconds, tokens, speed[name] / speed[PLAIN], said[name] == said[PLAIN])
            llm.engine.scheduler.running = leaders.copy()
            for r in leaders:
                llm.engine.cancel(r)
        for name in config.drafters:
            about = {"workload": workload, "batch": config.batch_size, "drafter": name}
            yield about | sums[name].to_json(sums[PLAIN])


def _make_engine(llm: LLM, drafter_spec: str) -> Engine:
    drafter = None if drafter_spec == PLAIN else drafters.parse(drafter_spec)
    if drafter:
        drafter.attach(llm.target)
    return Engine(llm.engine.runner, llm.cache, llm.config.max_batched_tokens, drafter)


def _prefill(llm: LLM, prompt_token_ids: Sequence[list[int]], output_len: int) -> list[Request]:
    """Requests with their prompts computed and a first token."""
    made = []
    for text in prompt_token_ids:  # one by one: nobody goes on while others are read
        request = Request(text, SamplingParams(temperature=0, ignore_eos=True), policies.parse("full"), output_len + 1)
        llm.engine.add(request)
        while not request.first_token_time:
            llm.engine.step()
        llm.engine.scheduler.running.remove(request)  # it waits as it is, to be copied
        made.append(request)
    return made


def _fork_request(llm: LLM, source: Request, output_len: int) -> Request:
    assert source.row is not None
    copy = Request(source.prompt, source.params, source.policy, output_len + 1)
    copy.tokens, copy.num_computed_tokens, copy.first_token_time = (
        list(source.tokens),
        source.num_computed_tokens,
        perf_counter(),
    )
    copy.row = llm.cache.fork(source.row, copy.policy, copy.num_computed_tokens)
    if copy.row is None:
        raise ValueError("the pool is too small for a copy of every prompt: raise --kv-memory, or lower --batch")
    pages = llm.cache.kv.to_index(llm.cache.pages[copy.row].ravel())
    llm.cache.kv.mass[pages] = 0  # whole pages are shared with who ran before
    llm.cache.commit(copy.row, copy.num_computed_tokens, 0)
    return copy


def _accumulate(
    totals: DecodeTotals, requests: Sequence[Request], seconds: float, tokens: int, speedup: float, tokens_equal: bool
) -> None:
    totals.speedups.append(speedup)
    totals.seconds += seconds
    totals.tokens += tokens
    totals.tokens_equal = totals.tokens_equal and tokens_equal
    for r in requests:
        totals.rounds += r.spec_decode_stats.num_rounds
        totals.fully_accepted_rounds += r.spec_decode_stats.num_fully_accepted
        totals.drafted += sum(r.spec_decode_stats.num_drafted_per_position)
        totals.accepted += sum(r.spec_decode_stats.num_accepted_per_position)
        totals.draft_s += r.spec_decode_stats.draft_s
        totals.verify_s += r.spec_decode_stats.verify_s


def write_results(results: Sequence[Line], out: Path) -> None:
    """Every number as JSON; as pictures the speed-up against K and against the context, where several were asked."""
    from retain.bench.plots import plot_speedups

    out.mkdir(parents=True, exist_ok=True)
    (out / "speculate.json").write_text(json.dumps(results, indent=1))
    plot_speedups(results, out)
