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

from retain.bench.tasks import articles, records
from retain.engine import drafters
from retain.engine.loop import Engine
from retain.engine.request import Request, SamplingParams
from retain.kv import policies
from retain.llm import LLM

Line = dict[str, Any]
PLAIN = "plain"
GROUPS = ("translation", "summarization", "qa", "math_reasoning", "rag")  # of Spec-Bench; all others are conversation
WORKLOADS = ("humaneval", "editing", "summaries", "books", "conversation", *GROUPS)


@dataclass(frozen=True)
class Asked:
    """`items` prompts of each workload, `batch` at once, `new` tokens each; books are cut to `contexts` tokens."""

    workloads: Sequence[str]
    drafters: Sequence[str]
    data: Path
    items: int = 8
    batch: int = 1
    new: int = 128
    contexts: Sequence[int] = (4000,)

    def __post_init__(self) -> None:
        for name in self.workloads:
            if name not in WORKLOADS:
                raise ValueError(f"unknown workload {name!r}: choose from {', '.join(WORKLOADS)}")
        for name in self.drafters:
            drafters.parse(name)
        if min(self.items, self.batch, self.new, *self.contexts) < 1:
            raise ValueError("items, batch, new and contexts are at least 1")

    def sets(self, llm: LLM) -> Iterator[tuple[str, list[list[int]]]]:
        """Names and prompts."""
        for name in self.workloads:
            for context in self.contexts if name == "books" else [0]:
                room = llm.context - self.new - 32
                found = [p for p in prompts(llm, name, self.data, self.items, context or room) if len(p) <= room]
                yield (f"books-{context}" if context else name), found[: self.items]


def prompts(llm: LLM, name: str, data: Path, n: int, context: int) -> list[list[int]]:
    """At least n prompts of a workload, where there are as many. Raises OSError or ValueError."""
    if name == "humaneval":
        return [llm.encode(r["prompt"]) for r in records(data, "humaneval", 2 * n)]
    if name == "editing":
        ask = "Repeat this Python function in full, with the parameters renamed to x, y and z.\n\n"
        code = [r["prompt"] + r["canonical_solution"] for r in records(data, "humaneval", 2 * n)]
        return [llm.tokenizer.encode_chat([{"role": "user", "content": ask + c}]) for c in code]
    if name == "summaries":
        return [p for p, _ in articles(llm, data, n, min(context, 2000))]
    if name == "books":
        texts = [llm.encode(r["text"][: 8 * context * n]) for r in records(data, "books")]
        return [t[i : i + context] for i in range(0, context * n, context) for t in texts if len(t) >= i + context]
    found = records(data, "spec_bench")
    mine = [r for r in found if (r["category"] if r["category"] in GROUPS else "conversation") == name]
    return [llm.tokenizer.encode_chat([{"role": "user", "content": r["turns"][0]}]) for r in mine[: 2 * n]]


@dataclass
class Sum:
    """Of one way to decode, over all groups of a workload."""

    times: list[float] = field(default_factory=list)  # as fast as plain
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    full_rounds: int = 0  # in which every draft was right
    same: bool = True  # tokens as plain's

    def line(self, plain: Sum) -> Line:
        """What is printed; times in milliseconds, of a step of the whole batch."""
        rounds, plain_ms = max(self.rounds, 1), 1e3 * plain.seconds / max(plain.steps, 1)
        draft, verify = (1e3 * s / rounds for s in (self.draft_s, self.verify_s))
        line = {
            "tok_s": round(self.tokens / self.seconds, 1),
            "times_plain": round(median(self.times), 3),
            "worst": round(min(self.times), 3),
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
            right = self.accepted / max(self.accepted + rounds - self.full_rounds, 1)
            K = self.drafted / rounds
            gives = K + 1 if right == 1 else (1 - right ** (K + 1)) / (1 - right)
            line["theory"] = round(gives * plain_ms / (draft + verify), 3)
        return line | {"same": self.same}


def run(llm: LLM, asked: Asked) -> Iterator[Line]:
    """A line for each workload and drafter."""
    engines = {name: _engine(llm, name) for name in (PLAIN, *asked.drafters)}
    for workload, texts in asked.sets(llm):
        sums = {name: Sum() for name in engines}
        for i in range(0, len(texts), asked.batch):
            leaders = _prefill(llm, texts[i : i + asked.batch], asked.new)
            said: dict[str, list[list[int]]] = {}
            speed: dict[str, float] = {}
            for name, engine in engines.items():
                made = [_copy(llm, r, asked.new) for r in leaders]
                engine.scheduler.running, started = made.copy(), perf_counter()
                while engine.has_unfinished_requests:
                    engine.step()
                    sums[name].steps += 1
                seconds, tokens = perf_counter() - started, sum(len(r.output_tokens) - 1 for r in made)
                said[name], speed[name] = [r.output_tokens for r in made], tokens / seconds
                _add(sums[name], made, seconds, tokens, speed[name] / speed[PLAIN], said[name] == said[PLAIN])
            llm.engine.scheduler.running = leaders.copy()
            for r in leaders:
                llm.engine.cancel(r)
        for name in asked.drafters:
            about = {"workload": workload, "batch": asked.batch, "drafter": name}
            yield about | sums[name].line(sums[PLAIN])


def _engine(llm: LLM, name: str) -> Engine:
    drafter = None if name == PLAIN else drafters.parse(name)
    if drafter:
        drafter.attach(llm.target)
    return Engine(llm.engine.runner, llm.cache, llm.config.step_tokens, drafter)


def _prefill(llm: LLM, texts: Sequence[list[int]], new: int) -> list[Request]:
    """Requests with their prompts computed and a first token."""
    made = []
    for text in texts:  # one by one: nobody goes on while others are read
        request = Request(text, SamplingParams(temperature=0, ignore_eos=True), policies.parse("full"), new + 1)
        llm.engine.add(request)
        while not request.first_token_time:
            llm.engine.step()
        llm.engine.scheduler.running.remove(request)  # it waits as it is, to be copied
        made.append(request)
    return made


def _copy(llm: LLM, leader: Request, new: int) -> Request:
    assert leader.row is not None
    copy = Request(leader.prompt, leader.params, leader.policy, new + 1)
    copy.tokens, copy.num_computed_tokens, copy.first_token_time = list(leader.tokens), leader.num_computed_tokens, perf_counter()
    copy.row = llm.cache.fork(leader.row, copy.policy, copy.num_computed_tokens)
    if copy.row is None:
        raise ValueError("the pool is too small for a copy of every prompt: raise --kv-memory, or lower --batch")
    pages = llm.cache.kv.index(llm.cache.pages[copy.row].ravel())
    llm.cache.kv.mass[pages] = 0  # whole pages are shared with who ran before
    llm.cache.commit(copy.row, copy.num_computed_tokens, 0)
    return copy


def _add(to: Sum, made: Sequence[Request], seconds: float, tokens: int, times: float, same: bool) -> None:
    to.times.append(times)
    to.seconds += seconds
    to.tokens += tokens
    to.same = to.same and same
    for r in made:
        to.rounds += r.spec_decode_stats.num_rounds
        to.full_rounds += r.spec_decode_stats.num_fully_accepted
        to.drafted += sum(r.spec_decode_stats.num_drafted_per_position)
        to.accepted += sum(r.spec_decode_stats.num_accepted_per_position)
        to.draft_s += r.spec_decode_stats.draft_s
        to.verify_s += r.spec_decode_stats.verify_s


def write(lines: Sequence[Line], out: Path) -> None:
    """Every number as JSON; as pictures the speed-up against K and against the context, where several were asked."""
    from retain.bench.plots import speedups

    out.mkdir(parents=True, exist_ok=True)
    (out / "speculate.json").write_text(json.dumps(lines, indent=1))
    speedups(lines, out)
