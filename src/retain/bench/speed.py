"""`retain bench speed`: prefill and decoding speed on fixed pseudo-random prompts, beside the bandwidth of the memory.

A workload is (prompt tokens, output tokens, batch size). Decoding is greedy and ignores the end of text. Every figure
is the median of three repeats.

Prefill is the time of a run with one output token. Decoding is timed step by step, over the steps in which the whole
batch decodes and nothing else happens, until they have given each request its output tokens. The peers' scripts cannot
see an engine's steps: there decoding is the time of a run with N + 1 output tokens less that of a run with one. The
two differ where requests of a batch decode beside the prefill of others, which the difference counts as decoding, and
where prefill takes most of both runs: its noise then exceeds the difference (docs/benchmarks/speed.md).

The requests of a batch take the adapters of `--lora` in turn.

A decode step must read all weights once, and the keys and values of every request: `read_mb`. `bandwidth` is the share
of the machine's measured read bandwidth that this comes to. `host_share` is the part of a step outside of the model:
scheduling, building the batch, sampling. On a GPU it means nothing, because the model is still computing then.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any

import torch

import retain
from retain.bench.bytes_read import cache_bytes_read
from retain.bench.engines import DecodeTimer, greedy_request, random_prompts
from retain.engine.request import Request
from retain.llm import LLM
from retain.plugins import check_known

REPEATS = 3


@dataclass(frozen=True)
class Workload:
    """`batch_size` prompts of `prompt_len` tokens, with `output_len` output tokens each."""

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
LARGE_BATCHES = tuple(Workload(f"short-{n}", 128, 64, n) for n in (64, 128, 256))  # on demand only


def select_workloads(names: Sequence[str]) -> list[Workload]:
    """Return the workloads of these names, without names all but the large batches. Raises ValueError."""
    known = {w.name: w for w in (*WORKLOADS, *LARGE_BATCHES)}
    check_known("workload", names, known)
    return [known[n] for n in names or (w.name for w in WORKLOADS)]


def fitting_workloads(workloads: Sequence[Workload], max_model_len: int) -> list[Workload]:
    """Return the workloads whose texts a context of so many tokens holds."""
    return [w for w in workloads if w.prompt_len + w.output_len <= max_model_len]


def run(llm: LLM, workloads: Sequence[Workload], as_json: bool, peer: str | None = None) -> None:
    """Print a line for each workload as soon as it is measured, and one with the ratios to a peer.

    `peer` is a command (see measure_peer). It runs after each workload, so that both see the same machine. Raises
    ValueError where it fails.
    """
    bandwidth = measure_read_bandwidth(llm.device)
    time_prefill(llm, Workload("warm-up", 128, 8, 1), seed=0, output_len=8)
    if not as_json:
        print(
            f"{'workload':10} {'prompt':>7} {'new':>5} {'batch':>5} {'prefill tok/s':>14} "
            f"{'decode tok/s':>13} {'step ms':>8} {'host':>5} {'reads MB':>9} {f'of {bandwidth / 1e9:.0f} GB/s':>12}"
        )
    for w in workloads:
        row = measure_workload(llm, w, bandwidth)
        if as_json:
            print(json.dumps(row), flush=True)
        else:
            print(
                f"{w.name:10} {w.prompt_len:7} {w.output_len:5} {w.batch_size:5} {row['prefill_tok_s']:14.1f} "
                f"{row['decode_tok_s']:13.1f} {row['decode_step_ms']:8.2f} "
                f"{row['host_share']:5.0%} {row['read_mb']:9.1f} {row['bandwidth']:12.0%}",
                flush=True,
            )
        if peer and (other := measure_peer(peer, w.name)):
            ratios = compare(row, other)
            if as_json:
                print(json.dumps(other), json.dumps(ratios), sep="\n", flush=True)
            else:
                name = ratios["peer"]
                prefill = ratios["prefill_ratio"]
                decode = ratios["decode_ratio"]
                print(f"{'':10} {prefill:.2f}x the prefill and {decode:.2f}x the decoding of {name}", flush=True)


def measure_read_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a device reads from its memory, with all of its threads.

    The best of five sums over 512 MiB (on a GPU 4 GiB).
    """
    x = torch.ones(2**30 if device.type == "cuda" else 2**27, device=device)
    times = []
    for _ in range(5):
        started = perf_counter()
        x.sum().item()
        times.append(perf_counter() - started)
    return x.nbytes / min(times)


def decode_step_bytes(llm: LLM, workload: Workload) -> int:
    """Return the bytes that the step in the middle of decoding must read: weights, and slots that are attended to."""
    length = workload.prompt_len + workload.output_len // 2
    policy = llm.cache.plan_policy(llm.policy, workload.prompt_len)
    of_request = cache_bytes_read(llm.cache.planner, policy, length)
    return llm.program.weight_bytes + int(workload.batch_size * of_request)


def measure_workload(
    llm: LLM, workload: Workload, bandwidth: float, clock: Callable[[], float] = perf_counter
) -> dict[str, Any]:
    """Return the line of one workload."""
    prefill_s = median(time_prefill(llm, workload, seed, clock=clock) for seed in range(10, 10 + 10 * REPEATS, 10))
    timers = [time_decoding(llm, workload, seed, clock) for seed in range(11, 11 + 10 * REPEATS, 10)]
    tok_s = median(timer.tokens_per_s for timer in timers)
    step_s = workload.batch_size / tok_s
    read = decode_step_bytes(llm, workload)
    return {
        "engine": f"retain {retain.__version__}",
        "workload": workload.name,
        "prompt": workload.prompt_len,
        "new": workload.output_len,
        "batch": workload.batch_size,
        "prefill_s": round(prefill_s, 3),
        "prefill_tok_s": round(workload.prompt_len * workload.batch_size / prefill_s, 1),
        "decode_tok_s": round(tok_s, 1),
        "decode_step_ms": round(1e3 * step_s, 2),
        "host_share": round(median(timer.host_share for timer in timers), 3),
        "read_mb": round(read / 1e6, 1),
        "bandwidth": round(read / step_s / bandwidth, 3),
        "note": f"{llm.device.type}, {llm.config.dtype}, weights {llm.config.weights}, "
        f"prompts {llm.config.prompt_activations}, kv {llm.config.kv_policy}",
    }


def time_prefill(
    llm: LLM, workload: Workload, seed: int, output_len: int = 1, clock: Callable[[], float] = perf_counter
) -> float:
    """Return the seconds of a run of the batch with one output token each."""
    requests = _make_requests(llm, workload, seed, output_len)
    started = clock()
    llm.engine.add(*requests)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    return clock() - started


def time_decoding(llm: LLM, workload: Workload, seed: int, clock: Callable[[], float] = perf_counter) -> DecodeTimer:
    """Time the steps in which the whole batch decodes and nothing else happens.

    Raises ValueError where there is no such step.
    """
    # Requests whose prompt is computed early decode beside the prefill of the others: those tokens do not count.
    prefill_steps = workload.batch_size * (workload.prompt_len // llm.config.max_batched_tokens + 2)
    output_len = workload.output_len + 1 + (prefill_steps if workload.batch_size > 1 else 0)
    requests = _make_requests(llm, workload, seed, min(output_len, llm.max_output_tokens(workload.prompt_len)))
    timer = DecodeTimer(llm.engine, min_batch=workload.batch_size, clock=clock)
    llm.engine.add(*requests)
    try:
        while llm.engine.has_unfinished_requests and timer.num_tokens < workload.output_len * workload.batch_size:
            timer.step()
    finally:
        for request in requests:
            llm.engine.cancel(request)
    if not timer.num_tokens:
        raise ValueError(f"{workload.name}: the whole batch never decodes together: raise --kv-memory")
    return timer


def _make_requests(llm: LLM, workload: Workload, seed: int, output_len: int) -> list[Request]:
    prompts = random_prompts(llm.spec.vocab_size, workload.prompt_len, workload.batch_size, seed)
    adapters = cycle(llm.input_processor.adapters.named.values() or [None])
    return [
        greedy_request(llm.cache, prompt, llm.policy, output_len, adapter=adapter)
        for prompt, adapter in zip(prompts, adapters, strict=False)
    ]


RATES = ("prefill_tok_s", "decode_tok_s")
TIME_LIMIT_S = 1800.0  # of one workload, loading included


def measure_peer(command: str, workload: str) -> dict[str, Any] | None:
    """Run `command workload`, and return its line of that workload; None where the engine skips it.

    Raises ValueError if the command cannot be run, fails, takes too long, or prints no such figures.
    """
    shown = f"--peer {command!r}"
    try:
        words = [*shlex.split(command), workload]
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    except (OSError, ValueError) as e:
        raise ValueError(f"{shown} cannot be run: {e}") from None
    except subprocess.TimeoutExpired:
        raise ValueError(f"{shown} takes more than {TIME_LIMIT_S:.0f} s for {workload}") from None
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise ValueError(f"{shown} ends with exit code {done.returncode} on {workload}: {last_line[:200]}")
    for line in done.stdout.splitlines():
        row = _parse(line)
        if row.get("workload") == workload:
            if not all(isinstance(row.get(name), int | float) and row[name] > 0 for name in RATES):
                raise ValueError(f"{shown} prints no {' and '.join(RATES)} for {workload}")
            return row
    return None


def compare(ours: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    """Return how many times as fast as the peer this engine is."""
    ratios = {name.replace("tok_s", "ratio"): round(ours[name] / peer[name], 3) for name in RATES}
    return {"workload": ours["workload"], "peer": peer.get("engine", "peer"), **ratios}


def _parse(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
