"""Requests run together, and under a cap so small that some are preempted: are the tokens those that each gives alone?

    .venv/bin/python tools/company.py [--model smollm2] [--requests 64] [--longest 120] [--new 48] [--cap 16MiB]

Float32, greedy, prompts of mixed lengths cut from this project's licence. The accountant looks after every step.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

os.environ.setdefault("OMP_PROC_BIND", "true")
from retain import LLM, SamplingParams


def check_pages_after_each_step(llm: LLM) -> LLM:
    """The same engine, its accountant called after every step."""
    step = llm.engine.step

    def checked() -> list:
        ready = step()
        llm.cache.check()
        return ready

    llm.engine.step = checked  # type: ignore[method-assign]
    return llm


def main() -> int:
    """Exit code 1 when a token differs."""
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--model", default="smollm2")
    args.add_argument("--requests", type=int, default=64)
    args.add_argument("--longest", type=int, default=120)
    args.add_argument("--new", type=int, default=48)
    args.add_argument("--cap", default="16MiB")
    a = args.parse_args()
    params, rng = SamplingParams(max_tokens=a.new, temperature=0, ignore_eos=True), random.Random(0)
    plenty = check_pages_after_each_step(LLM(a.model, dtype="float32"))
    ids = plenty.encode((Path(__file__).parents[1] / "LICENSE").read_text())
    prompts = []
    for _ in range(a.requests):
        n = rng.randint(4, a.longest)
        start = rng.randrange(len(ids) - n)
        prompts.append(ids[start : start + n])
    alone = [plenty.generate([p], params)[0].token_ids for p in prompts]
    wrong = 0
    for what, llm in (
        ("together", plenty),
        (f"under {a.cap}", check_pages_after_each_step(LLM(a.model, dtype="float32", kv_memory=a.cap))),
    ):
        answers = llm.generate(prompts, params)
        same = sum(x.token_ids == y for x, y in zip(answers, alone, strict=True))
        wrong += same != len(alone)
        preempted = sum(x.num_preemptions for x in answers)
        print(
            f"{what}: {same} of {len(alone)} answers the same as alone, {preempted} preemptions, "
            f"{llm.cache.total_pages - llm.cache.free_pages} pages left behind",
            flush=True,
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
