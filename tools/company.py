"""Compare answers of requests that run together, and under a cap that preempts some, with those that each gives alone.

    python tools/company.py [--model smollm2] [--requests 64] [--max-prompt-len 120] [--output-len 48]
                            [--kv-memory 16MiB]

Float32, greedy, prompts of mixed lengths cut from this project's licence. The accountant checks the pages after every
step.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

os.environ.setdefault("OMP_PROC_BIND", "true")  # before torch: threads stay on their cores, as in `retain`
from retain import LLM, SamplingParams


def check_pages_after_each_step(llm: LLM) -> LLM:
    """Make the engine check its pages after every step."""
    step = llm.engine.step

    def checked_step() -> list:
        sampled = step()
        llm.cache.check()
        return sampled

    llm.engine.step = checked_step  # type: ignore[method-assign]
    return llm


def main() -> int:
    """Return exit code 1 when an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-prompt-len", type=int, default=120)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--kv-memory", default="16MiB")
    args = parser.parse_args()
    params = SamplingParams(max_tokens=args.output_len, temperature=0, ignore_eos=True)
    large = check_pages_after_each_step(LLM(args.model, dtype="float32"))
    small = check_pages_after_each_step(LLM(args.model, dtype="float32", kv_memory=args.kv_memory))
    ids, rng, prompts = (
        large.tokenizer.encode((Path(__file__).parents[1] / "LICENSE").read_text()),
        random.Random(0),
        [],
    )
    for _ in range(args.requests):
        n = rng.randint(4, args.max_prompt_len)
        start = rng.randrange(len(ids) - n)
        prompts.append(ids[start : start + n])
    alone = [large.generate([p], params)[0].token_ids for p in prompts]
    num_different = 0
    for name, llm in (("together", large), (f"under {args.kv_memory}", small)):
        outputs = llm.generate(prompts, params)
        num_equal = sum(output.token_ids == ids for output, ids in zip(outputs, alone, strict=True))
        num_different += len(alone) - num_equal
        print(
            f"{name}: {num_equal} of {len(alone)} answers equal those alone, "
            f"{sum(output.num_preemptions for output in outputs)} preemptions, "
            f"{llm.cache.total_pages - llm.cache.free_pages} pages leaked",
            flush=True,
        )
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
