"""Print hashes over the outputs of a fixed set of requests: equal before and after a change that changes no result.

    python -m tools.output_hash [--quick] [--schedules 200] [--seed 0]

Tiny random models: the schedules of the fuzz (tests/helpers/schedules.py), with their policies, dtypes, drafters,
prefixes, tiers and preemptions. Embedded models: each of CASES. A hash covers the token ids, and the log-probabilities
where a backend gives the same bits for any batch. Compare hashes of one machine only: instruction sets round apart.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from retain import LLM, SamplingParams
from tests.helpers.schedule_runner import ScheduleRun
from tests.helpers.schedules import draw_schedule, families_of_tests

STORY = "The old harbour was quiet that morning. " * 40
PROMPTS = ("Name three rivers.", STORY + "What was quiet?", STORY + "Go on with the story.")
CASES: tuple[dict[str, Any], ...] = (
    {"model": "smollm2", "dtype": "float32"},
    {"model": "smollm2", "kv_policy": "keyformer:budget=25%"},
    {"model": "smollm2", "kv_policy": "h2o:budget=128,demote=int4", "kv_dtype": "int8"},
    {"model": "smollm2", "kv_dtype": "int4", "speculate": "ngram"},
    {"model": "smollm2", "weights": "int8", "speculate": "self"},
    {"model": "gemma3", "dtype": "float32", "kv_policy": "reread:budget=50%"},
    {"model": "gemma3", "speculate": "draft:weights=int4"},
    {"model": "gemma3", "backend": "reference", "kv_policy": "sinks:budget=128"},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a hash a line, and one over all of them last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the next ones count up")
    parser.add_argument("--quick", action="store_true", help="40 schedules, and no embedded models")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    hashes = []
    num_schedules = 40 if args.quick else args.schedules
    for first in range(args.seed, args.seed + num_schedules, 20):
        last = min(first + 20, args.seed + num_schedules)
        hashes.append(hash_values(value for seed in range(first, last) for value in schedule_outputs(seed)))
        print(f"{hashes[-1]}  schedules {first} to {last - 1}", flush=True)
    for case in () if args.quick else CASES:
        hashes.append(hash_values(embedded_outputs(case)))
        print(f"{hashes[-1]}  {' '.join(f'{k}={v}' for k, v in case.items())}", flush=True)
    print(f"{hash_values(hashes)}  all")
    return 0


def hash_values(values: Iterable[Any]) -> str:
    """Return 16 hexadecimal digits of the hash of some values, by their representations."""
    digest = sha256()
    for value in values:
        digest.update(repr(value).encode())
    return digest.hexdigest()[:16]


def schedule_outputs(seed: int) -> list[Any]:
    """Run a schedule. Returns the token ids, and the log-probabilities where a batch does not change their bits."""
    with families_of_tests(), tempfile.TemporaryDirectory() as folder:
        schedule = draw_schedule(seed)
        run = ScheduleRun(schedule, Path(folder))
        run.run()
    outputs: list[Any] = [seed, sorted(run.refused)]
    for request in run.requests.values():
        outputs.append(request.output_tokens)
        if schedule.backend == "cpu":
            outputs.append([(p.logprob, p.top_logprobs) for p in request.logprobs])
    return outputs


def embedded_outputs(options: dict[str, Any]) -> list[Any]:
    """Return the token ids and log-probabilities of a model's answers: two rounds, the second one with hits."""
    params = SamplingParams(temperature=0, seed=0, max_tokens=32, logprobs=1, ignore_eos=True)
    llm = LLM(**options, kv_memory="256MiB", max_model_len=2048)
    try:
        rounds = [llm.generate(list(PROMPTS), params) for _ in range(2)]
    finally:
        llm.close()
    return [(o.token_ids, o.logprobs) for outputs in rounds for o in outputs]


if __name__ == "__main__":
    sys.exit(main())
