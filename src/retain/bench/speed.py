"""`retain bench speed`: prefill and decoding speed on fixed pseudo-random prompts, beside what memory allows.

A workload is (prompt tokens, new tokens, batch). Decoding is greedy and ignores the end of text. Prefill is the time
of a run with one new token; decoding is the time of a run with N + 1 new tokens less that. Each is the better of two
runs before they are subtracted: the difference of one pair may be anything where prefill is most of both. A decoding
step must read all weights once, and the keys and values of every request: `read_mb`; `bandwidth` is the share of the
machine's measured read bandwidth that this comes to.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

import retain
from retain.kv.eviction.budget import BudgetPolicy
from retain.llm import LLM
from retain.sampling_params import SamplingParams


@dataclass(frozen=True)
class Workload:
    """`batch` prompts of `prompt` tokens, `new` tokens each."""

    name: str
    prompt_len: int
    output_len: int
    batch_size: int


WORKLOADS = (
    Workload("short-1", 128, 64, 1),
    Workload("short-8", 128, 64, 8),
    Workload("short-32", 128, 64, 32),
    Workload("long-1", 4096, 96, 1),
    Workload("long-8", 4096, 96, 8),
    Workload("full-1", 8000, 96, 1),
)


def select_workloads(names: str | None) -> list[Workload]:
    """The workloads of these names, all where none is named. Raises ValueError."""
    known = {w.name: w for w in WORKLOADS}
    wanted = [n.strip() for n in names.split(",")] if names else list(known)
    for name in wanted:
        if name not in known:
            raise ValueError(f"unknown workload {name!r}: choose from {', '.join(known)}")
    return [known[n] for n in wanted]


def run(llm: LLM, workloads: list[Workload], as_json: bool) -> None:
    """Print a line for each workload as soon as it is measured."""
    bandwidth = measure_read_bandwidth(llm.device)
    time_batch(llm, Workload("warm-up", 128, 8, 1), seed=0, output_len=8)
    if not as_json:
        print(
            f"{'workload':10} {'prompt':>7} {'new':>5} {'batch':>5} {'prefill tok/s':>14} "
            f"{'decode tok/s':>13} {'step ms':>8} {'reads MB':>9} {f'of {bandwidth / 1e9:.0f} GB/s':>12}"
        )
    for w in workloads:
        row = measure_workload(llm, w, bandwidth)
        if as_json:
            print(json.dumps(row), flush=True)
        else:
            print(
                f"{w.name:10} {w.prompt_len:7} {w.output_len:5} {w.batch_size:5} {row['prefill_tok_s']:14.1f} "
                f"{row['decode_tok_s']:13.1f} {row['decode_step_ms']:8.2f} "
                f"{row['read_mb']:9.1f} {row['bandwidth']:12.0%}",
                flush=True,
            )


def measure_read_bandwidth(device: torch.device) -> float:
    """Bytes a second that a device reads from its memory, with all of its threads: the best of five sums over 512 MiB
    (on a GPU 4 GiB).
    """
    x = torch.ones(2**30 if device.type == "cuda" else 2**27, device=device)
    times = []
    for _ in range(5):
        started = perf_counter()
        x.sum().item()
        times.append(perf_counter() - started)
    return x.nbytes / min(times)


def decode_step_bytes(llm: LLM, workload: Workload) -> int:
    """What the step in the middle of decoding must read: weights, and the slots that are seen."""
    spec, length, policy = (
        llm.spec,
        workload.prompt_len + workload.output_len // 2,
        llm.policy.resolve(workload.prompt_len),
    )
    most = policy.decode_slots if isinstance(policy, BudgetPolicy) else length  # where everything is seen
    seen = sum(min(length, most, window) for window in llm.cache.windows(policy).tolist())
    return (
        llm.weight_bytes + workload.batch_size * seen * spec.num_kv_heads * llm.cache.page_bytes // llm.config.page_size
    )


def measure_workload(llm: LLM, workload: Workload, bandwidth: float) -> dict[str, Any]:
    """One workload."""
    total = min(time_batch(llm, workload, seed, workload.output_len + 1) for seed in (11, 21))
    prefill = min(time_batch(llm, workload, seed, 1) for seed in (10, 20))
    decode = max(total - prefill, 1e-9)
    read = decode_step_bytes(llm, workload)
    return {
        "engine": f"retain {retain.__version__}",
        "workload": workload.name,
        "prompt": workload.prompt_len,
        "new": workload.output_len,
        "batch": workload.batch_size,
        "prefill_s": round(prefill, 3),
        "prefill_tok_s": round(workload.prompt_len * workload.batch_size / prefill, 1),
        "decode_tok_s": round(workload.output_len * workload.batch_size / decode, 1),
        "decode_step_ms": round(1e3 * decode / workload.output_len, 2),
        "read_mb": round(read / 1e6, 1),
        "bandwidth": round(read / (decode / workload.output_len) / bandwidth, 3),
        "note": f"{llm.device.type}, {llm.config.dtype}, weights {llm.config.weights}, kv {llm.config.kv_policy}",
    }


def time_batch(llm: LLM, workload: Workload, seed: int, output_len: int) -> float:
    """Wall time of one batch to its end."""
    rng, top = random.Random(seed), min(40000, llm.spec.vocab_size)
    prompts = [
        [rng.randrange(min(100, top - 1), top) for _ in range(workload.prompt_len)] for _ in range(workload.batch_size)
    ]
    started = perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True))
    return perf_counter() - started
