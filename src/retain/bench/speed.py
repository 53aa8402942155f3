"""`retain bench speed`: prefill and decoding speed on fixed pseudo-random prompts.

A workload is (prompt tokens, new tokens, batch). Decoding is greedy and ignores the end of text. Prefill is the time
of a run with one new token; decoding is the time of a run with N + 1 new tokens less that; the better of two runs
counts.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import retain
from retain.engine.request import SamplingParams
from retain.llm import LLM


@dataclass(frozen=True)
class Workload:
    """`batch` prompts of `prompt` tokens, `new` tokens each."""

    name: str
    prompt: int
    new: int
    batch: int


WORKLOADS = (
    Workload("short-1", 128, 64, 1),
    Workload("short-8", 128, 64, 8),
    Workload("short-32", 128, 64, 32),
    Workload("long-1", 4096, 96, 1),
    Workload("long-8", 4096, 96, 8),
    Workload("full-1", 8000, 96, 1),
)


def choose(names: str | None) -> list[Workload]:
    """The workloads of these names, all where none is named. Raises ValueError."""
    known = {w.name: w for w in WORKLOADS}
    wanted = [n.strip() for n in names.split(",")] if names else list(known)
    for name in wanted:
        if name not in known:
            raise ValueError(f"unknown workload {name!r}: choose from {', '.join(known)}")
    return [known[n] for n in wanted]


def run(llm: LLM, workloads: list[Workload], as_json: bool) -> None:
    """Print a line for each workload as soon as it is measured."""
    seconds(llm, Workload("warm-up", 128, 8, 1), seed=0, new=8)
    if not as_json:
        print(
            f"{'workload':10} {'prompt':>7} {'new':>5} {'batch':>5} {'prefill tok/s':>14} "
            f"{'decode tok/s':>13} {'step ms':>8}"
        )
    for w in workloads:
        row = measure(llm, w)
        if as_json:
            print(json.dumps(row), flush=True)
        else:
            print(
                f"{w.name:10} {w.prompt:7} {w.new:5} {w.batch:5} {row['prefill_tok_s']:14.1f} "
                f"{row['decode_tok_s']:13.1f} {row['decode_step_ms']:8.2f}",
                flush=True,
            )


def measure(llm: LLM, w: Workload) -> dict[str, Any]:
    """One workload: the better of two runs."""
    prefill = decode = float("inf")
    for seed in (1, 2):
        total, first = seconds(llm, w, 10 * seed + 1, w.new + 1), seconds(llm, w, 10 * seed, 1)
        prefill, decode = min(prefill, first), min(decode, max(total - first, 1e-9))
    return {
        "engine": f"retain {retain.__version__}",
        "workload": w.name,
        "prompt": w.prompt,
        "new": w.new,
        "batch": w.batch,
        "prefill_s": round(prefill, 3),
        "prefill_tok_s": round(w.prompt * w.batch / prefill, 1),
        "decode_tok_s": round(w.new * w.batch / decode, 1),
        "decode_step_ms": round(1e3 * decode / w.new, 2),
        "note": f"{llm.config.dtype}, kv {llm.config.kv_policy}",
    }


def seconds(llm: LLM, w: Workload, seed: int, new: int) -> float:
    """Wall time of one batch to its end."""
    rng, top = random.Random(seed), min(40000, llm.model.spec.vocab)
    prompts = [[rng.randrange(min(100, top - 1), top) for _ in range(w.prompt)] for _ in range(w.batch)]
    started = perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=new, temperature=0, ignore_eos=True))
    return perf_counter() - started
