"""Time a model on several ranks beside one rank: steps and prompts, where the time of a step goes, peak memory.

    python -m tools.rank_speed --model smollm2 [--ranks 2] [--batch-sizes 1,8,32] [--rounds 5]

All configurations use the same cores: one rank has them all, each of several its share. A line gives tokens a second,
medians of rounds in turns, with the ratio to one rank. Then of a step of one request the microseconds on the first
rank: of all, of the message to the others, of the program.

    python -m tools.rank_speed --model M --memory

prints the most memory that each rank's process has had behind a short answer, beside one rank's.

    python -m tools.rank_speed --model M --budgets

prints the bytes that budgets keep of a long text on a rank, beside one rank's, where heads divide them and do not.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from retain import LLM, SamplingParams
from retain.bench.speed import Workload, time_decoding, time_prefill

PROMPT_LENGTH = 1024
LONG_TEXT = 4000  # tokens
BUDGETS = ("h2o:budget=25%", "h2o:budget=25%,share=layer", "h2o:budget=25%,share=all", "gate:budget=25%")


class Stopwatch:
    """Time calls of a method, in microseconds."""

    def __init__(self, owner: Any, method: str):
        self.times: list[float] = []
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any) -> Any:
            started = perf_counter()
            result = inner(*args)
            self.times.append(1e6 * (perf_counter() - started))
            return result

        setattr(owner, method, timed)


def peak_memory(pid: int | str) -> float:
    """Return the most MiB that a process has had in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]  # Linux has it


def tokens_per_second(llm: LLM, workload: Workload, seed: int) -> float:
    """Compute a workload once; of a prompt only its own tokens count."""
    if workload.name == "decode":
        return time_decoding(llm, workload, seed).tokens_per_s
    return workload.prompt_len * workload.batch_size / time_prefill(llm, workload, seed)


def measure_peaks(model: str, weights: str, num_ranks: int) -> list[float]:
    """Return the peak memory of each rank's process in MiB, measured in processes of their own."""
    code = (
        "import sys; from tools.rank_speed import print_peaks; print_peaks(sys.argv[1], sys.argv[2], int(sys.argv[3]))"
    )
    command = [sys.executable, "-c", code, model, weights, str(num_ranks)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [float(x) for x in printed.split()]


def print_peaks(model: str, weights: str, num_ranks: int) -> None:
    """Answer a prompt, and print the peak memory of each rank in MiB."""
    llm = LLM(model, tensor_parallel=num_ranks, weights=weights, max_model_len=2048, kv_memory="128MiB")
    llm.generate("The sea is", SamplingParams(max_tokens=32, ignore_eos=True))
    others = llm.ranks.process_ids if llm.ranks else []
    print(*(peak_memory(process) for process in ("self", *others)))
    llm.close()


def print_kept_bytes(model: str, num_ranks: int) -> None:
    """Print what budgets keep of a text on the first rank, in bytes of pages, and its ratio to one rank's."""
    text = (Path(__file__).parent.parent / "docs/guide/policies.md").read_text()
    kept: dict[int, list[int]] = {}
    for n in (1, num_ranks):
        llm = LLM(model, tensor_parallel=n, kv_memory="2GiB", max_model_len=8192, prefix_cache="off")
        prompt = (llm.tokenizer.encode(text) * 2)[:LONG_TEXT]
        answers = [llm.generate([prompt], SamplingParams(max_tokens=16), kv_policy=policy)[0] for policy in BUDGETS]
        kept[n] = [answer.kv["bytes_end"] for answer in answers]
        llm.close()
    for policy, alone, own in zip(BUDGETS, *kept.values(), strict=True):
        ratio = own / alone
        print(f"{policy:28} 1 rank {alone / 1e6:6.1f} MB, {num_ranks} ranks {own / 1e6:6.1f} MB each: {ratio:.2f}")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--batch-sizes", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--budgets", action="store_true")
    args = parser.parse_args(argv)
    if args.budgets:
        print_kept_bytes(args.model, args.ranks)
        return
    num_threads = torch.get_num_threads()
    options = {"max_model_len": 2048, "weights": args.weights, "prefix_cache": "off"}
    if args.memory:
        (alone,) = measure_peaks(args.model, args.weights, 1)
        peaks = measure_peaks(args.model, args.weights, args.ranks)
        found = ", ".join(f"{peak:.0f} MiB ({peak / alone:.2f})" for peak in peaks)
        print(f"1 rank {alone:.0f} MiB, {args.ranks} ranks {found}")
        return
    one = LLM(args.model, **options)
    several = LLM(args.model, tensor_parallel=args.ranks, **options)
    llms = {1: one, args.ranks: several}
    workloads = [Workload("decode", 64, 64, int(n)) for n in args.batch_sizes.split(",")]
    workloads.append(Workload("prompt", PROMPT_LENGTH, 1, 1))
    for workload in workloads:
        speeds: dict[int, list[float]] = {n: [] for n in llms}
        for i in range(args.rounds + 1):
            for n, llm in llms.items():
                torch.set_num_threads(max(num_threads // n, 1))
                speeds[n] += [tokens_per_second(llm, workload, i)] * (i > 0)  # the first is a warm-up
        base, found = (median(speeds[n]) for n in llms)
        name = f"{workload.name}, batch of {workload.batch_size}"
        print(f"{name:20} 1 rank {base:8.1f} tok/s, {args.ranks} ranks {found:8.1f}: {found / base:.2f}", flush=True)
    torch.set_num_threads(max(num_threads // args.ranks, 1))
    watches = {
        "a step": Stopwatch(several.engine, "launch"),
        "the message": Stopwatch(several.engine.driver, "broadcast_step"),
        "the program": Stopwatch(several.engine.runner, "forward"),
    }
    time_decoding(several, workloads[0], seed=0)
    print(", ".join(f"{name} {median(watch.times):.0f} us" for name, watch in watches.items()))
    several.close()


if __name__ == "__main__":
    main()
