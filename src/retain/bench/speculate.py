"""`retain bench speculate`: the speed of drafters on real prompts, beside plain decoding.

Prompts are computed once. Plain decoding and every drafter then continue from copies of their slots, one after the
other, greedily and past the end of text, so that all do the same work; speed-ups compare such runs side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from retain.bench.config import SpeculateBenchConfig
from retain.bench.engines import greedy_request
from retain.bench.tasks import load_articles, load_records
from retain.engine import drafters
from retain.engine.cache_interface import RequestRow
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kv.eviction import policies
from retain.llm import LLM
from retain.plugins import check_known

Line = dict[str, Any]
PLAIN = "plain"
# Spec-Bench's categories; all others of its records are workload `conversation`.
SPEC_BENCH_CATEGORIES = ("translation", "summarization", "qa", "math_reasoning", "rag")
WORKLOADS = ("humaneval", "editing", "summaries", "books", "conversation", *SPEC_BENCH_CATEGORIES)
MAX_SUMMARY_PROMPT_LEN = 2000


def check_names(config: SpeculateBenchConfig) -> None:
    """Raise ValueError for an unknown workload or drafter."""
    check_known("workload", config.workloads, WORKLOADS)
    for spec in config.drafters:
        drafters.parse(spec)


def iter_workloads(llm: LLM, config: SpeculateBenchConfig) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield names and prompts; `books` once for each context length."""
    n = config.num_prompts
    room = llm.max_model_len - config.output_len - 32
    for name in config.workloads:
        for context_len in config.context_lens if name == "books" else [0]:
            prompts = load_prompts(llm, name, config.data_dir, n, context_len or room)
            yield f"books-{context_len}" if context_len else name, [p for p in prompts if len(p) <= room][:n]


def load_prompts(llm: LLM, workload: str, data: Path, num_prompts: int, max_prompt_len: int) -> list[list[int]]:
    """Return `num_prompts` prompts of a workload or more; all of them if it has fewer. Raises OSError or ValueError."""
    if workload == "humaneval":
        return [llm.encode(r["prompt"]) for r in load_records(data, "humaneval", 2 * num_prompts)]
    if workload == "editing":
        instruction = "Repeat this Python function in full, with the parameters renamed to x, y and z.\n\n"
        code = [r["prompt"] + r["canonical_solution"] for r in load_records(data, "humaneval", 2 * num_prompts)]
        return [_encode_message(llm, instruction + c) for c in code]
    if workload == "summaries":
        return [p for p, _ in load_articles(llm, data, num_prompts, min(max_prompt_len, MAX_SUMMARY_PROMPT_LEN))]
    if workload == "books":
        books = [llm.encode(r["text"][: 8 * max_prompt_len * num_prompts]) for r in load_records(data, "books")]
        starts = range(0, max_prompt_len * num_prompts, max_prompt_len)
        return [ids[i : i + max_prompt_len] for i in starts for ids in books if len(ids) >= i + max_prompt_len]
    records = [r for r in load_records(data, "spec_bench") if _spec_bench_workload(r) == workload]
    return [_encode_message(llm, r["turns"][0]) for r in records[: 2 * num_prompts]]


def _spec_bench_workload(record: dict[str, Any]) -> str:
    category: str = record["category"]
    return category if category in SPEC_BENCH_CATEGORIES else "conversation"


def _encode_message(llm: LLM, text: str) -> list[int]:
    return llm.tokenizer.encode_chat([{"role": "user", "content": text}])


@dataclass
class DecodeTotals:
    """Totals of one way to decode, over all batches of a workload."""

    speedups: list[float] = field(default_factory=list)  # over plain decoding, one a batch
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    fully_accepted_rounds: int = 0
    tokens_equal: bool = True  # to plain decoding

    def to_json(self, baseline: DecodeTotals) -> Line:
        """Return the printed line; times are milliseconds of a step of the whole batch."""
        rounds = max(self.rounds, 1)
        baseline_step_ms = 1e3 * baseline.seconds / max(baseline.steps, 1)
        draft_ms, verify_ms = (1e3 * s / rounds for s in (self.draft_s, self.verify_s))
        line = {
            "tok_s": round(self.tokens / self.seconds, 1),
            "speedup": round(median(self.speedups), 3),
            "min_speedup": round(min(self.speedups), 3),
            "acceptance_rate": round(self.accepted / max(self.drafted, 1), 3),
            "mean_draft_len": round(self.drafted / rounds, 2),
            "mean_acceptance_length": round(1 + self.accepted / rounds, 2),
            "baseline_step_ms": round(baseline_step_ms, 2),
            "draft_ms": round(draft_ms, 2),
            "verify_ms": round(verify_ms, 2),
        }
        # With acceptance rate a, a round of K drafts gives 1 + a + ... + a^K tokens and takes K c + v plain steps
        # (Chen et al., 2023, section 3, where v is 1).
        if self.rounds:
            a = self.accepted / max(self.accepted + rounds - self.fully_accepted_rounds, 1)
            K = self.drafted / rounds
            tokens = K + 1 if a == 1 else (1 - a ** (K + 1)) / (1 - a)
            line["expected_speedup"] = round(tokens * baseline_step_ms / (draft_ms + verify_ms), 3)
        return line | {"tokens_equal": self.tokens_equal}


def run(llm: LLM, config: SpeculateBenchConfig) -> Iterator[Line]:
    """Yield a line for each workload and drafter."""
    engines = {name: _make_engine(llm, name) for name in (PLAIN, *config.drafters)}
    for workload, prompts in iter_workloads(llm, config):
        totals = {name: DecodeTotals() for name in engines}
        for i in range(0, len(prompts), config.batch_size):
            leaders = _prefill(llm, prompts[i : i + config.batch_size], config.output_len)
            plain_tokens = list[list[int]]()
            plain_speed = 0.0
            for name, engine in engines.items():
                forks = dict(_fork_request(llm, r, row, config.output_len) for r, row in leaders.items())
                engine.scheduler.running = dict(forks)
                started = perf_counter()
                while engine.has_unfinished_requests:
                    engine.step()
                    totals[name].steps += 1
                seconds = perf_counter() - started
                output_tokens = [r.output_tokens for r in forks]
                num_tokens = sum(len(tokens) - 1 for tokens in output_tokens)  # the first one was there
                if name == PLAIN:
                    plain_tokens = output_tokens
                    plain_speed = num_tokens / seconds
                totals[name].speedups.append(num_tokens / seconds / plain_speed)
                totals[name].tokens_equal &= output_tokens == plain_tokens
                _accumulate(totals[name], list(forks), seconds, num_tokens)
            llm.engine.scheduler.running = dict(leaders)
            for r in leaders:
                llm.engine.cancel(r)
        for name in config.drafters:
            line = {"workload": workload, "batch": config.batch_size, "drafter": name}
            yield line | totals[name].to_json(totals[PLAIN])


def _make_engine(llm: LLM, drafter_spec: str) -> Engine:
    drafter = None if drafter_spec == PLAIN else drafters.parse(drafter_spec)
    if drafter:
        drafter.attach(llm.target)
    return Engine(llm.engine.runner, llm.cache, drafter, llm.config.prompt_activations)


def _prefill(llm: LLM, prompts: Sequence[list[int]], output_len: int) -> dict[Request, RequestRow]:
    """Return requests with computed prompts and a first token, and their rows, outside of a scheduler."""
    found = {}
    for prompt in prompts:  # one by one, so that none decodes while another is computed
        request = greedy_request(llm.cache, prompt, policies.parse("full"), output_len + 1)
        engine = _make_engine(llm, PLAIN)  # with one pending step: nothing is computed behind the first token
        engine.add(request)
        while not request.stats.first_token_time:
            engine.step()
        found[request] = engine.scheduler.running.pop(request)
    return found


def _fork_request(llm: LLM, source: Request, row: RequestRow, output_len: int) -> tuple[Request, RequestRow]:
    """Return a request that continues from a copy of another's slots, and its row.

    Raises ValueError where the pool is too small.
    """
    fork = greedy_request(llm.cache, source.prompt, source.policy, output_len + 1)
    fork.text.ids[:] = source.tokens
    fork.num_computed_tokens = source.num_computed_tokens
    fork.hidden_state = source.hidden_state
    fork.stats.first_token_time = perf_counter()
    copied = row.fork(fork.policy, fork.num_computed_tokens, fork.row_task())
    if copied is None:
        raise ValueError("the pool is too small for a copy of every prompt: raise --kv-memory or lower --batch-size")
    llm.cache.rows[copied.index].clear_masses()  # the forks before this one left masses on the shared pages
    copied.advance(fork.num_computed_tokens, 0)
    llm.cache.evict()
    return fork, copied


def _accumulate(totals: DecodeTotals, requests: Sequence[Request], seconds: float, num_tokens: int) -> None:
    totals.seconds += seconds
    totals.tokens += num_tokens
    for r in requests:
        stats = r.stats.spec_decode
        totals.rounds += stats.num_rounds
        totals.fully_accepted_rounds += stats.num_fully_accepted
        totals.drafted += sum(stats.num_drafted_per_position)
        totals.accepted += sum(stats.num_accepted_per_position)
        totals.draft_s += stats.draft_s
        totals.verify_s += stats.verify_s
