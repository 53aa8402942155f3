"""Time decoding with 0, 1 and 8 adapters (LoRA) of random weights in a batch, beside the model without room for any.

    python -m tools.lora_speed --model smollm2 [--rank 16] [--batch-size 32] [--rounds 5]

A line gives the median milliseconds of a step, of engines in turns, and the ratio to the model alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

import torch

from retain import LLM
from retain.bench.speed import Workload, time_decoding
from retain.formats.lora import LoRAAdapter, LowRankUpdate

NUM_ADAPTERS = (0, 1, 8)
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_random_adapters(llm: LLM, count: int, rank: int) -> None:
    """Let requests name so many adapters of all layers."""
    adapters = llm.input_processor.adapters
    assert adapters.bank is not None
    for i in range(count):
        updates = {
            name: LowRankUpdate(torch.randn(rank, entry.a.shape[2]) / 100, torch.randn(entry.rows.num_rows, rank) / 100)
            for name, (entry,) in adapters.bank.entries.items()
            if name.endswith(MODULES)
        }
        adapters.add(f"adapter {i}", LoRAAdapter(updates, bytes([i])))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    llms = {"no room": LLM(args.model, max_model_len=512)}
    for count in NUM_ADAPTERS:
        llm = llms[f"{count} adapters"] = LLM(args.model, max_model_len=512, max_loras=8, max_lora_rank=args.rank)
        add_random_adapters(llm, count, args.rank)
    workload = Workload("decode", 64, 64, args.batch_size)
    times: dict[str, list[float]] = {name: [] for name in llms}
    for i in range(args.rounds + 1):
        for name, llm in llms.items():
            step_s = args.batch_size / time_decoding(llm, workload, seed=i).tokens_per_s
            times[name] += [step_s] * (i > 0)  # the first round is a warm-up
    base = median(times["no room"])
    for name, found in times.items():
        print(f"{name:12} {1e3 * median(found):8.2f} ms a step {median(found) / base:6.3f}", flush=True)


if __name__ == "__main__":
    main()
